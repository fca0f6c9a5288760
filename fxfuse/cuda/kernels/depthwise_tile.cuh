// Depthwise convolution on NCHW with a square filter whose size and stride are known at compile time. (channels_last:
// depthwise_nhwc.cuh.)
//
// Memory is the limit: x should come from DRAM once, and enough of it should be under way at any time. So a block
// starts all copies of a tile of x to shared memory at once, 16 bytes each, with zeros around the image. Several blocks
// per multiprocessor take turns in copying and multiplying. From shared memory a thread computes a strip, kRows rows of
// kCols columns, top to bottom. The filter stays in registers. Every row of the strip's input is read once, and a row
// of outputs is finished as soon as its last input row has been read.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "depthwise_launch.cuh"
#include "divisor.cuh"

namespace fxfuse {

// kAccess: bytes per copy of x; addresses of rows are multiples of it.
template <class Element_, int kKernel_, int kStride_, int kAccess_>
struct DepthwiseTileConfig {
    using Element = Element_;
    static constexpr int kKernel = kKernel_, kStride = kStride_, kAccess = kAccess_;
    // Threads of a block, at most, and blocks that must fit a multiprocessor. A filter of 49 elements takes more
    // registers, so its blocks have fewer threads.
    static constexpr int kThreads = kKernel == 7 ? 128 : 256, kBlocks = 2;
    static constexpr int kRows = 7;  // of a strip: sides of 7, 14, 28, 56 and 112 are common
    static constexpr int kInRows = (kRows - 1) * kStride + kKernel;
    static_assert(kKernel % 2 == 1 && kKernel <= 7, "filters are at most 7 wide");
};

namespace detail {

// Tiles are made smaller until there are this many: a few for every multiprocessor.
constexpr int kEnoughTiles = 264;

// Threads of a block for `strips` strips: as few rounds as possible, all of one size.
inline int threads_for(int strips, int most) {
    const int rounds = (strips + most - 1) / most, warps = ((strips + rounds - 1) / rounds + 31) / 32;
    return 32 * warps;
}

inline int round_up(int value, int to) { return (value + to - 1) / to * to; }

// to[i] = load(i) for all i below `count`, by all threads. Loads go out in batches: nothing else hides their latency.
template <class Load>
__device__ __forceinline__ void fill(float* to, int count, Load load) {
    constexpr int kBatch = 4;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    if (count <= threads) {
        if (thread < count) to[thread] = load(thread);
        return;
    }
#pragma unroll 1
    for (int first = thread; first < count; first += kBatch * threads) {
        float value[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) value[j] = load(min(first + j * threads, count - 1));
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            if (first + j * threads < count) to[first + j * threads] = value[j];
        }
    }
}

// Computes one strip. `load(i, in)` reads row i of its input; `finish(i, sum)` takes row i of its output.
template <class Config, int kCols, class Load, class Finish>
__device__ __forceinline__ void multiply_strip(const float (&filter)[Config::kKernel][Config::kKernel], Load load,
                                               Finish finish) {
    constexpr int kKernel = Config::kKernel, kStride = Config::kStride, kRows = Config::kRows;
    constexpr int kInCols = (kCols - 1) * kStride + kKernel;
    float sum[kRows][kCols] = {};
#pragma unroll
    for (int i = 0; i < Config::kInRows; ++i) {
        float in[kInCols];
        load(i, in);
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            const int r = i - row * kStride;
            if (r < 0 || r >= kKernel) continue;
#pragma unroll
            for (int s = 0; s < kKernel; ++s) {
#pragma unroll
                for (int col = 0; col < kCols; ++col) {
                    sum[row][col] = fmaf(filter[r][s], in[col * kStride + s], sum[row][col]);
                }
            }
            if (r == kKernel - 1) finish(row, sum[row]);
        }
    }
}

}  // namespace detail

// The kernel: x has adjacent columns, out is NCHW. A plane is one channel of one image. A tile is a band of rows of a
// plane, or several whole planes. Its outputs are one piece of memory. They are written through shared memory in runs
// of 16 bytes, whatever a row's length. In shared memory, rows of x lie `pitch` apart and the gaps are zero: so strips
// read runs of 16 bytes and need not know where a row ends.
template <class Config_, class Output_, class Epilogue_>
struct DepthwiseTileNchw {
    using Config = Config_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Element = typename Config::Element;
    using Problem = Conv2dProblem;

