// Depthwise convolution on channels_last with a square filter whose size and stride are known at compile time.
//
// Memory is the limit, and close behind it the number of instructions. So x comes to a multiprocessor once, in copies
// of 16 bytes into a ring of rows in shared memory; they are under way while earlier rows are multiplied. A thread
// walks down kCols columns of one channel. It reads every row of its window once. Its registers hold the filter and the
// sums of all output rows that a row contributes to. A sum moves on to the filter's next row as the addend of that
// row's first product, which costs no instruction. Neighbouring threads have neighbouring channels.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "depthwise_ring.cuh"
#include "divisor.cuh"

namespace fxfuse {

template <class Element_, int kKernel_, int kStride_>
struct DepthwiseNhwcConfig {
    using Element = Element_;
    static constexpr int kKernel = kKernel_, kStride = kStride_;
    static constexpr int kCols = 7;  // of outputs, for a thread: sides of 7, 14, 28, 56 and 112 are common
    // Stages of the ring, kStride rows of x each. Where memory is the only limit, three are better than four.
    static constexpr int kStages = kStride == 2 || (kKernel == 3 && sizeof(Element) == 4) ? 3 : 4;
    static constexpr int kThreads = 128;  // of a block, at most
    // Blocks per multiprocessor. With more, the registers of the filter, the sums and a row would spill.
    static constexpr int kBlocks = (kKernel == 7 ? 3 : kKernel == 5 ? 5 : 6) + (kKernel > 3 && kStride == 2);
    static_assert(kKernel % 2 == 1, "filters of an odd size are read from shared memory without conflicts");
};

template <class Config_, class Output_, class Epilogue_>
struct DepthwiseNhwc {
    using Config = Config_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Element = typename Config::Element;
    using Problem = Conv2dProblem;

    static constexpr int kTensors = 3;  // x, w, out
    static constexpr int kKernel = Config::kKernel, kStride = Config::kStride, kTaps = kKernel * kKernel;
    static constexpr int kCols = Config::kCols, kStages = Config::kStages;
    static constexpr int kChunk = 32;  // channels of a tile, and threads side by side on them
    static constexpr int kElement = static_cast<int>(sizeof(Element));
    static constexpr int kRun = 16 / kElement;     // channels that a copy takes
    static constexpr int kCopies = kChunk / kRun;  // of a pixel
    static constexpr int kInCols = (kCols - 1) * kStride + kKernel;
    static constexpr int kOpen = (kKernel + kStride - 1) / kStride;  // output rows that a row of x contributes to
    // Copies per thread and row, at most: in a tile of one strip.
    static constexpr int kPieces = (kInCols * kCopies + kChunk - 1) / kChunk;

    // A tile is kChunk channels of a rectangle of outputs, a strip kCols columns of it.
    struct Tiles {
        FastDivisor chunks, tiles_x, bands;
        int strips, rows;             // of a tile
        int in_cols;                  // columns of x that a tile reads
        int x_at, row_bytes, bytes;   // in shared memory: the ring (behind the filters), a row of x, everything
        int piece_bytes, piece_step;  // from a thread's piece of a row to the next: bytes (shared memory), elements (x)
        int64_t count;

        Tiles(const Problem& problem, int multiprocessors) {
            constexpr int kMost = Config::kThreads / kChunk;
            const int all_x = ceil_div(problem.out_width, kCols), count_x = ceil_div(all_x, kMost);
            strips = ceil_div(all_x, count_x);
            in_cols = (strips * kCols - 1) * kStride + kKernel;
            x_at = kTaps * kChunk * kElement;
            piece_bytes = threads() * 16;
            piece_step = threads() / kCopies * static_cast<int>(problem.x_col);
            row_bytes = in_cols * kChunk * kElement;
            bytes = x_at + kStages * kStride * row_bytes;
            const int chunk_count = ceil_div(problem.channels, kChunk), height = static_cast<int>(problem.out_height);
            const int64_t columns = problem.images * chunk_count * count_x;
            const int by_registers = Config::kBlocks * Config::kThreads / threads();
            rows = rows_of_tile(columns, height, kOpen - 1, by_registers, strips, bytes, multiprocessors);
            count = columns * ceil_div(height, rows);
            chunks = FastDivisor(chunk_count);
            tiles_x = FastDivisor(count_x);
            bands = FastDivisor(ceil_div(height, rows));
        }

        int threads() const { return strips * kChunk; }
    };

