// A GPU for tests on machines without one: as much of CUDA as fxfuse's kernels use, run by fibers on one CPU thread.
//
// Thread blocks run one after another, and of a block warp after warp, each as far as the next barrier: as far apart as
// warps can be. Shared memory is poisoned before every block and ends at a page that may not be touched. Copies by cp.async
// arrive no sooner than they are waited for (ptx.cuh). So what a kernel reads too early or out of bounds does not
// happen to be right, as it often is on a GPU.
#pragma once

#include <dlfcn.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

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

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

// ------------------------------------------------------------------------------------------------ the machine

namespace emulation {

constexpr int kWarp = 32;
constexpr int kMultiprocessors = 2;
constexpr size_t kStackBytes = 256 << 10, kPage = 4096;
inline size_t most_shared = 163 << 10;  // bytes that a block may have: an A100's limit
constexpr size_t kSharedUnasked = 48 << 10;           // the same of kernels that were allowed no more

// The same of a kernel, by its name: libraries share their variables, and so what launches remember of kernels.
template <class Kernel>
size_t& shared_of(Kernel kernel) {
    static std::map<std::string, size_t> of_names;
    Dl_info found{};
    dladdr(reinterpret_cast<const void*>(kernel), &found);
    return of_names.try_emplace(found.dli_sname == nullptr ? "" : found.dli_sname, kSharedUnasked).first->second;
}

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "emulated GPU: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
    std::abort();
}

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

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done, waits;                     // waits: at a barrier of the block, or for a phase of one in shared memory
    bool pauses;                          // lets all others go first
    std::vector<Copy> open;               // copies that are not committed
    std::deque<std::vector<Copy>> groups;  // committed ones
};

// Where threads meet: the last that arrives does what is to be done for all of them.
struct Meeting {
    int arrived = 0;
    uint64_t generation = 0;
    void* offered[1024];

    std::function<void()> finish;  // for those that have arrived

    template <class Item, class Complete>
    void attend(int index, int expected, Item& mine, Complete complete);
};

inline std::vector<Fiber> fibers;
inline int current, running;  // the thread that runs, and how many of the block have not ended
inline ucontext_t scheduler;
inline Meeting block_meeting, warp_meetings[32];
inline unsigned char* shared;
inline size_t shared_bytes;
inline std::function<void()> body;

inline void yield() { swapcontext(&fibers[current].context, &scheduler); }

// Lets all other threads go as far as they can.
inline void pause() {
    fibers[current].pauses = true;
    yield();
}

template <class Item, class Complete>
void Meeting::attend(int index, int expected, Item& mine, Complete complete) {
    const uint64_t mine_is = generation;
    offered[index] = &mine;
    finish = [this, complete] {
        complete(reinterpret_cast<Item**>(offered));
        arrived = 0;
        ++generation;
        for (Fiber& fiber : fibers) fiber.waits = false;
    };
    if (++arrived == expected) return finish();
    while (generation == mine_is) {
        fibers[current].waits = this == &block_meeting;
        yield();
    }
}

// All lanes of the calling thread's warp offer an item; `complete` sees all 32 of them.
template <class Item, class Complete>
void with_warp(Item& mine, Complete complete) {
    warp_meetings[current / kWarp].attend(current % kWarp, kWarp, mine, complete);
}

// Barriers of the block do not wait for threads that have ended.
inline void enter() {
    body();
    fibers[current].done = true;
    if (--running == block_meeting.arrived && running > 0) block_meeting.finish();
    yield();
}

inline void run_block(unsigned threads) {
    if (fibers.size() < threads) fibers.resize(threads);
    running = static_cast<int>(threads);
    block_meeting.arrived = 0;
    for (Meeting& meeting : warp_meetings) meeting.arrived = 0;
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.stack.resize(kStackBytes);
        fiber.done = fiber.waits = fiber.pauses = false;
        fiber.open.clear();
        fiber.groups.clear();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    const bool backwards = blockIdx.x % 2 == 1;  // the order of threads must not matter
    unsigned left = threads;
    while (left > 0) {
        const unsigned before = left;
        bool ran = false;
        for (unsigned i = 0; i < threads; ++i) {
            ran |= fibers[i].pauses;
            fibers[i].pauses = false;
        }
        for (unsigned first = 0; first < threads; first += kWarp) {
            for (bool runs = true; runs;) {
                runs = false;
                bool pauses = false;
                for (unsigned i = first; i < first + kWarp && i < threads; ++i) {
                    const unsigned thread = backwards ? threads - 1 - i : i;
                    Fiber& fiber = fibers[thread];
                    if (fiber.done || fiber.waits || fiber.pauses) continue;
                    current = static_cast<int>(thread);
                    threadIdx = {thread, 0, 0};
                    swapcontext(&scheduler, &fiber.context);
                    left -= fiber.done;
                    runs = ran = true;
                    pauses |= fiber.pauses;
                }
                if (pauses) break;  // for the whole warp: others of it may be waiting for that thread
            }
        }
        if (!ran && left == before) fail("threads wait for others that are gone");
    }
}

// kernel<<<grid, threads, bytes>>>(arguments…)
template <class Kernel, class... Arguments>
void launch(Kernel kernel, dim3 grid, dim3 block, size_t bytes, Arguments... arguments) {
    const unsigned threads = block.x;
    if (threads == 0 || threads > 1024 || bytes > std::min(shared_of(kernel), most_shared)) fail("a launch that the GPU refuses");
    const size_t room = (bytes + kPage - 1) / kPage * kPage;
    auto* base = static_cast<unsigned char*>(
        mmap(nullptr, room + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base + room, kPage, PROT_NONE);
    constexpr size_t kAlignment = 1024;
    shared = base + (room - bytes) / kAlignment * kAlignment;
    shared_bytes = base + room - shared;
    blockDim = dim3(threads);
    gridDim = grid;
    body = [&] { kernel(arguments...); };
    for (uint32_t z = 0; z < grid.z; ++z) {
        for (uint32_t y = 0; y < grid.y; ++y) {
            for (uint32_t x = 0; x < grid.x; ++x) {
                blockIdx = {x, y, z};
                std::memset(base, 0xff, room);  // NaN in every type
                run_block(threads);
            }
        }
    }
    munmap(base, room + kPage);
}

}  // namespace emulation

// ------------------------------------------------------------------------------------------- what device code calls

inline void __syncthreads() {
    int nothing = 0;
    emulation::block_meeting.attend(emulation::block_meeting.arrived, emulation::running, nothing, [](int**) {});
}

inline void __syncwarp() {
    int nothing = 0;
    emulation::with_warp(nothing, [](int**) {});
}

inline int __syncthreads_or(int predicate) {
    int mine = predicate;
    emulation::block_meeting.attend(emulation::block_meeting.arrived, emulation::running, mine, [](int** all) {
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
[[noreturn]] inline void __trap() { throw std::runtime_error("a kernel stopped"); }
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
    emulation::shared_of(kernel) = static_cast<size_t>(bytes);
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
    return *blocks = 1, cudaSuccess;
}
