// out = epilogue(acc), one pass over a result whose rows lie where out has columns: what takes a convolution's result
// from channels_last to NCHW, or with nothing to compute, its input there.
//
// Both are seen as (batch, row, col). Columns are contiguous in out, rows in acc. A block reads a tile along rows,
// turns it in shared memory and writes it along columns, both in pieces of 16 bytes where alignment allows.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "device_pass.cuh"
#include "epilogue.cuh"

namespace fxfuse {

// Sizes, and strides in elements.
struct TransposedProblem {
    int64_t batch, row, col;
    int64_t acc_batch, acc_col;
    int64_t out_batch, out_row;
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    pointwise_transposed_kernel(const __grid_constant__ TransposedProblem problem,
                                const typename Kernel::Element* __restrict__ acc,
                                typename Kernel::Output* __restrict__ out, const typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(problem, acc, out, epilogue));
}

// kAccess: bytes that one instruction reads, of which acc's columns start at multiples and are multiples. kRows, kCols:
// a block's tile.
template <class Element_, class Output_, class Epilogue_, int kAccess, int kRows, int kCols>
struct PointwiseTransposed {
    using Element = Element_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = TransposedProblem;

    static constexpr int kTensors = 2;  // acc, out
    static constexpr int kThreads = 256;
    static constexpr int kWarp = 32;
    static constexpr int kRun = kAccess / static_cast<int>(sizeof(Element));  // rows that a thread reads at once
    static constexpr int kTogether = 4;  // columns of which it does: it stores 16 bytes of a row
    // A warp reads 64 bytes of every column: whole sectors, and eight lanes store without conflicts.
    static constexpr int kSectors = 64 / kAccess, kRowLanes = kSectors * kRun < kRows ? kSectors : kRows / kRun;
    static constexpr int kColLanes = kWarp / kRowLanes;
    static constexpr int kWarpRows = kRowLanes * kRun, kWarpCols = kColLanes * kTogether;
    static constexpr int kPitch = kCols + 4;
    static constexpr int kPieces = kRows / kWarpRows * (kCols / kWarpCols);  // of a warp each
    static constexpr int kWarps = kThreads / kWarp, kPiecesOfWarp = kPieces / kWarps;
    static_assert(kRows % kWarpRows == 0 && kCols % kWarpCols == 0 && kPieces % kWarps == 0, "every pass must be full");

    static __device__ __forceinline__ void run(const Problem& problem, const Element* acc, Output* out,
                                               const Epilogue& epilogue) {
        constexpr int kBeyond = 8;  // the last row's last run is read whole, and used in part
        __shared__ alignas(16) float staged[kRows * kPitch + kBeyond];
        const unsigned row_tiles = tiles(problem.row, kRows), col_tiles = tiles(problem.col, kCols);
        const unsigned matrix = blockIdx.x / row_tiles;
        const int64_t row = static_cast<int64_t>(blockIdx.x % row_tiles) * kRows;
        const int64_t col = static_cast<int64_t>(matrix % col_tiles) * kCols, batch = matrix / col_tiles;
        const int rows = smaller(kRows, problem.row - row), cols = smaller(kCols, problem.col - col);
        turn(acc + batch * problem.acc_batch + col * problem.acc_col + row, problem.acc_col, rows, cols, staged);
        __syncthreads();
        Output* first = out + batch * problem.out_batch + row * problem.out_row + col;
        if constexpr (kRowVector<Output, Epilogue> > 0) {
            store_rows<kThreads, kCols, kPitch, Output>(staged, rows, problem.out_row, epilogue, [&](int at) {
                return RowStart<Output>{at < cols ? first + at : nullptr, Position{batch, row, col + at}};
            });
        } else {
            store_spans<kThreads, Output>(rows, cols, all_aligned(first, problem.out_row), epilogue, [&](int index) {
                return OutputSpan<Output>{staged + index * kPitch, first + index * problem.out_row,
                                          Position{batch, row + index, col}, cols};
            });
        }
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        const int64_t blocks = problem.batch * tiles(problem.row, kRows) * tiles(problem.col, kCols);
        if (blocks == 0) return cudaSuccess;
        if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
        pointwise_transposed_kernel<PointwiseTransposed><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
            problem, reinterpret_cast<const Element*>(pointers[0]), reinterpret_cast<Output*>(pointers[1]), epilogue);
        return cudaGetLastError();
    }
#endif  // __CUDACC_RTC__

private:
    static __host__ __device__ __forceinline__ unsigned tiles(int64_t size, int tile) {
        return (static_cast<unsigned>(size) + tile - 1) / tile;
    }

    static __device__ __forceinline__ int smaller(int most, int64_t left) {
        return left < most ? static_cast<int>(left) : most;
    }

    // The tile at `acc`, `rows` x `cols` of which exist, as staged[row][col].
    static __device__ __forceinline__ void turn(const Element* acc, int64_t acc_col, int rows, int cols,
                                                float* staged) {
        const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
        const int lane_row = lane / kColLanes * kRun, lane_col = lane % kColLanes * kTogether;
        Elements<Element, kRun> elements[kPiecesOfWarp][kTogether];
#pragma unroll
        for (int i = 0; i < kPiecesOfWarp; ++i) {
            const int row = row_of(warp + i * kWarps) + lane_row, col = col_of(warp + i * kWarps) + lane_col;
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                elements[i][j].clear();
                if (row < rows && col + j < cols) {
                    elements[i][j].template load_whole<kAccess, true>(acc + (col + j) * acc_col + row);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kPiecesOfWarp; ++i) {
            const int row = row_of(warp + i * kWarps) + lane_row, col = col_of(warp + i * kWarps) + lane_col;
            const auto(&columns)[kTogether] = elements[i];
#pragma unroll
            for (int k = 0; k < kRun; ++k) {
                *reinterpret_cast<float4*>(staged + (row + k) * kPitch + col) =
                    make_float4(columns[0][k], columns[1][k], columns[2][k], columns[3][k]);
            }
        }
    }

    static __device__ __forceinline__ int row_of(int piece) { return piece % (kRows / kWarpRows) * kWarpRows; }
    static __device__ __forceinline__ int col_of(int piece) { return piece / (kRows / kWarpRows) * kWarpCols; }
};

}  // namespace fxfuse
