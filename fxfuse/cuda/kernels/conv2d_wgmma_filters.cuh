// Filters as the M operand of Hopper's convolution (conv2d_wgmma.cuh), packed as
//   [group and filter tile][step][part][tap][16 bytes of channels][filter]
// Floats are rounded to TF32 or split in two parts of TF32. Filters and channels that do not exist are zero.
#pragma once

#include <cstdint>

#include "conv2d_wgmma_config.cuh"
#include "device_pass.cuh"
#include "epilogue.cuh"
#include "launch.cuh"
#include "mma.cuh"

namespace fxfuse {

template <class Config>
struct WgmmaFilters {
    using Mma = typename Config::Mma;
    using Element = typename Config::Element;
    static constexpr int kChannels = Config::kPieceChannels;

    // The index-th 16 bytes of all packed filters.
    static __device__ __forceinline__ uint4 piece(const Conv2dProblem& problem, const Element* w, int64_t steps,
                                                  unsigned filter_tiles, int64_t index) {
        const auto take = [&](int64_t radix) {
            const int digit = static_cast<int>(index % radix);
            index /= radix;
            return digit;
        };
        const int in_tile = take(Config::kFilterTile), half = take(Config::kStepPieces);
        const int col = take(problem.kernel_width), row = take(problem.kernel_height);
        const int part = take(Config::kParts), step = take(steps);
        const int filter = take(filter_tiles) * Config::kFilterTile + in_tile;
        const int64_t filters = problem.out_channels / problem.groups, channels = problem.channels / problem.groups;
        const Element* source =
            w + (index * filters + filter) * problem.w_filter + row * problem.w_row + col * problem.w_col;
        const int first = (step * Config::kStepPieces + half) * kChannels;
        Element value[kChannels];
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
            const bool exists = filter < filters && first + i < channels;
            value[i] = exists ? source[(first + i) * problem.w_channel] : from_float<Element>(0.0f);
        }
        return operand(value, part);
    }

    // 16 bytes as the tensor cores take them. If numbers are split, `part` 0 is hi and 1 is lo.
    static __device__ __forceinline__ uint4 operand(const float (&value)[4], int part) {
        return make_uint4(tf32(value[0], part), tf32(value[1], part), tf32(value[2], part), tf32(value[3], part));
    }
    template <class Half>
    static __device__ __forceinline__ uint4 operand(const Half (&value)[8], int) {
        return make_uint4(pair(value[0], value[1]), pair(value[2], value[3]), pair(value[4], value[5]),
                          pair(value[6], value[7]));
    }

#ifndef __CUDACC_RTC__
    // Packs all filters. `steps`: the steps of all channels.
    static cudaError_t launch(const Conv2dProblem& problem, int64_t steps, const Element* w, uint4* packed,
                              cudaStream_t stream);
#endif

private:
    static __device__ __forceinline__ uint32_t tf32(float value, int part) {
        if constexpr (Config::kParts == 1) {
            return Tf32::round_to_tf32(__float_as_uint(value));
        } else {
            const uint32_t hi = Mma::upper(__float_as_uint(value));
            return part == 0 ? hi : __float_as_uint(value - __uint_as_float(hi));
        }
    }
    template <class Half>
    static __device__ __forceinline__ uint32_t pair(const Half& first, const Half& second) {
        return reinterpret_cast<const uint16_t&>(first) |
               static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(second)) << 16;
    }
};

constexpr int kWgmmaPackThreads = 128;

template <class Config>
__global__ void __launch_bounds__(kWgmmaPackThreads)
    wgmma_pack_filters_kernel(const __grid_constant__ Conv2dProblem problem,
                              const typename Config::Element* __restrict__ w, int64_t steps, unsigned filter_tiles,
                              int64_t pieces, uint4* __restrict__ packed) {
    wait_for_predecessors();
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kWgmmaPackThreads + threadIdx.x;
    if (index < pieces) packed[index] = WgmmaFilters<Config>::piece(problem, w, steps, filter_tiles, index);
}

#ifndef __CUDACC_RTC__
template <class Config>
cudaError_t WgmmaFilters<Config>::launch(const Conv2dProblem& problem, int64_t steps, const Element* w, uint4* packed,
                                         cudaStream_t stream) {
    const int64_t filters = problem.out_channels / problem.groups;
    const int64_t tiles = (filters + Config::kFilterTile - 1) / Config::kFilterTile;
    const int64_t pieces = problem.groups * tiles * steps * problem.kernel_height * problem.kernel_width *
                           Config::kPartPieces * Config::kFilterTile;
    const int64_t blocks = (pieces + kWgmmaPackThreads - 1) / kWgmmaPackThreads;
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    return queue(wgmma_pack_filters_kernel<Config>, static_cast<unsigned>(blocks), kWgmmaPackThreads, 0, stream,
                 problem, w, steps, static_cast<unsigned>(tiles), pieces, packed);
}
#endif  // __CUDACC_RTC__

}  // namespace fxfuse
