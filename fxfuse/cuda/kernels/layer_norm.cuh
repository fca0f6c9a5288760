// out = epilogue((x - mean) / sqrt(variance + eps)), mean and variance of each row of x: layer_norm, whose weight and
// bias are operands of the epilogue.
//
// kLanes threads share a row. They read it once and hold it in registers: they subtract the mean, then add up the
// squares of the differences, so that nothing cancels. A thread has the vectors lane, lane + kLanes, ... of kVector
// elements, so that neighbouring threads read and write neighbouring memory.
//
// As many blocks are launched as run at once. They hold weight and bias in registers, and read their next rows while
// they work on the present ones. torch's kernel has a block for each row, and so too few bytes in flight: an eighth of
// the bandwidth for rows of 96, a third for rows of 768.
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "divisor.cuh"
#include "epilogue.cuh"
#include "launch.cuh"
#include "math.cuh"
#include "ptx.cuh"

namespace fxfuse {

// What a launch computes, as the device needs it.
struct LayerNormCut {
    int64_t rows, x_stride;  // x_stride: of rows, in elements
    FastDivisor rows_per_batch;
    float eps;
};

// The largest power of two that is at most 1 / n.
constexpr float power_of_two_within(int n) {
    float power = 1.0f;
    for (int i = 1; i < n; i *= 2) power *= 0.5f;
    return power;
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    layer_norm_kernel(const __grid_constant__ LayerNormCut cut, const typename Kernel::Element* __restrict__ x,
                      typename Kernel::Output* __restrict__ out, const typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(cut, x, out, epilogue));
}

// kCols: columns of a row, a multiple of kVector. So are the row stride and the address of x, in elements.
template <class Element_, class Output_, class Epilogue_, int kCols, int kLanes, int kVector>
struct LayerNorm {
    using Element = Element_;
    using Output = Output_;
    using Epilogue = Epilogue_;

    static constexpr int kTensors = 2;  // x, out
    static constexpr int kWarp = 32;
    static constexpr int kThreads = kLanes > 128 ? kLanes : 128;
    static constexpr int kRows = kThreads / kLanes;  // rows that a block works on at a time
    static constexpr int kVectors = (kCols + kLanes * kVector - 1) / (kLanes * kVector);  // of a row, per thread
    static constexpr bool kFull = kCols == kLanes * kVector * kVectors;
    static_assert(kCols % kVector == 0 && (kLanes & (kLanes - 1)) == 0 && kLanes <= 1024);

    struct Problem {
        int64_t rows, rows_per_batch, x_stride;
        double eps;
    };

    static __device__ __forceinline__ void run(const LayerNormCut& cut, const Element* x, Output* out,
                                               const Epilogue& epilogue) {
        const int lane = threadIdx.x % kLanes;
        const int64_t step = static_cast<int64_t>(gridDim.x) * kRows;
        int64_t first = static_cast<int64_t>(blockIdx.x) * kRows;  // the first of the block's rows
        const auto exists = [&](int v) { return kFull || v < kVectors - 1 || v * kLanes + lane < kCols / kVector; };
        const auto col_of = [&](int v) { return exists(v) ? (v * kLanes + lane) * kVector : 0; };
        // Rows and vectors beyond the end read existing ones: no branch separates the loads, and shuffles need all
        // lanes.
        const auto load = [&](Row& loaded) {
            const int64_t row = min(first + threadIdx.x / kLanes, cut.rows - 1);
            Position at = position(cut, row);
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                loaded.elements[v].template load_whole<16, true>(x + row * cut.x_stride + col_of(v));
            }
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                at.col = col_of(v);
                loaded.operands[v] = epilogue.template load_rows<Runs::kWhole, kVector>(at, kVector);
            }
        };

        Row next;
        load(next);
        typename Epilogue::template ColumnValues<kVector, Position> columns[kVectors];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            columns[v] = epilogue.template load_columns<Runs::kWhole, kVector>(Position{0, 0, col_of(v)}, kVector);
        }
        while (first < cut.rows) {
            const Row present = next;
            const int64_t row = first + threadIdx.x / kLanes;
            first += step;
            if (first < cut.rows) load(next);

            float value[kVectors][kVector];
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                for (int k = 0; k < kVector; ++k) value[v][k] = present.elements[v][k];
            }
            // For float32 the mean is subtracted twice: a large mean is rounded by more than the smallest deviations
            // from it. 16-bit numbers deviate by more, and the sum of equal ones is exact.
#pragma unroll
            for (int turn = 0; turn < (sizeof(Element) == 4 ? 2 : 1); ++turn) {
                const float sum = add_up(turn, [&](int v) { return exists(v) ? scaled_sum(value[v]) : 0.0f; });
                const float mean = math_float::divide_by_constant(sum, kScale * kCols);
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                    for (int k = 0; k < kVector; ++k) value[v][k] -= mean;
                }
            }
