// Depthwise convolution of 16-bit types on channels_last, by tensor cores, with a stride of 1 and a square filter whose
// size is known at compile time.
//
// On ordinary cores the number of instructions is the limit: one for each tap of each output, one for each element that
// must become a float. A tensor core multiplies 16 pixels by 8 channels with two taps at once: pixels are rows of A, as
// they lie in shared memory, 8 channels for one tap and then 8 for another; B has the filters' taps on its diagonals,
// a register for a tap. Seven eighths of the products are by zero. It is faster nevertheless, but not by as much as it
// saves: a warp waits for its own products, and what it has in registers lets few others share its multiprocessor.
//
// An infinity or NaN times those zeros would be NaN in other channels. So what may have met one is computed again,
// without tensor cores.
//
// Otherwise as in depthwise_nhwc.cuh: a block walks down its columns, rows of x come through a ring in shared memory,
// and a sum moves on to its next row of the filter by being the addend of that row's first product. Results leave by
// way of shared memory, too, because a warp has only 16 bytes of each pixel, half of what memory takes at once.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "depthwise_ring.cuh"
#include "depthwise_sum.cuh"
#include "divisor.cuh"
#include "mma.cuh"

namespace fxfuse {

// Mma: Bf16 or Fp16.
template <class Mma_, int kKernel_>
struct DepthwiseMmaConfig {
    using Mma = Mma_;
    using Element = typename Mma::Element;
    static constexpr int kKernel = kKernel_;
    static constexpr int kStages = 4;  // rows of x in the ring
    static constexpr int kUnits = 2;   // products of 16 pixels that a warp has side by side
    static constexpr int kThreads = 128;
    // So many fit a multiprocessor: what filter, sums and a row take of registers allows no more without spills.
    static constexpr int kBlocks = kKernel == 3 ? 6 : kKernel == 5 ? 4 : 3;
    static_assert(kKernel % 2 == 1 && sizeof(Element) == 2);
};

template <class Config_, class Output_, class Epilogue_>
struct DepthwiseMma {
    using Config = Config_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Mma = typename Config::Mma;
    using Element = typename Config::Element;
    using Problem = Conv2dProblem;

    static constexpr int kTensors = 3;  // x, w, out
    static constexpr int kKernel = Config::kKernel, kTaps = kKernel * kKernel;
    static constexpr int kStages = Config::kStages, kUnits = Config::kUnits, kThreads = Config::kThreads;
    static constexpr int kElement = static_cast<int>(sizeof(Element)), kOutput = static_cast<int>(sizeof(Output));
    static constexpr int kPiece = 16;                // bytes of a copy
    static constexpr int kGroup = kMmaN;             // channels of a warp, a piece of a pixel
    static constexpr int kGroups = kThreads / 32;    // of a tile
    static constexpr int kRun = 8;                   // columns of outputs side by side
    static constexpr int kRuns = kUnits * kMmaM / kRun;  // of a tile, at most
    static constexpr int kPixels = kRuns * kRun;
    // Copies of a thread for a row: most if every run is a row of another image.
    static constexpr int kPieces = (kRuns * (kRun - 1 + kKernel) * kGroups + kThreads - 1) / kThreads;
    static constexpr int kPairs = kKernel / 2;  // of taps side by side, and one is left
    // Results in shared memory: a pixel, the next one, in other banks, and a row.
    static constexpr int kPixelBytes = kGroups * kGroup * kOutput, kPixelPitch = kPixelBytes + kPiece;
    static constexpr int kRowBytes = kPixels * kPixelPitch;
    static constexpr int kPixelPieces = kPixelBytes / kPiece, kPixelStep = kThreads / kPixelPieces;
    static constexpr int kCarried = kPixels * kPixelBytes / (kPiece * kThreads);  // pieces that a thread stores
    static_assert(kPiece == kGroup * kElement && kCarried > 0);

    // A tile is kGroups groups of channels of a rectangle of outputs, of several images where a row has few runs.
    struct Tiles {
        FastDivisor chunks, tiles_x, bands, part_cols;
        int parts, runs, rows;       // of a tile: images, runs of columns in each, rows
        int row_bytes;               // of the ring
        int x_at, results_at, bytes;  // in shared memory, behind the filters: the ring, and two rows of results
        int64_t count;