    static __device__ __forceinline__ void run(const Problem& problem, const Tiles& tiles, unsigned char* shared,
                                               const Element* x, const Element* w, Output* out,
                                               const Epilogue& epilogue) {
        uint32_t index = blockIdx.x;
        const int first = static_cast<int>(tiles.chunks.take(index)) * kChunk;
        const int left = static_cast<int>(tiles.tiles_x.take(index)) * tiles.strips * kCols;
        const int top = static_cast<int>(tiles.bands.take(index)) * tiles.rows;
        const int64_t image = index;
        const int height = static_cast<int>(problem.height), out_height = static_cast<int>(problem.out_height);

        // A step reads kStride rows of x, begins an output row and completes another. Steps whose rows of x are above
        // the image are left out. Steps whose rows are below it only complete output rows.
        const int above = top * kStride - static_cast<int>(problem.pad_h);
        const int steps = min(tiles.rows, out_height - top) + kOpen - 1;
        const int begin = above < 0 ? -above / kStride : 0;
        const int end = min(steps, (height - above + kStride - 1) / kStride);

        Element* filters = reinterpret_cast<Element*>(shared);
        // Filters have an odd number of taps: those of neighbouring channels are in different banks.
        copy_filters<kKernel>(problem, filters, w + first * problem.w_filter,
                              min(kChunk, static_cast<int>(problem.channels) - first));
        Copier copier(problem, tiles, shared + tiles.x_at, x + image * problem.x_image, first, left,
                      above + begin * kStride);
        int to_copy = end - begin;
        const auto copy_next = [&] {
            if (to_copy > 0) copier.copy_stage(problem, tiles);
            --to_copy;
            ptx::cp_async_commit();
        };
#pragma unroll 1
        for (int i = 0; i < kStages - 1; ++i) copy_next();

        // Threads whose outputs do not exist compute with whatever they read, and store nothing.
        const int lane = static_cast<int>(threadIdx.x) % kChunk, col = static_cast<int>(threadIdx.x) / kChunk * kCols;
        Strip strip(problem, out, image, top, left + col, first + lane);
        const auto columns = epilogue.template load_columns<Runs::kWhole, 1>(Position{0, 0, strip.channel}, 1);

        ptx::cp_async_wait<kStages - 2>();
        __syncthreads();
        float filter[kTaps];
#pragma unroll
        for (int i = 0; i < kTaps; ++i) filter[i] = to_float(filters[lane * kTaps + i]);

        float sum[kOpen][kCols] = {};  // of the output row that the step begins, the one above it, …
        const unsigned char* source = shared + tiles.x_at + (col * kStride * kChunk + lane) * kElement;
        int stage = 0;
#pragma unroll 1
        for (int step = begin; step < end; ++step) {
            ptx::cp_async_wait<kStages - 2>();
            __syncthreads();
            copy_next();
            const unsigned char* row = source + stage * kStride * tiles.row_bytes;
            stage = stage + 1 == kStages ? 0 : stage + 1;
            begin_row(sum);
#pragma unroll
            for (int a = 0; a < kStride; ++a) {
                multiply_row(a, filter, reinterpret_cast<const Element*>(row + a * tiles.row_bytes), sum);
            }
            if (step >= kOpen - 1) strip.store_row(problem, epilogue, columns, sum[kOpen - 1]);
        }
#pragma unroll 1
        for (int step = max(begin, end); step < steps; ++step) {
            begin_row(sum);
            if (step >= kOpen - 1) strip.store_row(problem, epilogue, columns, sum[kOpen - 1]);
        }
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        return launch_depthwise_ring<DepthwiseNhwc>(problem, pointers, epilogue, stream);
    }
#endif  // __CUDACC_RTC__

private:
    // The copies of one thread: the same pieces of 16 bytes in every row.
    struct Copier {
        const Element* from;  // the first piece of the next row
        bool exists[kPieces];
        int pieces, y;        // how many pieces; the next row's number
        uint32_t to, stage;

        __device__ __forceinline__ Copier(const Problem& problem, const Tiles& tiles, unsigned char* ring,
                                          const Element* image, int first, int out_left, int top)
            : pieces(0), y(top), to(ptx::shared_address(ring) + threadIdx.x * 16), stage(0) {
            const int channel = first + static_cast<int>(threadIdx.x) % kCopies * kRun;
            const int col = static_cast<int>(threadIdx.x) / kCopies, step = static_cast<int>(blockDim.x) / kCopies;
            const int left = out_left * kStride - static_cast<int>(problem.pad_w);
            from = image + (top * problem.x_row + (left + col) * problem.x_col + channel);
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                const int at = col + i * step;
                if (at < tiles.in_cols) pieces = i + 1;
                exists[i] = static_cast<uint32_t>(left + at) < static_cast<uint32_t>(problem.width) &&
                            channel < static_cast<int>(problem.channels);
            }
        }

