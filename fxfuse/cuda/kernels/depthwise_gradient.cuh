// The gradient of a depthwise convolution's filters, on channels_last:
//
//   out[c, r, s] = epilogue(sum over n, p, q of dy[n, p, q, c] * x[n, p * stride + r - pad_h, q * stride + s - pad_w, c])
//
// Every output is a sum over all images. So a thread has one channel, and threads share the images. A thread walks
// along kRows rows of dy. In registers it has all sums of its channel, and the window of x that is multiplied by dy's
// elements. Each step reads kStride new columns of the window; the others stay where they are, in a ring.
//
//            kStride new columns                  q = 0: columns 0 1 2      ring of kKernel = 3, kStride = 1:
//                 v                               q = 1: columns 1 2 3      column 3 lies where 0 was
//   x   . . [ . . . ] . .   kWindow rows
//   dy        [ . ]         kRows rows
//
// Neighbouring threads have neighbouring channels. A block's warps share one tile of kWarp channels and take strips of
// kRows rows in turns, so that rows of x which several rows of dy need come from the cache. Large filters are divided
// into parts of kHeight rows: a warp has one part, and other warps have the others. Blocks add up their sums through
// the workspace (split_k.cuh).
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "epilogue.cuh"
#include "launch.cuh"
#include "ptx.cuh"
#include "split_k.cuh"

namespace fxfuse {

// Sizes, and strides in elements. `splits`: blocks that share a tile of channels.
struct DepthwiseGradientProblem {
    int64_t images, channels, height, width, out_height, out_width, pad_h, pad_w;
    int64_t x_image, x_row, x_col, dy_image, dy_row, dy_col;
    int64_t splits;
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    depthwise_gradient_kernel(const __grid_constant__ DepthwiseGradientProblem problem,
                              const typename Kernel::Element* __restrict__ dy,
                              const typename Kernel::Element* __restrict__ x, typename Kernel::Output* __restrict__ out,
                              const SplitWorkspace workspace, const typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(problem, dy, x, out, workspace, epilogue));
}

// kRows: rows of dy that a thread takes at a time. kHeight: rows of the filter that a thread has.
template <class Element_, class Output_, class Epilogue_, int kKernel, int kStride, int kRows, int kHeight>
struct DepthwiseGradient {
    using Element = Element_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = DepthwiseGradientProblem;

    static constexpr int kTensors = 4;  // dy, x, out, the workspace
    static constexpr int kWarp = 32, kWarps = 8, kThreads = kWarp * kWarps;
    static constexpr int kBlocks = 2;  // of a multiprocessor: 128 registers for each thread
    static constexpr int kTaps = kKernel * kKernel, kParts = (kKernel + kHeight - 1) / kHeight;
    static constexpr int kWindow = (kRows - 1) * kStride + kHeight;
    static_assert(kKernel > kStride, "steps share columns of the window");
    static_assert(kWarps % (2 * kParts) == 0, "halves of the warps have the same parts");

    static __device__ __forceinline__ void run(const Problem& problem, const Element* dy, const Element* x, Output* out,
                                               const SplitWorkspace& workspace, const Epilogue& epilogue) {
        __shared__ float shared[kWarps / 2][kHeight * kKernel][kWarp];  // at most 14 KB
        const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
        const int part = warp % kParts;
        const int64_t tile = blockIdx.y, first = tile * kWarp;
        const int64_t channel = min(first + lane, problem.channels - 1);
        float sum[kHeight][kKernel] = {};
        const int groups = (static_cast<int>(problem.out_height) + kRows - 1) / kRows;
        const int64_t strips = problem.images * groups, splits = problem.splits;
        const int64_t begin = strips * blockIdx.x / splits, end = strips * (blockIdx.x + 1) / splits;
        for (int64_t strip = begin + warp / kParts; strip < end; strip += kWarps / kParts) {
            const int64_t image = strip / groups;
            const int top = static_cast<int>(strip - image * groups) * kRows;
            add_strip(sum, problem, x + image * problem.x_image + channel,
                      dy + image * problem.dy_image + top * problem.dy_row + channel, top, part * kHeight);
        }
        // Tree: half of the warps hand their sums to the other half, until kParts warps are left.
#pragma unroll
        for (int half = kWarps / 2; half >= kParts; half /= 2) {
            if (warp >= half && warp < 2 * half) {
                for_each_tap([&](int r, int s) { shared[warp - half][r * kKernel + s][lane] = sum[r][s]; });
            }
            __syncthreads();
            if (warp < half) for_each_tap([&](int r, int s) { sum[r][s] += shared[warp][r * kKernel + s][lane]; });
            __syncthreads();
        }
        const auto for_each_sum = [&](auto function) {
            if (warp >= kParts) return;
            for_each_tap([&](int r, int s) {
                if (part * kHeight + r < kKernel) function((part * kHeight + r) * kKernel + s, sum[r][s]);
            });
        };
        if (splits == 1) {
            for_each_sum([&](int tap, float value) { store(problem, out, epilogue, first + lane, tap, value); });
            return;
        }
        constexpr int kPart = kTaps * kWarp;
        float* parts = reinterpret_cast<float*>(workspace.parts) + tile * splits * kPart;
        float* own = parts + blockIdx.x * kPart + lane;
        for_each_sum([&](int tap, float value) { __stcg(own + tap * kWarp, value); });
        __threadfence();  // before the block is counted in
        __syncthreads();
        const bool last = thread == 0 && workspace.is_last(tile, static_cast<unsigned>(splits));
        if (!__syncthreads_or(last)) return;
        __threadfence();
        constexpr int kTogether = 8;  // reads in flight
        for (int index = thread; index < kPart; index += kThreads) {
            float all = 0.0f;
#pragma unroll kTogether
            for (int split = 0; split < static_cast<int>(splits); ++split) all += __ldcg(parts + split * kPart + index);
            store(problem, out, epilogue, first + index % kWarp, index / kWarp, all);
        }
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        const int64_t tiles = (problem.channels + kWarp - 1) / kWarp;
        const dim3 grid(static_cast<unsigned>(problem.splits), static_cast<unsigned>(tiles));
        return queue(depthwise_gradient_kernel<DepthwiseGradient>, grid, kThreads, 0, stream, problem,
                     reinterpret_cast<const Element*>(pointers[0]), reinterpret_cast<const Element*>(pointers[1]),
                     reinterpret_cast<Output*>(pointers[2]), SplitWorkspace::make(pointers[3], tiles), epilogue);
    }
#endif  // __CUDACC_RTC__

private:
    // Calls function(r, s) for each tap that a thread has.
    template <class Function>
    static __device__ __forceinline__ void for_each_tap(Function function) {
#pragma unroll
        for (int r = 0; r < kHeight; ++r) {
#pragma unroll
            for (int s = 0; s < kKernel; ++s) function(r, s);
        }
    }

