// Shared by the stores of all kernels: the position of an output element, reads of operands there, and writes of runs
// of finished values.
//
// Every output is seen as three dimensions (batch, row, col), col innermost in memory:
//   linear, matmul   batch = leading dimensions, row = the last of them, col = output feature
//   conv2d, NCHW     batch = image, row = channel, col = pixel (y * width + x)
//   conv2d, NHWC     batch = image, row = pixel,   col = channel
// cuda/codegen.py generates `struct Epilogue` on top of this: its operands and the expression.
#pragma once

#include <cstdint>

#include "half.cuh"
#include "ptx.cuh"

namespace fxfuse {

// Kernels work on runs of kVector consecutive columns, one run per thread. `count` columns of a run exist.
enum class Runs {
    kWhole,       // all columns of a run exist, and its first is a multiple of kVector
    kAligned,     // if all columns of a run exist, its first is a multiple of kVector
    kAnywhere,    // a run starts at any column
    kStraddling,  // a run starts at any column, and may go on in the next row
};

template <class T>
struct OneValue;
template <class T>
struct TwoValues;

// Where a run starts.
struct Position {
    int64_t batch, row, col;

    // The values of an operand that does not vary along col, for a run that starts here.
    template <class T>
    using Broadcast = OneValue<T>;
};

// The position of `col` in `row`, where rows are numbered through all batches. The batch is 0 for an epilogue that does
// not use it.
template <class Epilogue>
__device__ __forceinline__ Position position_in(int64_t row, int64_t col, int64_t rows_per_batch) {
    if constexpr (Epilogue::kUsesBatch) {
        const unsigned of_batch = static_cast<unsigned>(rows_per_batch);
        return {static_cast<unsigned>(row) / of_batch, static_cast<unsigned>(row) % of_batch, col};
    } else {
        return {0, row, col};
    }
}

// Where a run starts that may straddle two rows: its first `split` elements start at `first`, the others at `second`.
// Without others, `second` is `first`.
struct Straddle {
    Position first, second;
    int split;

    template <class T>
    using Broadcast = TwoValues<T>;
};

// How one operand is laid out, as the host packs it. A stride of zero broadcasts.
struct OperandStrides {
    int64_t batch, row, col;  // in elements
};

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(bool value) { return value ? 1.0f : 0.0f; }
__device__ __forceinline__ float to_float(uint8_t value) { return static_cast<float>(value); }
__device__ __forceinline__ float to_float(int8_t value) { return static_cast<float>(value); }
__device__ __forceinline__ float to_float(int16_t value) { return static_cast<float>(value); }
__device__ __forceinline__ float to_float(int32_t value) { return static_cast<float>(value); }
__device__ __forceinline__ float to_float(int64_t value) { return static_cast<float>(value); }

template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) { return value; }

// Two values as they lie in memory, the first at the lower address.
template <class T>
__device__ __forceinline__ uint32_t pack_two(float first, float second);

__device__ __forceinline__ float to_float(Float16 value) { return ptx::cvt_f32_f16(value.bits); }
template <>
__device__ __forceinline__ Float16 from_float<Float16>(float value) { return {ptx::cvt_rn_f16(value)}; }
template <>
__device__ __forceinline__ uint32_t pack_two<Float16>(float first, float second) {
    return ptx::cvt_rn_f16x2(first, second);
}

__device__ __forceinline__ float to_float(BFloat16 value) { return ptx::cvt_f32_bf16(value.bits); }
template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float value) { return {ptx::cvt_rn_bf16(value)}; }
template <>
__device__ __forceinline__ uint32_t pack_two<BFloat16>(float first, float second) {
    return ptx::cvt_rn_bf16x2(first, second);
}

// The integer of kBytes that one instruction reads or writes.
template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
    using Type = uint8_t;
};
template <>
struct WordOf<2> {
    using Type = uint16_t;
};
template <>
struct WordOf<4> {
    using Type = uint32_t;
};
template <>
struct WordOf<8> {
    using Type = uint2;
};
template <>
struct WordOf<16> {
    using Type = uint4;
};
template <int kBytes>
using Word = typename WordOf<kBytes>::Type;

// The element that starts at bit `first` of a unit.
template <class T, class Unit>
__device__ __forceinline__ float part_to_float(Unit unit, int first) {
    const Word<static_cast<int>(sizeof(T))> bits = static_cast<Word<static_cast<int>(sizeof(T))>>(unit >> first);
    return to_float(reinterpret_cast<const T&>(bits));
}
// bfloat16 is the upper half of a float: one instruction for either half of a register.
template <>
__device__ __forceinline__ float part_to_float<BFloat16, uint32_t>(uint32_t unit, int first) {
    return __uint_as_float(first == 0 ? unit << 16 : unit & 0xffff0000u);
}