        // Copies the next kStride rows, with zeros outside the image.
        __device__ __forceinline__ void copy_stage(const Problem& problem, const Tiles& tiles) {
#pragma unroll
            for (int a = 0; a < kStride; ++a) {
                const bool inside = kStride == 1 || static_cast<uint32_t>(y) < static_cast<uint32_t>(problem.height);
                const uint32_t row = to + (stage * kStride + a) * tiles.row_bytes;
#pragma unroll
                for (int i = 0; i < kPieces; ++i) {
                    if (i < pieces) {
                        ptx::cp_async_16(row + i * tiles.piece_bytes, from + i * tiles.piece_step,
                                         exists[i] && inside ? 16 : 0);
                    }
                }
                from += problem.x_row;
                ++y;
            }
            stage = stage + 1 == kStages ? 0 : stage + 1;
        }
    };

    // A thread's outputs, row after row.
    struct Strip {
        int64_t image, pixel;
        int channel, count;  // count: columns that exist
        unsigned char* destination;
        uint32_t col_bytes, row_bytes;  // from an output to its neighbours

        __device__ __forceinline__ Strip(const Problem& problem, Output* out, int64_t image, int top, int left,
                                         int channel)
            : image(image), channel(min(channel, static_cast<int>(problem.channels) - 1)) {
            const int width = static_cast<int>(problem.out_width);
            count = channel < problem.channels ? min(kCols, width - left) : 0;
            pixel = static_cast<int64_t>(top) * width + min(left, width - 1);
            const int64_t pixels = problem.out_height * problem.out_width;
            out += (image * pixels + pixel) * problem.channels + this->channel;
            destination = reinterpret_cast<unsigned char*>(out);
            col_bytes = static_cast<uint32_t>(problem.channels) * static_cast<uint32_t>(sizeof(Output));
            row_bytes = static_cast<uint32_t>(width) * col_bytes;
        }

        __device__ __forceinline__ void store_row(const Problem& problem, const Epilogue& epilogue,
                                                  const typename Epilogue::template ColumnValues<1, Position>& columns,
                                                  const float (&sum)[kCols]) {
            float value[kCols][1];
#pragma unroll
            for (int j = 0; j < kCols; ++j) {
                value[j][0] = sum[j];
                const auto of_row = epilogue.template load_rows<Runs::kWhole, 1>(
                    Position{image, pixel + max(min(j, count - 1), 0), channel}, 1);
                epilogue.apply(value[j], columns, of_row);
            }
            // Hides that all threads share col_bytes: the compiler would multiply it in several instructions.
            ptx::forget(col_bytes);
            if (count == kCols) {  // nearly always; no comparison per column
#pragma unroll
                for (int j = 0; j < kCols; ++j) store(j, value[j][0]);
            } else {
#pragma unroll
                for (int j = 0; j < kCols - 1; ++j) {
                    if (j < count) store(j, value[j][0]);
                }
            }
            pixel += problem.out_width;
            destination += row_bytes;
        }

        __device__ __forceinline__ void store(int col, float value) {
            Output* to = reinterpret_cast<Output*>(destination + static_cast<uint64_t>(col_bytes) * col);
            *to = from_float<Output>(value);
        }
    };

    // Adds the contributions of a step's a-th row of x to all output rows that need it.
    static __device__ __forceinline__ void multiply_row(int a, const float (&filter)[kTaps], const Element* row,
                                                        float (&sum)[kOpen][kCols]) {
        float in[kInCols];
#pragma unroll
        for (int j = 0; j < kInCols; ++j) in[j] = to_float(row[j * kChunk]);
#pragma unroll
        for (int q = kOpen - 1; q >= 0; --q) {
            const int r = q * kStride + a;
            if (r >= kKernel) continue;
#pragma unroll
            for (int s = 0; s < kKernel; ++s) {
#pragma unroll
                for (int j = 0; j < kCols; ++j) {
                    sum[q][j] = fmaf(filter[r * kKernel + s], in[j * kStride + s], sum[q][j]);
                }
            }
        }
    }
};

}  // namespace fxfuse
