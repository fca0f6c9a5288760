// Depthwise convolution with a square filter whose size and stride are known at compile time.
//
// Memory is the limit: x should come from DRAM once, and enough of it be under way at any time. So a block copies a tile
// of x into shared memory, 16 bytes at a time and all at once, zeros around the image included, and several blocks per
// multiprocessor take turns in copying and multiplying. From there a thread computes a strip, kRows rows of kCols
// columns of kVector channels, top to bottom: the filter stays in registers, every row of the strip's input is read
// once, and a row of outputs is finished as soon as its last input row was there.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "device_pass.cuh"
#include "divisor.cuh"
#include "launch.cuh"

namespace fxfuse {

// kAccess: bytes that a copy of x takes at a time, of which addresses of rows (NCHW) are multiples; 16 for NHWC.
template <class Element_, int kKernel_, int kStride_, int kAccess_>
struct DepthwiseTileConfig {
    using Element = Element_;
    static constexpr int kKernel = kKernel_, kStride = kStride_, kAccess = kAccess_;
    // Of a block, at most. Two must fit a multiprocessor, of which the 49 elements of a filter take more registers.
    static constexpr int kThreads = kKernel == 7 ? 128 : 256;
    static constexpr int kRows = 7;  // of a strip: sides of 7, 14, 28, 56 and 112 are common
    static constexpr int kInRows = (kRows - 1) * kStride + kKernel;
    static_assert(kKernel % 2 == 1 && kKernel <= 7, "filters are at most 7 wide");
};

namespace detail {

// Tiles are made smaller until there are so many: a few for every multiprocessor.
constexpr int kEnoughTiles = 264;

// Threads for so many strips: as few rounds as possible, all alike.
inline int threads_for(int strips, int most) {
    const int rounds = (strips + most - 1) / most, warps = ((strips + rounds - 1) / rounds + 31) / 32;
    return 32 * warps;
}

inline int tiles_of(int64_t extent, int tile) {
    return static_cast<int>((extent + tile - 1) / tile);
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
template <class Config, int kCols, int kVector, class Load, class Finish>
__device__ __forceinline__ void multiply_strip(const float (&filter)[Config::kKernel][Config::kKernel][kVector],
                                               Load load, Finish finish) {
    constexpr int kKernel = Config::kKernel, kStride = Config::kStride, kRows = Config::kRows;
    constexpr int kInCols = (kCols - 1) * kStride + kKernel;
    float sum[kRows][kCols][kVector] = {};
#pragma unroll
    for (int i = 0; i < Config::kInRows; ++i) {
        float in[kInCols][kVector];
        load(i, in);
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            const int r = i - row * kStride;
            if (r < 0 || r >= kKernel) continue;
#pragma unroll
            for (int s = 0; s < kKernel; ++s) {
#pragma unroll
                for (int col = 0; col < kCols; ++col) {
#pragma unroll
                    for (int v = 0; v < kVector; ++v) {
                        sum[row][col][v] = fmaf(filter[r][s][v], in[col * kStride + s][v], sum[row][col][v]);
                    }
                }
            }
            if (r == kKernel - 1) finish(row, sum[row]);
        }
    }
}

}  // namespace detail

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kThreads, 2)
    depthwise_tile_kernel(const __grid_constant__ Conv2dProblem problem,
                          const __grid_constant__ typename Kernel::Tiles tiles,
                          const typename Kernel::Element* __restrict__ x,
                          const typename Kernel::Element* __restrict__ w, typename Kernel::Output* __restrict__ out,
                          const typename Kernel::Epilogue epilogue) {
    extern __shared__ __align__(16) unsigned char depthwise_shared[];
    FXFUSE_DEVICE_PASS(Kernel::run(problem, tiles, depthwise_shared, x, w, out, epilogue));
}

#ifndef __CUDACC_RTC__
template <class Kernel>
cudaError_t launch_depthwise_tile(const Conv2dProblem& problem, const uint64_t* pointers,
                                  const typename Kernel::Epilogue& epilogue, cudaStream_t stream) {
    using Element = typename Kernel::Element;
    const typename Kernel::Tiles tiles(problem);
    if (tiles.count > INT32_MAX) return cudaErrorInvalidConfiguration;
    constexpr auto kKernel = depthwise_tile_kernel<Kernel>;
    if (const cudaError_t error = allow_shared_memory<kKernel>(tiles.bytes); error != cudaSuccess) return error;
    kKernel<<<static_cast<unsigned>(tiles.count), tiles.threads, tiles.bytes, stream>>>(
        problem, tiles, reinterpret_cast<const Element*>(pointers[0]), reinterpret_cast<const Element*>(pointers[1]),
        reinterpret_cast<typename Kernel::Output*>(pointers[2]), epilogue);
    return cudaGetLastError();
}
#endif  // __CUDACC_RTC__

