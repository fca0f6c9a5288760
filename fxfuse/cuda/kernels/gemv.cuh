// out[m, n] = epilogue(sum over k of x[m, k] * weight[n, k]) for a few rows of x. Reading the weight is all the work,
// so tensor cores are not used. Sums are in float32, of exact products.
//
// A launch computes one product or several. A block computes some columns of one product, in all rows. Its threads
// share K: each reads every kThreads-th 16 bytes of a row and adds up their products, with several reads in flight.
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "epilogue.cuh"
#include "launch.cuh"
#include "ptx.cuh"

namespace fxfuse {

// Sizes, and strides of rows in elements.
struct GemvProblem {
    int64_t together;  // products in the launch, this one included: the others follow it
    int64_t m, n, k;
    int64_t x_stride, weight_stride, out_stride;
    int64_t rows_per_batch;  // row m of out is row m % rows_per_batch of a batch
};

// One of a launch's products. They differ only in sizes and addresses, and none needs another's result.
template <class Kernel>
struct GemvPart {
    typename Kernel::Problem problem;
    const typename Kernel::Element* x;
    const typename Kernel::Element* weight[Kernel::kWeights];
    typename Kernel::Output* out;
    typename Kernel::Epilogue epilogue;
    unsigned blocks;
};

template <class Kernel>
struct GemvTogether {
    static constexpr int kArgumentBytes = 4000;  // a little less than the 4 KB that every driver takes
    static constexpr int kMost = 4 * sizeof(GemvPart<Kernel>) <= kArgumentBytes ? 4 : 1;

    GemvPart<Kernel> part[kMost];
    int count;
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    gemv_kernel(const __grid_constant__ GemvTogether<Kernel> together) {
    FXFUSE_DEVICE_PASS({
        unsigned block = blockIdx.x;
        int number = 0;
        while (number + 1 < together.count && block >= together.part[number].blocks) {
            block -= together.part[number++].blocks;
        }
        Kernel::run(together.part[number], block);
    });
}

#ifndef __CUDACC_RTC__
// params: each product's Problem, followed by its operands' strides; pointers: each one's tensors and operands.
template <class Kernel>
cudaError_t launch_gemv(const void* params, const uint64_t* pointers, cudaStream_t stream) {
    using Problem = typename Kernel::Problem;
    GemvTogether<Kernel> together{};
    const auto* problem = static_cast<const Problem*>(params);
    const int64_t count = problem->together;
    if (count < 1 || count > together.kMost) return cudaErrorInvalidConfiguration;
    unsigned blocks = 0;
    for (int64_t i = 0; i < count; ++i) {
        const auto* strides = reinterpret_cast<const OperandStrides*>(problem + 1);
        if (problem->m > Kernel::kRows) return cudaErrorInvalidConfiguration;
        GemvPart<Kernel>& part = together.part[i];
        part.problem = *problem;
        part.x = reinterpret_cast<const typename Kernel::Element*>(pointers[0]);
        for (int j = 0; j < Kernel::kWeights; ++j) {
            part.weight[j] = reinterpret_cast<const typename Kernel::Element*>(pointers[1 + j]);
        }
        part.out = reinterpret_cast<typename Kernel::Output*>(pointers[1 + Kernel::kWeights]);
        part.epilogue = Kernel::Epilogue::make(pointers + Kernel::kTensors, strides);
        part.blocks = static_cast<unsigned>((problem->n + Kernel::kOwnCols - 1) / Kernel::kOwnCols);
        blocks += part.blocks;
        pointers += Kernel::kTensors + Kernel::Epilogue::kOperands;
        problem = reinterpret_cast<const Problem*>(strides + Kernel::Epilogue::kOperands);
    }
    together.count = static_cast<int>(count);
    constexpr auto kKernel = gemv_kernel<Kernel>;
    return queue(kKernel, blocks, Kernel::kThreads, 0, stream, together);
}
#endif  // __CUDACC_RTC__

// An element of out: the epilogue of the block's sum, or of its two sums if there are two weights.
template <class Kernel, class Operands>
__device__ __forceinline__ float finished(const GemvPart<Kernel>& part, const float (&sum)[Kernel::kWeights],
                                          const Operands& operands) {
    float value[1] = {sum[0]};
    if constexpr (Kernel::kWeights == 1) {
        part.epilogue.apply(value, operands);
    } else {
        const float other[1] = {sum[1]};
        part.epilogue.apply(value, other, operands.columns, operands.rows);
    }
    return value[0];
}

// kRows: at least as many as x has. kWeights: 2 for a gated unit; a block then computes the same columns of both. Rows
// of x and of weights start at multiples of 16 bytes, and their sizes are such multiples.
template <class Element_, class Output_, class Epilogue_, int kRows_, int kWeights_ = 1>
struct Gemv {
    using Element = Element_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = GemvProblem;

