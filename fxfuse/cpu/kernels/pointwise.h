// One pass over an anchor's result, in place: the epilogue of an element and of the operands replaces the element. If
// the result is a new tensor, the epilogue reads the operands alone.
//
// The result is seen as three dimensions (batch, row, col), col contiguous in memory:
//   linear, matmul      batch = leading dimensions, row = the last of them, col = output feature
//   conv2d, NCHW        batch = image, row = channel, col = pixel
//   conv2d, NHWC        batch = image, row = pixel,   col = channel
// or any dimensions that the host merges these into. Operands have a stride along each dimension; stride 0 broadcasts.
//
// The pass works in blocks of at most kBlock elements: a piece of one row, or several whole rows where rows are short.
// Per block, every operand that is not float and contiguous is first converted, broadcast or gathered into a small
// float buffer. The buffer is kept while blocks read the same elements: a bias is laid out once, a value per row once a
// row. So one loop computes, over contiguous floats. It always vectorises, and its code exists once, whatever the
// layouts.
//
// A generated source defines a functor and instantiates launch():
//
//     namespace fxfuse::fxfuse_kernel {
//     struct Epilogue {
//         static constexpr bool kReadsResult = true;  // whether the expression contains acc
//         static inline float expression(float acc, float o0, float o1) { … }
//     };
//     }
//     extern "C" int fxfuse_launch(const void* params, const uint64_t* pointers, uint64_t threads) {
//         using namespace fxfuse;
//         using namespace fxfuse_kernel;
//         launch<Half, Epilogue, Operand<float, kRow>, HostScalar>(params, pointers, threads);
//         return 0;
//     }
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "math.h"

namespace fxfuse {

// ------------------------------------------------------------------------------------------- interface

// `params` points to this, followed by one Strides per operand.
struct Problem {
    int64_t batch, row, col;              // sizes of the result
    int64_t batch_stride, row_stride;     // of the result, in elements
};

struct Strides {
    int64_t batch, row, col;  // in elements
};

// float16 and bfloat16 in memory.
struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};
// A truth value in memory. Loops that read bool have no vectors of other types in g++ 12.
struct Truth {
    uint8_t byte;
};

// Dimensions along which an operand varies: the bits of Operand's kDims.
enum Dims : int { kCol = 1, kRow = 2, kBatch = 4 };

// An operand in memory, element type T, varying along the dimensions in kDims and broadcast along the others.
template <class T, int kDims>
struct Operand {};

// A number that the host knows at call time: the bits of a float, in the pointer's place.
struct HostScalar {};

// Elements per block: the buffers of a handful of operands fit into the first-level cache.
constexpr int64_t kBlock = 1024;
// Elements that are worth another thread: waking one costs about as much as this many elements of a cheap epilogue.
constexpr int64_t kElementsPerThread = 16384;

namespace detail {

// ----------------------------------------------------------------------------------------- conversions

template <class T>
FXFUSE_INLINE float to_float(T value) { return static_cast<float>(value); }
FXFUSE_INLINE float to_float(Truth value) { return value.byte != 0 ? 1.0f : 0.0f; }
FXFUSE_INLINE float to_float(Half value) { return from_half_bits(value.bits); }
FXFUSE_INLINE float to_float(BFloat16 value) { return from_bfloat16_bits(value.bits); }

FXFUSE_INLINE void assign(Half& to, float value) { to.bits = static_cast<uint16_t>(to_half_bits(value)); }
FXFUSE_INLINE void assign(BFloat16& to, float value) { to.bits = static_cast<uint16_t>(to_bfloat16_bits(value)); }

template <class T>
void load(float* __restrict__ to, const T* __restrict__ from, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

template <class T>
void store(T* __restrict__ to, const float* __restrict__ from, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) assign(to[i], from[i]);
}

#ifdef __F16C__
// The machine's own conversions, which the vectoriser does not find. They are called as builtins, because <immintrin.h>
// takes 0.7 s to compile.
using Floats = float __attribute__((vector_size(32)));
using Halves = short __attribute__((vector_size(16)));
constexpr int64_t kLanes = 8;
constexpr int kRoundToNearest = 0;

inline void load(float* __restrict__ to, const Half* __restrict__ from, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        Halves halves;
        std::memcpy(&halves, from + i, sizeof(halves));
        const Floats floats = __builtin_ia32_vcvtph2ps256(halves);
        std::memcpy(to + i, &floats, sizeof(floats));
    }
    for (; i < count; ++i) to[i] = to_float(from[i]);
}

