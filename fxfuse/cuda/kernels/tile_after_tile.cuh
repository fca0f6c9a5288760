// Matrix products by persistent thread blocks: as many as the device holds, each computing one tile after another.
#pragma once

#include <cstdint>

#include "epilogue.cuh"
#include "gemm.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse {

// The base of such kernels: the order of tiles, and how each warp stores its own rows.
template <class Config_, class Output_, class Epilogue_>
struct TileAfterTile : Gemm<Config_, Output_, Epilogue_> {
    using Base = Gemm<Config_, Output_, Epilogue_>;
    using Config = Config_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using typename Base::Problem, typename Base::Rows, typename Base::Element;
    using Base::kTileM, Base::kTileN, Base::kThreads, Base::kVector, Base::kWhole, Base::kRuns;
    using Base::position, Base::tiles_m;
    using Sum = typename Base::Loop::Sum;

    // Two weights share the columns of a tile's products: on the right are the products with the second weight, which
    // the epilogue takes as another argument. So each thread has both products of an element.
    static constexpr int kWeights = Config::kWeights, kTileCols = kTileN / kWeights;  // kTileCols: of out
    static_assert(kWeights == 1 || Config::kGroupColumns == kTileN);
    static constexpr int kTensors = 2 + kWeights;  // x, weights, out
    struct Weights {
        const Element* of[kWeights];
    };

    // Columns of products in a slice: a warp stores its 16 rows slice by slice.
    static constexpr int kSlice = Config::kGroupColumns % 64 == 0 ? 64 : 32;
    static constexpr int kSlices = Config::kGroupColumns / kSlice, kStagedBytes = kMmaM * kSlice * 4;
    static constexpr int kSliceCols = kSlice / kWeights;  // of out
    static_assert(Config::kGroupColumns % kSlice == 0);

protected:
#ifndef __CUDACC_RTC__
    template <auto kKernel>
    static cudaError_t launch_kernel(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                                     cudaStream_t stream, int threads, int shared_bytes) {
        unsigned blocks = 0;
        cudaError_t error = allow_shared_memory<kKernel>(shared_bytes);
        if (error == cudaSuccess) error = resident_blocks<kKernel>(threads, shared_bytes, &blocks);
        if (error != cudaSuccess) return error;
        const unsigned tiles = tile_count(problem);
        Weights weights;
        for (int i = 0; i < kWeights; ++i) weights.of[i] = reinterpret_cast<const Element*>(pointers[1 + i]);
        return queue(kKernel, blocks < tiles ? blocks : tiles, threads, shared_bytes, stream, problem,
                     Rows::make(problem.rows, Config::kTileK), reinterpret_cast<const Element*>(pointers[0]), weights,
                     reinterpret_cast<Output*>(pointers[1 + kWeights]), epilogue);
    }
#endif  // __CUDACC_RTC__

    static __host__ __device__ __forceinline__ int64_t tiles_n(const Problem& problem) {
        return (problem.n + kTileCols - 1) / kTileCols;
    }
    static __host__ __device__ __forceinline__ unsigned tile_count(const Problem& problem) {
        const unsigned each = static_cast<unsigned>(tiles_m(problem)) * static_cast<unsigned>(tiles_n(problem));
        if constexpr (Rows::kBatched) return each * static_cast<unsigned>(problem.rows.count);
        return each;
    }

    // Where a tile begins.
    struct Origin {
        int64_t row, col;
        int batch = 0;

        __device__ __forceinline__ Origin(const Problem& problem, unsigned index) {
            const unsigned high = static_cast<unsigned>(tiles_m(problem)), wide = static_cast<unsigned>(tiles_n(problem));
            if constexpr (Rows::kBatched) {
                batch = static_cast<int>(index / (high * wide));
                index -= static_cast<unsigned>(batch) * (high * wide);
            }
            const typename Base::Place at(index, high, wide);
            row = static_cast<int64_t>(at.row) * kTileM;
            col = static_cast<int64_t>(at.col) * kTileCols;
        }
    };

    // How a warp stores its rows of a tile: slice by slice through shared memory. There a lane has one run of columns
    // in every kRowStep-th row. Operands that are the same in all rows are read once per slice.
    static constexpr int kRunsPerRow = kSliceCols / kVector, kRowStep = 32 / kRunsPerRow;
    static constexpr int kTogether = 2, kTurns = kMmaM / kRowStep / kTogether;
    using Columns = typename Epilogue::template ColumnValues<kVector, Position>;
    using Values = typename Epilogue::template RowValues<kVector, Position>;

    struct RowsOfTurn {
        Values values[kTogether];
    };
    // Whether the operands of the rows of a slice's first turn are fetched one slice earlier.
    static constexpr bool kFetchesAhead = kTogether * kVector * Epilogue::kElementBytes <= 32;

    struct Store {
        const Problem& problem;
        const Epilogue& epilogue;
        Output* out;
        int64_t before, top, left;  // before: rows of out that belong to earlier products
        int rows, lane;

        __device__ __forceinline__ Store(const Problem& problem, const Origin& origin, Output* out,
                                         const Epilogue& epilogue)
            : problem(problem), epilogue(epilogue), out(out) {
            const uint32_t thread = ptx::read_thread_index();
            lane = static_cast<int>(thread % 32);
            before = Base::rows_before(problem, origin.batch);
            top = origin.row + Config::warp_m(thread);
            left = origin.col + Config::warp_n(thread) + run();
            rows = static_cast<int>(min(static_cast<int64_t>(kMmaM), problem.m - top));
        }