        Tiles(const Problem& problem, int multiprocessors) {
            const int all_runs = ceil_div(problem.out_width, kRun), count_x = ceil_div(all_runs, kRuns);
            runs = ceil_div(all_runs, count_x);
            parts = kRuns / runs < problem.images ? kRuns / runs : static_cast<int>(problem.images);
            const int cols = runs * kRun - 1 + kKernel;
            part_cols = FastDivisor(cols);
            row_bytes = parts * cols * kGroups * kPiece;
            x_at = kTaps * kGroups * kGroup * kElement;
            results_at = x_at + kStages * row_bytes;
            bytes = results_at + 2 * kRowBytes;
            const int chunk_count = ceil_div(problem.channels, kGroups * kGroup);
            const int height = static_cast<int>(problem.out_height);
            const int64_t columns = int64_t{ceil_div(problem.images, parts)} * chunk_count * count_x;
            rows = rows_of_tile(columns, height, kKernel - 1, Config::kBlocks, kGroups, bytes, multiprocessors);
            count = columns * ceil_div(height, rows);
            chunks = FastDivisor(chunk_count);
            tiles_x = FastDivisor(count_x);
            bands = FastDivisor(ceil_div(height, rows));
        }

        static constexpr int threads() { return kThreads; }
    };

    static __device__ __forceinline__ void run(const Problem& problem, const Tiles& tiles, unsigned char* shared,
                                               const Element* x, const Element* w, Output* out,
                                               const Epilogue& epilogue) {
        const Corner corner(tiles, blockIdx.x);
        const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, group = thread / 32;
        const int height = static_cast<int>(problem.height), out_height = static_cast<int>(problem.out_height);

        // A step reads a row of x, begins an output row and completes another. Steps whose rows are above the image are
        // left out, and those whose rows are below it only complete.
        const int above = corner.top - static_cast<int>(problem.pad_h);
        const int steps = min(tiles.rows, out_height - corner.top) + kKernel - 1;
        const int begin = max(-above, 0), end = min(steps, height - above);

        copy_filters<kKernel>(problem, reinterpret_cast<Element*>(shared), w + corner.channel * problem.w_filter,
                              min(kGroups * kGroup, static_cast<int>(problem.channels) - corner.channel));
        Copier copier(problem, tiles, shared + tiles.x_at, x, corner, above + begin);
        int to_copy = end - begin;
        const auto copy_next = [&] {
            if (to_copy > 0) copier.copy_row(problem, tiles);
            --to_copy;
            ptx::cp_async_commit();
        };
#pragma unroll 1
        for (int i = 0; i < kStages - 1; ++i) copy_next();

        Results results(problem, tiles, shared + tiles.results_at, out, corner, thread);
        const auto columns = epilogue.template load_columns<Runs::kWhole, 2>(Position{0, 0, results.channel}, 2);

        ptx::cp_async_wait<kStages - 2>();
        __syncthreads();
        uint32_t filter[kTaps];
        read_filter(filter, reinterpret_cast<const Element*>(shared), group, lane);

        float sum[kKernel][kUnits][4] = {};  // of the output row that the step begins, the one above it, …
        uint32_t source[kUnits][kPairs + 1];
#pragma unroll
        for (int i = 0; i < kUnits * (kPairs + 1); ++i) {
            const int pair = i % (kPairs + 1), at = pixel_of_a(tiles, i / (kPairs + 1), lane) + pair * 2;
            source[i / (kPairs + 1)][pair] = ptx::shared_address(shared) + tiles.x_at + place(at, group);
        }
        const int64_t row_step = problem.out_width * problem.channels;
        uint32_t stage = 0;
        int row = corner.top + begin - (kKernel - 1);  // which the step completes
        const auto complete = [&] {
            if (row >= corner.top) results.complete(problem, epilogue, columns, sum[kKernel - 1], row);
            ++row;
        };
#pragma unroll 1
        for (int step = begin; step < end; ++step) {
            ptx::cp_async_wait<kStages - 2>();
            __syncthreads();
            copy_next();
            if (row > corner.top) results.store(row_step);
            begin_row(sum);
#pragma unroll
            for (int i = 0; i < kUnits; ++i) multiply_row(filter, source[i], stage, sum, i);
            stage = next_stage(tiles, stage);
            complete();
        }
#pragma unroll 1
        for (int step = max(begin, end); step < steps; ++step) {
            __syncthreads();
            if (row > corner.top) results.store(row_step);
            begin_row(sum);
            complete();
        }
        __syncthreads();
        results.store(row_step);
        __syncthreads();  // all others have stored what is stored again
        if (results.poison != results.poison) compute_again(problem, tiles, x, w, out, epilogue);
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        return launch_depthwise_ring<DepthwiseMma>(problem, pointers, epilogue, stream);
    }
#endif  // __CUDACC_RTC__

private:
    // Where a tile begins.
    struct Corner {
        int image, top, left, channel;

