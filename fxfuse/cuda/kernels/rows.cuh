// out[row][i] = an expression of elements of other tensors and of what rows of such expressions come to (sums, the
// greatest): softmax, means, norms, with whatever is pointwise around them. The generated Body knows the expressions and
// the places (program/loops.py).
//
// A row belongs to kLanes threads: to a part of a warp, a warp, or the whole block. They go over it once for each sum and
// once more for the result; what they read again is in caches.
#pragma once

#include <cstdint>

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

// What the values of a row's threads come to, in each of them. `kTurn`: which of a row's sums; each has memory of its own,
// since who is late reads one while others write the next.
template <class Op, int kLanes, int kThreads, int kTurn>
__device__ __forceinline__ float across(float value) {
    constexpr int kWarp = 32;
#pragma unroll
    for (int offset = (kLanes < kWarp ? kLanes : kWarp) / 2; offset > 0; offset /= 2) {
        value = Op::of(value, __shfl_xor_sync(~0u, value, offset));
    }
    if constexpr (kLanes > kWarp) {
        static_assert(kLanes == kThreads);
        __shared__ float parts[kThreads / kWarp];
        if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
        __syncthreads();
        value = parts[0];
#pragma unroll
        for (int warp = 1; warp < kThreads / kWarp; ++warp) value = Op::of(value, parts[warp]);
    }
    return value;
}

template <class Body>
__global__ void __launch_bounds__(Body::kThreads)
    rows_kernel(const __grid_constant__ LoopsArguments<Body> arguments, typename Body::Output* out) {
    FXFUSE_DEVICE_PASS({
        // Threads beyond the last row compute it, too: shuffles need all lanes.
        const unsigned row = blockIdx.x * (Body::kThreads / Body::kLanes) + threadIdx.x / Body::kLanes;
        const bool exists = row < arguments.count;
        Body::compute(arguments, exists ? row : arguments.count - 1, threadIdx.x % Body::kLanes, exists, out);
    });
}

#ifndef __CUDACC_RTC__
// params: rows, numbers, divisors. pointers: the result's, then those of the tensors that are read.
template <class Body>
cudaError_t launch_rows(const void* params, const uint64_t* pointers, cudaStream_t stream) {
    const auto arguments = LoopsArguments<Body>::make(params, pointers);
    constexpr unsigned kRows = Body::kThreads / Body::kLanes;
    const unsigned blocks = (arguments.count + kRows - 1) / kRows;
    rows_kernel<Body><<<blocks, Body::kThreads, 0, stream>>>(
        arguments, reinterpret_cast<typename Body::Output*>(pointers[0]));
    return cudaGetLastError();
}
#endif  // __CUDACC_RTC__

}  // namespace fxfuse
