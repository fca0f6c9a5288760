// Max-pooling that applies the epilogue while it reads: out = the largest epilogue(acc) of each window.
//
// acc is a dense result of a convolution (NCHW or channels_last), and out has the same layout. A thread computes
// kVector channels of one pixel, or in NCHW one pixel of one channel, so that neighbouring threads read and write
// neighbouring memory. The epilogue of an element is computed once for every window that the element is in.
//
// Windows reach over the border by no more than half their size. An element beyond the border is replaced by the
// nearest one that exists: that one is in the window too, and counting it twice does not change the maximum.
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "divisor.cuh"
#include "epilogue.cuh"
#include "launch.cuh"

namespace fxfuse {

struct MaxPoolProblem {
    int64_t images, channels, height, width;  // of acc
    int64_t out_height, out_width;
    int64_t stride[2], padding[2];            // along height and width
};

// The images that one launch computes, few enough to be counted in 31 bits.
struct MaxPoolCut {
    int64_t first_image;
    unsigned runs;  // in all
    FastDivisor channel_runs, channels, out_height, out_width;
    int height, width, stride[2], padding[2];
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    max_pool_kernel(const __grid_constant__ MaxPoolCut cut, const typename Kernel::Element* __restrict__ acc,
                    typename Kernel::Output* __restrict__ out, const typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(cut, acc, out, epilogue));
}

// kVector: channels of a thread in channels_last, a divisor of all channels; 1 in NCHW. kHeight, kWidth: the window.
template <class Element_, class Output_, class Epilogue_, int kVector, int kHeight, int kWidth, bool kChannelsLast>
struct MaxPool {
    using Element = Element_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = MaxPoolProblem;

    static constexpr int kTensors = 2;  // acc, out
    static constexpr int kThreads = 256;
    // Elements whose loads are in flight together: the whole window, or one.
    static constexpr bool kAllAtOnce = kHeight * kWidth <= 16;
    static constexpr int kRowsAtOnce = kAllAtOnce ? kHeight : 1, kColsAtOnce = kAllAtOnce ? kWidth : 1;
    static_assert(kChannelsLast || kVector == 1, "channels are not adjacent in NCHW");

    static __device__ __forceinline__ void run(const MaxPoolCut& cut, const Element* acc, Output* out,
                                               const Epilogue& epilogue) {
        const unsigned index = blockIdx.x * kThreads + threadIdx.x;
        if (index >= cut.runs) return;
        unsigned rest = index, channel;
        if constexpr (kChannelsLast) channel = cut.channel_runs.take(rest) * kVector;
        const int x = static_cast<int>(cut.out_width.take(rest)) * cut.stride[1] - cut.padding[1];
        const int y = static_cast<int>(cut.out_height.take(rest)) * cut.stride[0] - cut.padding[0];
        if constexpr (!kChannelsLast) channel = cut.channels.take(rest);
        const int64_t image = cut.first_image + rest;

        const int64_t channels = cut.channels.divisor, pixels = static_cast<int64_t>(cut.height) * cut.width;
        const Element* plane = acc + (kChannelsLast ? image * pixels * channels + channel
                                                    : (image * channels + channel) * pixels);
        const auto columns = epilogue.template load_columns<Runs::kWhole, kVector>(at(image, channel, 0), kVector);
        float best[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) best[i] = -__int_as_float(0x7f800000);
#pragma unroll 1
        for (int step = 0; step < kHeight * kWidth; step += kRowsAtOnce * kColsAtOnce) {
            const int top = y + step / kWidth, left = x + step % kWidth;
            Elements<Element, kVector> elements[kRowsAtOnce][kColsAtOnce];
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) {
#pragma unroll
                for (int j = 0; j < kColsAtOnce; ++j) {
                    const int64_t pixel = pixel_of(cut, top + i, left + j);
                    elements[i][j].template load_whole<16, true>(plane + pixel * (kChannelsLast ? channels : 1));
                }
            }
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) {
#pragma unroll
                for (int j = 0; j < kColsAtOnce; ++j) {
                    const Position here = at(image, channel, pixel_of(cut, top + i, left + j));
                    const auto rows = epilogue.template load_rows<Runs::kWhole, kVector>(here, kVector);
                    float value[kVector];
#pragma unroll
                    for (int k = 0; k < kVector; ++k) value[k] = elements[i][j][k];
                    epilogue.apply(value, columns, rows);
#pragma unroll
                    for (int k = 0; k < kVector; ++k) best[k] = larger(best[k], value[k]);
                }
            }
        }
        const int64_t first = cut.first_image * cut.out_height.divisor * cut.out_width.divisor * channels;
        store_run<Output, kVector, Runs::kWhole>(out + first + static_cast<int64_t>(index) * kVector, best, kVector);
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        const int64_t per_image = problem.channels / kVector * problem.out_height * problem.out_width;
        if (per_image == 0) return cudaSuccess;
        const int64_t most = (int64_t{1} << 30) / per_image;
        if (most == 0 || problem.height * problem.width > INT32_MAX) return cudaErrorInvalidConfiguration;
        for (int64_t image = 0; image < problem.images; image += most) {
            const int64_t images = most < problem.images - image ? most : problem.images - image;
            const MaxPoolCut cut = {
                image,
                static_cast<unsigned>(images * per_image),
                FastDivisor(static_cast<unsigned>(problem.channels / kVector)),
                FastDivisor(static_cast<unsigned>(problem.channels)),
                FastDivisor(static_cast<unsigned>(problem.out_height)),
                FastDivisor(static_cast<unsigned>(problem.out_width)),
                static_cast<int>(problem.height),
                static_cast<int>(problem.width),
                {static_cast<int>(problem.stride[0]), static_cast<int>(problem.stride[1])},
                {static_cast<int>(problem.padding[0]), static_cast<int>(problem.padding[1])},
            };
            const cudaError_t error = queue(max_pool_kernel<MaxPool>, (cut.runs + kThreads - 1) / kThreads, kThreads, 0,
                                            stream, cut, reinterpret_cast<const Element*>(pointers[0]),
                                            reinterpret_cast<Output*>(pointers[1]), epilogue);
            if (error != cudaSuccess) return error;
        }
        return cudaSuccess;
    }
#endif  // __CUDACC_RTC__

private:
    static __device__ __forceinline__ int64_t pixel_of(const MaxPoolCut& cut, int y, int x) {
        return static_cast<int64_t>(min(max(y, 0), cut.height - 1)) * cut.width + min(max(x, 0), cut.width - 1);
    }

    static __device__ __forceinline__ Position at(int64_t image, int64_t channel, int64_t pixel) {
        return kChannelsLast ? Position{image, pixel, channel} : Position{image, channel, pixel};
    }

    // NaN is larger than everything, as in torch.
    static __device__ __forceinline__ float larger(float best, float value) {
        return value > best || value != value ? value : best;
    }
};

}  // namespace fxfuse
