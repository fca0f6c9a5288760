// out[m, n] = epilogue(sum over k of x[m, k] * weight[n, k]) for up to 16 rows of x in 16 bits. As in gemv.cuh, reading
// the weight is all the work. But each of its elements takes part in many products; tensor cores make them meanwhile.
//
// The weight is the left operand: 16 of its rows fill an instruction's M, 8 rows of x its N. A block computes kCols
// columns of products. Its warps share K: each takes 2 * kHalf of every kStep elements. Fragments are read directly
// from memory. The order of K in them does not matter, so a thread's fragment is 16 adjacent bytes.
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "epilogue.cuh"
#include "gemv.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse {

// kGroups: groups of 8 rows, enough for all rows of x. kTiles: tiles of 16 columns that read x once; in a gated unit
// (kWeights: 2), 8 columns of either weight. Rows of x and of weights start at multiples of 16 bytes; so do their ends.
template <class Mma, class Output_, class Epilogue_, int kGroups, int kTiles, int kWeights_ = 1>
struct FewRows {
    using Element = typename Mma::Element;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = GemvProblem;

    static constexpr int kWeights = kWeights_;
    static constexpr int kTensors = 2 + kWeights;  // x, weights, out
    static constexpr int kThreads = 256, kWarp = 32, kWarps = kThreads / kWarp;
    static constexpr int kBlocks = kGroups * kTiles == 4 ? 1 : 2;  // that a multiprocessor has registers for
    static constexpr int kCols = kMmaM * kTiles, kRows = kMmaN * kGroups, kOwnCols = kCols / kWeights;
    static constexpr int kVector = 16 / static_cast<int>(sizeof(Element));
    static constexpr int kHalf = 4 * kVector, kStep = 2 * kHalf * kWarps;  // along K; per warp 128 bytes of each row
    static_assert(sizeof(Element) == 2);

    static __device__ __forceinline__ void run(const GemvPart<FewRows>& product, unsigned block) {
        __shared__ float sums[kWarps][kRows][kCols];
        const Problem& problem = product.problem;
        const int thread = static_cast<int>(threadIdx.x), m = static_cast<int>(problem.m);
        const int64_t first = static_cast<int64_t>(block) * kOwnCols;
        const int warp = thread / kWarp, group = thread % kWarp / 4, part = thread % 4;
        float sum[kTiles][kGroups][4] = {};
        add_up(sum, product, first, warp, group, part);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < kGroups; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    sums[warp][i * kMmaN + 2 * part + j % 2][tile * kMmaM + group + j / 2 * 8] = sum[tile][i][j];
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int index = thread; index < kRows * kOwnCols; index += kThreads) {
            const int row = index / kOwnCols, own = index % kOwnCols;
            const int64_t col = first + own;
            if (row >= m || col >= problem.n) continue;
            const auto operands = product.epilogue.template load<Runs::kWhole, 1>(
                position_in<Epilogue>(row, col, problem.rows_per_batch), 1);
            float of_weight[kWeights] = {};
#pragma unroll
            for (int other = 0; other < kWarps; ++other) {
#pragma unroll
                for (int i = 0; i < kWeights; ++i) of_weight[i] += sums[other][row][column_of(own, i)];
            }
            product.out[row * problem.out_stride + col] = from_float<Output>(finished(product, of_weight, operands));
        }
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const void* params, const uint64_t* pointers, cudaStream_t stream) {
        return launch_gemv<FewRows>(params, pointers, stream);
    }
#endif  // __CUDACC_RTC__

private:
    // The block's column that has the products of column `own` of out: with two weights, a tile has 8 of either.
    static __device__ __forceinline__ int column_of(int own, int weight) {
        return kWeights == 1 ? own : own / kMmaN * kMmaM + weight * kMmaN + own % kMmaN;
    }

    // Fragments of a step, in halves of 64 bytes of each row: two rows of the weight for each tile.
    struct Fragments {
        uint4 of_weight[2][kTiles][2], of_x[2][kGroups];
    };

    // sum[tile][i] += the sum over the warp's part of K, for the i-th 8 rows of x.
    static __device__ __forceinline__ void add_up(float (&sum)[kTiles][kGroups][4], const GemvPart<FewRows>& product,
                                                  int64_t first, int warp, int group, int part) {
        const Problem& problem = product.problem;
        const int k = static_cast<int>(problem.k), last = static_cast<int>(problem.m) - 1;
        const Element *of_col[kTiles][2], *of_row[kGroups];
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) {
            const Element* weight = product.weight[kWeights == 1 ? 0 : i % 2];
            const int own = group + kMmaN * (i / kWeights);
            of_col[i / 2][i % 2] = weight + min(first + own, problem.n - 1) * problem.weight_stride;
        }
#pragma unroll
        for (int i = 0; i < kGroups; ++i) of_row[i] = product.x + min(group + kMmaN * i, last) * problem.x_stride;
        Fragments fragments[2];  // of two steps: one is read while the other is multiplied
        const auto read = [&](Fragments& to, int begin) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int place = begin + half * kHalf;
#pragma unroll
                for (int i = 0; i < 2 * kTiles; ++i) {
                    to.of_weight[half][i / 2][i % 2] = load(of_col[i / 2][i % 2], place, k);
                }
#pragma unroll
                for (int i = 0; i < kGroups; ++i) to.of_x[half][i] = load(of_row[i], place, k);
            }
        };
        int place = warp * 2 * kHalf + part * kVector;
        read(fragments[0], place);
#pragma unroll 1
        for (; place - part * kVector < k; place += 2 * kStep) {  // all lanes of a warp together
            read(fragments[1], place + kStep);
            multiply(sum, fragments[0]);
            read(fragments[0], place + 2 * kStep);
            multiply(sum, fragments[1]);
        }
    }

    static __device__ __forceinline__ void multiply(float (&sum)[kTiles][kGroups][4], const Fragments& from) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                const uint4(&w)[2] = from.of_weight[half][tile];
                const auto low = Mma::make_a({w[0].x, w[1].x, w[0].y, w[1].y});
                const auto high = Mma::make_a({w[0].z, w[1].z, w[0].w, w[1].w});
#pragma unroll
                for (int i = 0; i < kGroups; ++i) {
                    const uint4& b = from.of_x[half][i];
                    Mma::template product<0>(sum[tile][i], low, Mma::make_b({b.x, b.y}));
                    Mma::template product<0>(sum[tile][i], high, Mma::make_b({b.z, b.w}));
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
