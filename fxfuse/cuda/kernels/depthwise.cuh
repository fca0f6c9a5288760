// Depthwise convolution: every output channel has one input channel (groups = channels, any multiplier).
//
// Too few multiplications per element for tensor cores: both kernels multiply in fp32 and are bound by memory, so what
// matters is that x is read from DRAM once, wide, and the output written once. Neighbouring outputs find the rows and
// columns they share in registers and L1.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"

namespace fxfuse {

// kKernel: height and width of the filter, kStride: both strides, dilation 1, all known at compile time;
// or kKernel = 0, kStride = 0: whatever the problem says.
// For NHWC, the former also needs as many channels out as in, and every 16 bytes of channels of x aligned.
template <class Element_, int kKernel_, int kStride_>
struct DepthwiseConfig {
    using Element = Element_;
    static constexpr int kKernel = kKernel_, kStride = kStride_;
    static constexpr int kThreads = 256;
    static_assert((kKernel == 0) == (kStride == 0), "both are known, or neither");
};

namespace detail {

// The row and column of x, perhaps outside, that element (r, s) of the filter multiplies for output (row, col).
__device__ __forceinline__ int input_row(const Conv2dProblem& problem, int row, int r) {
    return row * static_cast<int>(problem.stride_h) - static_cast<int>(problem.pad_h) +
           r * static_cast<int>(problem.dilation_h);
}

__device__ __forceinline__ int input_col(const Conv2dProblem& problem, int col, int s) {
    return col * static_cast<int>(problem.stride_w) - static_cast<int>(problem.pad_w) +
           s * static_cast<int>(problem.dilation_w);
}

// Splits the last digit off a number in mixed radix.
__device__ __forceinline__ uint32_t take(uint32_t& index, uint32_t radix) {
    const uint32_t digit = index % radix;
    index /= radix;
    return digit;
}

}  // namespace detail

// One block per multiprocessor as the minimum: told nothing, the compiler spills rather than pass 128 registers.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kThreads, 1)
    depthwise_kernel(const __grid_constant__ Conv2dProblem problem, const typename Kernel::Element* __restrict__ x,
                     const typename Kernel::Element* __restrict__ w, typename Kernel::Output* __restrict__ out,
                     const typename Kernel::Epilogue epilogue) {
    Kernel::run(problem, x, w, out, epilogue);
}

// Any strides of x; out NCHW. A thread computes kCols neighbouring columns of kRows rows of one channel, top to bottom:
// every input row is read once per thread. Threads run along the columns.
template <class Config_, class Output_, class Epilogue_>
struct DepthwiseNchw {
    using Config = Config_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Element = typename Config::Element;
    using Problem = Conv2dProblem;

    static constexpr int kTensors = 3;  // x, w, out
    static constexpr int kKernel = Config::kKernel, kStride = Config::kStride;
    static constexpr int kCols = 4 / static_cast<int>(sizeof(Output));  // a warp then writes 128 bytes at once
    static constexpr int kRows = kKernel == 0 ? 1 : 8;

