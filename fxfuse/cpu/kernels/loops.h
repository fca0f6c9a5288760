// The CPU kernel of a program's loops (program/loops.py): out[i] = an expression of elements of other tensors, whose
// places are computed from i, and of reductions (sums, maxima) over rows of such expressions. The generated Body
// contains expressions and places (cpu/loops.py); its functions of one element are inlined into loops that vectorise.
//
// Such a loop goes over lanes: the elements of a row, or rows that lie side by side or are short.
#pragma once

#include <cstdint>

#include "pointwise.h"

namespace fxfuse {

using Place = uint64_t;  // in memory, in elements

// Divides by a number greater than 1: multiplies by 2^64 / by, rounded up, which is exact for numbers below 2^31. A
// greater number is a negative index read as unsigned, which a condition rejects. Its quotient is large, too, so that
// the condition rejects the quotient as well.
struct Divisor {
    Place by, inverse;

    Divisor() = default;
    explicit Divisor(Place by) : by(by), inverse(~Place{0} / by + 1) {}
    FXFUSE_INLINE Place divide(Place number) const {
        return static_cast<Place>(static_cast<unsigned __int128>(number) * inverse >> 64);
    }
    // Takes the last digit of `number` in this radix; the other digits are left in `number`.
    FXFUSE_INLINE Place take(Place& number) const {
        const Place rest = divide(number), digit = number - rest * by;
        number = rest;
        return digit;
    }
};

template <class Body>
struct LoopsArguments {
    int64_t rows, length;  // each of `rows` has the lanes 0 to `length` - 1
    int64_t work;          // elements to compute, including those that are only added up
    int64_t together;      // the most rows per call of Body::run, if it holds values of rows
    int64_t held;          // elements of a thread's buffer for each of the Body::kHeld held values
    Place number[Body::kNumbers + 1];
    Divisor divisor[Body::kDivisors + 1];
    const void* memory[Body::kTensors + 1];
    typename Body::Output* out;
    void* other[Body::kOthers + 1];  // further results

    // params: rows, length, work, together, held, numbers and divisors, each in 32 bits; pointers: results, then the
    // tensors that are read.
    LoopsArguments(const void* params, const uint64_t* pointers) {
        const auto* values = static_cast<const int32_t*>(params);
        rows = *values++;
        length = *values++;
        work = *values++;
        together = *values++;
        held = *values++;
        for (int i = 0; i < Body::kNumbers; ++i) number[i] = static_cast<Place>(int64_t{*values++});
        for (int i = 0; i < Body::kDivisors; ++i) divisor[i] = Divisor(static_cast<Place>(*values++));
        out = reinterpret_cast<typename Body::Output*>(*pointers++);
        for (int i = 0; i < Body::kOthers; ++i) other[i] = reinterpret_cast<void*>(*pointers++);
        for (int i = 0; i < Body::kTensors; ++i) memory[i] = reinterpret_cast<const void*>(*pointers++);
    }
};

// An element as expressions use it: a float; an integer of 64 bits, or of 32 if it has at most 16 in memory; a truth
// value. float64 is only moved.
FXFUSE_INLINE float as_number(float element) { return element; }
FXFUSE_INLINE float as_number(Half element) { return detail::to_float(element); }
FXFUSE_INLINE float as_number(BFloat16 element) { return detail::to_float(element); }
FXFUSE_INLINE int32_t as_number(uint8_t element) { return element; }
FXFUSE_INLINE int32_t as_number(int8_t element) { return element; }
FXFUSE_INLINE int32_t as_number(int16_t element) { return element; }
FXFUSE_INLINE int64_t as_number(int32_t element) { return element; }
FXFUSE_INLINE int64_t as_number(int64_t element) { return element; }
FXFUSE_INLINE bool as_number(Truth element) { return element.byte != 0; }
FXFUSE_INLINE double as_number(double element) { return element; }

// A number as it lies in memory.
template <class T, class Number>
FXFUSE_INLINE void set(T& element, Number number) {
    element = static_cast<T>(number);
}
FXFUSE_INLINE void set(Truth& element, bool number) { element.byte = number; }
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
    template <class T>
    FXFUSE_INLINE static T of(T a, T b) {
        return (a > b) | (a != a) ? a : b;
    }
};

