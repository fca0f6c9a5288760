// A GPU for tests on machines without one: as much of CUDA as fxfuse's kernels use, run by fibers on one CPU thread.
//
// Thread blocks run one after another, and of a block warp after warp, each as far as the next barrier: as far apart as
// warps can be. Shared memory is poisoned before every block and ends at a page that may not be touched. Copies by cp.async
// arrive no sooner than they are waited for (ptx.cuh). So what a kernel reads too early or out of bounds does not
// happen to be right, as it often is on a GPU.
//
// Every kernel is compiled with this header, so it says little; what runs them is a library of its own (machine.cpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static  // blocks run one after another

using std::isfinite;
using std::isnan;

struct alignas(8) int2 {
    int32_t x, y;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct uint3 {
    uint32_t x, y, z;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct dim3 {
    uint32_t x, y, z;
    dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {}
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

// ------------------------------------------------------------------------------------------------ the machine

namespace emulation {

constexpr int kWarp = 32;
constexpr int kMultiprocessors = 2;

extern size_t most_shared;     // bytes that a block may have
extern unsigned char* shared;  // the block's, and how many bytes of it there are
extern size_t shared_bytes;
extern int current, running;  // the thread that runs, and how many of the block have not ended

[[noreturn]] void fail(const char* what);

// Bytes of shared memory that a kernel may have, by its address.
size_t& shared_of(const void* kernel);

// A copy to shared memory that is under way: `valid` bytes, then zeros.
struct Copy {
    unsigned char* to;
    const unsigned char* from;
    int bytes, valid;

    void arrive() const {
        std::memset(to, 0, bytes);
        std::memcpy(to, from, valid);
    }
};

// The calling thread's copies: begins one, ends a group of them, waits until no more than `pending` groups are open.
void begin_copy(const Copy& copy);
void commit_copies();
void wait_for_copies(size_t pending);

void pause();     // the calling thread lets all others go as far as they can
void wait();      // the calling thread stands still until another calls wake_all
void wake_all();

// Each thread brings an item. The last to arrive calls `complete` on all items; then all of them go on.
using Complete = void (*)(void** all, const void* how);
void meet_warp(void* mine, Complete complete, const void* how);
void meet_block(void* mine, Complete complete, const void* how);

template <class Item, class How>
void complete(void** all, const void* how) {
    (*static_cast<const How*>(how))(reinterpret_cast<Item**>(all));
}

// All lanes of the calling thread's warp offer an item; `how` sees all 32 of them.
template <class Item, class How>
void with_warp(Item& mine, How how) {
    meet_warp(&mine, complete<Item, How>, &how);
}

// The same of those threads of the block that have not ended.
template <class Item, class How>
void with_block(Item& mine, How how) {
    meet_block(&mine, complete<Item, How>, &how);
}

// Calls body(how) in every thread of every block.
void run(const void* kernel, dim3 grid, dim3 block, size_t bytes, void (*body)(const void*), const void* how);

// kernel<<<grid, threads, bytes>>>(arguments…)
template <class Kernel, class... Arguments>
void launch(Kernel kernel, dim3 grid, dim3 block, size_t bytes, Arguments... arguments) {
    const auto call = [&] { kernel(arguments...); };
    run(reinterpret_cast<const void*>(kernel), grid, block, bytes,
        [](const void* how) { (*static_cast<decltype(&call)>(how))(); }, &call);
}

}  // namespace emulation

// ------------------------------------------------------------------------------------------- what device code calls

inline void __syncthreads() {
    int nothing = 0;
    emulation::with_block(nothing, [](int**) {});
}

inline void __syncwarp() {
    int nothing = 0;
    emulation::with_warp(nothing, [](int**) {});
}

inline int __syncthreads_or(int predicate) {
    int mine = predicate;
    emulation::with_block(mine, [](int** all) {
        int any = 0;
        for (int i = 0; i < emulation::running; ++i) any |= *all[i] != 0;
        for (int i = 0; i < emulation::running; ++i) *all[i] = any;
    });
    return mine;
}

inline void __threadfence() {}

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    struct Item {
        T value;
        int lane;
    } mine = {value, lane};
    emulation::with_warp(mine, [](Item** all) {
        T values[emulation::kWarp];
        for (int i = 0; i < emulation::kWarp; ++i) values[i] = all[i]->value;
        for (int i = 0; i < emulation::kWarp; ++i) all[i]->value = values[all[i]->lane % emulation::kWarp];
    });
    return mine.value;
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % emulation::kWarp) ^ lanes);
}

inline int __any_sync(unsigned, int predicate) {
    emulation::with_warp(predicate, [](int** all) {
        int any = 0;
        for (int i = 0; i < emulation::kWarp; ++i) any |= *all[i] != 0;
        for (int i = 0; i < emulation::kWarp; ++i) *all[i] = any;
    });
    return predicate;
}

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    emulation::with_warp(value, [](unsigned** all) {
        unsigned most = 0;
        for (int i = 0; i < emulation::kWarp; ++i) most = std::max(most, *all[i]);
        for (int i = 0; i < emulation::kWarp; ++i) *all[i] = most;
    });
    return value;
}

inline unsigned long long atomicCAS(unsigned long long* word, unsigned long long expected, unsigned long long value) {
    const unsigned long long found = *word;
    if (found == expected) *word = value;
    return found;
}

template <class T>
T __ldg(const T* source) {
    return *source;
}
template <class T>
T __ldcg(const T* source) {
    return *source;
}
template <class T>
void __stcg(T* destination, T value) {
    *destination = value;
}

template <class To, class From>
To bits_as(From from) {
    To to;
    static_assert(sizeof(To) == sizeof(From));
    std::memcpy(&to, &from, sizeof(To));
    return to;
}
inline float __uint_as_float(uint32_t bits) { return bits_as<float>(bits); }
inline uint32_t __float_as_uint(float value) { return bits_as<uint32_t>(value); }
inline float __int_as_float(int32_t bits) { return bits_as<float>(bits); }
inline int32_t __float_as_int(float value) { return bits_as<int32_t>(value); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
[[noreturn]] inline void __trap() { emulation::fail("a kernel stopped"); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = uint64_t{high} << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= static_cast<uint32_t>(bytes >> ((selector >> 4 * i & 7) * 8) & 0xff) << 8 * i;
    }
    return result;
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
    return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift & 31));
}

template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
    return b < a ? b : a;
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
    return a < b ? b : a;
}

// ---------------------------------------------------------------------------------------------- what the host calls

enum cudaError_t { cudaSuccess, cudaErrorInvalidConfiguration };
using cudaStream_t = void*;
enum {
    cudaFuncAttributeMaxDynamicSharedMemorySize,
    cudaFuncAttributeNonPortableClusterSizeAllowed,
    cudaDevAttrMultiProcessorCount
};

inline const char* cudaGetErrorString(cudaError_t) { return "an invalid configuration"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
    return *value = emulation::kMultiprocessors, cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel kernel, int, int bytes) {
    emulation::shared_of(reinterpret_cast<const void*>(kernel)) = static_cast<size_t>(bytes);
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
    return *blocks = 1, cudaSuccess;
}
