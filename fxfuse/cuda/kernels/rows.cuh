// out[row][i] = an expression of elements of other tensors and of reductions (sums, maxima) over rows of such
// expressions: softmax, means, norms, with the pointwise operations around them. The generated Body knows the
// expressions and the places (program/loops.py).
//
// kLanes threads of a block share a row. They go over the row once for each sum and once more for the result; repeated
// reads hit caches. Where a row's elements are adjacent in memory, its threads are adjacent, too (kColumns is 1). Where
// rows are adjacent (means over the pixels of images in channels_last), a thread has kRows rows, and the next threads
// have the next rows, kColumns threads in all. The threads after these are the next lanes of the same rows:
//
//   thread    0 1 2 3 4 5 6 7   8 9 ... 15   ...   24 ... 31     kColumns = 8, kLanes = 4
//   rows      0 1 2 3 4 5 6 7   0 1 ...  7          0 ...  7     kRows each
//   lane      0 0 0 0 0 0 0 0   1 1 ...  1          3 ...  3
//
// Short rows that do not begin at sectors of memory are staged: see Staged in cuda/row_threads.py.
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
    static __device__ __forceinline__ float of(float a, float b) { return maximum(a, b); }
};

// A thread's partial totals of its rows.
template <class Op, int kRows>
struct Totals {
    float value[kRows];

    __device__ __forceinline__ Totals() {
#pragma unroll
        for (int row = 0; row < kRows; ++row) value[row] = Op::nothing();
    }
    __device__ __forceinline__ void add(int row, float number) { value[row] = Op::of(value[row], number); }

    // Combines the totals of a row's threads; each thread then has the whole. kTurn: which of a row's reductions this
    // is. Each has shared memory of its own, because late threads read one while others write the next.
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

// Copies `count` elements by all threads of a block, from memory to shared memory or back. Both places are multiples of
// 16 bytes.
template <int kThreads, class To, class From>
__device__ __forceinline__ void stage(To* to, const From* from, unsigned count) {
    constexpr unsigned kVector = 16 / (sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
    const unsigned whole = count / kVector * kVector;
    for (unsigned at = threadIdx.x * kVector; at < whole; at += kThreads * kVector) {
        Adjacent<From, kVector, 16> read;
        Adjacent<To, kVector, 16> written;
        read.load(from + at);
#pragma unroll
        for (unsigned i = 0; i < kVector; ++i) set(written.element[i], as_number(read.element[i]));
        written.store(to + at);
    }
    for (unsigned at = whole + threadIdx.x; at < count; at += kThreads) set(to[at], as_number(from[at]));
}

// Like run_loops, for a Body of rows.
template <class Body>
__device__ __forceinline__ void run_rows(const LoopsArguments<Body>& arguments, unsigned block) {
    if (block * Body::kOfBlock >= arguments.count) return;  // another result of the launch has more rows
    // Threads beyond the last row compute the last row, too: shuffles need all lanes.
    constexpr int kGroup = Body::kColumns * Body::kLanes;
    const unsigned group = block * (Body::kThreads / kGroup) + threadIdx.x / kGroup;
    const unsigned row = group * Body::kColumns + threadIdx.x % Body::kColumns;
    const unsigned lane = threadIdx.x % kGroup / Body::kColumns;
    const bool exists = row < arguments.count;
    Body::compute(arguments, exists ? row : arguments.count - 1, lane, exists,
                  block * Body::kOfBlock, arguments.out);
}

}  // namespace fxfuse