inline void store(Half* __restrict__ to, const float* __restrict__ from, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        Floats floats;
        std::memcpy(&floats, from + i, sizeof(floats));
        const Halves halves = __builtin_ia32_vcvtps2ph256(floats, kRoundToNearest);
        std::memcpy(to + i, &halves, sizeof(halves));
    }
    for (; i < count; ++i) assign(to[i], from[i]);
}
#endif

// -------------------------------------------------------------------------------------------- operands

// Whole rows [row, row + rows), or with rows == 1 the columns [col, col + cols) of one row.
struct Block {
    int64_t batch, row, col, rows, cols;
};

// An operand as the computing loop sees it: at(i) is its value for the block's i-th element.
struct Values {
    const float* __restrict__ data;
    FXFUSE_INLINE float at(int64_t i) const { return data[i]; }
};
struct Constant {
    float value;
    FXFUSE_INLINE float at(int64_t) const { return value; }
};

template <class Kind>
class Reader;

template <class T, int kDims>
class Reader<Operand<T, kDims>> {
public:
    Reader(uint64_t pointer, const Strides& strides) : data_(reinterpret_cast<const T*>(pointer)), strides_(strides) {}

    Values read(const Block& block) {
        const T* source = data_;
        if constexpr ((kDims & kBatch) != 0) source += block.batch * strides_.batch;
        if constexpr ((kDims & kRow) != 0) source += block.row * strides_.row;
        if constexpr ((kDims & kCol) != 0) source += block.col * strides_.col;
        if constexpr ((kDims & kCol) != 0 && std::is_same_v<T, float>) {
            if (strides_.col == 1 && (block.rows == 1 || row_stride() == block.cols)) return {source};
        }
        const bool laid_out = source == source_ && block.rows <= rows_ && block.cols <= cols_;
        if (!laid_out) {
            for (int64_t row = 0; row < block.rows; ++row) {
                lay_out(row * block.cols, source + row * row_stride(), block.cols);
            }
            source_ = source;
            rows_ = block.rows;
            cols_ = block.cols;
        }
        return {buffer_};
    }

private:
    int64_t row_stride() const { return (kDims & kRow) != 0 ? strides_.row : 0; }

    void lay_out(int64_t start, const T* source, int64_t count) {
        float* to = buffer_ + start;
        if constexpr ((kDims & kCol) == 0) {
            const float value = to_float(*source);
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) to[i] = value;
        } else if (strides_.col == 1) {
            load(to, source, count);
        } else {
            for (int64_t i = 0; i < count; ++i) to[i] = to_float(source[i * strides_.col]);
        }
    }

    const T* data_;
    Strides strides_;
    // what buffer_ holds
    const T* source_ = nullptr;
    int64_t rows_ = 0, cols_ = 0;
    alignas(64) float buffer_[kBlock];
};

template <class T>
class Reader<Operand<T, 0>> {
public:
    Reader(uint64_t pointer, const Strides&) : value_{to_float(*reinterpret_cast<const T*>(pointer))} {}
    Constant read(const Block&) const { return value_; }

private:
    Constant value_;
};

template <>
class Reader<HostScalar> {
public:
    Reader(uint64_t pointer, const Strides&) : value_{from_bits(static_cast<uint32_t>(pointer))} {}
    Constant read(const Block&) const { return value_; }

private:
    Constant value_;
};

// -------------------------------------------------------------------------------------------- the pass