    static constexpr int kTensors = 3;  // x, w, out
    static constexpr int kKernel = Config::kKernel, kStride = Config::kStride, kRows = Config::kRows;
    static constexpr int kElement = static_cast<int>(sizeof(Element));
    static constexpr int kRun = 16 / kElement;  // elements of x in 16 bytes
    static constexpr int kCols = kRun;          // of a strip
    static constexpr int kInCols = (kCols - 1) * kStride + kKernel;
    static constexpr int kSkipped = kRun - kKernel / 2;  // elements that a strip's first run has before its window
    static constexpr int kRead = (kSkipped + kInCols + kRun - 1) / kRun * kRun;
    static constexpr int kLead = 16;  // elements in front of the tile: padding, and kSkipped
    // A tile's shared memory: one or two warps' strips. Small tiles wait for less and overlap more.
    static constexpr int kTileBytes = (kStride == 1 ? 14 : 28) * 1024;

    struct Tiles {
        FastDivisor bands, channels, multiplier, in_rows, runs, strips_x, strips_y;
        uint32_t all_planes;
        int planes, rows;      // of a tile: planes, and output rows of each
        int pitch, shift;      // in elements: from row to row, and from a row's start to its first column
        int threads, copy_rows;  // of a block, and the rows that they copy at once
        int filters_at, x_at, staged_at, bytes;  // in shared memory, behind pointers to each plane of x
        int64_t count;

        explicit Tiles(const Problem& problem) {
            const int width = static_cast<int>(problem.width), out_width = static_cast<int>(problem.out_width);
            const int pad_left = static_cast<int>(problem.pad_w);
            const int pad_right = (out_width - 1) * kStride + kKernel - pad_left - width;
            // A strip's window starts kKernel / 2 before a multiple of 16 bytes.
            shift = ((pad_left - kKernel / 2) % kRun + kRun) % kRun;
            pitch = detail::round_up(width + (pad_left > pad_right ? pad_left : pad_right), kRun);
            const int along_x = ceil_div(out_width, kCols);
            const int all_y = ceil_div(problem.out_height, kRows);
            const int64_t total = problem.images * problem.out_channels;
            int along_y = all_y;
            planes = 1;
            place(along_x, along_y, out_width);
            while (along_y > 1 && (bytes > kTileBytes ||
                                   total * ceil_div(all_y, along_y) < detail::kEnoughTiles)) {
                along_y = (along_y + 1) / 2;
                place(along_x, along_y, out_width);
            }
            if (along_y == all_y && bytes <= kTileBytes) {
                const int fit = kTileBytes / bytes, wanted = ceil_div(total, detail::kEnoughTiles);
                planes = fit < wanted ? fit : wanted;
                place(along_x, along_y, out_width);
            }
            const int along = ceil_div(all_y, along_y);
            count = ceil_div(total, planes) * int64_t{along};
            all_planes = static_cast<uint32_t>(total);
            threads = detail::threads_for(planes * along_x * along_y, Config::kThreads);
            const int row_runs = pitch / kRun;
            copy_rows = row_runs < threads ? threads / row_runs : 1;
            bands = FastDivisor(along);
            channels = FastDivisor(static_cast<unsigned>(problem.out_channels));
            multiplier = FastDivisor(static_cast<unsigned>(problem.out_channels / problem.groups));
            in_rows = FastDivisor(rows_of_x(along_y));
            runs = FastDivisor(row_runs);
            strips_x = FastDivisor(along_x);
            strips_y = FastDivisor(along_y);
        }

    private:
        static int rows_of_x(int along_y) { return (along_y * kRows - 1) * kStride + kKernel; }

        // Lays out shared memory for tiles of `planes` planes of along_x * along_y strips each.
        void place(int along_x, int along_y, int out_width) {
            rows = along_y * kRows;
            filters_at = detail::round_up(planes * static_cast<int>(sizeof(Element*)), 16);
            x_at = filters_at + detail::round_up(planes * kKernel * kKernel * static_cast<int>(sizeof(float)), 16);
            // The last strip of the last row reads past the row's end.
            const int past = (along_x - 1) * kCols * kStride + kRead - pitch;
            const int elements = kLead + kRun + planes * rows_of_x(along_y) * pitch + (past > 0 ? past : 0);
            staged_at = x_at + detail::round_up(elements * kElement, 16);
            bytes = staged_at + (planes * rows * out_width) * static_cast<int>(sizeof(Output)) + 16;
        }
    };

