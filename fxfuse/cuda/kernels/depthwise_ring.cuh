// Parts of the depthwise kernels that walk down columns (depthwise_nhwc.cuh, depthwise_mma.cuh): the height of a tile,
// the launch, the copy of filters to shared memory, and the step of sums from row to row.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "depthwise_launch.cuh"
#include "launch.cuh"

namespace fxfuse {

// The height of a tile, in output rows, where `columns` tiles are side by side. `extra`: rows that a block works on
// beyond its own. `by_registers`: blocks that a multiprocessor has registers for; each has `warps` warps and `bytes`
// bytes of shared memory. `fixed`: what a wave takes beyond its warps, counted in warps. On an H200 the heights chosen
// for depthwise_nhwc.cuh took on average 0.7 % longer than the best ones.
inline int rows_of_tile(int64_t columns, int height, int extra, int64_t by_registers, int warps, int bytes,
                        int multiprocessors, int fixed = 0) {
    constexpr int kFewest = 2;
    constexpr int kStart = 3;       // a block's work before and after its rows, in rows
    constexpr int kBusyWarps = 12;  // fewer warps in a multiprocessor take as long
    constexpr int kShared = 160 << 10;  // bytes of a multiprocessor: an A100's
    const int64_t by_shared = kShared / bytes, resident = by_registers < by_shared ? by_registers : by_shared;
    const auto wave = [&](int64_t blocks) {
        const int64_t all = blocks * warps + fixed;
        return all > kBusyWarps ? all : int64_t{kBusyWarps};
    };
    // Waves of blocks run one after another.
    const auto cost = [&](int rows) {
        const int64_t tiles = columns * ceil_div(height, rows), at_once = resident * multiprocessors;
        const int64_t rest = tiles % at_once;
        const int64_t last = rest > 0 ? wave((rest + multiprocessors - 1) / multiprocessors) : 0;
        return (tiles / at_once * wave(resident) + last) * (rows + extra + kStart);
    };
    int best = height;
    int64_t least = cost(best);
    for (int fewer = height; fewer > kFewest;) {
        fewer = (fewer + 1) / 2;
        const int64_t costs = cost(fewer);
        if (costs < least) best = fewer, least = costs;
    }
    return best;
}

#ifndef __CUDACC_RTC__
// Launches Kernel with tiles chosen for the current device's number of multiprocessors.
template <class Kernel>
cudaError_t launch_depthwise_ring(const Conv2dProblem& problem, const uint64_t* pointers,
                                  const typename Kernel::Epilogue& epilogue, cudaStream_t stream) {
    unsigned count = 0;
    if (const cudaError_t error = multiprocessors(&count); error != cudaSuccess) return error;
    const typename Kernel::Tiles tiles(problem, static_cast<int>(count));
    return launch_depthwise_tiles<Kernel>(problem, tiles, tiles.threads(), pointers, epilogue, stream);
}
#endif  // __CUDACC_RTC__

// Copies the filters of `channels` channels to shared memory, by all threads of a block: channel after channel, each
// channel's taps in a row. Filters that lie like this in w, at a multiple of 16 bytes, are copied 16 bytes at a time by
// cp.async; the caller's next commit includes these copies.
template <int kKernel, class Element>
__device__ __forceinline__ void copy_filters(const Conv2dProblem& problem, Element* filters, const Element* w,
                                             int channels) {
    constexpr int kTaps = kKernel * kKernel, kRun = 16 / static_cast<int>(sizeof(Element));
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x), count = channels * kTaps;
    const bool adjacent = problem.w_filter == kTaps && problem.w_row == kKernel && problem.w_col == 1;
    if (adjacent && reinterpret_cast<uintptr_t>(w) % 16 == 0) {
        for (int i = thread * kRun; i < count; i += threads * kRun) {
            ptx::cp_async_16(ptx::shared_address(filters + i), w + i);
        }
        return;
    }
    for (int i = thread; i < count; i += threads) {
        const int tap = i % kTaps;
        const int64_t at = tap / kKernel * problem.w_row + tap % kKernel * problem.w_col;
        filters[i] = w[i / kTaps * problem.w_filter + at];
    }
}

// Begins a new output row: sums of the open rows, newest first, move from sum[q - 1] to sum[q], and sum[0] becomes
// zero. Row: an array of floats of any shape.
template <int kOpen, class Row>
__device__ __forceinline__ void begin_row(Row (&sum)[kOpen]) {
    constexpr int kValues = sizeof(Row) / sizeof(float);
#pragma unroll
    for (int q = kOpen - 1; q >= 0; --q) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            reinterpret_cast<float*>(sum[q])[i] = q > 0 ? reinterpret_cast<const float*>(sum[q - 1])[i] : 0.0f;
        }
    }
}

}  // namespace fxfuse
