// out[m, n] = epilogue(sum over k of x[m, k] * weight[n, k]) for up to 16 rows of x in 16 bits: as gemv.cuh reading the
// weight is all the work, but each of its elements takes part in many products, which tensor cores make beside it.
//
// The weight is the left operand, so that its 16 rows fill an instruction and x's rows are its 8 columns. A block computes
// kCols columns of out; its warps share K, a step of kStep in turns. Fragments are read from memory as they are needed:
// which numbers along K are multiplied together is all the same, so that a thread's are 16 bytes that lie side by side.
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "epilogue.cuh"
#include "gemv.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse {

// kGroups: of 8 rows, at least as many as x has. Rows of x and of the weight start at multiples of 16 bytes and have such a
// multiple.
template <class Mma, class Output_, class Epilogue_, int kGroups>
struct FewRows {
    using Element = typename Mma::Element;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = GemvProblem;

    static constexpr int kTensors = 3;  // x, weight, out
    static constexpr int kThreads = 256, kWarp = 32, kWarps = kThreads / kWarp;
    static constexpr int kBlocks = 2;  // of a multiprocessor, that have registers
    static constexpr int kCols = kMmaM, kRows = kMmaN * kGroups;
    static constexpr int kVector = 16 / static_cast<int>(sizeof(Element));
    static constexpr int kStep = 2 * 4 * kVector;  // along K, of a warp: 128 bytes of each row
    static constexpr int kResults = kCols * kRows;
    static constexpr int kTogether = kGroups == 1 ? 2 : 1;  // steps that a warp has under way
    static_assert(kResults <= kThreads && sizeof(Element) == 2);

    static __device__ __forceinline__ void run(const Problem& problem, const Element* x, const Element* weight,
                                               Output* out, const Epilogue& epilogue) {
        __shared__ float sums[kWarps][kRows][kCols];
        const int thread = static_cast<int>(threadIdx.x), m = static_cast<int>(problem.m);
        const int64_t first = static_cast<int64_t>(blockIdx.x) * kCols;
        // A thread stores one result. Others read what the last one does, as rows and columns beyond the end do.
        const int row = thread / kCols, own_row = min(row, m - 1);
        const int64_t col = first + thread % kCols, own_col = min(col, problem.n - 1);
        const auto operands = epilogue.template load<Runs::kWhole, 1>(
            position_in<Epilogue>(own_row, own_col, problem.rows_per_batch), 1);

        const int warp = thread / kWarp, group = thread % kWarp / 4, part = thread % 4;
        float sum[kGroups][4] = {};
        add_up(sum, problem, x, weight, first, warp, group, part);
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[warp][i * kMmaN + 2 * part + j % 2][group + j / 2 * 8] = sum[i][j];
        }
        __syncthreads();
        if (row >= m || row >= kRows || col >= problem.n) return;
        float value[1] = {0.0f};
#pragma unroll
        for (int other = 0; other < kWarps; ++other) value[0] += sums[other][row][thread % kCols];
        epilogue.apply(value, operands);
        out[own_row * problem.out_stride + own_col] = from_float<Output>(value[0]);
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        const int64_t blocks = (problem.n + kCols - 1) / kCols;
        if (problem.m > kRows) return cudaErrorInvalidConfiguration;
        constexpr auto kKernel = gemv_kernel<FewRows>;
        return queue(kKernel, static_cast<unsigned>(blocks), kThreads, 0, stream, problem,
                     reinterpret_cast<const Element*>(pointers[0]), reinterpret_cast<const Element*>(pointers[1]),
                     reinterpret_cast<Output*>(pointers[2]), epilogue);
    }
#endif  // __CUDACC_RTC__

private:
    // sum[i] += what the warp's part of K comes to, for the i-th 8 rows of x.
    static __device__ __forceinline__ void add_up(float (&sum)[kGroups][4], const Problem& problem, const Element* x,
                                                  const Element* weight, int64_t first, int warp, int group, int part) {
        const int k = static_cast<int>(problem.k), last = static_cast<int>(problem.m) - 1;
        const Element *of_col[2], *of_row[kGroups];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            of_col[i] = weight + min(first + group + 8 * i, problem.n - 1) * problem.weight_stride;
        }
#pragma unroll
        for (int i = 0; i < kGroups; ++i) of_row[i] = x + min(group + kMmaN * i, last) * problem.x_stride;
#pragma unroll 1
        for (int begin = warp * kStep; begin < k; begin += kWarps * kStep * kTogether) {
            uint4 of_weight[kTogether][2][2], of_x[kTogether][2][kGroups];
#pragma unroll
            for (int i = 0; i < 2 * kTogether; ++i) {
                const int at = begin + i / 2 * (kWarps * kStep) + i % 2 * (kStep / 2) + part * kVector;
#pragma unroll
                for (int j = 0; j < 2; ++j) of_weight[i / 2][i % 2][j] = load(of_col[j], at, k);
#pragma unroll
                for (int j = 0; j < kGroups; ++j) of_x[i / 2][i % 2][j] = load(of_row[j], at, k);
            }
#pragma unroll
            for (int i = 0; i < 2 * kTogether; ++i) {
                const uint4(&w)[2] = of_weight[i / 2][i % 2];
                const uint32_t a[2][4] = {{w[0].x, w[1].x, w[0].y, w[1].y}, {w[0].z, w[1].z, w[0].w, w[1].w}};
#pragma unroll
                for (int j = 0; j < kGroups; ++j) {
                    const uint4& b = of_x[i / 2][i % 2][j];
                    Mma::template product<0>(sum[j], Mma::make_a(a[0]), Mma::make_b({b.x, b.y}));
                    Mma::template product<0>(sum[j], Mma::make_a(a[1]), Mma::make_b({b.z, b.w}));
                }
            }
        }
    }

    // Zeros beyond the end.
    static __device__ __forceinline__ uint4 load(const Element* row, int place, int k) {
        return place < k ? __ldg(reinterpret_cast<const uint4*>(row + place)) : uint4{0, 0, 0, 0};
    }
};

}  // namespace fxfuse