// x with adjacent columns; out NCHW. A plane is one channel of one image. A tile is a band of rows of a plane, or several
// whole planes: its outputs are one piece of memory, written through shared memory in runs of 16 bytes, whatever a row's
// length. Rows of x lie in shared memory `pitch` apart, the gap between them zero, so that strips read runs of 16 bytes
// and need not know where a row ends.
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
        int pitch, shift;      // elements from row to row, and from there to the first column
        int threads, copy_rows;  // of a block, and the rows that they copy at once
        int filters_at, x_at, staged_at, bytes;  // in shared memory; in front of all of it where each plane of x starts
        int64_t count;

        explicit Tiles(const Problem& problem) {
            const int width = static_cast<int>(problem.width), out_width = static_cast<int>(problem.out_width);
            const int pad_left = static_cast<int>(problem.pad_w);
            const int pad_right = (out_width - 1) * kStride + kKernel - pad_left - width;
            // A strip's window starts kKernel / 2 before a multiple of 16 bytes.
            shift = ((pad_left - kKernel / 2) % kRun + kRun) % kRun;
            pitch = detail::round_up(width + (pad_left > pad_right ? pad_left : pad_right), kRun);
            const int along_x = detail::tiles_of(out_width, kCols);
            const int all_y = detail::tiles_of(problem.out_height, kRows);
            const int64_t total = problem.images * problem.out_channels;
            int along_y = all_y;
            planes = 1;
            place(along_x, along_y, out_width);
            while (along_y > 1 && (bytes > kTileBytes ||
                                   total * detail::tiles_of(all_y, along_y) < detail::kEnoughTiles)) {
                along_y = (along_y + 1) / 2;
                place(along_x, along_y, out_width);
            }
            if (along_y == all_y && bytes <= kTileBytes) {
                const int fit = kTileBytes / bytes, wanted = detail::tiles_of(total, detail::kEnoughTiles);
                planes = fit < wanted ? fit : wanted;
                place(along_x, along_y, out_width);
            }
            const int along = detail::tiles_of(all_y, along_y);
            count = detail::tiles_of(total, planes) * int64_t{along};
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

        // Where everything is in shared memory, for tiles of `planes` and that many strips.
        void place(int along_x, int along_y, int out_width) {
            rows = along_y * kRows;
            filters_at = detail::round_up(planes * static_cast<int>(sizeof(Element*)), 16);
            x_at = filters_at + detail::round_up(planes * kKernel * kKernel * static_cast<int>(sizeof(float)), 16);
            // The last strip of the last row reads past its end.
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
        return launch_depthwise_tile<DepthwiseTileNchw>(problem, pointers, epilogue, stream);
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

    // 16 bytes of which `count` elements exist, in pieces of Config::kAccess; zeros for the others.
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
        float filter[kKernel][kKernel][1];
#pragma unroll
        for (int i = 0; i < kKernel * kKernel; ++i) filter[i / kKernel][i % kKernel][0] = taps[i];

        const int in_row = plane * static_cast<int>(tiles.in_rows.divisor) + row * kStride;
        const Element* source = reinterpret_cast<const Element*>(shared + tiles.x_at) + kLead + tiles.shift -
                                static_cast<int>(problem.pad_w) - kSkipped + in_row * tiles.pitch + col * kStride;
        const int width = static_cast<int>(problem.out_width), count = min(kCols, width - col);
        staged += (plane * rows + row) * width + col;
        constexpr int kAligned = Elements<Output, kCols>::kWidest;
        const bool whole = count == kCols && reinterpret_cast<uintptr_t>(staged) % kAligned == 0 &&
                           width * static_cast<int>(sizeof(Output)) % kAligned == 0;
        detail::multiply_strip<Config, kCols, 1>(
            filter,
            [&](int i, float(&in)[kInCols][1]) {
                Elements<Element, kRead> run;
                run.template load_whole<16, false>(source + i * tiles.pitch);
#pragma unroll
                for (int j = 0; j < kInCols; ++j) in[j][0] = run[kSkipped + j];
            },
            [&](int i, float(&sum)[kCols][1]) {
                float value[kCols];
#pragma unroll
                for (int j = 0; j < kCols; ++j) value[j] = sum[j][0];
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

    // `count` staged outputs, which are `misaligned` elements past a multiple of 16 bytes, as their destination is.
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

// x and out NHWC with as many channels, 16 bytes of which are aligned in x. A tile has kChunk channels of a rectangle of
// pixels. Neighbouring threads compute neighbouring channels.
template <class Config_, class Output_, class Epilogue_>
struct DepthwiseTileNhwc {
    using Config = Config_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Element = typename Config::Element;
    using Problem = Conv2dProblem;

    static constexpr int kTensors = 3;  // x, w, out
    static constexpr int kKernel = Config::kKernel, kStride = Config::kStride;
    static constexpr int kRows = Config::kRows, kCols = 4;
    static constexpr int kInCols = (kCols - 1) * kStride + kKernel;
    static constexpr int kElement = static_cast<int>(sizeof(Element));
    static constexpr int kRun = 16 / kElement;  // channels that a copy takes
    // Copies of a pixel: 128 bytes where memory is the limit, else 64, which fewer numbers of channels leave unused.
    static constexpr int kCopies = kKernel == 3 && kElement == 4 ? 8 : 4;
    static constexpr int kChunk = kCopies * kRun;
    static constexpr int kVector = kKernel == 3 ? 2 : 1;  // channels of a thread: their filters stay in registers
    static constexpr int kLanes = kChunk / kVector;       // threads along a chunk
    static constexpr int kTileBytes = 40 * 1024;          // of shared memory

    struct Tiles {
        FastDivisor chunks, tiles_x, tiles_y, in_cols, strips_y;
        int in_rows, strips, strips_x;  // of a tile
        int threads;          // of a block
        int x_at, bytes;      // in shared memory, behind the filters
        int64_t count;

        explicit Tiles(const Problem& problem) {
            const int all_x = detail::tiles_of(problem.out_width, kCols);
            const int all_y = detail::tiles_of(problem.out_height, kRows);
            const int chunk_count = detail::tiles_of(problem.channels, kChunk);
            int along_x = all_x, along_y = all_y;
            const auto shrinkable = [&] { return along_x > 1 || along_y > 1; };
            place(along_x, along_y);
            count = problem.images * chunk_count;
            while (shrinkable() && (bytes > kTileBytes || count < detail::kEnoughTiles)) {
                // The side that is longer in pixels: squares share the least of their surroundings.
                int& longer = along_x * kCols > along_y * kRows ? along_x : along_y;
                longer = (longer + 1) / 2;
                place(along_x, along_y);
                count = problem.images * chunk_count * detail::tiles_of(all_x, along_x) *
                        detail::tiles_of(all_y, along_y);
            }
            strips = along_x * along_y;
            strips_x = along_x;
            threads = detail::threads_for(strips * kLanes, Config::kThreads);
            chunks = FastDivisor(chunk_count);
            tiles_x = FastDivisor(detail::tiles_of(all_x, along_x));
            tiles_y = FastDivisor(detail::tiles_of(all_y, along_y));
            in_cols = FastDivisor(cols_of_x(along_x));
            strips_y = FastDivisor(along_y);
        }

    private:
        static int cols_of_x(int along_x) { return (along_x * kCols - 1) * kStride + kKernel; }

        void place(int along_x, int along_y) {
            in_rows = (along_y * kRows - 1) * kStride + kKernel;
            x_at = kKernel * kKernel * kChunk * static_cast<int>(sizeof(float));
            bytes = x_at + in_rows * cols_of_x(along_x) * kChunk * kElement;
        }
    };

    static __device__ __forceinline__ void run(const Problem& problem, const Tiles& tiles, unsigned char* shared,
                                               const Element* x, const Element* w, Output* out,
                                               const Epilogue& epilogue) {
        uint32_t index = blockIdx.x;
        const int first = static_cast<int>(tiles.chunks.take(index)) * kChunk;
        const int left = static_cast<int>(tiles.tiles_x.take(index)) * tiles.strips_x * kCols;
        const int top = static_cast<int>(tiles.tiles_y.take(index) * tiles.strips_y.divisor) * kRows;
        const int64_t image = index;
        float* filters = reinterpret_cast<float*>(shared);
        Element* tile = reinterpret_cast<Element*>(shared + tiles.x_at);
        copy_tile(problem, tiles, tile, x + image * problem.x_image, first, top, left);
        copy_filters(problem, filters, w, first);
        ptx::cp_async_wait<0>();
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < static_cast<uint32_t>(tiles.strips * kLanes); i += blockDim.x) {
            uint32_t strip = i / kLanes;
            const int lane = static_cast<int>(i % kLanes) * kVector;
            const int row = static_cast<int>(tiles.strips_y.take(strip)) * kRows;
            const int col = static_cast<int>(strip) * kCols;
            multiply(problem, tiles, tile, filters, out, image, first, lane, row, col, top, left, epilogue);
        }
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        return launch_depthwise_tile<DepthwiseTileNhwc>(problem, pointers, epilogue, stream);
    }
#endif  // __CUDACC_RTC__

private:
    static __device__ __forceinline__ void copy_tile(const Problem& problem, const Tiles& tiles, Element* tile,
                                                     const Element* x, int first, int out_top, int out_left) {
        const int thread = static_cast<int>(threadIdx.x);
        const int lane = thread % kCopies * kRun;
        const int height = static_cast<int>(problem.height), width = static_cast<int>(problem.width);
        const int top = out_top * kStride - static_cast<int>(problem.pad_h);
        const int left = out_left * kStride - static_cast<int>(problem.pad_w);
        const int in_cols = static_cast<int>(tiles.in_cols.divisor);
        const bool channel_exists = first + lane < static_cast<int>(problem.channels);
        x += first + lane;
#pragma unroll 4
        for (int pixel = thread / kCopies; pixel < tiles.in_rows * in_cols; pixel += blockDim.x / kCopies) {
            const int row = static_cast<int>(tiles.in_cols.divide(pixel));
            const int y = top + row, at = left + pixel - row * in_cols;
            const bool exists = channel_exists && static_cast<uint32_t>(y) < static_cast<uint32_t>(height) &&
                                static_cast<uint32_t>(at) < static_cast<uint32_t>(width);
            const int offset = y * static_cast<int>(problem.x_row) + at * static_cast<int>(problem.x_col);
            ptx::cp_async_16(ptx::shared_address(tile + pixel * kChunk + lane), x + offset, exists ? 16 : 0);
        }
        ptx::cp_async_commit();
    }

    static __device__ __forceinline__ void copy_filters(const Problem& problem, float* filters, const Element* w,
                                                        int first) {
        const int last = static_cast<int>(problem.out_channels) - 1;  // what lies behind it is not used
        detail::fill(filters, kKernel * kKernel * kChunk, [&](int i) {
            const int tap = i / kChunk, channel = min(first + i % kChunk, last);
            return to_float(__ldg(w + channel * problem.w_filter + tap / kKernel * static_cast<int>(problem.w_row) +
                                  tap % kKernel * static_cast<int>(problem.w_col)));
        });
    }

    // (row, col): of the strip in the tile, which starts at (top, left); `lane`: its first channel in the chunk.
    static __device__ __forceinline__ void multiply(const Problem& problem, const Tiles& tiles, const Element* tile,
                                                    const float* filters, Output* out, int64_t image, int first,
                                                    int lane, int row, int col, int top, int left,
                                                    const Epilogue& epilogue) {
        const int height = static_cast<int>(problem.out_height), width = static_cast<int>(problem.out_width);
        const int64_t channels = problem.out_channels, channel = first + lane;
        if (channel >= channels || top + row >= height || left + col >= width) return;
        float filter[kKernel][kKernel][kVector];
#pragma unroll
        for (int i = 0; i < kKernel * kKernel; ++i) {
            Elements<float, kVector> taps;
            taps.template load_whole<16, false>(filters + i * kChunk + lane);
#pragma unroll
            for (int v = 0; v < kVector; ++v) filter[i / kKernel][i % kKernel][v] = taps[v];
        }
        const int pitch = static_cast<int>(tiles.in_cols.divisor) * kChunk;
        const Element* source = tile + row * kStride * pitch + col * kStride * kChunk + lane;
        const int64_t corner = static_cast<int64_t>(top + row) * width + left + col;
        out += (image * height * width + corner) * channels + channel;
        const uint32_t col_step = static_cast<uint32_t>(channels), row_step = width * col_step;
        detail::multiply_strip<Config, kCols, kVector>(
            filter,
            [&](int i, float(&in)[kInCols][kVector]) {
#pragma unroll
                for (int j = 0; j < kInCols; ++j) {
                    Elements<Element, kVector> run;
                    run.template load_whole<16, false>(source + i * pitch + j * kChunk);
#pragma unroll
                    for (int v = 0; v < kVector; ++v) in[j][v] = run[v];
                }
            },
            [&](int i, float(&sum)[kCols][kVector]) {
                const bool row_exists = top + row + i < height;
#pragma unroll
                for (int j = 0; j < kCols; ++j) {
                    const bool exists = row_exists && left + col + j < width;
                    const int64_t pixel = exists ? corner + i * width + j : corner;
                    const auto operands =
                        epilogue.template load<Runs::kWhole, kVector>(Position{image, pixel, channel}, kVector);
                    epilogue.apply(sum[j], operands);
                    if (!exists) continue;
                    store_run<Output, kVector, Runs::kWhole>(out + (i * row_step + j * col_step), sum[j], kVector);
                }
            });
    }
};

}  // namespace fxfuse