        __device__ __forceinline__ Corner(const Tiles& tiles, uint32_t index)
            : channel(static_cast<int>(tiles.chunks.take(index)) * kGroups * kGroup) {
            left = static_cast<int>(tiles.tiles_x.take(index)) * tiles.runs * kRun;
            top = static_cast<int>(tiles.bands.take(index)) * tiles.rows;
            image = static_cast<int>(index) * tiles.parts;
        }
    };

    // Where a pixel of a tile's row is, or the nearest one that exists.
    struct Pixel {
        int image, col;
        bool exists;

        Pixel() = default;
        __device__ __forceinline__ Pixel(const Problem& problem, const Tiles& tiles, const Corner& corner, int index) {
            const int width = static_cast<int>(problem.out_width), images = static_cast<int>(problem.images);
            const int part = part_of(tiles, index / kRun);
            image = corner.image + part;
            col = corner.left + index - part * tiles.runs * kRun;
            exists = index < tiles.parts * tiles.runs * kRun && image < images && col < width;
            image = min(image, images - 1);
            col = min(col, width - 1);
        }
    };

    // The image of a tile that a run belongs to.
    static __device__ __forceinline__ int part_of(const Tiles& tiles, int run) {
        int part = 0;
#pragma unroll
        for (int i = 1; i < kRuns; ++i) part += i * tiles.runs <= run;
        return min(part, tiles.parts - 1);
    }

    // What a thread has of a warp's results, with g = lane / 4 and t = lane % 4: channels 2t and 2t + 1 of a group, of
    // pixel g in each run.
    static __device__ __forceinline__ int channel_of(int thread) { return thread / 32 * kGroup + thread % 4 * 2; }
    static __device__ __forceinline__ int pixel_of(int thread, int run) { return run * kRun + thread % 32 / 4; }

    // What a thread copies of every row: pieces of a pixel's 8 channels, the same of all rows.
    struct Copier {
        const Element* from[kPieces];
        uint32_t to[kPieces];
        bool mine[kPieces], exists[kPieces];
        uint32_t stage;

        __device__ __forceinline__ Copier(const Problem& problem, const Tiles& tiles, unsigned char* ring,
                                          const Element* x, const Corner& corner, int top)
            : stage(0) {
            const int group = static_cast<int>(threadIdx.x) % kGroups, channel = corner.channel + group * kGroup;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                uint32_t part = (threadIdx.x + i * kThreads) / kGroups;
                const int at = static_cast<int>(tiles.part_cols.take(part));
                const int image = corner.image + static_cast<int>(part);
                const int col = corner.left - static_cast<int>(problem.pad_w) + at;
                mine[i] = static_cast<int>(part) < tiles.parts;
                exists[i] = static_cast<uint32_t>(col) < static_cast<uint32_t>(problem.width) &&
                            channel < static_cast<int>(problem.channels) && image < static_cast<int>(problem.images);
                from[i] = x + image * problem.x_image + (top * problem.x_row + col * problem.x_col + channel);
                const int pixel = static_cast<int>(threadIdx.x + i * kThreads) / kGroups;
                to[i] = ptx::shared_address(ring) + place(pixel, group);
            }
        }

