// out = epilogue(acc), one pass that also transposes: it takes a convolution's result from channels_last to NCHW or,
// with nothing to compute, a convolution's input.
//
// Both tensors are indexed (batch, row, col). col is contiguous in out, row is contiguous in acc. A block reads a tile
// along row, transposes it in shared memory and writes it along col, in pieces of 16 bytes where alignment allows.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "device_pass.cuh"
#include "epilogue.cuh"
#include "launch.cuh"

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
    FXFUSE_DEVICE_PASS(
        __shared__ alignas(16) unsigned char staged[Kernel::kStagedBytes];
        // Tiles are taken backwards: the part of acc that was computed last is still in L2.
        Kernel::run(gridDim.x - 1 - blockIdx.x, problem, acc, out, epilogue, staged));
}

// kAccess: bytes that one instruction reads. The address and the length of each column of acc are multiples of it.
// kRows, kCols: a block's tile.
template <class Element_, class Output_, class Epilogue_, int kAccess, int kRows, int kCols>
struct PointwiseTransposed {
    using Element = Element_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = TransposedProblem;

    static constexpr int kTensors = 2;  // acc, out
    static constexpr int kThreads = 128;
    static constexpr int kWarp = 32;
    static constexpr int kSize = static_cast<int>(sizeof(Element)), kOutputSize = static_cast<int>(sizeof(Output));
    static constexpr int kRun = kAccess / kSize;      // rows that a thread reads at once
    static constexpr int kTogether = 4;               // columns that it reads: it stages so many elements of a row
    static constexpr int kPitch = kCols + kTogether;  // of staged rows: neighbouring rows use different banks
    static constexpr int kStagedBytes = kRows * kPitch * kSize;
    // A warp reads 64 bytes of every column: whole sectors, and lanes stage without bank conflicts.
    static constexpr int kSectors = 64 / kAccess, kRowLanes = kSectors * kRun < kRows ? kSectors : kRows / kRun;
    static constexpr int kColLanes = kWarp / kRowLanes;
    static constexpr int kWarpRows = kRowLanes * kRun, kWarpCols = kColLanes * kTogether;
    static constexpr int kPieces = kRows / kWarpRows * (kCols / kWarpCols);  // of the tile, each read by one warp
    static constexpr int kWarps = kThreads / kWarp, kPiecesOfWarp = kPieces / kWarps;
    static_assert(kRows % kWarpRows == 0 && kCols % kWarpCols == 0 && kPieces % kWarps == 0, "every pass must be full");

    static __host__ __device__ __forceinline__ int64_t blocks(const Problem& problem) {
        return problem.batch * tiles(problem.row, kRows) * tiles(problem.col, kCols);
    }

    static __device__ __forceinline__ void run(unsigned block, const Problem& problem, const Element* acc, Output* out,
                                               const Epilogue& epilogue, unsigned char* shared) {
        Element* staged = reinterpret_cast<Element*>(shared);
        const unsigned row_tiles = tiles(problem.row, kRows), col_tiles = tiles(problem.col, kCols);
        const unsigned matrix = block / row_tiles;
        const int64_t row = static_cast<int64_t>(block % row_tiles) * kRows;
        const int64_t col = static_cast<int64_t>(matrix % col_tiles) * kCols, batch = matrix / col_tiles;
        const int rows = smaller(kRows, problem.row - row), cols = smaller(kCols, problem.col - col);
        const Read read(acc + batch * problem.acc_batch + col * problem.acc_col + row, problem.acc_col, rows, cols);
        const Store store(epilogue, Position{batch, row, col}, rows, cols);
        const auto operands = store.fetch(store.first_row());  // under way together with acc
        read.stage(staged);
        __syncthreads();
        store.run(staged, out + batch * problem.out_batch + row * problem.out_row + col, problem.out_row, operands);
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        const int64_t all = blocks(problem);
        if (all == 0) return cudaSuccess;
        if (all > INT32_MAX) return cudaErrorInvalidConfiguration;
        return queue(pointwise_transposed_kernel<PointwiseTransposed>, static_cast<unsigned>(all), kThreads, 0, stream,
                     problem, reinterpret_cast<const Element*>(pointers[0]), reinterpret_cast<Output*>(pointers[1]),
                     epilogue);
    }
#endif  // __CUDACC_RTC__

private:
    static __host__ __device__ __forceinline__ unsigned tiles(int64_t size, int tile) {
        return (static_cast<unsigned>(size) + tile - 1) / tile;
    }