        __device__ __forceinline__ int run() const { return lane % kRunsPerRow * kVector; }
        __device__ __forceinline__ int row(int turn, int i) const {
            return lane / kRunsPerRow + (turn * kTogether + i) * kRowStep;
        }
        __device__ __forceinline__ int count(int slice) const {  // of columns that exist
            return static_cast<int>(min(static_cast<int64_t>(kVector), problem.n - left - slice * kSliceCols));
        }
        // Runs and rows beyond the end read the last one's operands, so that no branch separates them from the others.
        __device__ __forceinline__ int64_t column(int slice) const {
            return count(slice) > 0 || !kWhole ? left + slice * kSliceCols : problem.n - kVector;
        }

        // Fetches a lane's operands: those of the columns of a slice, and those of the rows of a turn.
        __device__ __forceinline__ Columns fetch_columns(int slice) const {
            return epilogue.template load_columns<kRuns, kVector>(Position{0, 0, column(slice)}, count(slice));
        }
        __device__ __forceinline__ void fetch(RowsOfTurn& rows_of_turn, int slice, int turn) const {
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const Position at = position(problem, before + top + min(row(turn, i), rows - 1), column(slice));
                rows_of_turn.values[i] = epilogue.template load_rows<kRuns, kVector>(at, count(slice));
            }
        }

        // Stores all slices. `free_stage`: shared memory, kStagedBytes for each warp.
        __device__ __forceinline__ void all(const Sum& sum, Columns columns, RowsOfTurn rows_ahead,
                                            unsigned char* free_stage) const {
            float* staged = reinterpret_cast<float*>(free_stage + ptx::read_thread_index() / 32 * kStagedBytes);
#pragma unroll
            for (int slice = 0; slice < kSlices; ++slice) {  // unrolled: sums that have been staged take no registers
                RowsOfTurn next = rows_ahead;
                if (slice > 0) {
                    columns = fetch_columns(slice);
                    if constexpr (!kFetchesAhead) fetch(next, slice, 0);
                }
                if constexpr (kFetchesAhead) {
                    if (slice + 1 < kSlices) fetch(rows_ahead, slice + 1, 0);
                }
                stage(sum, slice, staged);
                __syncwarp();
#pragma unroll 1
                for (int turn = 0; turn < kTurns; ++turn) {
                    const RowsOfTurn operands = next;
                    if (turn + 1 < kTurns) fetch(next, slice, turn + 1);
#pragma unroll
                    for (int i = 0; i < kTogether; ++i) {
                        float value[kVector];
                        load_staged(value, staged, row(turn, i), run());
                        if constexpr (kWeights == 1) {
                            epilogue.apply(value, columns, operands.values[i]);
                        } else {
                            float other[kVector];
                            load_staged(other, staged, row(turn, i), kSliceCols + run());
                            epilogue.apply(value, other, columns, operands.values[i]);
                        }
                        if (count(slice) <= 0 || row(turn, i) >= rows) continue;
                        store_run<Output, kVector, kWhole ? Runs::kWhole : Runs::kAnywhere>(
                            out + (before + top + row(turn, i)) * problem.out_stride + column(slice), value,
                            count(slice));
                    }
                }
                __syncwarp();  // before the next slice is written over this one
            }
        }

    private:
        // Where a float of a slice is staged. Rows are swizzled in pieces of four floats, eight pieces at a time. So
        // both the writes of fragments and the reads of runs of 8 find different banks:
        //
        //   row % 4 = 0    pieces 0 1 2 3 4 5 6 7
        //             1           2 3 0 1 6 7 4 5
        //             2           4 5 6 7 0 1 2 3
        //             3           6 7 4 5 2 3 0 1
        static __device__ __forceinline__ int place(int row, int col) {
            return row * kSlice + ((col / 4 ^ row % 4 * 2) * 4 + col % 4);
        }

        __device__ __forceinline__ void stage(const Sum& sum, int slice, float* staged) const {
            constexpr int kMmas = kSlice / kMmaN, kMmasOfOne = kMmas / kWeights;
#pragma unroll
            for (int n = 0; n < kMmas; ++n) {
                const int first = n / kMmasOfOne * (Config::kMmasN / kWeights);  // MMA tile with the same weight
                const float(&d)[4] = sum.value[0][first + slice * kMmasOfOne + n % kMmasOfOne];
                const int row = lane / 4, col = n * kMmaN + lane % 4 * 2;
                *reinterpret_cast<float2*>(staged + place(row, col)) = make_float2(d[0], d[1]);
                *reinterpret_cast<float2*>(staged + place(row + 8, col)) = make_float2(d[2], d[3]);
            }
        }

        // Half of the lanes read the second half of a run of 8 first: so eight lanes at a time find different banks.
        __device__ __forceinline__ void load_staged(float (&value)[kVector], const float* staged, int row, int col) const {
            if constexpr (kVector == 4) {
                read_four(value, staged + place(row, col));
            } else {
                static_assert(kVector == 8);
                const int swapped = lane % 8 >= 4 ? 4 : 0;
                float one[4], other[4];
                read_four(one, staged + place(row, col + swapped));
                read_four(other, staged + place(row, col + 4 - swapped));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    value[i] = swapped != 0 ? other[i] : one[i];
                    value[i + 4] = swapped != 0 ? one[i] : other[i];
                }
            }
        }
        static __device__ __forceinline__ void read_four(float (&to)[4], const float* from) {
            const float4 four = *reinterpret_cast<const float4*>(from);
            to[0] = four.x;
            to[1] = four.y;
            to[2] = four.z;
            to[3] = four.w;
        }
    };
};

}  // namespace fxfuse