// Eight lanes in a register. Adding lanes up in memory would wait for every store.
using Lanes = float __attribute__((vector_size(32)));

template <class Op, int64_t kLanes>
FXFUSE_INLINE float joined(const float (&lanes)[kLanes]) {
    using Order = int32_t __attribute__((vector_size(32)));
    constexpr int64_t kCount = kLanes / 8;
    Lanes each[kCount];
    std::memcpy(each, lanes, sizeof(lanes));
    for (int64_t step = kCount / 2; step > 0; step /= 2) {
        for (int64_t i = 0; i < step; ++i) each[i] = Op::of(each[i], each[i + step]);
    }
    Lanes whole = each[0];
    whole = Op::of(whole, __builtin_shuffle(whole, Order{4, 5, 6, 7, 0, 1, 2, 3}));
    whole = Op::of(whole, __builtin_shuffle(whole, Order{2, 3, 0, 1, 6, 7, 4, 5}));
    whole = Op::of(whole, __builtin_shuffle(whole, Order{1, 0, 3, 2, 5, 4, 7, 6}));
    return whole[0];
}

// The most rows per call of Body::run where lanes are rows: sums of several vectors then do not wait for each other.
constexpr int64_t kBeside = 64;
// The most rows per call of Body::run where lanes are the elements of a row. Each step is taken for all of these rows:
// while the lanes of one row are joined, the processor works on the next row.
constexpr int64_t kTogether = 8;
// The most elements of these rows: they should stay in the first-level cache from one step to the next.
constexpr int64_t kElementsTogether = 4096;

// Reduces a row whose elements are element(i). Each lane has its own total, so that the loop vectorises. The totals of
// a long row's pieces are added up in double, so that no float sum is longer than kPiece / kLanes numbers.
template <class Op, class Element>
FXFUSE_INLINE float come_to(int64_t length, Element element) {
    constexpr int64_t kLanes = 32, kPiece = 4096;
    float lanes[kLanes];
    if (length < kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = Op::nothing();
#pragma omp simd
        for (int64_t i = 0; i < length; ++i) lanes[i] = element(i);
        return joined<Op>(lanes);
    }
    typename Op::Total total = Op::nothing();
    for (int64_t begin = 0; begin < length; begin += kPiece) {
        const int64_t end = begin + kPiece < length ? begin + kPiece : length;
        for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = Op::nothing();
        int64_t i = begin;
        for (; i + kLanes <= end; i += kLanes) {
#pragma omp simd
            for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = Op::of(lanes[lane], element(i + lane));
        }
        if (i < end) {  // the row's last kLanes elements: `known` have been added up
            const int64_t known = kLanes - (end - i);
#pragma omp simd
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                const float value = element(end - kLanes + lane);
                lanes[lane] = Op::of(lanes[lane], lane < known ? Op::nothing() : value);
            }
        }
        total = Op::of(total, static_cast<typename Op::Total>(joined<Op>(lanes)));
    }
    return static_cast<float>(total);
}

// Reduces `count` rows, each in a lane of its own. add(turn, totals) joins element `turn` of every row to totals.
// Totals are double for sums, because one lane adds up a whole row, number by number.
template <class Op, class Add>
FXFUSE_INLINE void come_to_beside(int64_t length, int64_t count, float* __restrict__ totals, Add add) {
    typename Op::Total whole[kBeside];
    for (int64_t i = 0; i < kBeside; ++i) whole[i] = Op::nothing();
    for (int64_t turn = 0; turn < length; ++turn) add(static_cast<Place>(turn), whole);
    for (int64_t i = 0; i < count; ++i) totals[i] = static_cast<float>(whole[i]);
}

// Stores each element's results, for lanes from `begin` to `end`.
template <class Element>
FXFUSE_INLINE void for_each(int64_t begin, int64_t end, Element element) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) element(i);
}