    static __device__ __forceinline__ int smaller(int most, int64_t left) {
        return left < most ? static_cast<int>(left) : most;
    }

    // A thread's part of the tile at `acc`, `rows` x `cols` of which exist.
    struct Read {
        Elements<Element, kRun> columns[kPiecesOfWarp][kTogether];

        __device__ __forceinline__ Read(const Element* acc, int64_t acc_col, int rows, int cols) {
#pragma unroll
            for (int i = 0; i < kPiecesOfWarp; ++i) {
                const int row = row_of(i), col = col_of(i);
#pragma unroll
                for (int j = 0; j < kTogether; ++j) {
                    columns[i][j].clear();
                    if (row < rows && col + j < cols) {
                        columns[i][j].template load_whole<kAccess, true>(acc + (col + j) * acc_col + row);
                    }
                }
            }
        }

        __device__ __forceinline__ void stage(Element* staged) const {
#pragma unroll
            for (int i = 0; i < kPiecesOfWarp; ++i) {
#pragma unroll
                for (int k = 0; k < kRun; ++k) {
                    Elements<Element, kTogether> together;
                    together.clear();
#pragma unroll
                    for (int j = 0; j < kTogether; ++j) {
                        together.unit[j * kSize / 4] |= bits(columns[i][j], k) << (j * kSize % 4 * 8);
                    }
                    together.store_whole(staged + (row_of(i) + k) * kPitch + col_of(i));
                }
            }
        }

    private:
        // Where the thread's part of the warp's i-th piece begins.
        static __device__ __forceinline__ int row_of(int i) {
            return piece(i) % (kRows / kWarpRows) * kWarpRows + lane() / kColLanes * kRun;
        }
        static __device__ __forceinline__ int col_of(int i) {
            return piece(i) / (kRows / kWarpRows) * kWarpCols + lane() % kColLanes * kTogether;
        }
        static __device__ __forceinline__ int piece(int i) {
            return static_cast<int>(threadIdx.x) / kWarp + i * kWarps;
        }
        static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

        static __device__ __forceinline__ uint32_t bits(const Elements<Element, kRun>& run, int k) {
            if constexpr (kSize == 4) {
                return run.unit[k];
            } else {
                return run.unit[k * kSize / run.kUnit] >> (k * kSize % run.kUnit * 8) & 0xffffu;
            }
        }
    };

    // A thread stores kParts runs of kVector columns, all in one row. What the epilogue computes from operands with one
    // value per row, such as a batch normalisation's, is then computed once for all of them.
    struct Store {
        static constexpr int kAligned = Epilogue::kColumns * kOutputSize;  // bytes: rows of out begin at multiples
        static constexpr int kVector = kAligned > 16 ? 16 / kOutputSize : Epilogue::kColumns, kRuns = kCols / kVector;
        // kLanes of a row: enough to read 128 bytes of it at once, without bank conflicts, but at most half a warp.
        static constexpr int kFull = 128 / (kVector * kSize), kMost = kRuns < kWarp / 2 ? kRuns : kWarp / 2;
        static constexpr int kLanes = kFull < kMost ? kFull : kMost;
        static constexpr int kParts = kRuns / kLanes, kStep = kThreads / kLanes;
        static_assert(kRuns % kLanes == 0 && kThreads % kLanes == 0);

        struct Operands {
            typename Epilogue::template Values<kVector, Position> part[kParts];
        };

        const Epilogue& epilogue;
        Position corner;  // of the tile
        int rows, cols;   // of the tile that exist

