// out[i] = an expression of elements of other tensors, whose places are computed from i: what program/loops.py made of
// copies, paddings, rolls and whatever is pointwise between them. The generated Body knows the places.
//
// The result's memory is cut into runs of kVector elements, a run for each thread. Elements that lie side by side where
// a run reads them are read together. A kernel may have kOthers further results of as many elements, which lie in the same
// order. A result may be a part of memory that is there (kPlaced): then the Body puts it there. A launch may have kTogether of them of one form, none of which needs another.
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "divisor.cuh"
#include "epilogue.cuh"
#include "launch.cuh"

namespace fxfuse {

template <class Body>
struct LoopsArguments {
    unsigned count;  // of runs, or of rows
    unsigned number[Body::kNumbers + 1];
    FastDivisor divisor[Body::kDivisors + 1];
    const void* memory[Body::kTensors + 1];
    typename Body::Output* out;
    void* other[Body::kOthers + 1];  // further results

#ifndef __CUDACC_RTC__
    // Moves `values` and `pointers` behind what it takes.
    static LoopsArguments take(const uint32_t*& values, const uint64_t*& pointers) {
        LoopsArguments arguments;
        arguments.count = *values++;
        for (int i = 0; i < Body::kNumbers; ++i) arguments.number[i] = *values++;
        for (int i = 0; i < Body::kDivisors; ++i) arguments.divisor[i] = FastDivisor(*values++);
        arguments.out = reinterpret_cast<typename Body::Output*>(*pointers++);
        for (int i = 0; i < Body::kOthers; ++i) arguments.other[i] = reinterpret_cast<void*>(*pointers++);
        for (int i = 0; i < Body::kTensors; ++i) arguments.memory[i] = reinterpret_cast<const void*>(*pointers++);
        return arguments;
    }
#endif  // __CUDACC_RTC__
};

// Of a launch, in which blockIdx.y says which result a block is for.
template <class Body>
struct LoopsTogether {
    LoopsArguments<Body> of[Body::kTogether];

    __device__ __forceinline__ const LoopsArguments<Body>& mine() const {
        return of[Body::kTogether == 1 ? 0 : blockIdx.y];
    }
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

// What belongs to an element of a run, of numbers of four bits and of bits: constants, where its loop is unrolled.
__device__ __forceinline__ unsigned number_of(uint64_t numbers, int lane) {
    return static_cast<unsigned>(numbers >> (4 * lane)) & 15u;
}
__device__ __forceinline__ bool is_one_of(unsigned lanes, int lane) { return (lanes >> lane & 1u) != 0; }

// An element as expressions have it: floats, integers of 64 bits, truth values; float64 is only moved.
template <class T>
__device__ __forceinline__ float as_number(const T& element) {
    return to_float(element);
}
__device__ __forceinline__ int64_t as_number(const uint8_t& element) { return element; }
__device__ __forceinline__ int64_t as_number(const int8_t& element) { return element; }
__device__ __forceinline__ int64_t as_number(const int16_t& element) { return element; }
__device__ __forceinline__ int64_t as_number(const int32_t& element) { return element; }
__device__ __forceinline__ int64_t as_number(const int64_t& element) { return element; }
__device__ __forceinline__ bool as_number(const bool& element) { return element; }
__device__ __forceinline__ double as_number(const double& element) { return element; }

// A number as it lies in memory.
template <class T, class Number>
__device__ __forceinline__ void set(T& element, Number number) {
    element = static_cast<T>(number);
}
__device__ __forceinline__ void set(Float16& element, float number) { element = from_float<Float16>(number); }
__device__ __forceinline__ void set(BFloat16& element, float number) { element = from_float<BFloat16>(number); }

// The integer at `at`, one of 0 to size - 1. Others are errors, as torch has it; if kWraps, negative ones count from the end.
template <bool kWraps, class T>
__device__ __forceinline__ unsigned integer_at(const void* memory, unsigned at, unsigned size) {
    const int64_t value = static_cast<const T*>(memory)[at];
    const int64_t index = kWraps && value < 0 ? value + size : value;
    if (index < 0 || index >= size) __trap();
    return static_cast<unsigned>(index);
}

template <class Body>
__global__ void __launch_bounds__(Body::kThreads) loops_kernel(const __grid_constant__ LoopsTogether<Body> together) {
    FXFUSE_DEVICE_PASS({
        const LoopsArguments<Body>& arguments = together.mine();
        const unsigned run = blockIdx.x * Body::kThreads + threadIdx.x;
        if (run < arguments.count) {
            Adjacent<typename Body::Output, Body::kVector, Body::kAccess> result;
            Body::compute(arguments, run, result);
            if constexpr (!Body::kPlaced) result.store(arguments.out + static_cast<int64_t>(run) * Body::kVector);
        }
    });
}

#ifndef __CUDACC_RTC__
// A launch of a kernel of loops, of which a block has kOfBlock runs or rows. params: for each result their number, then
// numbers and divisors; pointers: for each its own, then those of the tensors that are read.
template <class Body, unsigned kOfBlock>
cudaError_t queue_loops(void (*kernel)(const LoopsTogether<Body>), const void* params, const uint64_t* pointers,
                        cudaStream_t stream) {
    const auto* values = static_cast<const uint32_t*>(params);
    LoopsTogether<Body> together;
    unsigned most = 0;
    for (LoopsArguments<Body>& one : together.of) {
        one = LoopsArguments<Body>::take(values, pointers);
        most = one.count > most ? one.count : most;
    }
    return queue(kernel, dim3((most + kOfBlock - 1) / kOfBlock, Body::kTogether), Body::kThreads, 0, stream, together);
}

template <class Body>
cudaError_t launch_loops(const void* params, const uint64_t* pointers, cudaStream_t stream) {
    return queue_loops<Body, Body::kThreads>(loops_kernel<Body>, params, pointers, stream);
}
#endif  // __CUDACC_RTC__

}  // namespace fxfuse