        // The next row, with zeros for what is outside the image.
        __device__ __forceinline__ void copy_row(const Problem& problem, const Tiles& tiles) {
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                if (mine[i]) ptx::cp_async_16(to[i] + stage, from[i], exists[i] ? kPiece : 0);
                from[i] += problem.x_row;
            }
            stage = next_stage(tiles, stage);
        }
    };

    // From one stage of the ring to the next, in bytes from the first.
    static __device__ __forceinline__ uint32_t next_stage(const Tiles& tiles, uint32_t stage) {
        const uint32_t row_bytes = tiles.row_bytes;
        return stage == (kStages - 1) * row_bytes ? 0 : stage + row_bytes;
    }

    // Where a group's piece of a pixel is in a row of the ring, in bytes: pieces of a pixel are side by side, and those
    // of a group in 8 neighbouring pixels are in different banks.
    static __device__ __forceinline__ int place(int pixel, int group) {
        return (pixel * kGroups + (group ^ pixel * kGroups / 8 % kGroups)) * kPiece;
    }

    // The pixel in a row of the ring that this lane gives ldmatrix for the first two taps of a unit: lanes 0 to 15 for
    // the first tap, lanes 16 to 31 for the second. Runs that do not exist read another.
    static __device__ __forceinline__ int pixel_of_a(const Tiles& tiles, int unit, int lane) {
        const int run = min(unit * (kMmaM / kRun) + lane / kRun % (kMmaM / kRun), tiles.parts * tiles.runs - 1);
        const int part = part_of(tiles, run);
        return part * static_cast<int>(tiles.part_cols.divisor) + (run - part * tiles.runs) * kRun + lane % kRun +
               lane / kMmaM;
    }

    // A thread's part of the output: what it completes, and what it carries from shared memory.
    struct Results {
        int channel;
        Pixel pixel[kRuns];
        unsigned char *to, *from;  // in the first of two rows: where it writes, and the first piece that it reads
        int row;                   // bytes from the first row to the one that is written next
        bool exists[kCarried];
        Output* destination[kCarried];
        float poison;  // NaN once a sum was infinite or NaN

        __device__ __forceinline__ Results(const Problem& problem, const Tiles& tiles, unsigned char* rows, Output* out,
                                           const Corner& corner, int thread)
            : channel(min(corner.channel + channel_of(thread), static_cast<int>(problem.channels) - 2)), row(0),
              poison(0.0f) {
#pragma unroll
            for (int i = 0; i < kRuns; ++i) pixel[i] = Pixel(problem, tiles, corner, pixel_of(thread, i));
            const int index = thread / kPixelPieces, piece = thread % kPixelPieces;
            to = rows + pixel_of(thread, 0) * kPixelPitch + channel_of(thread) * kOutput;
            from = rows + index * kPixelPitch + piece * kPiece;
#pragma unroll
            for (int i = 0; i < kCarried; ++i) {
                const Pixel at(problem, tiles, corner, index + i * kPixelStep);
                const int first = corner.channel + piece * (kPiece / kOutput);
                exists[i] = at.exists && first < problem.channels;
                const int64_t pixel = (at.image * problem.out_height + corner.top) * problem.out_width + at.col;
                destination[i] = out + (pixel * problem.channels + first);
            }
        }

        // Finishes a row and writes it to shared memory.
        __device__ __forceinline__ void complete(const Problem& problem, const Epilogue& epilogue,
                                                 const typename Epilogue::template ColumnValues<2, Position>& columns,
                                                 const float (&sum)[kUnits][4], int out_row) {
#pragma unroll
            for (int i = 0; i < kRuns; ++i) {
                float value[2] = {sum[i / 2][i % 2 * 2], sum[i / 2][i % 2 * 2 + 1]};
                poison = fmaf(value[0], 0.0f, poison);  // if it is only the other that is infinite, this one is NaN
                const int64_t at = static_cast<int64_t>(out_row) * problem.out_width + pixel[i].col;
                epilogue.apply(value, columns, epilogue.template load_rows<Runs::kWhole, 2>(
                                                   Position{pixel[i].image, at, channel}, 2));
                Elements<Output, 2> packed;
                packed.set(value);
                packed.store_whole(reinterpret_cast<Output*>(to + row + i * kRun * kPixelPitch));
            }
            row = kRowBytes - row;
        }

        // Carries the row that all threads have written to its place.
        __device__ __forceinline__ void store(int64_t row_step) {
#pragma unroll
            for (int i = 0; i < kCarried; ++i) {
                if (exists[i]) {
                    *reinterpret_cast<uint4*>(destination[i]) =
                        *reinterpret_cast<const uint4*>(from + (kRowBytes - row) + i * kPixelStep * kPixelPitch);
                }
                destination[i] += row_step;
            }
        }
    };

    // What this thread has of the tile, without tensor cores. Seldom needed: so indices are read anew, and nothing is
    // kept in registers for it.
    static __device__ __forceinline__ void compute_again(const Problem& problem, const Tiles& tiles, const Element* x,
                                                         const Element* w, Output* out, const Epilogue& epilogue) {
        const int thread = static_cast<int>(ptx::read_thread_index());
        const Corner corner(tiles, ptx::read_block_index().x);
        const int channel = corner.channel + channel_of(thread);
        const int last = min(corner.top + tiles.rows, static_cast<int>(problem.out_height));
        if (channel >= problem.channels) return;
#pragma unroll 1
        for (int i = 0; i < kRuns; ++i) {
            const Pixel pixel(problem, tiles, corner, pixel_of(thread, i));
            if (!pixel.exists) continue;
            const Element* of_image = x + pixel.image * problem.x_image;
#pragma unroll 1
            for (int row = corner.top; row < last; ++row) {
                const Position at{pixel.image, static_cast<int64_t>(row) * problem.out_width + pixel.col, channel};
                float value[2];
#pragma unroll 1
                for (int j = 0; j < 2; ++j) {
                    value[0] = value[1];
                    value[1] = depthwise_sum(problem, of_image, w, channel + j, row, pixel.col);
                }
                epilogue.template apply<2>(value, at, 2);
                const int64_t pixels = problem.out_height * problem.out_width;
                store_run<Output, 2, Runs::kWhole>(out + (at.batch * pixels + at.row) * problem.channels + channel,
                                                   value, 2);
            }
        }
    }

    // Adds what a row of x contributes to a unit's output rows that it is part of.
    static __device__ __forceinline__ void multiply_row(const uint32_t (&filter)[kTaps],
                                                        const uint32_t (&source)[kPairs + 1], uint32_t stage,
                                                        float (&sum)[kKernel][kUnits][4], int unit) {
        uint32_t in[kPairs][4], last[2];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) ptx::ldmatrix_x4(in[i], source[i] + stage);
        ptx::ldmatrix_x2(last, source[kPairs] + stage);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
#pragma unroll
            for (int r = kKernel - 1; r >= 0; --r) {
                const uint32_t* taps = filter + r * kKernel + 2 * i;
                const typename Mma::A a = {{in[i][0], in[i][1], in[i][2], in[i][3]}};
                Mma::template product<0>(sum[r][unit], a, {{taps[0], taps[1]}});
            }
        }
#pragma unroll
        for (int r = kKernel - 1; r >= 0; --r) {
            Mma::half_product(sum[r][unit], last, filter[r * kKernel + kKernel - 1]);
        }
    }

    // Fragments of B: column n has a tap of channel n in row n, and zeros in the others.
    static __device__ __forceinline__ void read_filter(uint32_t (&filter)[kTaps], const Element* filters, int group,
                                                       int lane) {
        const int channel = lane / 4;
        const uint32_t place = lane % 4 == channel / 2 ? 1u << channel % 2 * 16 : 0;
#pragma unroll
        for (int i = 0; i < kTaps; ++i) {
            filter[i] = filters[(group * kGroup + channel) * kTaps + i].bits * place;
        }
    }
};

}  // namespace fxfuse