// The loop that computes.
template <class Epilogue, class... Inputs>
void compute(float* __restrict__ values, int64_t count, Inputs... inputs) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) values[i] = Epilogue::expression(values[i], inputs.at(i)...);
}

template <class T, class Epilogue, class... Inputs>
void compute_block(T* output, int64_t count, Inputs... inputs) {
    if constexpr (std::is_same_v<T, float>) {
        compute<Epilogue>(output, count, inputs...);
    } else {
        alignas(64) float values[kBlock];
        if constexpr (Epilogue::kReadsResult) load(values, output, count);
        compute<Epilogue>(values, count, inputs...);
        store(output, values, count);
    }
}

FXFUSE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// How the result is cut into blocks.
struct Blocks {
    int64_t rows;          // rows per block
    int64_t row_blocks;    // blocks along row
    int64_t col_blocks;    // blocks along col
    int64_t count;

    explicit Blocks(const Problem& problem) {
        const bool rows_adjoin = problem.row_stride == problem.col;
        rows = rows_adjoin && problem.col < kBlock ? kBlock / problem.col : 1;
        row_blocks = (problem.row + rows - 1) / rows;
        col_blocks = (problem.col + kBlock - 1) / kBlock;
        count = problem.batch * row_blocks * col_blocks;
    }
};

// Runs blocks [first, last) on one thread.
template <class T, class Epilogue, class... Readers>
void run(const Problem& problem, const Blocks& blocks, T* output, int64_t first, int64_t last, Readers&&... readers) {
    int64_t col_block = first % blocks.col_blocks;
    int64_t row_block = first / blocks.col_blocks % blocks.row_blocks;
    int64_t batch = first / blocks.col_blocks / blocks.row_blocks;
    for (int64_t i = first; i < last; ++i) {
        const int64_t row = row_block * blocks.rows, col = col_block * kBlock;
        const int64_t rows = smaller(blocks.rows, problem.row - row);
        const int64_t cols = smaller(kBlock, problem.col - col);
        [[maybe_unused]] const Block block = {batch, row, col, rows, cols};  // unused without operands
        T* start = output + batch * problem.batch_stride + row * problem.row_stride + col;
        compute_block<T, Epilogue>(start, rows * cols, readers.read(block)...);
        if (++col_block == blocks.col_blocks) {
            col_block = 0;
            if (++row_block == blocks.row_blocks) {
                row_block = 0;
                ++batch;
            }
        }
    }
}

template <class T, class Epilogue, class... Kinds, size_t... kIndex>
void run_parallel(const Problem& problem, const uint64_t* pointers, const Strides* strides, int64_t threads,
                  std::index_sequence<kIndex...>) {
    const Blocks blocks(problem);
    const int64_t useful = problem.batch * problem.row * problem.col / kElementsPerThread;
    const int64_t slices = smaller(useful < 1 ? 1 : useful, smaller(threads, blocks.count));
#pragma omp parallel for num_threads(static_cast<int>(slices)) schedule(static, 1) if (slices > 1)
    for (int64_t slice = 0; slice < slices; ++slice) {
        run<T, Epilogue>(problem, blocks, reinterpret_cast<T*>(pointers[0]), slice * blocks.count / slices,
                         (slice + 1) * blocks.count / slices, Reader<Kinds>(pointers[1 + kIndex], strides[kIndex])...);
    }
}

}  // namespace detail

// Runs the pass. pointers: the result, then one per operand. threads: the most threads; a small result takes fewer.
template <class T, class Epilogue, class... Kinds>
void launch(const void* params, const uint64_t* pointers, uint64_t threads) {
    const Problem& problem = *static_cast<const Problem*>(params);
    const Strides* strides = reinterpret_cast<const Strides*>(&problem + 1);
    if (problem.batch > 0 && problem.row > 0 && problem.col > 0) {
        detail::run_parallel<T, Epilogue, Kinds...>(problem, pointers, strides, static_cast<int64_t>(threads),
                                                    std::index_sequence_for<Kinds...>());
    }
}

}  // namespace fxfuse
