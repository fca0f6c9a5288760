// out = epilogue(acc), one pass over a result that a library computed; in place if acc and out are the same tensor.
//
// The result is seen as (batch, row, col), col contiguous. acc and out have the same strides. A thread works on kVector
// consecutive elements, its run, so that memory is read and written 16 bytes at a time:
//
//   Runs::kInRows   every row is cut into runs from its start. Rows may be padded; their starts must be aligned.
//   Runs::kDense    rows follow each other without gaps, and the whole memory is cut into runs, so that one may end a
//                   row and begin the next: aligned runs of rows of any length (49 pixels) from kVector elements on.
#pragma once

#include <cstdint>

#include "epilogue.cuh"

namespace fxfuse {

enum class Runs { kInRows, kDense };

// Where a run starts: in one row, or in two.
template <Runs>
struct RunStart {
    using Type = Position;
};
template <>
struct RunStart<Runs::kDense> {
    using Type = Straddle;
};

// Division by a number that is known before the launch: n / divisor for n below 2^31 (Granlund and Montgomery 1994,
// "Division by invariant integers using multiplication").
struct Divider {
    uint32_t divisor, multiplier, shift;

    static Divider by(int64_t divisor) {
        uint32_t shift = 0;
        while ((int64_t{1} << shift) < divisor) ++shift;
        const uint64_t power = uint64_t{1} << shift, d = static_cast<uint64_t>(divisor);
        return {static_cast<uint32_t>(divisor), static_cast<uint32_t>(((power - d) << 32) / d + 1), shift};
    }

