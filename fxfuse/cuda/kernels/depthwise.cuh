// Depthwise convolution of any kind: every output channel has one input channel (groups = channels, any multiplier),
// filters of any size, any stride, dilation and padding, x with any strides. The common kinds have kernels of their
// own: depthwise_tile.cuh and depthwise_nhwc.cuh.
//
// A thread computes a run of outputs adjacent in memory, 4 bytes, so that a warp writes 128 bytes at once. Neighbouring
// threads find the elements of x that they share in L1.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "depthwise_sum.cuh"
#include "device_pass.cuh"
#include "launch.cuh"

namespace fxfuse {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    depthwise_kernel(const __grid_constant__ Conv2dProblem problem, const typename Kernel::Element* __restrict__ x,
                     const typename Kernel::Element* __restrict__ w, typename Kernel::Output* __restrict__ out,
                     const typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(problem, x, w, out, epilogue));
}

// kNhwc: whether out is NHWC, with runs along the channels; else it is NCHW, with runs along the columns.
template <class Element_, bool kNhwc, class Output_, class Epilogue_>
struct Depthwise {
    using Element = Element_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = Conv2dProblem;

    static constexpr int kTensors = 3;  // x, w, out
    static constexpr int kThreads = 256;
    static constexpr int kRun = 4 / static_cast<int>(sizeof(Output));

    static __device__ __forceinline__ void run(const Problem& problem, const Element* x, const Element* w, Output* out,
                                               const Epilogue& epilogue) {
        uint32_t index = blockIdx.x * kThreads + threadIdx.x;
        if (index >= threads(problem)) return;
        const int start = static_cast<int>(take(index, runs(problem))) * kRun;
        const uint32_t middle = take(index, middle_extent(problem));
        const int row = static_cast<int>(kNhwc ? take(index, static_cast<uint32_t>(problem.out_height)) : middle);
        const int64_t plane = kNhwc ? 0 : take(index, static_cast<uint32_t>(problem.out_channels));
        const int64_t image = index;
        const int count = min(kRun, static_cast<int>(fast_extent(problem)) - start);

        float sum[kRun] = {};
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            if (i >= count) break;
            const int64_t channel = kNhwc ? start + i : plane;
            sum[i] = depthwise_sum(problem, x + image * problem.x_image, w, channel, row,
                              kNhwc ? static_cast<int>(middle) : start + i);
        }
        const int64_t pixel = static_cast<int64_t>(row) * problem.out_width + (kNhwc ? middle : start);
        const Position at = kNhwc ? Position{image, pixel, start} : Position{image, plane, pixel};
        const int64_t rows = kNhwc ? problem.out_height * problem.out_width : problem.out_channels;
        const int64_t cols = kNhwc ? problem.out_channels : problem.out_height * problem.out_width;
        epilogue.template apply<kRun>(sum, at, count);
        store_run<Output, kRun>(out + (at.batch * rows + at.row) * cols + at.col, sum, count);
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        const int64_t blocks = (threads(problem) + kThreads - 1) / kThreads;
        if (blocks == 0) return cudaSuccess;
        if (blocks * kThreads > UINT32_MAX) return cudaErrorInvalidConfiguration;
        return queue(depthwise_kernel<Depthwise>, static_cast<unsigned>(blocks), kThreads, 0, stream, problem,
                     reinterpret_cast<const Element*>(pointers[0]), reinterpret_cast<const Element*>(pointers[1]),
                     reinterpret_cast<Output*>(pointers[2]), epilogue);
    }
#endif  // __CUDACC_RTC__

private:
    // A thread's index counts outputs in mixed radix, fastest first: NCHW (run of columns, row, channel, image), NHWC
    // (run of channels, column, row, image).
    static __host__ __device__ int64_t fast_extent(const Problem& problem) {
        return kNhwc ? problem.out_channels : problem.out_width;
    }
    static __host__ __device__ uint32_t middle_extent(const Problem& problem) {
        return static_cast<uint32_t>(kNhwc ? problem.out_width : problem.out_height);
    }
    static __host__ __device__ uint32_t runs(const Problem& problem) {
        return static_cast<uint32_t>((fast_extent(problem) + kRun - 1) / kRun);
    }
    static __host__ __device__ int64_t threads(const Problem& problem) {
        return problem.images * (kNhwc ? problem.out_height : problem.out_channels) * middle_extent(problem) *
               runs(problem);
    }

    // Splits the last digit off a number in mixed radix.
    static __device__ __forceinline__ uint32_t take(uint32_t& index, uint32_t radix) {
        const uint32_t digit = index % radix;
        index /= radix;
        return digit;
    }
};

}  // namespace fxfuse