#pragma unroll
            for (int v = 0; v < kVectors; ++v) keep_packed(columns[v]);
            const float squares = add_up(2, [&](int v) { return exists(v) ? sum_of_squares(value[v]) : 0.0f; });
            const float inverse_deviation = rsqrtf(squares * (1.0f / kCols) + cut.eps);
            Elements<Output, kVector> results[kVectors];
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                for (int k = 0; k < kVector; ++k) value[v][k] *= inverse_deviation;
                epilogue.apply(value[v], columns[v], present.operands[v]);
                results[v].set(value[v]);
            }
            if (row >= cut.rows) continue;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (exists(v)) store(out + row * kCols + col_of(v), results[v]);
            }
        }
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        if (problem.rows == 0) return cudaSuccess;
        if (problem.rows > INT32_MAX) return cudaErrorInvalidConfiguration;
        const LayerNormCut cut = {problem.rows, problem.x_stride,
                                  FastDivisor(static_cast<unsigned>(problem.rows_per_batch)),
                                  static_cast<float>(problem.eps)};
        constexpr auto kKernel = &layer_norm_kernel<LayerNorm>;
        unsigned resident = 0;
        const cudaError_t error = resident_blocks<kKernel>(kThreads, 0, &resident);
        if (error != cudaSuccess) return error;
        // The blocks' numbers of turns differ by at most one.
        const int64_t parts = (problem.rows + kRows - 1) / kRows, turns = (parts + resident - 1) / resident;
        const unsigned blocks = static_cast<unsigned>((parts + turns - 1) / turns);
        return queue(kKernel, blocks, kThreads, 0, stream, cut, reinterpret_cast<const Element*>(pointers[0]),
                     reinterpret_cast<Output*>(pointers[1]), epilogue);
    }
#endif  // __CUDACC_RTC__

private:
    // What a thread reads of a row.
    struct Row {
        Elements<Element, kVector> elements[kVectors];
        typename Epilogue::template RowValues<kVector, Position> operands[kVectors];
    };

    // Elements are multiplied by it as they are added up: the sum then stays finite wherever the mean is.
    static constexpr float kScale = power_of_two_within(kCols);

    static __device__ __forceinline__ Position position(const LayerNormCut& cut, int64_t row) {
        if constexpr (Epilogue::kUsesBatch) {
            const unsigned batch = cut.rows_per_batch.divide(static_cast<unsigned>(row));
            return {batch, static_cast<unsigned>(row) - batch * cut.rows_per_batch.divisor, 0};
        } else {
            return {0, row, 0};
        }
    }

    // Keeps ptxas from converting columns of 16 bits to floats before the loop.
    template <class Columns>
    static __device__ __forceinline__ void keep_packed(Columns& columns) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(Columns) / 4); ++i) {
            ptx::forget(reinterpret_cast<uint32_t*>(&columns)[i]);
        }
    }

    static __device__ __forceinline__ void store(Output* destination, const Elements<Output, kVector>& results) {
        if constexpr (results.kBytes % 16 == 0) {
            const uint64_t address = reinterpret_cast<uint64_t>(destination);
#pragma unroll
            for (int i = 0; i < results.kBytes / 16; ++i) {
                ptx::store_global_16(address + 16 * i, reinterpret_cast<const uint4*>(results.unit)[i]);
            }
        } else {
            results.store_whole(destination);
        }
    }

    static __device__ __forceinline__ float scaled_sum(const float (&value)[kVector]) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < kVector; ++k) sum = fmaf(value[k], kScale, sum);
        return sum;
    }

    static __device__ __forceinline__ float sum_of_squares(const float (&value)[kVector]) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < kVector; ++k) sum = fmaf(value[k], value[k], sum);
        return sum;
    }

    // The sum of part(v) for all vectors v of a row, those of other threads included. `turn`: which of a row's sums.
    template <class Part>
    static __device__ __forceinline__ float add_up(int turn, Part part) {
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) sum += part(v);
#pragma unroll
        for (int offset = (kLanes < kWarp ? kLanes : kWarp) / 2; offset > 0; offset /= 2) {
            sum += __shfl_xor_sync(~0u, sum, offset);
        }
        if constexpr (kLanes > kWarp) {
            // An array for each sum of a row: a late thread may still read one while others write the next.
            __shared__ float parts[3][kThreads / kWarp];
            constexpr int kWarps = kLanes / kWarp;  // of a row
            const int warp = threadIdx.x / kWarp;
            if (threadIdx.x % kWarp == 0) parts[turn][warp] = sum;
            __syncthreads();
            sum = 0.0f;
#pragma unroll
            for (int other = 0; other < kWarps; ++other) sum += parts[turn][warp / kWarps * kWarps + other];
        }
        return sum;
    }
};

}  // namespace fxfuse