    static __device__ __forceinline__ void run(const Problem& problem, const Element* x, const Element* w, Output* out,
                                               const Epilogue& epilogue) {
        uint32_t index = blockIdx.x * Config::kThreads + threadIdx.x;
        if (index >= threads(problem)) return;
        const int col = static_cast<int>(detail::take(index, strips_x(problem))) * kCols;
        const int row = static_cast<int>(detail::take(index, strips_y(problem))) * kRows;
        const int64_t channel = detail::take(index, static_cast<uint32_t>(problem.out_channels));
        const int64_t image = index;
        const uint32_t multiplier = static_cast<uint32_t>(problem.out_channels) / static_cast<uint32_t>(problem.groups);
        x += image * problem.x_image + static_cast<uint32_t>(channel) / multiplier * problem.x_channel;
        w += channel * problem.w_filter;

        float sum[kRows][kCols] = {};
        if constexpr (kKernel > 0) {
            multiply(sum, problem, x, w, row * kStride - static_cast<int>(problem.pad_h),
                     col * kStride - static_cast<int>(problem.pad_w));
        } else {
            multiply_any(sum[0], problem, x, w, row, col);
        }

        const int height = static_cast<int>(problem.out_height), width = static_cast<int>(problem.out_width);
        out += (image * problem.out_channels + channel) * height * width;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (row + i >= height) break;
            const int64_t pixel = static_cast<int64_t>(row + i) * width + col;
            const int count = min(kCols, width - col);
            epilogue.template apply<kCols>(sum[i], Position{image, channel, pixel}, count);
            store_run<Output, kCols>(out + pixel, sum[i], count);
        }
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        const int64_t blocks = (threads(problem) + Config::kThreads - 1) / Config::kThreads;
        if (blocks == 0) return cudaSuccess;
        if (blocks * Config::kThreads > UINT32_MAX) return cudaErrorInvalidConfiguration;
        depthwise_kernel<DepthwiseNchw><<<static_cast<unsigned>(blocks), Config::kThreads, 0, stream>>>(
            problem, reinterpret_cast<const Element*>(pointers[0]), reinterpret_cast<const Element*>(pointers[1]),
            reinterpret_cast<Output*>(pointers[2]), epilogue);
        return cudaGetLastError();
    }
#endif  // __CUDACC_RTC__

private:
    static __host__ __device__ uint32_t strips_x(const Problem& problem) {
        return (static_cast<uint32_t>(problem.out_width) + kCols - 1) / kCols;
    }
    static __host__ __device__ uint32_t strips_y(const Problem& problem) {
        return (static_cast<uint32_t>(problem.out_height) + kRows - 1) / kRows;
    }
    static __host__ __device__ int64_t threads(const Problem& problem) {
        return problem.images * problem.out_channels * strips_x(problem) * strips_y(problem);
    }
    // (top, left): of the strip in x, whose row and column 0 are at `x`.
    static __device__ __forceinline__ void multiply(float (&sum)[kRows][kCols], const Problem& problem,
                                                    const Element* x, const Element* w, int top, int left) {
        float filter[kKernel][kKernel];
#pragma unroll
        for (int r = 0; r < kKernel; ++r) {
#pragma unroll
            for (int s = 0; s < kKernel; ++s) filter[r][s] = to_float(__ldg(w + r * problem.w_row + s * problem.w_col));
        }
        constexpr int kInRows = (kRows - 1) * kStride + kKernel, kInCols = (kCols - 1) * kStride + kKernel;
        const int height = static_cast<int>(problem.height), width = static_cast<int>(problem.width);
#pragma unroll
        for (int i = 0; i < kInRows; ++i) {
            const int y = top + i;
            const Element* source = x + y * problem.x_row + left * problem.x_col;
            float in[kInCols];
#pragma unroll
            for (int j = 0; j < kInCols; ++j) {
                const bool inside = static_cast<uint32_t>(y) < static_cast<uint32_t>(height) &&
                                    static_cast<uint32_t>(left + j) < static_cast<uint32_t>(width);
                in[j] = inside ? to_float(__ldg(source + j * problem.x_col)) : 0.0f;
            }
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
            }
        }
    }

    // One output row, everything from the problem.
    static __device__ __forceinline__ void multiply_any(float (&sum)[kCols], const Problem& problem, const Element* x,
                                                        const Element* w, int row, int col) {
        const int height = static_cast<int>(problem.height), width = static_cast<int>(problem.width);
        for (int r = 0; r < static_cast<int>(problem.kernel_height); ++r) {
            const int y = detail::input_row(problem, row, r);
            if (y < 0 || y >= height) continue;
            for (int s = 0; s < static_cast<int>(problem.kernel_width); ++s) {
                const float filter = to_float(__ldg(w + r * problem.w_row + s * problem.w_col));
#pragma unroll
                for (int i = 0; i < kCols; ++i) {
                    const int at = detail::input_col(problem, col + i, s);
                    if (at < 0 || at >= width) continue;
                    sum[i] = fmaf(filter, to_float(__ldg(x + y * problem.x_row + at * problem.x_col)), sum[i]);
                }
            }
        }
    }
};

