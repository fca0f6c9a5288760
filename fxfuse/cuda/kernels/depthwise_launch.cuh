// The kernel of depthwise convolutions that the host cuts into tiles (depthwise_tile.cuh, and those that
// depthwise_ring.cuh launches), and its launch.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "device_pass.cuh"
#include "launch.cuh"

namespace fxfuse {

inline int ceil_div(int64_t value, int by) { return static_cast<int>((value + by - 1) / by); }

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kThreads, Kernel::Config::kBlocks)
    depthwise_tiles_kernel(const __grid_constant__ Conv2dProblem problem,
                           const __grid_constant__ typename Kernel::Tiles tiles,
                           const typename Kernel::Element* __restrict__ x,
                           const typename Kernel::Element* __restrict__ w, typename Kernel::Output* __restrict__ out,
                           const typename Kernel::Epilogue epilogue) {
    extern __shared__ __align__(16) unsigned char depthwise_shared[];
    FXFUSE_DEVICE_PASS(Kernel::run(problem, tiles, depthwise_shared, x, w, out, epilogue));
}

#ifndef __CUDACC_RTC__
// Launches tiles.count blocks of `threads` threads, each with tiles.bytes bytes of shared memory.
template <class Kernel>
cudaError_t launch_depthwise_tiles(const Conv2dProblem& problem, const typename Kernel::Tiles& tiles, int threads,
                                   const uint64_t* pointers, const typename Kernel::Epilogue& epilogue,
                                   cudaStream_t stream) {
    using Element = typename Kernel::Element;
    if (tiles.count > INT32_MAX) return cudaErrorInvalidConfiguration;
    constexpr auto kKernel = depthwise_tiles_kernel<Kernel>;
    if (const cudaError_t error = allow_shared_memory<kKernel>(tiles.bytes); error != cudaSuccess) return error;
    return queue(kKernel, static_cast<unsigned>(tiles.count), threads, tiles.bytes, stream, problem, tiles,
                 reinterpret_cast<const Element*>(pointers[0]), reinterpret_cast<const Element*>(pointers[1]),
                 reinterpret_cast<typename Kernel::Output*>(pointers[2]), epilogue);
}
#endif  // __CUDACC_RTC__

}  // namespace fxfuse
