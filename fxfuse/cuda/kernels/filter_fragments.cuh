// Filters of a 3x3 convolution, packed in the order in which warps read them: as A fragments (mma.cuh). float is
// rounded to TF32 or, for 3xTF32, split into two fragments, hi and then lo.
//
// One unit holds the weights of kFilterTile filters for 8 channels, or 16 channels of 16 bits, as
//   [column s][row r][16 filters m][lane], 16 bytes each
// so that a warp reads a fragment as one access of 512 bytes. Filters and channels that do not exist are zero.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "conv2d_problem.cuh"
#include "device_pass.cuh"
#include "launch.cuh"
#include "mma.cuh"

namespace fxfuse {

template <class Mma, int kFilterTile_>
struct FilterFragments {
    using Element = typename Mma::Element;
    static constexpr int kFilterTile = kFilterTile_;
    static constexpr int kKernel = 3, kMmasM = kFilterTile / kMmaM;
    static constexpr int kSize = static_cast<int>(sizeof(Element)), kPerWord = 4 / kSize;
    static constexpr int kChannels = kMmaBytesOfK / kSize;
    static constexpr int kParts = Mma::kProducts > 1 ? 2 : 1;
    static constexpr int kFragments = kKernel * kKernel * kMmasM * kParts;
    static constexpr int kPieces = kFragments * 32;  // of 16 bytes, in a unit

    // Index of the fragment for column s, row r and the m-th 16 filters; with hi and lo, of the first of the two.
    static __device__ __forceinline__ constexpr int index(int s, int r, int m) {
        return ((s * kKernel + r) * kMmasM + m) * kParts;
    }

    // The 16 bytes at index `piece` of a unit: that of `filters` filters from `filter` on, and of channels (of the
    // group) from `channel` on.
    static __device__ __forceinline__ uint4 piece(const Conv2dProblem& problem, const Element* w, int filter,
                                                  int filters, int channel, int channels, int piece) {
        const int lane = piece % 32, fragment = piece / 32 / kParts, m = fragment % kMmasM, tap = fragment / kMmasM;
        const Element* corner = w + tap % kKernel * problem.w_row + tap / kKernel * problem.w_col;
        uint32_t value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int k = m * kMmaM + lane / 4 + i % 2 * 8, c = channel + (lane % 4 + i / 2 * 4) * kPerWord;
            const Element* source = corner + (filter + k) * problem.w_filter + c * problem.w_channel;
            value[i] = 0;
            if (k >= filters) continue;
            if constexpr (kSize == 4) {
                if (c < channels) value[i] = __float_as_uint(*source);
            } else {
                if (c < channels) value[i] = bits(source[0]);
                if (c + 1 < channels) value[i] |= bits(source[problem.w_channel]) << 16;
            }
        }
        if constexpr (kParts == 2) {
            const typename Mma::A a = Mma::make_a(value);
            return piece / 32 % 2 == 0 ? make_uint4(a.hi[0], a.hi[1], a.hi[2], a.hi[3])
                                       : make_uint4(a.lo[0], a.lo[1], a.lo[2], a.lo[3]);
        } else if constexpr (kSize == 4) {
            const typename Mma::A a = Mma::make_a(value);
            return make_uint4(a.value[0], a.value[1], a.value[2], a.value[3]);
        } else {
            return make_uint4(value[0], value[1], value[2], value[3]);
        }
    }

    // Packs the chunk-th kChannels channels to `unit`. Called by all kThreads threads of a block.
    template <int kThreads>
    static __device__ __forceinline__ void pack(const Conv2dProblem& problem, const Element* w, int channels,
                                                int filter, int filters, int chunk, uint4* unit) {
        for (int i = static_cast<int>(threadIdx.x); i < kPieces; i += kThreads) {
            unit[i] = piece(problem, w, filter, filters, chunk * kChannels, channels, i);
        }
    }

#ifndef __CUDACC_RTC__
    // Packs all filters, unit after unit, in the order (group, tile of filters, chunk of channels).
    static cudaError_t launch(const Conv2dProblem& problem, const Element* w, uint4* packed, cudaStream_t stream);
#endif

private:
    static __device__ __forceinline__ uint32_t bits(const Element& value) {
        return reinterpret_cast<const uint16_t&>(value);
    }
};

template <class Fragments, int kThreads>
__global__ void __launch_bounds__(kThreads)
    pack_filters_kernel(const __grid_constant__ Conv2dProblem problem,
                        const typename Fragments::Element* __restrict__ w, uint4* __restrict__ packed) {
    wait_for_predecessors();
    const int channels = static_cast<int>(problem.channels / problem.groups);
    const int group_filters = static_cast<int>(problem.out_channels / problem.groups);
    const int first = static_cast<int>(blockIdx.y) * Fragments::kFilterTile;
    const int filters = min(Fragments::kFilterTile, group_filters - first);
    const int chunks = (channels + Fragments::kChannels - 1) / Fragments::kChannels;
    const int64_t unit = (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * chunks;
    for (int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x); i < chunks * Fragments::kPieces;
         i += static_cast<int>(gridDim.x) * kThreads) {
        const int chunk = i / Fragments::kPieces, piece = i % Fragments::kPieces;
        packed[unit * Fragments::kPieces + i] =
            Fragments::piece(problem, w, static_cast<int>(blockIdx.z) * group_filters + first, filters,
                             chunk * Fragments::kChannels, channels, piece);
    }
}

#ifndef __CUDACC_RTC__
template <class Mma, int kFilterTile>
cudaError_t FilterFragments<Mma, kFilterTile>::launch(const Conv2dProblem& problem, const Element* w, uint4* packed,
                                                      cudaStream_t stream) {
    constexpr int kThreads = 128;
    constexpr int64_t kLargestGridYz = 65535;
    const int64_t filters = problem.out_channels / problem.groups, channels = problem.channels / problem.groups;
    const int64_t tiles = (filters + kFilterTile - 1) / kFilterTile, chunks = (channels + kChannels - 1) / kChannels;
    if (tiles > kLargestGridYz || problem.groups > kLargestGridYz) return cudaErrorInvalidConfiguration;
    const dim3 grid(static_cast<unsigned>((chunks * kPieces + kThreads - 1) / kThreads), static_cast<unsigned>(tiles),
                    static_cast<unsigned>(problem.groups));
    return queue(pack_filters_kernel<FilterFragments, kThreads>, grid, kThreads, 0, stream, problem, w, packed);
}
#endif  // __CUDACC_RTC__

}  // namespace fxfuse
