// out = epilogue(acc), one pass over a result that a library computed; in place if acc and out are the same tensor.
//
// The result is seen as (batch, row, col), col contiguous. acc and out have the same strides. A thread has one run:
// kVector consecutive elements, so that memory is read and written 16 bytes at a time. More runs per thread would take
// registers from other threads, which have as many bytes in flight.
//
//   Runs::kWhole       every row is cut into runs from its start; its length is a multiple of kVector
//   Runs::kAligned     the same, but a row's last run may be short. Rows may be padded; their starts must be aligned
//   Runs::kStraddling  rows follow each other without gaps, and the whole memory is cut into runs: a run may end a row
//                      and begin the next. Runs are aligned for rows of any length (49 pixels) from kVector on
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "divisor.cuh"
#include "epilogue.cuh"
#include "launch.cuh"

namespace fxfuse {

template <Runs>
struct RunStart {
    using Type = Position;
};
template <>
struct RunStart<Runs::kStraddling> {
    using Type = Straddle;
};

// The part of a result that one launch writes: whole rows or a piece of one, small enough to be counted in 32 bits.
struct PointwiseSlice {
    Position origin;                    // of its first element
    int64_t batch_stride, row_stride;   // in elements
    FastDivisor rows;                   // of a batch
    FastDivisor row_length;             // in runs, or elements if they straddle
    int32_t cols;                       // elements of a row, or of the piece of one
    uint32_t elements, runs;            // in all; elements only if runs straddle
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    pointwise_kernel(const __grid_constant__ PointwiseSlice slice, const typename Kernel::Element* acc,
                     typename Kernel::Output* out, const typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(slice, acc, out, epilogue));
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

    struct Problem {
        int64_t batch, row, col;           // sizes
        int64_t batch_stride, row_stride;  // in elements
    };

    static __device__ __forceinline__ void run(const PointwiseSlice& slice, const Element* acc, Output* out,
                                               const Epilogue& epilogue) {
        const uint32_t run = blockIdx.x * kThreads + threadIdx.x;
        if (run >= slice.runs) return;
        At at;
        int64_t offset;
        int count;
        locate(slice, run, at, offset, count);
        Elements<Element, kVector> elements;
        if (kRuns == Runs::kWhole || count == kVector) {
            elements.template load_whole<16, false>(acc + offset);
        } else {
            elements.load_some(acc + offset, 1, count);
        }
        const auto operands = epilogue.template load<kRuns, kVector>(at, count);
        float value[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) value[i] = elements[i];
        epilogue.apply(value, operands);
        constexpr Runs kAligned = kRuns == Runs::kWhole ? Runs::kWhole : Runs::kAligned;
        store_run<Output, kVector, kAligned>(out + offset, value, count);
    }

#ifndef __CUDACC_RTC__
    // Results with more elements than 32 bits can count take several launches, one after the other.
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        const Problem step = slice_sizes(problem);
        Position at = {0, 0, 0};
        for (at.batch = 0; at.batch < problem.batch; at.batch += step.batch) {
            for (at.row = 0; at.row < problem.row; at.row += step.row) {
                for (at.col = 0; at.col < problem.col; at.col += step.col) {
                    const PointwiseSlice slice = slice_at(problem, step, at);
                    const int64_t start = at.batch * problem.batch_stride + at.row * problem.row_stride + at.col;
                    const cudaError_t error = queue(pointwise_kernel<Pointwise>, (slice.runs + kThreads - 1) / kThreads,
                                                    kThreads, 0, stream, slice,
                                                    reinterpret_cast<const Element*>(pointers[0]) + start,
                                                    reinterpret_cast<Output*>(pointers[1]) + start, epilogue);
                    if (error != cudaSuccess) return error;
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
        const uint32_t row = slice.row_length.divide(run), batch = slice.rows.divide(row);
        const uint32_t row_in_batch = row - batch * slice.rows.divisor;
        const uint32_t col = (run - row * slice.row_length.divisor) * kVector;
        at = {slice.origin.batch + batch, slice.origin.row + row_in_batch, slice.origin.col + col};
        offset = batch * slice.batch_stride + row_in_batch * slice.row_stride + col;
        count = min(kVector, slice.cols - static_cast<int>(col));
    }

    static __device__ __forceinline__ void locate(const PointwiseSlice& slice, uint32_t run, Straddle& at,
                                                  int64_t& offset, int& count) {
        const uint32_t element = run * kVector;
        const uint32_t row = slice.row_length.divide(element), batch = slice.rows.divide(row);
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
    // Sizes of the slices that the result is cut into: as many whole batches as fit into kMost elements, or else rows,
    // or else a piece of a row. Numbers are multiples of kVector, so that slices whose runs straddle start aligned.
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
        constexpr bool kDense = kRuns == Runs::kStraddling;
        return {at,
                problem.batch_stride,
                problem.row_stride,
                FastDivisor(static_cast<unsigned>(rows)),
                FastDivisor(static_cast<unsigned>(kDense ? cols : runs_per_row)),
                static_cast<int32_t>(cols),
                static_cast<uint32_t>(elements),
                static_cast<uint32_t>(kDense ? (elements + kVector - 1) / kVector : batches * rows * runs_per_row)};
    }

    static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
#endif  // __CUDACC_RTC__
};

}  // namespace fxfuse
