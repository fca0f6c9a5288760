// out[i] = an expression of elements of other tensors, whose places are computed from i: what program/loops.py made of
// copies, paddings, rolls and whatever is pointwise between them. The generated Body knows the places.
//
// The result's memory is cut into runs of kVector elements, a run for each thread. Elements that lie side by side where
// a run reads them are read together.
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "divisor.cuh"
#include "epilogue.cuh"

namespace fxfuse {

template <class Body>
struct LoopsArguments {
    unsigned runs;
    unsigned number[Body::kNumbers + 1];
    FastDivisor divisor[Body::kDivisors + 1];
    const void* memory[Body::kTensors + 1];
};

// What lies at `source`, by instructions of kAccess bytes, of which the address is a multiple.
template <class T, int kVector, int kAccess>
struct Adjacent {
    static constexpr int kBytes = kVector * static_cast<int>(sizeof(T));
    static constexpr int kWord = kAccess < kBytes ? kAccess : kBytes;

    alignas(kWord) T element[kVector];

    __device__ __forceinline__ void load(const T* source) {
#pragma unroll
        for (int i = 0; i < kBytes / kWord; ++i) {
            reinterpret_cast<Word<kWord>*>(element)[i] = reinterpret_cast<const Word<kWord>*>(source)[i];
        }
    }
    __device__ __forceinline__ void store(T* destination) const {
#pragma unroll
        for (int i = 0; i < kBytes / kWord; ++i) {
            reinterpret_cast<Word<kWord>*>(destination)[i] = reinterpret_cast<const Word<kWord>*>(element)[i];
        }
    }
};

template <class T>
constexpr bool kIsFloat = false;
template <>
constexpr bool kIsFloat<float> = true;

// An element as the expression has it: a float, or as it lies there if it is only moved.
template <class Number, class T>
__device__ __forceinline__ Number as_number(const T& element) {
    if constexpr (kIsFloat<Number>) {
        return to_float(element);
    } else {
        return element;
    }
}
template <class T>
__device__ __forceinline__ void set(T& element, float number) {
    element = from_float<T>(number);
}
template <>
__device__ __forceinline__ void set(bool& element, float number) {
    element = number != 0.0f;
}

// The integer at `at`, one of 0 to size - 1. Others are errors, as torch has it; if kWraps, negative ones count from the end.
template <bool kWraps, class T>
__device__ __forceinline__ unsigned integer_at(const void* memory, unsigned at, unsigned size) {
    const int64_t value = static_cast<const T*>(memory)[at];
    const int64_t index = kWraps && value < 0 ? value + size : value;
    if (index < 0 || index >= size) __trap();
    return static_cast<unsigned>(index);
}

template <class Body>
__global__ void __launch_bounds__(Body::kThreads)
    loops_kernel(const __grid_constant__ LoopsArguments<Body> arguments, typename Body::Output* out) {
    FXFUSE_DEVICE_PASS({
        const unsigned run = blockIdx.x * Body::kThreads + threadIdx.x;
        if (run < arguments.runs) {
            Adjacent<typename Body::Output, Body::kVector, 16> result;
            Body::compute(arguments, run, result.element);
            result.store(out + static_cast<int64_t>(run) * Body::kVector);
        }
    });
}

#ifndef __CUDACC_RTC__
// params: runs, numbers, divisors. pointers: the result's, then those of the tensors that are read.
template <class Body>
cudaError_t launch_loops(const void* params, const uint64_t* pointers, cudaStream_t stream) {
    const auto* values = static_cast<const uint32_t*>(params);
    LoopsArguments<Body> arguments;
    arguments.runs = *values++;
    for (int i = 0; i < Body::kNumbers; ++i) arguments.number[i] = *values++;
    for (int i = 0; i < Body::kDivisors; ++i) arguments.divisor[i] = FastDivisor(*values++);
    for (int i = 0; i < Body::kTensors; ++i) arguments.memory[i] = reinterpret_cast<const void*>(pointers[i + 1]);
    const unsigned blocks = (arguments.runs + Body::kThreads - 1) / Body::kThreads;
    loops_kernel<Body><<<blocks, Body::kThreads, 0, stream>>>(
        arguments, reinterpret_cast<typename Body::Output*>(pointers[0]));
    return cudaGetLastError();
}
#endif  // __CUDACC_RTC__

}  // namespace fxfuse