    static __device__ __forceinline__ void run(const Problem& problem, const Tiles& tiles, unsigned char* shared,
                                               const Element* x, const Element* w, Output* out,
                                               const Epilogue& epilogue) {
        uint32_t index = blockIdx.x;
        const int band = static_cast<int>(tiles.bands.take(index));
        const uint32_t first = index * tiles.planes;
        const int planes = static_cast<int>(min(static_cast<uint32_t>(tiles.planes), tiles.all_planes - first));
        copy_tile(problem, tiles, shared, x, first, planes, band * tiles.rows);
        copy_filters(problem, tiles, reinterpret_cast<float*>(shared + tiles.filters_at), w, first, planes);
        ptx::cp_async_wait<0>();
        __syncthreads();

        const int height = static_cast<int>(problem.out_height), width = static_cast<int>(problem.out_width);
        const int top = band * tiles.rows, rows = min(tiles.rows, height - top);
        Output* destination = out + (static_cast<int64_t>(first) * height + top) * width;
        constexpr int kVector = 16 / static_cast<int>(sizeof(Output));
        const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(destination) / sizeof(Output) % kVector);
        Output* staged = reinterpret_cast<Output*>(shared + tiles.staged_at);
        const uint32_t strips = planes * tiles.strips_x.divisor * tiles.strips_y.divisor;
        for (uint32_t strip = threadIdx.x; strip < strips; strip += blockDim.x) {
            multiply(problem, tiles, shared, staged + misaligned, strip, first, top, rows, epilogue);
        }
        __syncthreads();
        store(destination, staged, misaligned, planes * rows * width);
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        const Tiles tiles(problem);
        return launch_depthwise_tiles<DepthwiseTileNchw>(problem, tiles, tiles.threads, pointers, epilogue, stream);
    }
#endif  // __CUDACC_RTC__

