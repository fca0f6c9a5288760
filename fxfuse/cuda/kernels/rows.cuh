// out[row][i] = an expression of elements of other tensors and of what rows of such expressions come to (sums, the
// greatest): softmax, means, norms, with whatever is pointwise around them. The generated Body knows the expressions and
// the places (program/loops.py).
//
// A row belongs to kLanes threads of a block. They go over it once for each sum and once more for the result; what they
// read again is in caches. Where what a row adds up lies side by side, its threads do, too (kColumns is 1). Where rows do
// (means over the pixels of images in channels_last), a thread has kRows rows and its neighbours the next ones, kColumns
// threads in all; then follow those that read on.
#pragma once

#include <cstdint>

#include "launch.cuh"
#include "loops.cuh"
#include "math.cuh"

namespace fxfuse {

struct Sum {
    static __device__ __forceinline__ float nothing() { return 0.0f; }
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};

struct Greatest {
    static __device__ __forceinline__ float nothing() { return -infinity(); }
    static __device__ __forceinline__ float of(float a, float b) { return a > b || isnan(a) ? a : b; }
};

// What rows come to, as far as a thread has added them up.
template <class Op, int kRows>
struct Totals {
    float value[kRows];

    __device__ __forceinline__ Totals() {
#pragma unroll
        for (int row = 0; row < kRows; ++row) value[row] = Op::nothing();
    }
    __device__ __forceinline__ void add(int row, float number) { value[row] = Op::of(value[row], number); }

    // Adds up what the threads of a row have; each has the whole then. `kTurn`: which of a row's sums; each has memory of
    // its own, since who is late reads one while others write the next.
    template <int kColumns, int kLanes, int kThreads, int kTurn>
    __device__ __forceinline__ void across_threads() {
        constexpr int kWarp = 32, kGroup = kColumns * kLanes;
#pragma unroll
        for (int offset = (kGroup < kWarp ? kGroup : kWarp) / 2; offset >= kColumns; offset /= 2) {
#pragma unroll
            for (int row = 0; row < kRows; ++row) add(row, __shfl_xor_sync(~0u, value[row], offset));
        }
        if constexpr (kGroup > kWarp) {
            static_assert(kThreads % kGroup == 0 && kColumns <= kWarp);
            constexpr int kWarps = kGroup / kWarp;
            __shared__ float parts[kThreads / kWarp][kRows][kColumns];
            const int column = threadIdx.x % kColumns, first = threadIdx.x / kGroup * kWarps;
            if (threadIdx.x % kWarp < kColumns) {
#pragma unroll
                for (int row = 0; row < kRows; ++row) parts[threadIdx.x / kWarp][row][column] = value[row];
            }
            __syncthreads();
#pragma unroll
            for (int row = 0; row < kRows; ++row) {
                value[row] = parts[first][row][column];
#pragma unroll
                for (int warp = 1; warp < kWarps; ++warp) add(row, parts[first + warp][row][column]);
            }
        }
    }
};

// As run_loops.
template <class Body>
__device__ __forceinline__ void run_rows(const LoopsArguments<Body>& arguments, unsigned block) {
    if (block * Body::kOfBlock >= arguments.count) return;  // another result has more
    // Threads beyond the last row compute it, too: shuffles need all lanes.
    constexpr int kGroup = Body::kColumns * Body::kLanes;
    const unsigned group = block * (kLoopsThreads / kGroup) + threadIdx.x / kGroup;
    const unsigned row = group * Body::kColumns + threadIdx.x % Body::kColumns;
    const unsigned lane = threadIdx.x % kGroup / Body::kColumns;
    const bool exists = row < arguments.count;
    Body::compute(arguments, exists ? row : arguments.count - 1, lane, exists, arguments.out);
}

}  // namespace fxfuse
