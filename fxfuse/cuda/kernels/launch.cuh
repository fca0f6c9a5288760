// Host side of a kernel launch, shared by all kernel families.
#pragma once

#ifndef __CUDACC_RTC__

#include <cuda_runtime.h>

#include <atomic>

namespace fxfuse {

constexpr int kRememberedDevices = 64;  // more than any host has; beyond, calls are repeated, which does no harm

// Lets kKernel use `bytes` of dynamic shared memory on the current device. Above 48 KB that takes an attribute, which
// is set again only if a launch needs more than all launches before it on this device.
template <auto kKernel>
cudaError_t allow_shared_memory(int bytes) {
    constexpr int kWithoutAttribute = 48 * 1024;
    static std::atomic<int> allowed[kRememberedDevices];
    static std::atomic<bool> setting{false};
    if (bytes <= kWithoutAttribute) return cudaSuccess;
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    const bool remembered = device < kRememberedDevices;
    if (remembered && allowed[device].load(std::memory_order_relaxed) >= bytes) return cudaSuccess;
    while (setting.exchange(true, std::memory_order_acquire)) {}  // no other thread may set a smaller number last
    cudaError_t error = cudaSuccess;
    if (!remembered || allowed[device].load(std::memory_order_relaxed) < bytes) {
        error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error == cudaSuccess && remembered) allowed[device].store(bytes, std::memory_order_relaxed);
    }
    setting.store(false, std::memory_order_release);
    return error;
}

// A positive number that `ask` finds for the current device; `ask` is called once per device.
template <class Ask>
cudaError_t ask_once(std::atomic<unsigned> (&known)[kRememberedDevices], unsigned* found, Ask ask) {
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    const bool remembered = device < kRememberedDevices;
    if (remembered) *found = known[device].load(std::memory_order_relaxed);
    if (remembered && *found > 0) return cudaSuccess;
    const cudaError_t error = ask(found, device);
    if (error == cudaSuccess && remembered) known[device].store(*found, std::memory_order_relaxed);
    return error;
}

// The current device's number of multiprocessors.
inline cudaError_t multiprocessors(unsigned* count) {
    static std::atomic<unsigned> known[kRememberedDevices];
    return ask_once(known, count, [](unsigned* found, int device) {
        int value = 0;
        const cudaError_t error = cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device);
        *found = static_cast<unsigned>(value);
        return error;
    });
}

// How many blocks of kKernel the current device holds at once.
template <auto kKernel>
cudaError_t resident_blocks(int threads, int shared_bytes, unsigned* blocks) {
    static std::atomic<unsigned> known[kRememberedDevices];
    return ask_once(known, blocks, [&](unsigned* found, int) {
        unsigned count = 0;
        int each = 0;
        cudaError_t error = multiprocessors(&count);
        if (error != cudaSuccess) return error;
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kKernel, threads, static_cast<size_t>(shared_bytes));
        *found = count * static_cast<unsigned>(each);
        return error == cudaSuccess && *found == 0 ? cudaErrorInvalidConfiguration : error;
    });
}

// Lets kKernel be launched in clusters of `cluster` blocks on the current device. Any GPU with clusters allows 8; more
// take an attribute.
template <auto kKernel>
cudaError_t allow_clusters(unsigned cluster) {
    constexpr unsigned kPortable = 8;
    static std::atomic<unsigned> known[kRememberedDevices];
    unsigned done = 0;
    if (cluster <= kPortable) return cudaSuccess;
    return ask_once(known, &done, [](unsigned* found, int) {
        *found = 1;
        return cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    });
}

// Puts a kernel on a stream. From sm_90 on the kernel is launched while the one before it ends (programmatic dependent
// launch), and waits for that end itself (device_pass.cuh): this saves a microsecond between kernels. It needs CUDA
// 12.3: before, CUDA graphs could not capture such launches. Also from sm_90 on, `cluster` blocks that follow each
// other along x may be launched together, so that they can read each other's shared memory.
template <class... Parameters, class... Arguments>
cudaError_t queue_in_clusters(unsigned cluster, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                              size_t shared_bytes, cudaStream_t stream, Arguments... arguments) {
#if defined(__CUDA_ARCH_LIST__) && __CUDA_ARCH_LIST__ >= 900
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {cluster, 1, 1};
    unsigned count = 1;
#if CUDART_VERSION >= 12030
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
#endif
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = cluster > 1 ? attributes : attributes + 1;
    config.numAttrs = cluster > 1 ? count : count - 1;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
#else
    if (cluster > 1) return cudaErrorInvalidConfiguration;
    kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
    return cudaGetLastError();
#endif
}

// The same without clusters.
template <class... Parameters, class... Arguments>
cudaError_t queue(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                  Arguments... arguments) {
    return queue_in_clusters(1, kernel, grid, block, shared_bytes, stream, arguments...);
}

}  // namespace fxfuse

#endif  // __CUDACC_RTC__