    __device__ __forceinline__ uint32_t quotient(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

// The part of a result that one launch writes: whole rows or a piece of one, small enough to be counted in 32 bits.
struct PointwiseSlice {
    Position origin;                    // of its first element
    int64_t batch_stride, row_stride;   // in elements
    Divider rows;                       // of a batch
    Divider row_length;                 // in runs (kInRows) or elements (kDense)
    int32_t cols;                       // elements of a row, or of the piece of one
    uint32_t elements, runs;            // in all; elements only for kDense
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    pointwise_kernel(const __grid_constant__ PointwiseSlice slice, const typename Kernel::Element* acc,
                     typename Kernel::Output* out, const typename Kernel::Epilogue epilogue) {
    Kernel::run(slice, acc, out, epilogue);
}

template <class Element_, class Output_, class Epilogue_, int kVector_, Runs kRuns_>
struct Pointwise {
    using Element = Element_;
    using Output = Output_;
    using Epilogue = Epilogue_;

    static constexpr int kTensors = 2;  // acc, out
    static constexpr int kVector = kVector_;
    static constexpr Runs kRuns = kRuns_;
    static constexpr int kThreads = 256;
    static constexpr int kTogether = 4;  // runs of a thread: what it reads of all is under way at once

    struct Problem {
        int64_t batch, row, col;           // sizes
        int64_t batch_stride, row_stride;  // in elements
    };

    static __device__ __forceinline__ void run(const PointwiseSlice& slice, const Element* acc, Output* out,
                                               const Epilogue& epilogue) {
        const uint32_t first = blockIdx.x * (kThreads * kTogether) + threadIdx.x;
        At at[kTogether];
        int64_t offset[kTogether];
        int count[kTogether];
        float value[kTogether][kVector];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            // Threads beyond the end work on the last run and do not store it: no branch separates the runs.
            locate(slice, min(first + i * kThreads, slice.runs - 1), at[i], offset[i], count[i]);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            if (count[i] == kVector) load_vector(value[i], acc + offset[i]);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            if (count[i] < kVector) {
#pragma unroll
                for (int j = 0; j < kVector; ++j) value[i][j] = j < count[i] ? to_float(acc[offset[i] + j]) : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            epilogue.template apply<kVector>(value[i], at[i], count[i]);
            if (first + i * kThreads < slice.runs) store_run<Output, kVector>(out + offset[i], value[i], count[i]);
        }
    }

#ifndef __CUDACC_RTC__
    // Larger results than 32 bits can count take several launches, one after the other.
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        const Problem step = slice_sizes(problem);
        Position at = {0, 0, 0};
        for (at.batch = 0; at.batch < problem.batch; at.batch += step.batch) {
            for (at.row = 0; at.row < problem.row; at.row += step.row) {
                for (at.col = 0; at.col < problem.col; at.col += step.col) {
                    const PointwiseSlice slice = slice_at(problem, step, at);
                    const int64_t start = at.batch * problem.batch_stride + at.row * problem.row_stride + at.col;
                    const uint32_t per_block = kThreads * kTogether;
                    pointwise_kernel<Pointwise><<<(slice.runs + per_block - 1) / per_block, kThreads, 0, stream>>>(
                        slice, reinterpret_cast<const Element*>(pointers[0]) + start,
                        reinterpret_cast<Output*>(pointers[1]) + start, epilogue);
                    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
                }
            }
        }
        return cudaSuccess;
    }
#endif  // __CUDACC_RTC__

private:
    using At = typename RunStart<kRuns>::Type;

    static __device__ __forceinline__ void locate(const PointwiseSlice& slice, uint32_t run, Position& at,
                                                  int64_t& offset, int& count) {
        const uint32_t row = slice.row_length.quotient(run), batch = slice.rows.quotient(row);
        const uint32_t row_in_batch = row - batch * slice.rows.divisor;
        const uint32_t col = (run - row * slice.row_length.divisor) * kVector;
        at = {slice.origin.batch + batch, slice.origin.row + row_in_batch, slice.origin.col + col};
        offset = batch * slice.batch_stride + row_in_batch * slice.row_stride + col;
        count = min(kVector, slice.cols - static_cast<int>(col));
    }

    static __device__ __forceinline__ void locate(const PointwiseSlice& slice, uint32_t run, Straddle& at,
                                                  int64_t& offset, int& count) {
        const uint32_t element = run * kVector;
        const uint32_t row = slice.row_length.quotient(element), batch = slice.rows.quotient(row);
        const uint32_t row_in_batch = row - batch * slice.rows.divisor;
        const uint32_t col = element - row * slice.row_length.divisor;
        offset = element;
        count = min(kVector, static_cast<int>(slice.elements - element));
        at.first = {slice.origin.batch + batch, slice.origin.row + row_in_batch, col};
        at.split = slice.cols - static_cast<int>(col);
        const bool next_batch = row_in_batch + 1 == slice.rows.divisor;
        at.second = at.split >= count ? at.first
                    : next_batch      ? Position{at.first.batch + 1, slice.origin.row, 0}
                                      : Position{at.first.batch, at.first.row + 1, 0};
    }

#ifndef __CUDACC_RTC__
    // Of the slices that the result is cut into: as many whole batches as kMost elements hold, or else rows, or else a
    // piece of a row. Multiples of kVector, so that dense slices start aligned.
    static Problem slice_sizes(const Problem& problem) {
        constexpr int64_t kMost = int64_t{1} << 30;
        const int64_t per_batch = problem.row * problem.col;
        Problem step = problem;
        if (problem.batch * per_batch <= kMost) return step;
        step.batch = kMost / per_batch / kVector * kVector;
        if (step.batch > 0) return step;
        step.batch = 1;
        step.row = per_batch <= kMost ? problem.row : kMost / problem.col / kVector * kVector;
        if (step.row > 0) return step;
        step.row = 1;
        step.col = problem.col <= kMost ? problem.col : kMost;
        return step;
    }

    static PointwiseSlice slice_at(const Problem& problem, const Problem& step, const Position& at) {
        const int64_t batches = smaller(step.batch, problem.batch - at.batch);
        const int64_t rows = smaller(step.row, problem.row - at.row);
        const int64_t cols = smaller(step.col, problem.col - at.col);
        const int64_t elements = batches * rows * cols, runs_per_row = (cols + kVector - 1) / kVector;
        const bool dense = kRuns == Runs::kDense;
        return {at,
                problem.batch_stride,
                problem.row_stride,
                Divider::by(rows),
                Divider::by(dense ? cols : runs_per_row),
                static_cast<int32_t>(cols),
                static_cast<uint32_t>(elements),
                static_cast<uint32_t>(dense ? (elements + kVector - 1) / kVector : batches * rows * runs_per_row)};
    }

    static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
#endif  // __CUDACC_RTC__
};

}  // namespace fxfuse