// x and out NHWC, x with contiguous channels. A thread computes 16 bytes' worth of channels of kCols neighbouring
// pixels; the threads of a block cover up to kChannels channels, and kRows rows, which find each other's input in L1.
template <class Config_, class Output_, class Epilogue_>
struct DepthwiseNhwc {
    using Config = Config_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Element = typename Config::Element;
    using Problem = Conv2dProblem;

    static constexpr int kTensors = 3;  // x, w, out
    static constexpr int kKernel = Config::kKernel, kStride = Config::kStride;
    static constexpr int kVector = 16 / static_cast<int>(sizeof(Element));
    static constexpr int kCols = kKernel == 0 ? 1 : 32 / kVector;  // 32 accumulators
    static constexpr int kChannels = 128, kRows = 8;

    static __device__ __forceinline__ void run(const Problem& problem, const Element* x, const Element* w, Output* out,
                                               const Epilogue& epilogue) {
        const Shape shape(problem);
        const int thread = static_cast<int>(threadIdx.x);
        uint32_t index = blockIdx.x;
        const int first_channel = static_cast<int>(detail::take(index, shape.channel_tiles)) * shape.lanes * kVector;
        const int tile_x = static_cast<int>(detail::take(index, shape.tiles_x));
        const int tile_y = static_cast<int>(detail::take(index, shape.tiles_y));
        const int64_t image = index;
        const int lane = thread % shape.lanes * kVector, strip = thread / shape.lanes;
        const int row = tile_y * kRows + strip % kRows;
        const int col = (tile_x * shape.strips + strip / kRows) * kCols;
        const int channel = first_channel + lane;

        __shared__ float filters[kKernel == 0 ? 1 : kKernel * kKernel][kChannels];
        if constexpr (kKernel > 0) load_filters(filters, problem, w, first_channel, shape.lanes * kVector);
        const int height = static_cast<int>(problem.out_height), width = static_cast<int>(problem.out_width);
        const int channels = min(kVector, static_cast<int>(problem.out_channels) - channel);
        if (strip >= shape.strips * kRows || row >= height || col >= width || channels <= 0) return;

        float sum[kCols][kVector] = {};
        x += image * problem.x_image;
        if constexpr (kKernel > 0) {
            multiply(sum, problem, x, filters, lane, row, col, channel, channels);
        } else {
            multiply_any(sum[0], problem, x, w, row, col, channel, channels);
        }
#pragma unroll
        for (int i = 0; i < kCols; ++i) {
            if (col + i >= width) break;
            const int64_t pixel = static_cast<int64_t>(row) * width + col + i;
            epilogue.template apply<kVector>(sum[i], Position{image, pixel, channel}, channels);
            store_run<Output, kVector>(out + (image * height * width + pixel) * problem.out_channels + channel, sum[i],
                                       channels);
        }
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        const Shape shape(problem);
        const int64_t blocks = problem.images * shape.tiles_y * shape.tiles_x * shape.channel_tiles;
        if (blocks == 0) return cudaSuccess;
        if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
        depthwise_kernel<DepthwiseNhwc><<<static_cast<unsigned>(blocks), Config::kThreads, 0, stream>>>(
            problem, reinterpret_cast<const Element*>(pointers[0]), reinterpret_cast<const Element*>(pointers[1]),
            reinterpret_cast<Output*>(pointers[2]), epilogue);
        return cudaGetLastError();
    }
#endif  // __CUDACC_RTC__

private:
    // How the threads of a block share its tile: `lanes` along the channels, kRows rows, `strips` strips of columns.
    struct Shape {
        int lanes, strips;
        uint32_t channel_tiles, tiles_x, tiles_y;

        __host__ __device__ explicit Shape(const Problem& problem) {
            const int vectors = static_cast<int>(tiles(problem.out_channels, kVector));
            channel_tiles = tiles(vectors, kChannels / kVector);
            lanes = static_cast<int>(tiles(vectors, static_cast<int>(channel_tiles)));
            strips = Config::kThreads / kRows / lanes;
            tiles_x = tiles(problem.out_width, strips * kCols);
            tiles_y = tiles(problem.out_height, kRows);
        }
        static __host__ __device__ uint32_t tiles(int64_t extent, int tile) {
            return (static_cast<uint32_t>(extent) + tile - 1) / tile;
        }
    };