        __device__ __forceinline__ Store(const Epilogue& epilogue, const Position& corner, int rows, int cols)
            : epilogue(epilogue), corner(corner), rows(rows), cols(cols) {}

        static __device__ __forceinline__ int first_row() { return static_cast<int>(threadIdx.x) / kLanes; }
        static __device__ __forceinline__ int col(int part) {
            return (part * kLanes + static_cast<int>(threadIdx.x) % kLanes) * kVector;
        }

        // The operands of a row. Runs beyond the last column read what the tile's first run reads.
        __device__ __forceinline__ Operands fetch(int row) const {
            Operands operands;
#pragma unroll
            for (int i = 0; i < kParts; ++i) {
                const Position at{corner.batch, corner.row + min(row, rows - 1), corner.col + (col(i) < cols ? col(i) : 0)};
                operands.part[i] = epilogue.template load<Runs::kWhole, kVector>(at, kVector);
            }
            return operands;
        }

        __device__ __forceinline__ void run(const Element* staged, Output* out, int64_t out_row,
                                            Operands operands) const {
#pragma unroll 1
            for (int row = first_row(); row < rows; row += kStep) {
                const Operands now = operands;
                if (row + kStep < rows) operands = fetch(row + kStep);
                float value[kParts][kVector];
#pragma unroll
                for (int i = 0; i < kParts; ++i) {
                    Elements<Element, kVector> run;
                    run.template load_whole<kTogether * kSize, false>(staged + row * kPitch + col(i));
#pragma unroll
                    for (int j = 0; j < kVector; ++j) value[i][j] = run[j];
                    epilogue.apply(value[i], now.part[i]);
                }
#pragma unroll
                for (int i = 0; i < kParts; ++i) {
                    if (col(i) >= cols) continue;
                    store_run<Output, kVector, Runs::kWhole>(out + row * out_row + col(i), value[i], kVector);
                }
            }
        }
    };
};

// Two transposes in one launch: a convolution's input and its filters.
struct TransposedPairProblem {
    TransposedProblem first, second;
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    transposed_pair_kernel(const __grid_constant__ TransposedPairProblem problem, unsigned blocks_of_first,
                           const typename Kernel::Element* __restrict__ first,
                           typename Kernel::Output* __restrict__ first_out,
                           const typename Kernel::Element* __restrict__ second,
                           typename Kernel::Output* __restrict__ second_out,
                           const typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(
        __shared__ alignas(16) unsigned char staged[Kernel::kStagedBytes];
        if (blockIdx.x < blocks_of_first) {
            Kernel::First::run(blockIdx.x, problem.first, first, first_out, epilogue, staged);
        } else {
            Kernel::Second::run(blockIdx.x - blocks_of_first, problem.second, second, second_out, epilogue, staged);
        });
}

template <class First_, class Second_>
struct TransposedPair {
    using First = First_;
    using Second = Second_;
    using Element = typename First::Element;
    using Output = typename First::Output;
    using Epilogue = typename First::Epilogue;
    using Problem = TransposedPairProblem;

    static constexpr int kTensors = 4;  // acc and out of each
    static constexpr int kThreads = First::kThreads;
    static constexpr int kStagedBytes =
        First::kStagedBytes > Second::kStagedBytes ? First::kStagedBytes : Second::kStagedBytes;
    static_assert(Second::kThreads == kThreads);

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        const int64_t first = First::blocks(problem.first), all = first + Second::blocks(problem.second);
        if (all == 0) return cudaSuccess;
        if (all > INT32_MAX) return cudaErrorInvalidConfiguration;
        return queue(transposed_pair_kernel<TransposedPair>, static_cast<unsigned>(all), kThreads, 0, stream, problem,
                     static_cast<unsigned>(first), reinterpret_cast<const Element*>(pointers[0]),
                     reinterpret_cast<Output*>(pointers[1]), reinterpret_cast<const Element*>(pointers[2]),
                     reinterpret_cast<Output*>(pointers[3]), epilogue);
    }
#endif  // __CUDACC_RTC__
};

}  // namespace fxfuse