    static __device__ __forceinline__ void store(const Problem& problem, Output* out, const Epilogue& epilogue,
                                                 int64_t channel, int tap, float value) {
        if (channel >= problem.channels) return;
        float one[1] = {value};
        epilogue.apply(one, Position{0, channel, tap}, 1);
        out[channel * kTaps + tap] = from_float<Output>(one[0]);
    }

    // Adds the products of kRows rows of dy, from `top` on, to the sums of the filter's rows from `skipped` on. x is
    // where the image begins, dy where the first of these rows begins.
    static __device__ __forceinline__ void add_strip(float (&sum)[kHeight][kKernel], const Problem& problem,
                                                     const Element* x, const Element* dy, int top, int skipped) {
        const int height = static_cast<int>(problem.height), width = static_cast<int>(problem.width);
        const int cols = static_cast<int>(problem.out_width), rows = static_cast<int>(problem.out_height) - top;
        const int above = top * kStride + skipped - static_cast<int>(problem.pad_h), left = -static_cast<int>(problem.pad_w);
        const Element* corner = x + above * problem.x_row + left * problem.x_col;  // of the window; perhaps outside
        float window[kWindow][kKernel];
        const auto read_column = [&](int col, float (&to)[kWindow]) {
            const bool inside = static_cast<unsigned>(left + col) < static_cast<unsigned>(width);
            const Element* from = corner + col * problem.x_col;
#pragma unroll
            for (int i = 0; i < kWindow; ++i) {
                const bool exists = inside && static_cast<unsigned>(above + i) < static_cast<unsigned>(height);
                to[i] = exists ? to_float(from[i * problem.x_row]) : 0.0f;
            }
        };
        const auto put = [&](int slot, const float (&column)[kWindow]) {
#pragma unroll
            for (int i = 0; i < kWindow; ++i) window[i][slot] = column[i];
        };
        const auto read_dy = [&](int col, float (&to)[kRows]) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                to[i] = i < rows && col < cols ? to_float(dy[i * problem.dy_row + col * problem.dy_col]) : 0.0f;
            }
        };
#pragma unroll
        for (int col = 0; col < kKernel - kStride; ++col) {
            float column[kWindow];
            read_column(col, column);
            put(col, column);
        }
        // A step's values are read while the previous step multiplies.
        float next[kStride][kWindow], next_dy[kRows];
        const auto read = [&](int q) {
#pragma unroll
            for (int i = 0; i < kStride; ++i) read_column(q * kStride + kKernel - kStride + i, next[i]);
            read_dy(q, next_dy);
        };
        read(0);
#pragma unroll 1
        for (int begin = 0; begin < cols; begin += kKernel) {
#pragma unroll
            for (int step = 0; step < kKernel; ++step) {
                const int q = begin + step;
                if (q >= cols) break;  // beyond dy there is no product, not even with zero: x may be infinite
                float of_dy[kRows];
#pragma unroll
                for (int i = 0; i < kStride; ++i) put((step * kStride + kKernel - kStride + i) % kKernel, next[i]);
#pragma unroll
                for (int i = 0; i < kRows; ++i) of_dy[i] = next_dy[i];
                read(q + 1);
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
                    if (i >= rows) continue;
                    for_each_tap([&](int r, int s) {
                        sum[r][s] = fmaf(of_dy[i], window[i * kStride + r][(step * kStride + s) % kKernel], sum[r][s]);
                    });
                }
            }
        }
    }
};

}  // namespace fxfuse