// A run's elements as they lie in memory. Elements of 16 bits take half the registers of floats, and nothing waits for
// the load before the values are used. Units have 32 bits, as registers do, so that no branch takes them apart.
template <class T, int kVector>
struct Elements {
    static constexpr int kSize = static_cast<int>(sizeof(T)), kBytes = kVector * kSize;
    static constexpr int kWidest = kBytes < 16 ? kBytes : 16;  // bytes of one instruction
    static constexpr int kUnit = kBytes < 4 ? kBytes : 4;
    using Unit = Word<kUnit>;

    alignas(kWidest) Unit unit[kBytes / kUnit];

    __device__ __forceinline__ float operator[](int i) const {
        if constexpr (kSize >= kUnit) {
            return to_float(reinterpret_cast<const T*>(unit)[i]);
        } else {
            return part_to_float<T>(unit[i * kSize / kUnit], i * kSize % kUnit * 8);
        }
    }

    // Loads all elements by instructions of at most kAccess bytes, at an address that is a multiple of kAccess.
    // kConstant: nothing writes there during the kernel.
    template <int kAccess, bool kConstant>
    __device__ __forceinline__ void load_whole(const T* source) {
        constexpr int kWord = kAccess < kWidest ? kAccess : kWidest;
        if constexpr (kWord < kUnit) {
            load_some(source, 1, kVector);
        } else {
            const Word<kWord>* from = reinterpret_cast<const Word<kWord>*>(source);
#pragma unroll
            for (int i = 0; i < kBytes / kWord; ++i) {
                Word<kWord>& to = reinterpret_cast<Word<kWord>*>(unit)[i];
                if constexpr (kConstant) {
                    to = __ldg(from + i);
                } else {
                    to = from[i];
                }
            }
        }
    }

    // Loads the first `count` elements, `step` apart in memory. The others become zero.
    __device__ __forceinline__ void load_some(const T* source, int64_t step, int count) {
        clear();
        add_some(source, step, 0, count);
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kBytes / kUnit; ++i) unit[i] = 0;
    }

    // Loads elements `first` to `last` - 1, which must be zero before.
    __device__ __forceinline__ void add_some(const T* source, int64_t step, int first, int last) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            const bool exists = i >= first && i < last;
            const Word<kSize>* from = reinterpret_cast<const Word<kSize>*>(source + i * step);
            if constexpr (kSize >= kUnit) {
                if (exists) reinterpret_cast<Word<kSize>*>(unit)[i] = *from;
            } else {
                const Unit bits = exists ? *from : Unit{0};
                unit[i * kSize / kUnit] |= bits << (i * kSize % kUnit * 8);
            }
        }
    }

    // Loads the first `count` elements. If all exist, and kRuns or the address shows that they are aligned, wide
    // instructions load them: of kAccess bytes where kRuns shows it.
    template <Runs kRuns, int kAccess>
    __device__ __forceinline__ void load(const T* source, int count) {
        if constexpr (kRuns == Runs::kWhole) {
            load_whole<kAccess, true>(source);
        } else if (count == kVector &&
                   (kRuns == Runs::kAligned || reinterpret_cast<uintptr_t>(source) % kWidest == 0)) {
            load_whole<kRuns == Runs::kAligned ? kAccess : kWidest, true>(source);
        } else {
            load_some(source, 1, count);
        }
    }

    __device__ __forceinline__ void set(const float (&value)[kVector]) {
        if constexpr (kSize == 2 && kVector > 1) {
#pragma unroll
            for (int i = 0; i < kVector / 2; ++i) unit[i] = pack_two<T>(value[2 * i], value[2 * i + 1]);
        } else {
#pragma unroll
            for (int i = 0; i < kVector; ++i) reinterpret_cast<T*>(unit)[i] = from_float<T>(value[i]);
        }
    }

    __device__ __forceinline__ void store_whole(T* destination) const {
        using Widest = Word<kWidest>;
#pragma unroll
        for (int i = 0; i < kBytes / kWidest; ++i) {
            reinterpret_cast<Widest*>(destination)[i] = reinterpret_cast<const Widest*>(unit)[i];
        }
    }
};

