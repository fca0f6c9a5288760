// out[i] = an expression of elements of other tensors, whose places are computed from i, and of what rows of such
// expressions come to (sums, the greatest): what program/loops.py made of operators, on a CPU. The generated Body knows
// expressions and places (cpu/loops.py); its functions of one element are inlined into loops that vectorise.
#pragma once

#include <cstdint>

#include "pointwise.h"

namespace fxfuse {

using Place = uint64_t;  // in memory, in elements

// The vocabulary of places that GPUs have faster words for.
struct Divisor {
    Place by;
    FXFUSE_INLINE Place divide(Place number) const { return number / by; }
    // The last digit of `number` in this radix; the others are left.
    FXFUSE_INLINE Place take(Place& number) const {
        const Place digit = number % by;
        number /= by;
        return digit;
    }
};

template <class Body>
struct LoopsArguments {
    int64_t rows, length;  // of the result: elements of a row lie side by side
    Place number[Body::kNumbers + 1];
    Divisor divisor[Body::kDivisors + 1];
    const void* memory[Body::kTensors + 1];
    typename Body::Output* out;
    void* other[Body::kOthers + 1];  // further results

    // params: rows, length, numbers and divisors, each in 32 bits; pointers: results, then what is read.
    LoopsArguments(const void* params, const uint64_t* pointers) {
        const auto* values = static_cast<const int32_t*>(params);
        rows = *values++;
        length = *values++;
        for (int i = 0; i < Body::kNumbers; ++i) number[i] = static_cast<Place>(int64_t{*values++});
        for (int i = 0; i < Body::kDivisors; ++i) divisor[i] = {static_cast<Place>(*values++)};
        out = reinterpret_cast<typename Body::Output*>(*pointers++);
        for (int i = 0; i < Body::kOthers; ++i) other[i] = reinterpret_cast<void*>(*pointers++);
        for (int i = 0; i < Body::kTensors; ++i) memory[i] = reinterpret_cast<const void*>(*pointers++);
    }
};

// An element as expressions have it: floats, integers of 64 bits, truth values; float64 is only moved.
FXFUSE_INLINE float as_number(float element) { return element; }
FXFUSE_INLINE float as_number(Half element) { return detail::to_float(element); }
FXFUSE_INLINE float as_number(BFloat16 element) { return detail::to_float(element); }
FXFUSE_INLINE int64_t as_number(uint8_t element) { return element; }
FXFUSE_INLINE int64_t as_number(int8_t element) { return element; }
FXFUSE_INLINE int64_t as_number(int16_t element) { return element; }
FXFUSE_INLINE int64_t as_number(int32_t element) { return element; }
FXFUSE_INLINE int64_t as_number(int64_t element) { return element; }
FXFUSE_INLINE bool as_number(bool element) { return element; }
FXFUSE_INLINE double as_number(double element) { return element; }

// A number as it lies in memory.
template <class T, class Number>
FXFUSE_INLINE void set(T& element, Number number) {
    element = static_cast<T>(number);
}
FXFUSE_INLINE void set(Half& element, float number) { detail::assign(element, number); }
FXFUSE_INLINE void set(BFloat16& element, float number) { detail::assign(element, number); }

struct Sum {
    using Total = double;
    FXFUSE_INLINE static float nothing() { return 0.0f; }
    template <class T>
    FXFUSE_INLINE static T of(T a, T b) {
        return a + b;
    }
};

struct Greatest {
    using Total = float;
    FXFUSE_INLINE static float nothing() { return -infinity(); }
    FXFUSE_INLINE static float of(float a, float b) { return a > b || a != a ? a : b; }
};

// What a row comes to. Lanes add up for themselves, so that the loop vectorises; pieces of a long row are added up in
// double, so that no sum is longer than kPiece / kLanes numbers.
template <class Op, class Element>
FXFUSE_INLINE float come_to(int64_t length, Element element) {
    constexpr int64_t kLanes = 16, kPiece = 4096;
    if (length < kLanes) {
        float total = Op::nothing();
        for (int64_t i = 0; i < length; ++i) total = Op::of(total, element(i));
        return total;
    }
    typename Op::Total total = Op::nothing();
    for (int64_t begin = 0; begin < length; begin += kPiece) {
        const int64_t end = begin + kPiece < length ? begin + kPiece : length;
        float lanes[kLanes];
        for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = Op::nothing();
        int64_t i = begin;
        for (; i + kLanes <= end; i += kLanes) {
#pragma omp simd
            for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = Op::of(lanes[lane], element(i + lane));
        }
        for (int64_t lane = 0; i < end; ++i, ++lane) lanes[lane] = Op::of(lanes[lane], element(i));
        for (int64_t step = kLanes / 2; step > 0; step /= 2) {
            for (int64_t lane = 0; lane < step; ++lane) lanes[lane] = Op::of(lanes[lane], lanes[lane + step]);
        }
        total = Op::of(total, static_cast<typename Op::Total>(lanes[0]));
    }
    return static_cast<float>(total);
}

// Stores each element's results.
template <class Element>
FXFUSE_INLINE void for_each(int64_t begin, int64_t end, Element element) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) element(i);
}

// Body::run(arguments, row, begin, end) stores a part of a row; all of it if it adds rows up.
template <class Body>
void launch_loops(const void* params, const uint64_t* pointers, uint64_t threads) {
    const LoopsArguments<Body> arguments(params, pointers);
    const int64_t rows = arguments.rows, length = arguments.length;
    const int64_t useful = rows * length / kElementsPerThread, most = static_cast<int64_t>(threads);
    const int64_t slices = detail::smaller(useful < 1 ? 1 : useful, most);
    if (slices == 1 || (Body::kAddsUp && rows == 1)) {
        for (int64_t row = 0; row < rows; ++row) Body::run(arguments, row, 0, length);
    } else if (Body::kAddsUp || rows >= slices) {
        const int64_t parts = detail::smaller(slices, rows);
#pragma omp parallel for num_threads(static_cast<int>(parts)) schedule(static, 1)
        for (int64_t part = 0; part < parts; ++part) {
            for (int64_t row = part * rows / parts; row < (part + 1) * rows / parts; ++row) {
                Body::run(arguments, row, 0, length);
            }
        }
    } else {
#pragma omp parallel for num_threads(static_cast<int>(slices)) schedule(static, 1)
        for (int64_t part = 0; part < slices; ++part) {
            for (int64_t row = 0; row < rows; ++row) {
                Body::run(arguments, row, part * length / slices, (part + 1) * length / slices);
            }
        }
    }
}

}  // namespace fxfuse
