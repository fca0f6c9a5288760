// out[i] = an expression of elements of other tensors, whose places are computed from i. program/loops.py makes such
// loops of copies, paddings, rolls and the pointwise operations between them. The generated Body computes the places.
//
// The result's memory is cut into runs of kVector elements, a run for each thread. Elements that a run reads are read
// together where they are adjacent in memory. A loop may have kOthers further results of as many elements, in the same
// order. A result may be a part of existing memory (kPlaced): then the Body stores it. A launch may compute several
// results, none of which needs another.
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "divisor.cuh"
#include "epilogue.cuh"
#include "launch.cuh"

namespace fxfuse {

using Place = unsigned;  // in memory, in elements

template <class Body>
struct LoopsArguments {
    unsigned count;  // of runs, or of rows
    unsigned number[Body::kNumbers + 1];
    FastDivisor divisor[Body::kDivisors + 1];
    const void* memory[Body::kTensors + 1];
    typename Body::Output* out;
    void* other[Body::kOthers + 1];  // further results

#ifndef __CUDACC_RTC__
    // Takes its arguments from the front of `values` and `pointers`, and moves both past them.
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

// The results of one form (Body) in a launch: kCount of them, each with as many blocks as the largest needs.
template <class Body_, int kCount>
struct Alike {
    using Body = Body_;

    LoopsArguments<Body> of[kCount];
    unsigned blocks;  // of each

#ifndef __CUDACC_RTC__
    unsigned take(const uint32_t*& values, const uint64_t*& pointers) {
        unsigned most = 0;
        for (LoopsArguments<Body>& one : of) {
            one = LoopsArguments<Body>::take(values, pointers);
            most = one.count > most ? one.count : most;
        }
        blocks = (most + Body::kOfBlock - 1) / Body::kOfBlock;
        return blocks * kCount;
    }
#endif  // __CUDACC_RTC__

    __device__ __forceinline__ void run(unsigned block) const {
        if constexpr (kCount == 1) {
            Body::run(of[0], block);
        } else {
            Body::run(of[block / blocks], block % blocks);
        }
    }
    __device__ __forceinline__ unsigned all_blocks() const { return blocks * kCount; }
};

// All results of a launch, form after form. None needs another. Their blocks follow each other.
template <class First, class... Others>
struct LoopsTogether {
    First first;
    LoopsTogether<Others...> others;

#ifndef __CUDACC_RTC__
    unsigned take(const uint32_t*& values, const uint64_t*& pointers) {
        const unsigned before = first.take(values, pointers);
        return before + others.take(values, pointers);
    }
#endif  // __CUDACC_RTC__

    __device__ __forceinline__ void run(unsigned block) const {
        const unsigned before = first.all_blocks();
        if (block < before) {
            first.run(block);
        } else {
            others.run(block - before);
        }
    }
};

template <class First>
struct LoopsTogether<First> {
    First first;

#ifndef __CUDACC_RTC__
    unsigned take(const uint32_t*& values, const uint64_t*& pointers) { return first.take(values, pointers); }
#endif  // __CUDACC_RTC__

    __device__ __forceinline__ void run(unsigned block) const { first.run(block); }
};

// kVector adjacent elements, read and written by instructions of kAccess bytes; addresses are multiples of kAccess.
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

// Tables by a run's elements: the lane-th number of four bits, and the lane-th bit. Both are constants where the loop
// over the run is unrolled.
__device__ __forceinline__ unsigned number_of(uint64_t numbers, int lane) {
    return static_cast<unsigned>(numbers >> (4 * lane)) & 15u;
}
__device__ __forceinline__ bool is_one_of(unsigned lanes, int lane) { return (lanes >> lane & 1u) != 0; }

// An element in the type that expressions compute with: float, bool, or an integer of 64 bits (of 32 bits if 16 hold
// it). float64 is only moved.
template <class T>
__device__ __forceinline__ float as_number(const T& element) {
    return to_float(element);
}
__device__ __forceinline__ int32_t as_number(const uint8_t& element) { return element; }
__device__ __forceinline__ int32_t as_number(const int8_t& element) { return element; }
__device__ __forceinline__ int32_t as_number(const int16_t& element) { return element; }
__device__ __forceinline__ int64_t as_number(const int32_t& element) { return element; }
__device__ __forceinline__ int64_t as_number(const int64_t& element) { return element; }
__device__ __forceinline__ bool as_number(const bool& element) { return element; }
__device__ __forceinline__ double as_number(const double& element) { return element; }

// Stores a number in the element's type.
template <class T, class Number>
__device__ __forceinline__ void set(T& element, Number number) {
    element = static_cast<T>(number);
}
__device__ __forceinline__ void set(Float16& element, float number) { element = from_float<Float16>(number); }
__device__ __forceinline__ void set(BFloat16& element, float number) { element = from_float<BFloat16>(number); }

// The index at `at`, from 0 to size - 1; if kWraps, negative ones count from the end. Others trap: in torch, too, they
// are errors.
template <bool kWraps, class T>
__device__ __forceinline__ unsigned integer_at(const void* memory, unsigned at, unsigned size) {
    const int64_t value = static_cast<const T*>(memory)[at];
    const int64_t index = kWraps && value < 0 ? value + size : value;
    if (index < 0 || index >= size) __trap();
    return static_cast<unsigned>(index);
}

// Computes one block's runs of a result.
template <class Body>
__device__ __forceinline__ void run_loops(const LoopsArguments<Body>& arguments, unsigned block) {
    const unsigned run = block * Body::kThreads + threadIdx.x;
    if (run >= arguments.count) return;
    Adjacent<typename Body::Output, Body::kVector, Body::kAccess> result;
    Body::compute(arguments, run, result);
    if constexpr (!Body::kPlaced) result.store(arguments.out + static_cast<int64_t>(run) * Body::kVector);
}

// Two blocks of 512 threads fit into the registers of a multiprocessor: one computes while the other reads. 0 leaves the
// registers of other blocks to the compiler.
template <int kThreads, class... Forms>
__global__ void __launch_bounds__(kThreads, kThreads == 512 ? 2 : 0)
    loops_kernel(const __grid_constant__ LoopsTogether<Forms...> together) {
    FXFUSE_DEVICE_PASS(together.run(blockIdx.x));
}

#ifndef __CUDACC_RTC__
// params: for each result its number of runs or rows, then numbers and divisors; pointers: for each result its own,
// those of further results, then those of the tensors that are read.
template <class First, class... Others>
cudaError_t launch_loops(const void* params, const uint64_t* pointers, cudaStream_t stream) {
    constexpr int kThreads = First::Body::kThreads;
    static_assert(((Others::Body::kThreads == kThreads) && ...));
    const auto* values = static_cast<const uint32_t*>(params);
    LoopsTogether<First, Others...> together;
    const unsigned blocks = together.take(values, pointers);
    return queue(loops_kernel<kThreads, First, Others...>, blocks, kThreads, 0, stream, together);
}
#endif  // __CUDACC_RTC__

}  // namespace fxfuse