// The most elements of each lane that are computed before any is stored, where lanes are apart in the result: a cache
// line of floats.
constexpr uint64_t kTile = 16;

// Stores kEach results of each lane, those of a lane beside each other.
template <class T, size_t kEach, size_t kLanes>
FXFUSE_INLINE void interleave(T* __restrict__ out, const T (&results)[kEach][kLanes], int64_t lanes) {
    constexpr auto kApart = static_cast<int64_t>(kEach);
    for (int64_t i = 0; i < lanes; ++i) {
        for (size_t each = 0; each < kEach; ++each) out[i * kApart + static_cast<int64_t>(each)] = results[each][i];
    }
}

// Lanes per call of Body::run where lanes are rows: kBeside, or fewer where some threads would have none.
FXFUSE_INLINE int64_t lanes_of_call(int64_t rows, int64_t length, int64_t threads) {
    constexpr int64_t kLeast = 16;  // a cache line of floats
    const int64_t each = rows < threads ? length * rows / threads : length;
    const int64_t lanes = (each + kLeast - 1) / kLeast * kLeast;
    return lanes < kLeast ? kLeast : detail::smaller(lanes, kBeside);
}

// Runs a thread's part. Body::run(arguments, row, count, begin, end, held) computes lanes `begin` to `end` - 1 of
// `count` rows from `row` on. Where lanes are rows, `row` numbers the remaining dimensions: one per call, with up to
// `lanes` lanes.
template <class Body>
void run_part(const LoopsArguments<Body>& arguments, int64_t part, int64_t parts, int64_t lanes) {
    const int64_t rows = arguments.rows, length = arguments.length;
    float* held = nullptr;
    if constexpr (Body::kHeld > 0) {
        constexpr int kCacheLineBits = 512;
        const size_t bytes = static_cast<size_t>(Body::kHeld * arguments.held) * sizeof(float);
        held = static_cast<float*>(__builtin_alloca_with_align(bytes, kCacheLineBits));
    }
    if constexpr (Body::kRowsBeside) {
        const int64_t blocks = (length + lanes - 1) / lanes, all = rows * blocks;
        for (int64_t block = part * all / parts; block < (part + 1) * all / parts; ++block) {
            const int64_t begin = block % blocks * lanes;
            Body::run(arguments, block / blocks, 1, begin, detail::smaller(begin + lanes, length), held);
        }
    } else {
        // a part of the rows; or a part of each row, if rows may be cut and are fewer than threads
        const bool is_of_rows = Body::kWholeRows || rows >= parts;
        const int64_t first = is_of_rows ? part * rows / parts : 0;
        const int64_t last = is_of_rows ? (part + 1) * rows / parts : rows;
        const int64_t begin = is_of_rows ? 0 : part * length / parts;
        const int64_t end = is_of_rows ? length : (part + 1) * length / parts;
        const int64_t step = Body::kHoldsRows ? arguments.together : last - first;
        for (int64_t row = first; row < last; row += step) {
            Body::run(arguments, row, detail::smaller(step, last - row), begin, end, held);
        }
    }
}

template <class Body>
void launch_loops(const void* params, const uint64_t* pointers, uint64_t threads) {
    const LoopsArguments<Body> arguments(params, pointers);
    const int64_t lanes = lanes_of_call(arguments.rows, arguments.length, static_cast<int64_t>(threads));
    const int64_t blocks = (arguments.length + lanes - 1) / lanes;
    const int64_t most = Body::kWholeRows ? arguments.rows * (Body::kRowsBeside ? blocks : 1) : arguments.work;
    const int64_t useful = detail::smaller(arguments.work / kElementsPerThread, most);
    const int64_t parts = detail::smaller(useful < 1 ? 1 : useful, static_cast<int64_t>(threads));
    if (parts == 1) {
        run_part(arguments, 0, 1, kBeside);
        return;
    }
#pragma omp parallel for num_threads(static_cast<int>(parts)) schedule(static, 1)
    for (int64_t part = 0; part < parts; ++part) run_part(arguments, part, parts, lanes);
}

}  // namespace fxfuse
