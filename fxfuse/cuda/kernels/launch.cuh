// Host side of a kernel launch, shared by all kernel families.
#pragma once

#ifndef __CUDACC_RTC__

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace fxfuse {

// Lets kKernel use `bytes` of dynamic shared memory on the current device: above 48 KB that takes an attribute, which
// is set once per device and kernel.
template <auto kKernel>
cudaError_t allow_shared_memory(int bytes) {
    constexpr int kWithoutAttribute = 48 * 1024;
    constexpr int kRemembered = 64;  // devices; more than any host has, and a repeated call does no harm
    static std::atomic<uint64_t> done{0};
    if (bytes <= kWithoutAttribute) return cudaSuccess;
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    const uint64_t bit = device < kRemembered ? uint64_t{1} << device : 0;
    if ((done.load(std::memory_order_relaxed) & bit) != 0) return cudaSuccess;
    const cudaError_t error =
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) done.fetch_or(bit, std::memory_order_relaxed);
    return error;
}

// Of the current device: asked once per device.
inline cudaError_t multiprocessors(int* count) {
    constexpr int kRemembered = 64;
    static std::atomic<int> known[kRemembered];
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    if (device < kRemembered) *count = known[device].load(std::memory_order_relaxed);
    if (device < kRemembered && *count > 0) return cudaSuccess;
    const cudaError_t error = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess && device < kRemembered) known[device].store(*count, std::memory_order_relaxed);
    return error;
}

// How many blocks of kKernel the current device holds at once: asked once per device and kernel.
template <auto kKernel>
cudaError_t resident_blocks(int threads, int shared_bytes, unsigned* blocks) {
    constexpr int kRemembered = 64;
    static std::atomic<unsigned> known[kRemembered];
    int device = 0, count = 0, each = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    if (device < kRemembered) *blocks = known[device].load(std::memory_order_relaxed);
    if (device < kRemembered && *blocks > 0) return cudaSuccess;
    cudaError_t error = multiprocessors(&count);
    if (error != cudaSuccess) return error;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kKernel, threads, static_cast<size_t>(shared_bytes));
    if (error != cudaSuccess) return error;
    *blocks = static_cast<unsigned>(count * each);
    if (device < kRemembered) known[device].store(*blocks, std::memory_order_relaxed);
    return *blocks > 0 ? cudaSuccess : cudaErrorInvalidConfiguration;
}

}  // namespace fxfuse

#endif  // __CUDACC_RTC__
