// Depthwise convolution of 16-bit types on channels_last, by tensor cores, with a stride of 1 and a square filter whose
// size is known at compile time.
//
// On ordinary cores the number of instructions is the limit: one for each tap of each output, one for each element that
// must become a float. Here a filter row is a band matrix B: K is neighbouring pixels, N is neighbouring outputs, and
// B[k, n] is tap k - n. Two channels lie in one register and share a product: K is 8 pixels of both, N is 4 outputs of
// both, and entries that would mix the channels are zero. A row of A belongs to a run of 4 outputs:
//
//   A[run, 2p + c]     pixel p of x under the run, channel c        B[2p + c, 2v + c] for a filter row w0 w1 w2:
//   B[2p + c, 2v + c]  tap p - v of channel c
//   D[run, 2v + c]     output v of the run, channel c                        v = 0   1   2   3
//                                                                   p = 0       w0   .   .   .
//                                                                       1       w1  w0   .   .
//                                                                       2       w2  w1  w0   .
//                                                                       3        .  w2  w1  w0
//                                                                       4        .   .  w2  w1
//                                                                       5        .   .   .  w2
//                                                                    6, 7        .   .   .   .
//
// So x in shared memory already has the order of A's fragments, and a thread has neighbouring channels of D's pixels. A
// 7x7 filter takes half a product (4 pixels) more.
//
// An infinity or NaN in x, times those zeros, makes other outputs NaN. So a thread with an infinity or NaN among its
// sums computes all its outputs again, without tensor cores.
//
// The rest is as in depthwise_nhwc.cuh: a block walks down its columns, rows of x come through a ring in shared memory,
// and a sum moves on to the next filter row as the addend of that row's first product. Results leave through shared
// memory, too, because a warp has only some of the channels that memory takes of a pixel at once.
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
    static constexpr int kStages = 4;                    // rows of x in the ring
    static constexpr int kPairs = kKernel == 7 ? 2 : 4;  // of channels, in a warp
    static constexpr int kThreads = 128;
    // Per multiprocessor: the registers for filter, sums and a row of x allow no more without spills.
    static constexpr int kBlocks = kKernel == 3 ? 4 : 3;
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
    static constexpr int kStages = Config::kStages, kPairs = Config::kPairs, kThreads = Config::kThreads;
    static constexpr int kElement = static_cast<int>(sizeof(Element)), kOutput = static_cast<int>(sizeof(Output));
    static constexpr int kPiece = 16;                      // bytes of a copy
    static constexpr int kGroup = 2 * kPairs;              // channels of a warp
    static constexpr int kChunk = kThreads / 32 * kGroup;  // channels of a tile
    static constexpr int kRun = 4;                         // neighbouring output columns: a row of A
    static constexpr int kRuns = kMmaM, kPixels = kRuns * kRun;  // of a tile's row, at most
    static constexpr int kQuads = (kRun - 1 + kKernel + 3) / 4;  // of pixels of x that a run reads
    // Pieces of a pixel of x in shared memory.
    static constexpr int kInPieces = kChunk * kElement / kPiece;
    // Most copies that a thread makes for a row: in a tile of kRuns / 2 images with two runs each.
    static constexpr int kCopies = kRuns / 2 * (kRun + kQuads * 4) * kInPieces / kThreads;
    // Results in shared memory: bytes of a pixel, bytes from it to the next (in other banks), bytes of a row.
    static constexpr int kPixelBytes = kChunk * kOutput, kPixelPitch = kPixelBytes + kPiece;
    static constexpr int kRowBytes = kPixels * kPixelPitch;
    static constexpr int kPixelPieces = kPixelBytes / kPiece, kPixelStep = kThreads / kPixelPieces;
    static constexpr int kCarried = kPixels * kPixelBytes / (kPiece * kThreads);  // pieces that a thread stores
    static_assert(kCopies > 0 && kCarried > 0 && kThreads / kInPieces % 8 == 0);

    // A tile is kChunk channels of a rectangle of outputs, in several images if an output row has few runs.
    struct Tiles {
        FastDivisor chunks, tiles_x, bands, part_runs, part_cols;
        int parts, rows;              // of a tile: images, rows
        int row_bytes;                // of a row of the ring
        int x_at, results_at, bytes;  // in shared memory, after the filters: the ring, two rows of results, the end
        int64_t count;

        Tiles(const Problem& problem, int multiprocessors) {
            const int all_runs = ceil_div(problem.out_width, kRun), count_x = ceil_div(all_runs, kRuns);
            const int runs = ceil_div(all_runs, count_x);
            const int cols = (runs - 1) * kRun + kQuads * 4;
            // Offsets from a tile's first pixel have 32 bits.
            const int64_t pixels = problem.out_height * problem.out_width;
            const int64_t of_x = problem.x_image * kElement, of_out = pixels * problem.channels * kOutput;
            const int64_t addressed = UINT32_MAX / (of_x > of_out ? of_x : of_out);
            const int64_t copied = kCopies * kThreads / (cols * kInPieces);
            parts = kRuns / runs;
            const auto limit_parts = [&](int64_t most) { parts = parts > most ? static_cast<int>(most) : parts; };
            limit_parts(problem.images);
            limit_parts(copied);
            limit_parts(addressed > 0 ? addressed : 1);
            part_runs = FastDivisor(runs);
            part_cols = FastDivisor(cols);
            row_bytes = parts * cols * kInPieces * kPiece;
            x_at = kTaps * kChunk * kElement;
            results_at = x_at + kStages * row_bytes;
            bytes = results_at + 2 * kRowBytes;
            const int chunk_count = ceil_div(problem.channels, kChunk);
            const int height = static_cast<int>(problem.out_height);
            const int64_t columns = int64_t{ceil_div(problem.images, parts)} * chunk_count * count_x;
            constexpr int kFixed = 12;  // as measured on an H200
            rows = rows_of_tile(columns, height, kKernel - 1, Config::kBlocks, kThreads / 32, bytes, multiprocessors,
                                kFixed);
            count = columns * ceil_div(height, rows);
            chunks = FastDivisor(chunk_count);
            tiles_x = FastDivisor(count_x);
            bands = FastDivisor(ceil_div(height, rows));
        }

        static constexpr int threads() { return kThreads; }
        __device__ __forceinline__ int runs() const { return static_cast<int>(part_runs.divisor); }
    };

    static __device__ __forceinline__ void run(const Problem& problem, const Tiles& tiles, unsigned char* shared,
                                               const Element* x, const Element* w, Output* out,
                                               const Epilogue& epilogue) {
        const Corner corner(tiles, blockIdx.x);
        const int thread = static_cast<int>(threadIdx.x);
        const int height = static_cast<int>(problem.height), out_height = static_cast<int>(problem.out_height);

        // A step reads a row of x, begins one output row and completes another. Steps whose row of x is above the image
        // are left out; steps whose row of x is below it only complete.
        const int above = corner.top - static_cast<int>(problem.pad_h);
        const int steps = min(tiles.rows, out_height - corner.top) + kKernel - 1;
        const int begin = max(-above, 0), end = min(steps, height - above);

        copy_filters<kKernel>(problem, reinterpret_cast<Element*>(shared), w + corner.channel * problem.w_filter,
                              min(kChunk, static_cast<int>(problem.channels) - corner.channel));
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
        const auto columns =
            epilogue.template load_columns<Runs::kWhole, kGroup>(Position{0, 0, results.channel}, kGroup);

        ptx::cp_async_wait<kStages - 2>();
        __syncthreads();
        uint32_t filter[kKernel][kPairs][kQuads];
        read_filter(filter, reinterpret_cast<const Element*>(shared), thread);

        float sum[kKernel][kPairs][4] = {};  // of the output row that the step begins, of the one above, …
        const Source source(tiles, shared + tiles.x_at, thread);
        const int64_t out_row_bytes = problem.out_width * problem.channels * kOutput;
        uint32_t ring_row = 0;
        int row = corner.top + begin - (kKernel - 1);  // the output row that the step completes
        const auto complete = [&] {
            if (row >= corner.top) results.complete(problem, epilogue, columns, sum[kKernel - 1], row);
            ++row;
        };
#pragma unroll 1
        for (int step = begin; step < end; ++step) {
            ptx::cp_async_wait<kStages - 2>();
            __syncthreads();
            copy_next();
            if (row > corner.top) results.store(out_row_bytes);
            begin_row(sum);
            multiply_row(filter, source, ring_row, sum);
            ring_row = next_row(tiles, ring_row);
            complete();
        }
#pragma unroll 1
        for (int step = max(begin, end); step < steps; ++step) {
            __syncthreads();
            if (row > corner.top) results.store(out_row_bytes);
            begin_row(sum);
            complete();
        }
        __syncthreads();
        results.store(out_row_bytes);
        __syncthreads();  // other threads' stores come before those of compute_again()
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
            : channel(static_cast<int>(tiles.chunks.take(index)) * kChunk) {
            left = static_cast<int>(tiles.tiles_x.take(index)) * tiles.runs() * kRun;
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
            uint32_t part = index / kRun;
            const int run = static_cast<int>(tiles.part_runs.take(part));
            image = corner.image + static_cast<int>(part);
            col = corner.left + run * kRun + index % kRun;
            exists = static_cast<int>(part) < tiles.parts && image < images && col < width;
            image = min(image, images - 1);
            col = min(col, width - 1);
        }
    };

    // A thread's share of a warp's results, with g = lane / 4 and t = lane % 4: all channels of pixel t in runs g and
    // g + 8.
    static __device__ __forceinline__ int channel_of(int thread) { return thread / 32 * kGroup; }
    static __device__ __forceinline__ int run_of(int thread, int half) { return half * 8 + thread % 32 / 4; }
    static __device__ __forceinline__ int pixel_of(int thread, int half) {
        return run_of(thread, half) * kRun + thread % 4;
    }

    // A thread's copies of every row: pieces of pixels' channels, at the same places in all rows.
    struct Copier {
        const unsigned char* from;  // the tile's first pixel in the next row
        uint32_t offset[kCopies];   // bytes from there
        uint32_t to;                // the first piece, in the ring's first row
        bool mine[kCopies], exists[kCopies];
        uint32_t row;               // of the ring, in bytes from its first

        __device__ __forceinline__ Copier(const Problem& problem, const Tiles& tiles, unsigned char* ring,
                                          const Element* x, const Corner& corner, int top)
            : row(0) {
            const int left = corner.left - static_cast<int>(problem.pad_w);
            x += corner.image * problem.x_image + (top * problem.x_row + left * problem.x_col + corner.channel);
            from = reinterpret_cast<const unsigned char*>(x);
            const int piece = static_cast<int>(threadIdx.x) % kInPieces;
            const int channel = corner.channel + piece * (kPiece / kElement);
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                uint32_t part = (threadIdx.x + i * kThreads) / kInPieces;
                const int at = static_cast<int>(tiles.part_cols.take(part));
                const int image = corner.image + static_cast<int>(part);
                mine[i] = static_cast<int>(part) < tiles.parts;
                exists[i] = static_cast<uint32_t>(left + at) < static_cast<uint32_t>(problem.width) &&
                            channel < static_cast<int>(problem.channels) && image < static_cast<int>(problem.images);
                const uint32_t elements =
                    part * static_cast<uint32_t>(problem.x_image) + at * static_cast<uint32_t>(problem.x_col);
                offset[i] = elements * kElement + piece * kPiece;
            }
            to = ptx::shared_address(ring) + place(static_cast<int>(threadIdx.x) / kInPieces, piece);
        }

        // Copies the next row. Columns, channels and images that do not exist become zeros.
        __device__ __forceinline__ void copy_row(const Problem& problem, const Tiles& tiles) {
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                const uint32_t piece = to + row + i * (kThreads * kPiece);  // as place() computes it
                if (mine[i]) ptx::cp_async_16(piece, from + offset[i], exists[i] ? kPiece : 0);
            }
            from += problem.x_row * kElement;
            row = next_row(tiles, row);
        }
    };

    // The row of the ring after `row`, both in bytes from the first.
    static __device__ __forceinline__ uint32_t next_row(const Tiles& tiles, uint32_t row) {
        const uint32_t row_bytes = tiles.row_bytes;
        return row == (kStages - 1) * row_bytes ? 0 : row + row_bytes;
    }

    // Where a piece of a pixel is in a row of the ring, in bytes. The pieces of a pixel are side by side, and the same
    // piece of 8 neighbouring pixels is in different banks. With kInPieces = 4, 128 bytes hold the pieces
    //
    //   of pixels 0, 1    0 1 2 3   0 1 2 3
    //             2, 3    1 0 3 2   1 0 3 2
    //             4, 5    2 3 0 1   2 3 0 1
    //             6, 7    3 2 1 0   3 2 1 0
    static __device__ __forceinline__ uint32_t place(int pixel, int piece) {
        return (pixel * kInPieces + (piece ^ pixel * kInPieces / 8 % kInPieces)) * kPiece;
    }

    // Where a thread reads its part of A: the warp's channels of pixels t, t + 4, … of two runs, with t = lane % 4.
    struct Source {
        const unsigned char* quad[2][2];  // of run g and of run g + 8: the first quad of pixels and the second
        uint32_t zero;                    // 0, but ptxas does not know

        __device__ __forceinline__ Source(const Tiles& tiles, const unsigned char* ring, int thread) {
            const int bytes = channel_of(thread) * kElement;
            zero = ptx::read_zero();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // For a run that does not exist, the last one is read.
                uint32_t part = min(run_of(thread, i / 2), tiles.parts * tiles.runs() - 1);
                const int run = static_cast<int>(tiles.part_runs.take(part));
                const int col = run * kRun + i % 2 * 4 + thread % 4;
                const int pixel = static_cast<int>(part * tiles.part_cols.divisor) + col;
                quad[i / 2][i % 2] = ring + place(pixel, bytes / kPiece) + bytes % kPiece;
            }
        }

        // Loads the channels of the thread's pixel in quad `index`, two per register. From a quad to the next but one
        // the distance is fixed.
        __device__ __forceinline__ void load(uint32_t (&pairs)[kPairs], int half, int index, uint32_t row) const {
            const unsigned char* from = quad[half][index % 2] + row + index / 2 * (8 * kInPieces * kPiece);
            using Whole = Word<kPairs * 4>;
            reinterpret_cast<Whole&>(pairs) = *reinterpret_cast<const Whole*>(from);
        }
    };

    // A thread's part of the output: the sums that it completes, and the pieces that it stores from shared memory.
    struct Results {
        int channel;
        Pixel pixel[2];
        unsigned char *to, *from;  // in the first of two rows: where it writes, and the first piece that it reads
        int row;                   // bytes from the first row to the one that is written next
        bool exists[kCarried];
        unsigned char* destination;  // the tile's first pixel in the next row
        uint32_t offset[kCarried];   // bytes from there
        float poison;                // NaN once a sum was infinite or NaN

        __device__ __forceinline__ Results(const Problem& problem, const Tiles& tiles, unsigned char* rows, Output* out,
                                           const Corner& corner, int thread)
            : channel(min(corner.channel + channel_of(thread), static_cast<int>(problem.channels) - kGroup)), row(0),
              poison(0.0f) {
#pragma unroll
            for (int i = 0; i < 2; ++i) pixel[i] = Pixel(problem, tiles, corner, pixel_of(thread, i));
            const int index = thread / kPixelPieces, piece = thread % kPixelPieces;
            to = rows + pixel_of(thread, 0) * kPixelPitch + channel_of(thread) * kOutput;
            from = rows + index * kPixelPitch + piece * kPiece;
            const uint32_t pixels = static_cast<uint32_t>(problem.out_height * problem.out_width);
            const int64_t pixel = (corner.image * problem.out_height + corner.top) * problem.out_width + corner.left;
            destination = reinterpret_cast<unsigned char*>(out + (pixel * problem.channels + corner.channel));
#pragma unroll
            for (int i = 0; i < kCarried; ++i) {
                const Pixel at(problem, tiles, corner, index + i * kPixelStep);
                const int first = corner.channel + piece * (kPiece / kOutput);
                exists[i] = at.exists && first < problem.channels;
                const uint32_t further = (at.image - corner.image) * pixels + (at.col - corner.left);
                offset[i] = further * static_cast<uint32_t>(problem.channels) * kOutput + piece * kPiece;
            }
        }

        // Applies the epilogue to a row of sums and writes the results to shared memory.
        __device__ __forceinline__ void complete(
            const Problem& problem, const Epilogue& epilogue,
            const typename Epilogue::template ColumnValues<kGroup, Position>& columns, const float (&sum)[kPairs][4],
            int out_row) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float value[kGroup];
#pragma unroll
                for (int j = 0; j < kPairs; ++j) {
                    value[2 * j] = sum[j][2 * i];
                    value[2 * j + 1] = sum[j][2 * i + 1];
                    poison = fmaf(value[2 * j], 0.0f, poison);  // an infinite x of the other channel is NaN here
                }
                const int64_t at = static_cast<int64_t>(out_row) * problem.out_width + pixel[i].col;
                epilogue.apply(value, columns, epilogue.template load_rows<Runs::kWhole, kGroup>(
                                                   Position{pixel[i].image, at, channel}, kGroup));
                Elements<Output, kGroup> packed;
                packed.set(value);
                packed.store_whole(reinterpret_cast<Output*>(to + row + i * (kPixels / 2) * kPixelPitch));
            }
            row = kRowBytes - row;
        }

        // Stores the row that all threads have written to shared memory.
        __device__ __forceinline__ void store(int64_t row_bytes) {
#pragma unroll
            for (int i = 0; i < kCarried; ++i) {
                if (exists[i]) {
                    *reinterpret_cast<uint4*>(destination + offset[i]) =
                        *reinterpret_cast<const uint4*>(from + (kRowBytes - row) + i * kPixelStep * kPixelPitch);
                }
            }
            destination += row_bytes;
        }
    };

    // Computes this thread's outputs of the tile without tensor cores. This is rare: so indices are read anew, and
    // nothing is kept in registers for it.
    static __device__ __forceinline__ void compute_again(const Problem& problem, const Tiles& tiles, const Element* x,
                                                         const Element* w, Output* out, const Epilogue& epilogue) {
        const int thread = static_cast<int>(ptx::read_thread_index());
        const Corner corner(tiles, ptx::read_block_index().x);
        const int first = corner.channel + channel_of(thread);
        const int last = min(corner.top + tiles.rows, static_cast<int>(problem.out_height));
        if (first >= problem.channels) return;
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            const Pixel pixel(problem, tiles, corner, pixel_of(thread, i));
            if (!pixel.exists) continue;
            const Element* of_image = x + pixel.image * problem.x_image;
            for (int row = corner.top; row < last; ++row) {
#pragma unroll 1
                for (int channel = first; channel < first + kGroup; channel += 2) {
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
    }

    // Adds the products of a row of x to the sums of all output rows that read it.
    static __device__ __forceinline__ void multiply_row(const uint32_t (&filter)[kKernel][kPairs][kQuads],
                                                        const Source& source, uint32_t row,
                                                        float (&sum)[kKernel][kPairs][4]) {
        uint32_t pixels[kPairs][kQuads][2];  // fragments of A
#pragma unroll
        for (int i = 0; i < 2 * kQuads; ++i) {
            alignas(16) uint32_t pairs[kPairs];
            source.load(pairs, i % 2, i / 2, row);
            // A load fills consecutive registers with different pairs; a product takes registers of one pair. Without
            // an operation in between, ptxas moves the registers anew for every product.
#pragma unroll
            for (int j = 0; j < kPairs; ++j) pixels[j][i / 2][i % 2] = pairs[j] ^ source.zero;
        }
#pragma unroll
        for (int k = 0; k < kQuads; k += 2) {
#pragma unroll
            for (int r = kKernel - 1; r >= 0; --r) {
#pragma unroll
                for (int i = 0; i < kPairs; ++i) {
                    const uint32_t(&in)[kQuads][2] = pixels[i];
                    const uint32_t* taps = filter[r][i] + k;
                    if (k + 1 < kQuads) {
                        const typename Mma::A of_runs = {{in[k][0], in[k][1], in[k + 1][0], in[k + 1][1]}};
                        Mma::template product<0>(sum[r][i], of_runs, {{taps[0], taps[1]}});
                    } else {
                        Mma::half_product(sum[r][i], in[k], taps[0]);
                    }
                }
            }
        }
    }

    // Reads the fragments of B. Column 2v + c is output v of a pair's channel c: there the register of pixel p has tap
    // p - v of this channel in half c, and zero in the other half.
    static __device__ __forceinline__ void read_filter(uint32_t (&filter)[kKernel][kPairs][kQuads],
                                                       const Element* filters, int thread) {
        const int lane = thread % 32, channel = lane / 4 % 2, tap = lane % 4 - lane / 8;
        filters += (channel_of(thread) + channel) * kTaps + tap;
#pragma unroll
        for (int r = 0; r < kKernel; ++r) {
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
#pragma unroll
                for (int k = 0; k < kQuads; ++k) {
                    const bool exists = static_cast<uint32_t>(tap + 4 * k) < static_cast<uint32_t>(kKernel);
                    const uint32_t bits = exists ? filters[2 * i * kTaps + r * kKernel + 4 * k].bits : 0;
                    filter[r][i][k] = bits << channel * 16;
                }
            }
        }
    }
};

}  // namespace fxfuse