// Writes `count` of kVector consecutive elements, 16 bytes at a time where all exist and the address allows.
// kRuns says of the address what it says of columns: whether it is a multiple of kVector elements.
template <class T, int kVector, Runs kRuns = Runs::kAnywhere>
__device__ __forceinline__ void store_run(T* destination, const float (&value)[kVector], int count) {
    using Packed = Elements<T, kVector>;
    const bool aligned =
        kRuns != Runs::kAnywhere || reinterpret_cast<uintptr_t>(destination) % Packed::kWidest == 0;
    if (kRuns == Runs::kWhole || (count == kVector && aligned)) {
        Packed packed;
        packed.set(value);
        packed.store_whole(destination);
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            if (i < count) destination[i] = from_float<T>(value[i]);
        }
    }
}

// An element that all columns of a run share.
template <class T>
struct OneValue {
    T element;
    __device__ __forceinline__ float operator[](int) const { return to_float(element); }
};

// Two elements: one for the part of a straddling run in its first row, and one for the rest.
template <class T>
struct TwoValues {
    T first, second;
    int split;
    __device__ __forceinline__ float operator[](int i) const { return to_float(i < split ? first : second); }
};

// Dimensions along which an operand varies: the bits of Operand's kDims.
enum Dims : int { kCol = 1, kRow = 2, kBatch = 4 };

template <int kDims, class Varying, class Broadcast>
struct ValuesOf {
    using Type = Broadcast;
};
template <class Varying, class Broadcast>
struct ValuesOf<1, Varying, Broadcast> {
    using Type = Varying;
};

// An operand in device memory, element type T, varying along the dimensions in kDims (others broadcast). kAccess: if
// elements of a row are adjacent, bytes (a power of two up to 16) that divide the addresses of all rows; else 0. kDims
// and kAccess are part of the kernel's identity, so that absent strides cost no arithmetic and loads have no branches.
template <class T, int kDims, int kAccess>
struct Operand {
    const T* __restrict__ data;
    OperandStrides strides;

    // The values of the operand for a run at an `At`: v[i] is the float for the run's i-th column.
    template <int kVector, class At>
    using Values = typename ValuesOf<kDims & kCol, Elements<T, kVector>, typename At::template Broadcast<T>>::Type;

    static Operand make(uint64_t pointer, const OperandStrides& strides) {
        return {reinterpret_cast<const T*>(pointer), strides};
    }

    template <Runs kRuns, int kVector>
    __device__ __forceinline__ Values<kVector, Position> load(const Position& at, int count) const {
        const T* row = row_of(at);
        Values<kVector, Position> values;
        if constexpr ((kDims & kCol) == 0) {
            values.element = *row;
        } else if constexpr (kAccess > 0) {
            values.template load<kRuns, kAccess>(row + at.col, count);
        } else {
            values.load_some(row + at.col * strides.col, strides.col, count);
        }
        return values;
    }

    template <Runs kRuns, int kVector>
    __device__ __forceinline__ Values<kVector, Straddle> load(const Straddle& at, int count) const {
        static_assert(kRuns == Runs::kStraddling);
        Values<kVector, Straddle> values;
        if constexpr ((kDims & kCol) == 0) {
            values.first = *row_of(at.first);
            values.second = *row_of(at.second);
            values.split = at.split;
        } else {
            const int64_t step = kAccess > 0 ? 1 : strides.col;
            const T* first = row_of(at.first) + at.first.col * step;
            const T* rest = row_of(at.second) + (at.second.col - at.split) * step;
            if (kAccess > 0 && (at.split >= count || first == rest)) {
                values.template load<Runs::kAnywhere, kAccess>(first, count);
            } else {
                values.clear();
                values.add_some(first, step, 0, min(at.split, count));
                values.add_some(rest, step, at.split, count);
            }
        }
        return values;
    }

private:
    __device__ __forceinline__ const T* row_of(const Position& at) const {
        const T* row = data;
        if constexpr ((kDims & kBatch) != 0) row += at.batch * strides.batch;
        if constexpr ((kDims & kRow) != 0) row += at.row * strides.row;
        return row;
    }
};

// A number that the host knows at call time (a zero-dimensional CPU tensor): its bits stand in the pointer's place.
struct HostScalar {
    float scalar;

    template <int kVector, class At>
    using Values = OneValue<float>;

    static HostScalar make(uint64_t bits, const OperandStrides&) {
        union {
            uint32_t from;
            float to;
        } cast = {static_cast<uint32_t>(bits)};
        return {cast.to};
    }

    template <Runs kRuns, int kVector, class At>
    __device__ __forceinline__ OneValue<float> load(const At&, int) const { return {scalar}; }
};

}  // namespace fxfuse