    static constexpr int kRows = kRows_, kWeights = kWeights_;
    static constexpr int kTensors = 2 + kWeights;  // x, weights, out
    static constexpr int kThreads = 128, kWarp = 32, kWarps = kThreads / kWarp;
    static constexpr int kCols = 4, kSums = kRows * kCols, kOwnCols = kCols / kWeights;  // kOwnCols: of out
    static constexpr int kBlocks = kRows == 1 ? 8 : 4;  // that a multiprocessor has registers for
    static constexpr int kVector = 16 / static_cast<int>(sizeof(Element)), kStep = kThreads * kVector;
    using Vector = Elements<Element, kVector>;
    static_assert(kSums <= kThreads);

    static __device__ __forceinline__ void run(const GemvPart<Gemv>& part, unsigned block) {
        __shared__ float sums[kWarps][kSums];
        const Problem& problem = part.problem;
        const int thread = static_cast<int>(threadIdx.x);
        const int64_t first = static_cast<int64_t>(block) * kOwnCols;
        // A thread stores one result. Rows and columns beyond the end read the last one's operands, and store nothing.
        const int row = thread / kOwnCols, col = thread % kOwnCols;
        const int own_row = min(row, static_cast<int>(problem.m) - 1);
        const int64_t own_col = min(first + col, problem.n - 1);
        const auto operands = part.epilogue.template load<Runs::kWhole, 1>(
            position_in<Epilogue>(own_row, own_col, problem.rows_per_batch), 1);

        float sum[kRows][kCols] = {};
        add_up(sum, part, first, thread);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int j = 0; j < kCols; ++j) {
#pragma unroll
                for (int offset = kWarp / 2; offset > 0; offset /= 2) {
                    sum[i][j] += __shfl_xor_sync(~0u, sum[i][j], offset);
                }
                if (thread % kWarp == 0) sums[thread / kWarp][i * kCols + j] = sum[i][j];
            }
        }
        __syncthreads();
        if (row >= kRows || row >= problem.m || first + col >= problem.n) return;
        float of_weight[kWeights] = {};
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
#pragma unroll
            for (int i = 0; i < kWeights; ++i) of_weight[i] += sums[warp][row * kCols + i * kOwnCols + col];
        }
        part.out[own_row * problem.out_stride + own_col] = from_float<Output>(finished(part, of_weight, operands));
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const void* params, const uint64_t* pointers, cudaStream_t stream) {
        return launch_gemv<Gemv>(params, pointers, stream);
    }
#endif  // __CUDACC_RTC__

private:
    // sum[m][n] += the products of the thread's part of K.
    static __device__ __forceinline__ void add_up(float (&sum)[kRows][kCols], const GemvPart<Gemv>& part, int64_t first,
                                                  int thread) {
        const Problem& problem = part.problem;
        const Element* of_row[kRows];
        const Element* of_col[kCols];
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            of_row[row] = part.x + min(row, static_cast<int>(problem.m) - 1) * problem.x_stride;
        }
#pragma unroll
        for (int col = 0; col < kCols; ++col) {
            const Element* weight = part.weight[col / kOwnCols];
            of_col[col] = weight + min(first + col % kOwnCols, problem.n - 1) * problem.weight_stride;
        }
        const int k = static_cast<int>(problem.k);
        Vector of_weight[2][kCols], of_x[2][kRows];  // of two steps: one is read while the other is added up
        const auto read = [&](int turn, int place) {
#pragma unroll
            for (int col = 0; col < kCols; ++col) load(of_weight[turn][col], of_col[col], place, k);
#pragma unroll
            for (int row = 0; row < kRows; ++row) load(of_x[turn][row], of_row[row], place, k);
        };
        int place = thread * kVector;
        read(0, place);
#pragma unroll 1
        for (; place < k; place += 2 * kStep) {
            read(1, place + kStep);
            add(sum, of_weight[0], of_x[0]);
            read(0, place + 2 * kStep);
            add(sum, of_weight[1], of_x[1]);
        }
    }

    static __device__ __forceinline__ void add(float (&sum)[kRows][kCols], const Vector (&of_weight)[kCols],
                                               const Vector (&of_x)[kRows]) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
#pragma unroll
            for (int row = 0; row < kRows; ++row) {
#pragma unroll
                for (int col = 0; col < kCols; ++col) {
                    sum[row][col] = fmaf(of_x[row][j], of_weight[col][j], sum[row][col]);
                }
            }
        }
    }

    // Loads a vector of a row: zeros beyond the end.
    static __device__ __forceinline__ void load(Vector& to, const Element* row, int place, int k) {
        to.clear();
        if (place < k) to.template load_whole<16, true>(row + place);
    }
};

}  // namespace fxfuse
