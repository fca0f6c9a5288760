// out = epilogue((x - mean) / sqrt(variance + eps)), mean and variance of each row of x: layer_norm, whose weight and
// bias are operands of the epilogue.
//
// A row belongs to kLanes threads, which read it once and hold it in registers: its mean goes, then the squares of what
// is left are added up, so that nothing cancels. A thread has the vectors lane, lane + kLanes, ... of kVector elements, so
// that neighbours read and write neighbouring memory. All that a thread reads is under way before it waits for any of
// it. torch's kernel has a block for each row, and so too few bytes under way: an eighth of the bandwidth for rows of
// 96, a third for rows of 768.
#pragma once

#include <cstdint>

#include "divisor.cuh"
#include "epilogue.cuh"

namespace fxfuse {

// What a launch computes.
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
    Kernel::run(cut, x, out, epilogue);
}

// kCols: of a row, a multiple of kVector, as are the distances between rows and the addresses of x. kRows: how many a
// thread works on at a time, which share what it reads of weight and bias.
template <class Element_, class Output_, class Epilogue_, int kCols, int kLanes, int kVector, int kRows>
struct LayerNorm {
    using Element = Element_;
    using Output = Output_;
    using Epilogue = Epilogue_;

    static constexpr int kTensors = 2;  // x, out
    static constexpr int kWarp = 32;
    static constexpr int kThreads = kLanes > 128 ? kLanes : 128;
    static constexpr int kGroups = kThreads / kLanes;  // of threads, with a row each
    static constexpr int kVectors = (kCols + kLanes * kVector - 1) / (kLanes * kVector);  // of a row in a thread
    static constexpr bool kFull = kCols == kLanes * kVector * kVectors;
    static_assert(kCols % kVector == 0 && (kLanes & (kLanes - 1)) == 0 && kLanes <= 1024);

    struct Problem {
        int64_t rows, rows_per_batch, x_stride;
        double eps;
    };

    static __device__ __forceinline__ void run(const LayerNormCut& cut, const Element* x, Output* out,
                                               const Epilogue& epilogue) {
        const int lane = threadIdx.x % kLanes;
        const int64_t first = static_cast<int64_t>(blockIdx.x) * (kGroups * kRows) + threadIdx.x / kLanes;
        // Rows and vectors beyond the end read what others do: no branch separates them, and shuffles need all lanes.
        const auto row_of = [&](int i) { return min(first + i * kGroups, cut.rows - 1); };
        const auto exists = [&](int v) { return kFull || v < kVectors - 1 || v * kLanes + lane < kCols / kVector; };
        const auto col_of = [&](int v) { return exists(v) ? (v * kLanes + lane) * kVector : 0; };

        Elements<Element, kVector> elements[kRows][kVectors];
        typename Epilogue::template RowValues<kVector, Position> rows[kRows][kVectors];
        typename Epilogue::template ColumnValues<kVector, Position> columns[kVectors];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const Element* row = x + row_of(i) * cut.x_stride;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) elements[i][v].template load_whole<16, true>(row + col_of(v));
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            Position at = position(cut, row_of(i));
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                at.col = col_of(v);
                rows[i][v] = epilogue.template load_rows<Runs::kWhole, kVector>(at, kVector);
            }
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            columns[v] = epilogue.template load_columns<Runs::kWhole, kVector>(Position{0, 0, col_of(v)}, kVector);
        }

        float value[kRows][kVectors][kVector], sum[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                for (int k = 0; k < kVector; ++k) value[i][v][k] = elements[i][v][k];
            }
        }
        // Twice: the mean is rounded, by more than small deviations from a large one.
#pragma unroll
        for (int turn = 0; turn < 2; ++turn) {
            add_up(sum, turn, [&](int i, int v) { return exists(v) ? scaled_sum(value[i][v]) : 0.0f; });
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const float mean = sum[i] * (1.0f / (kScale * kCols));
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                    for (int k = 0; k < kVector; ++k) value[i][v][k] -= mean;
                }
            }
        }
        add_up(sum, 2, [&](int i, int v) { return exists(v) ? sum_of_squares(value[i][v]) : 0.0f; });
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const float inverse_deviation = rsqrtf(sum[i] * (1.0f / kCols) + cut.eps);
            const int64_t row = first + i * kGroups;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                for (int k = 0; k < kVector; ++k) value[i][v][k] *= inverse_deviation;
                epilogue.apply(value[i][v], columns[v], rows[i][v]);
                if (row >= cut.rows || !exists(v)) continue;
                store_run<Output, kVector, Runs::kWhole>(out + row * kCols + col_of(v), value[i][v], kVector);
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
        constexpr int64_t kTogether = kGroups * kRows;
        const unsigned blocks = static_cast<unsigned>((problem.rows + kTogether - 1) / kTogether);
        layer_norm_kernel<LayerNorm><<<blocks, kThreads, 0, stream>>>(
            cut, reinterpret_cast<const Element*>(pointers[0]), reinterpret_cast<Output*>(pointers[1]), epilogue);
        return cudaGetLastError();
    }
#endif  // __CUDACC_RTC__

private:
    // Elements are multiplied by it on their way into the sum, which so stays finite wherever the mean is.
    static constexpr float kScale = power_of_two_within(kCols);

    static __device__ __forceinline__ Position position(const LayerNormCut& cut, int64_t row) {
        if constexpr (Epilogue::kUsesBatch) {
            const unsigned batch = cut.rows_per_batch.divide(static_cast<unsigned>(row));
            return {batch, static_cast<unsigned>(row) - batch * cut.rows_per_batch.divisor, 0};
        } else {
            return {0, row, 0};
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

    // sum[i]: of part(i, v) for all vectors v of row i, those of other threads included. `turn` counts the calls.
    template <class Part>
    static __device__ __forceinline__ void add_up(float (&sum)[kRows], int turn, Part part) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            sum[i] = 0.0f;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) sum[i] += part(i, v);
        }
#pragma unroll
        for (int offset = (kLanes < kWarp ? kLanes : kWarp) / 2; offset > 0; offset /= 2) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], offset);
        }
        if constexpr (kLanes > kWarp) {
            // Two of them: who is late reads one while others write the other.
            __shared__ float parts[2][kRows][kThreads / kWarp];
            constexpr int kWarps = kLanes / kWarp;  // of a row
            const int warp = threadIdx.x / kWarp;
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                if (threadIdx.x % kWarp == 0) parts[turn % 2][i][warp] = sum[i];
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                sum[i] = 0.0f;
#pragma unroll
                for (int other = 0; other < kWarps; ++other) {
                    sum[i] += parts[turn % 2][i][warp / kWarps * kWarps + other];
                }
            }
        }
    }
};

}  // namespace fxfuse