    static __device__ __forceinline__ void load_filters(float (*filters)[kChannels], const Problem& problem,
                                                        const Element* w, int first, int count) {
        for (int i = static_cast<int>(threadIdx.x); i < kKernel * kKernel * count; i += Config::kThreads) {
            const int tap = i / count, channel = i % count;
            if (first + channel >= problem.out_channels) continue;
            filters[tap][channel] = to_float(__ldg(w + (first + channel) * problem.w_filter +
                                                   tap / kKernel * problem.w_row + tap % kKernel * problem.w_col));
        }
        __syncthreads();
    }

    // kVector channels of x from output channel `channel` on; zeros for a pixel that is not `inside`.
    static __device__ __forceinline__ void load(float (&value)[kVector], const Problem& problem, const Element* pixel,
                                                int channel, int channels, bool inside) {
        if constexpr (kKernel > 0) {
            alignas(16) Element piece[kVector];
            const uint4* source = reinterpret_cast<const uint4*>(pixel + channel);
            *reinterpret_cast<uint4*>(piece) = inside ? __ldg(source) : uint4{0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < kVector; ++i) value[i] = to_float(piece[i]);
        } else {
            const int multiplier = static_cast<int>(problem.out_channels) / static_cast<int>(problem.channels);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                value[i] = inside && i < channels ? to_float(__ldg(pixel + (channel + i) / multiplier)) : 0.0f;
            }
        }
    }

    static __device__ __forceinline__ void multiply(float (&sum)[kCols][kVector], const Problem& problem,
                                                    const Element* x, const float (*filters)[kChannels], int lane,
                                                    int row, int col, int channel, int channels) {
        constexpr int kInCols = (kCols - 1) * kStride + kKernel;
        const int top = row * kStride - static_cast<int>(problem.pad_h);
        const int left = col * kStride - static_cast<int>(problem.pad_w);
        // Larger filters row by row: their loads would otherwise all be started at once and take all registers.
#pragma unroll(kKernel <= 3 ? kKernel : 1)
        for (int r = 0; r < kKernel; ++r) {
            const bool row_inside = top + r >= 0 && top + r < static_cast<int>(problem.height);
            const Element* source = x + (top + r) * problem.x_row + left * problem.x_col;
            float filter[kKernel][kVector];
#pragma unroll
            for (int s = 0; s < kKernel; ++s) {
#pragma unroll
                for (int i = 0; i < kVector; ++i) filter[s][i] = filters[r * kKernel + s][lane + i];
            }
#pragma unroll
            for (int j = 0; j < kInCols; ++j) {
                const bool inside = row_inside && left + j >= 0 && left + j < static_cast<int>(problem.width);
                float in[kVector];
                load(in, problem, source + j * problem.x_col, channel, channels, inside);
#pragma unroll
                for (int c = 0; c < kCols; ++c) {
                    const int s = j - c * kStride;
                    if (s < 0 || s >= kKernel) continue;
#pragma unroll
                    for (int i = 0; i < kVector; ++i) sum[c][i] = fmaf(filter[s][i], in[i], sum[c][i]);
                }
            }
        }
    }

    // One pixel, everything from the problem.
    static __device__ __forceinline__ void multiply_any(float (&sum)[kVector], const Problem& problem, const Element* x,
                                                        const Element* w, int row, int col, int channel, int channels) {
        for (int r = 0; r < static_cast<int>(problem.kernel_height); ++r) {
            const int y = detail::input_row(problem, row, r);
            if (y < 0 || y >= problem.height) continue;
            for (int s = 0; s < static_cast<int>(problem.kernel_width); ++s) {
                const int at = detail::input_col(problem, col, s);
                if (at < 0 || at >= problem.width) continue;
                float in[kVector];
                load(in, problem, x + y * problem.x_row + at * problem.x_col, channel, channels, true);
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    if (i >= channels) continue;
                    const float filter = to_float(
                        __ldg(w + (channel + i) * problem.w_filter + r * problem.w_row + s * problem.w_col));
                    sum[i] = fmaf(filter, in[i], sum[i]);
                }
            }
        }
    }
};

}  // namespace fxfuse