private:
    static __device__ __forceinline__ void copy_tile(const Problem& problem, const Tiles& tiles, unsigned char* shared,
                                                     const Element* x, uint32_t first, int planes, int out_top) {
        const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
        const Element** starts = reinterpret_cast<const Element**>(shared);
        for (int plane = thread; plane < planes; plane += threads) {
            uint32_t image = first + plane;
            const uint32_t channel = tiles.channels.take(image);
            starts[plane] = x + (image * problem.x_image + tiles.multiplier.divide(channel) * problem.x_channel);
        }
        Element* tile = reinterpret_cast<Element*>(shared + tiles.x_at);
        if (thread < kLead + tiles.shift) tile[thread] = from_float<Element>(0.0f);
        __syncthreads();

        const int height = static_cast<int>(problem.height), x_row = static_cast<int>(problem.x_row);
        const int top = out_top * kStride - static_cast<int>(problem.pad_h);
        const int runs = static_cast<int>(tiles.runs.divisor), in_rows = static_cast<int>(tiles.in_rows.divisor);
        const int first_row = static_cast<int>(tiles.runs.divide(thread));
        if (runs < threads && first_row >= tiles.copy_rows) return;
        tile += kLead + tiles.shift;
        // Usually a thread stays in its column and walks down; rows longer than a block take several rounds each.
        for (int col = (thread - first_row * runs) * kRun; col < tiles.pitch; col += threads * kRun) {
            const int exist = static_cast<int>(problem.width) - col;
            Element* to = tile + (first_row * tiles.pitch + col);
#pragma unroll 2
            for (int row = first_row; row < planes * in_rows; row += tiles.copy_rows) {
                const int plane = static_cast<int>(tiles.in_rows.divide(row));
                const int y = top + row - plane * in_rows;
                const bool inside = static_cast<uint32_t>(y) < static_cast<uint32_t>(height);
                copy_run(to, starts[plane] + (y * x_row + col), inside ? exist : 0);
                to += tiles.copy_rows * tiles.pitch;
            }
        }
        ptx::cp_async_commit();
    }

    // Copies 16 bytes, of which `count` elements exist, in pieces of Config::kAccess. The others become zero.
    static __device__ __forceinline__ void copy_run(Element* to, const Element* from, int count) {
        constexpr int kPiece = Config::kAccess / kElement;
        if constexpr (Config::kAccess == 16) {
            ptx::cp_async_16(ptx::shared_address(to), from, count > 0 ? 16 : 0);
        } else if constexpr (Config::kAccess >= 4) {
#pragma unroll
            for (int i = 0; i < kRun; i += kPiece) {
                ptx::cp_async_small<Config::kAccess>(ptx::shared_address(to) + i * kElement, from + i,
                                                     i < count ? Config::kAccess : 0);
            }
        } else {
            Elements<Element, kRun> run;
            run.load_some(from, 1, count);
            if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
                run.store_whole(to);
                return;
            }
#pragma unroll
            for (int i = 0; i < kRun; ++i) to[i] = reinterpret_cast<const Element*>(run.unit)[i];
        }
    }

    static __device__ __forceinline__ void copy_filters(const Problem& problem, const Tiles& tiles, float* filters,
                                                        const Element* w, uint32_t first, int planes) {
        constexpr int kTaps = kKernel * kKernel;
        detail::fill(filters, planes * kTaps, [&](int i) {
            const int tap = i % kTaps;
            uint32_t image = first + i / kTaps;
            const int64_t channel = tiles.channels.take(image);
            return to_float(__ldg(w + channel * problem.w_filter + tap / kKernel * static_cast<int>(problem.w_row) +
                                  tap % kKernel * static_cast<int>(problem.w_col)));
        });
    }

    static __device__ __forceinline__ void multiply(const Problem& problem, const Tiles& tiles,
                                                    const unsigned char* shared, Output* staged, uint32_t strip,
                                                    uint32_t first, int top, int rows, const Epilogue& epilogue) {
        const int col = static_cast<int>(tiles.strips_x.take(strip)) * kCols;
        const int row = static_cast<int>(tiles.strips_y.take(strip)) * kRows;
        const int plane = static_cast<int>(strip);
        uint32_t image = first + plane;
        const uint32_t channel = tiles.channels.take(image);
        const float* taps = reinterpret_cast<const float*>(shared + tiles.filters_at) + plane * kKernel * kKernel;
        float filter[kKernel][kKernel];
#pragma unroll
        for (int i = 0; i < kKernel * kKernel; ++i) filter[i / kKernel][i % kKernel] = taps[i];

        const int in_row = plane * static_cast<int>(tiles.in_rows.divisor) + row * kStride;
        const Element* source = reinterpret_cast<const Element*>(shared + tiles.x_at) + kLead + tiles.shift -
                                static_cast<int>(problem.pad_w) - kSkipped + in_row * tiles.pitch + col * kStride;
        const int width = static_cast<int>(problem.out_width), count = min(kCols, width - col);
        staged += (plane * rows + row) * width + col;
        constexpr int kAligned = Elements<Output, kCols>::kWidest;
        const bool whole = count == kCols && reinterpret_cast<uintptr_t>(staged) % kAligned == 0 &&
                           width * static_cast<int>(sizeof(Output)) % kAligned == 0;
        detail::multiply_strip<Config, kCols>(
            filter,
            [&](int i, float(&in)[kInCols]) {
                Elements<Element, kRead> run;
                run.template load_whole<16, false>(source + i * tiles.pitch);
#pragma unroll
                for (int j = 0; j < kInCols; ++j) in[j] = run[kSkipped + j];
            },
            [&](int i, float(&value)[kCols]) {
                // Rows that do not exist are computed, too: without a branch, operands are read once for all rows.
                const int64_t pixel = static_cast<int64_t>(top + min(row + i, rows - 1)) * width + col;
                epilogue.template apply<kCols>(value, Position{image, channel, pixel}, count);
                if (row + i >= rows) return;
                if (whole) {
                    store_run<Output, kCols, Runs::kWhole>(staged + i * width, value, kCols);
                    return;
                }
#pragma unroll
                for (int j = 0; j < kCols; ++j) {
                    if (j < count) staged[i * width + j] = from_float<Output>(value[j]);
                }
            });
    }

    // Stores `count` outputs, staged `misaligned` elements past a multiple of 16 bytes, as their destination is.
    static __device__ __forceinline__ void store(Output* destination, const Output* staged, int misaligned, int count) {
        constexpr int kVector = 16 / static_cast<int>(sizeof(Output));
        const int step = static_cast<int>(blockDim.x) * kVector;
        for (int i = static_cast<int>(threadIdx.x) * kVector; i < misaligned + count; i += step) {
            const int begin = i - misaligned;
            if (begin >= 0 && begin + kVector <= count) {
                *reinterpret_cast<uint4*>(destination + begin) = *reinterpret_cast<const uint4*>(staged + i);
                continue;
            }
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
                if (begin + j >= 0 && begin + j < count) destination[begin + j] = staged[i + j];
            }
        }
    }
};

}  // namespace fxfuse
