// out[m, n] = epilogue(sum over k of x[m, k] * weight[n, k]): linear, addmm and matmul. With Batched, many such
// products of one size: bmm.
//
// x is (M, K), K contiguous, or (K, M), M contiguous (MatrixColumns: the gradient of a weight). The weight is
// (N, K), K contiguous (Major::kK: linear) or (K, N), N contiguous (Major::kMN: matmul, addmm). out is (M, N), N
// contiguous. Rows may be padded: each matrix has a stride. Convolutions on channels_last gather the rows of x, and the
// gradients of their filters gather the weight: see windows.cuh.
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "epilogue.cuh"
#include "launch.cuh"
#include "mainloop.cuh"
#include "mma.cuh"
#include "ptx.cuh"
#include "shared_tile.cuh"
#include "split_k.cuh"

namespace fxfuse {

// A weight that is a matrix. Rows of x say which weight they are multiplied with.
struct MatrixWeight {
    template <class Tile, int kThreads, int kAccess>
    using WeightCopy = TileCopy<Tile, kThreads, kAccess>;

    // The copy of the weight for `extent` columns of out from `col` on, and for `k` elements of K from `first` on.
    // `stride`: of the weight's rows.
    template <Major kMajor, class Copy, class Element>
    __device__ __forceinline__ Copy copy_weight(const Element* weight, int64_t stride, int64_t col, int extent,
                                                int64_t first, int k, uint32_t thread) const {
        const Element* tile = kMajor == Major::kK ? weight + col * stride + first : weight + first * stride + col;
        return Copy(tile, stride, extent, k, thread);
    }
};

// Rows of x that lie a constant distance apart.
struct MatrixRows : MatrixWeight {
    static constexpr Major kMajor = Major::kK;
    static constexpr bool kBatched = false, kRagged = false;

    int64_t stride;  // in elements

    template <class Element>
    static constexpr int kLeastBlocks = 0;  // blocks per multiprocessor that registers must allow; 0: ptxas decides
    using Host = MatrixRows;                // the rows as the host packs them
    static MatrixRows make(const Host& rows, int) { return rows; }

    template <class Tile, int kThreads, int kAccess, int kFirstThread = 0>
    using Copy = TileCopy<Tile, kThreads, kAccess>;

    // The copy of `extent` rows from `row` on, and of `k` elements of K from `first` on.
    template <class Copy, class Element>
    __device__ __forceinline__ Copy copy(const Element* x, int64_t row, int extent, int64_t first, int k,
                                         uint32_t thread) const {
        return Copy(x + row * stride + first, stride, extent, k, thread);
    }
};

// Rows of an x that lies as (K, M). The constant distance is between indices of K.
struct MatrixColumns : MatrixRows {
    static constexpr Major kMajor = Major::kMN;
    using Host = MatrixColumns;
    static MatrixColumns make(const Host& rows, int) { return rows; }

    template <class Copy, class Element>
    __device__ __forceinline__ Copy copy(const Element* x, int64_t row, int extent, int64_t first, int k,
                                         uint32_t thread) const {
        return Copy(x + first * stride + row, stride, extent, k, thread);
    }
};

// The rows of `count` products. In out, the products' rows follow one another.
template <class Rows>
struct Batched : Rows {
    static constexpr bool kBatched = true;

    struct Host : Rows::Host {
        int64_t count, x_step, weight_step;  // steps: from one product to the next, in elements
    };
    static Batched make(const Host& host, int tile_k) { return {Rows::make(host, tile_k)}; }
};

// Rows, of x or of the weight, that may end within a piece which TileCopy reads at once.
template <class Rows>
struct Ragged : Rows {
    static constexpr bool kRagged = true;
    static Ragged make(const typename Rows::Host& host, int tile_k) { return {Rows::make(host, tile_k)}; }

    template <class Tile, int kThreads, int kAccess, int kFirstThread = 0>
    using Copy = TileCopy<Tile, kThreads, kAccess, true>;
    template <class Tile, int kThreads, int kAccess>
    using WeightCopy = TileCopy<Tile, kThreads, kAccess, true>;
};

// kSums: see Sums. kAccessX, kAccessW: bytes that one read of x, and of the weight, may have (see TileCopy).
template <class Mma_, int kTileM, int kTileN, int kWarpsM, int kWarpsN, int kStages, Sums kSums, Major kWeightMajor_,
          int kAccessX_, int kAccessW_, class Rows_ = MatrixRows, bool kHoldsK = false>
struct GemmConfig : MainloopShape<typename Mma_::Unguarded, kTileM, kTileN, kWarpsM, kWarpsN, kStages, kSums, kHoldsK> {
    static constexpr Major kWeightMajor = kWeightMajor_;
    static constexpr int kAccessX = kAccessX_, kAccessW = kAccessW_;
    using Rows = Rows_;

    // The mainloop for thread blocks whose sums are not finite. It rarely runs, so its code should be small.
    static constexpr bool kGuarded = Mma_::kGuarded;
    struct Guarded : MainloopShape<Mma_, kTileM, kTileN, kWarpsM, kWarpsN, kStages, kSums, kHoldsK> {
        static constexpr int kUnroll = 1;
    };
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kThreads, Kernel::kLeastBlocks)
    gemm_kernel(const typename Kernel::Problem problem, const typename Kernel::Rows rows,
                const typename Kernel::Element* __restrict__ x, const typename Kernel::Element* __restrict__ weight,
                typename Kernel::Output* __restrict__ out, const SplitWorkspace workspace,
                const typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(problem, rows, x, weight, out, workspace, epilogue));
}

// kSplits: split-K. Several thread blocks share each of the tiles that do not fill the device (all but the first
// `alone` tiles). Each of these blocks sums `split_tiles` tiles of K.
template <class Config_, class Output_, class Epilogue_, bool kSplits = false>
struct Gemm {
    using Config = Config_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Element = typename Config::Element;
    using Rows = typename Config::Rows;

    static constexpr int kTensors = kSplits ? 4 : 3;  // x, weight, out, workspace
    static constexpr int kLeastBlocks = Config::kLeastBlocks > 0 ? Config::kLeastBlocks
                                                                 : Rows::template kLeastBlocks<Element>;

    struct Problem {
        int64_t m, n, k;
        int64_t weight_stride, out_stride;  // of rows, in elements
        int64_t rows_per_batch;             // row m of out is row m % rows_per_batch of a batch
        int64_t block_tiles;                // tiles of K that make up a block of sums, for Sums with blocks
        int64_t alone;                      // the first tiles of each product: one thread block computes each
        int64_t splits, split_tiles;        // of the other tiles: thread blocks per tile, tiles of K per block
        typename Rows::Host rows;           // the rows of x
    };

    static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kThreads = Config::kThreads;
    using TileX = typename Config::template Tile<Rows::kMajor, kTileM>;
    using TileW = typename Config::template Tile<Config::kWeightMajor, kTileN>;
    using CopyX = typename Rows::template Copy<TileX, kThreads, Config::kAccessX>;
    using CopyW = typename Rows::template WeightCopy<TileW, kThreads, Config::kAccessW>;
    using ReadX = Fragments<TileX, Side::kA>;
    using ReadW = Fragments<TileW, Side::kB>;
    template <class Shape>
    using LoopOf = typename Config::template Loop<Shape, CopyX, CopyW, TileX, TileW>;
    using Loop = LoopOf<Config>;

    // Accumulators are staged as rows of floats, padded by 8 floats. A half-warp writes float2 into 4 consecutive rows:
    // with the padding, they fall on 32 different banks.
    // For 16-bit outputs a thread reads a run of 8 floats as two float4. In every second group of 32 columns these two
    // are exchanged. The 8 threads that read at a time then use different banks (kTileN >= 64):
    //
    //   a run's first float4, column     0   8  16  24  32  40  48  56
    //   it is staged at column           0   8  16  24  36  44  52  60
    //   its first bank within the row    0   8  16  24   4  12  20  28
    static constexpr int kStagingStride = kTileN + 8;
    static constexpr bool kHalvesExchanged = sizeof(Output) == 2;
    static __device__ __forceinline__ int staged_col(int col) {
        return kHalvesExchanged ? col ^ (col / 32 % 2 * 4) : col;
    }
    static constexpr int kStagingBytes = kTileM * kStagingStride * static_cast<int>(sizeof(float));
    static constexpr int kSharedBytes = Loop::kSharedBytes > kStagingBytes ? Loop::kSharedBytes : kStagingBytes;
    static_assert(kSharedBytes <= Config::kSharedLimit);

    static __device__ __forceinline__ void run(const Problem& problem, const Rows& rows, const Element* x,
                                               const Element* weight, Output* out, const SplitWorkspace& workspace,
                                               const Epilogue& epilogue) {
        extern __shared__ __align__(1024) unsigned char shared[];
        if (tile_origin(problem).row >= problem.m) return;
        typename Loop::Sum sum;
        multiply<Config>(sum, problem, tile_origin(problem), rows, x, weight, shared);
        if constexpr (Config::kGuarded) {
            // Also a barrier: all threads have read the last tile.
            if (__syncthreads_or(!sum.all_finite())) {
                multiply<typename Config::Guarded>(sum, problem, tile_origin(problem), rows, x, weight, shared);
            }
        }
        if constexpr (kSplits) {
            if (!collect(sum, problem, workspace)) return;
        }
        store(problem, tile_origin(problem), sum, reinterpret_cast<float*>(shared), out, epilogue);
    }

#ifndef __CUDACC_RTC__
    // Blocks start in the order x, y, z. So blocks that run together cover a compact part of out, a band at most kBand
    // tiles high, and share rows of x and of the weight through L2. Blocks that share a tile of out (kSplits) also
    // start together, after all others.
    static dim3 grid(const Problem& problem) {
        const int64_t high = tiles_m(problem), bands = bands_of(problem), products = products_of(problem);
        if constexpr (kSplits) {
            return {static_cast<unsigned>(problem.alone + shared_tiles(problem) * problem.splits), 1,
                    static_cast<unsigned>(products)};
        }
        return {static_cast<unsigned>((high + bands - 1) / bands), static_cast<unsigned>(tiles_n(problem)),
                static_cast<unsigned>(bands * products)};
    }

    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        return launch_kernel<&gemm_kernel<Gemm>>(problem, pointers, epilogue, stream, kThreads, kSharedBytes);
    }
#endif  // __CUDACC_RTC__

protected:
#ifndef __CUDACC_RTC__
    template <auto kKernel>
    static cudaError_t launch_kernel(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                                     cudaStream_t stream, int threads, int shared_bytes) {
        if (const cudaError_t error = allow_shared_memory<kKernel>(shared_bytes); error != cudaSuccess) return error;
        SplitWorkspace workspace{};
        if constexpr (kSplits) {
            workspace = SplitWorkspace::make(pointers[3], shared_tiles(problem) * products_of(problem));
        }
        return queue(kKernel, grid(problem), threads, shared_bytes, stream, problem,
                     Rows::make(problem.rows, Config::kTileK), reinterpret_cast<const Element*>(pointers[0]),
                     reinterpret_cast<const Element*>(pointers[1]), reinterpret_cast<Output*>(pointers[2]), workspace,
                     epilogue);
    }
#endif  // __CUDACC_RTC__

    struct Origin {
        int64_t row, col;
        int split;      // index among the blocks that share the tile; -1 if one block computes it
        int batch = 0;  // index of the product
    };

    // The part of K that a block sums.
    struct Share {
        int64_t first;
        int k;  // elements from `first` on
    };

    static constexpr int kBand = 8;  // height in tiles of a band, whose blocks run together

    static __host__ __device__ __forceinline__ int64_t tiles_m(const Problem& problem) {
        return (problem.m + kTileM - 1) / kTileM;
    }
    static __host__ __device__ __forceinline__ int64_t tiles_n(const Problem& problem) {
        return (problem.n + kTileN - 1) / kTileN;
    }
    static __host__ __device__ __forceinline__ int64_t bands_of(const Problem& problem) {
        return (tiles_m(problem) + kBand - 1) / kBand;
    }

    static __host__ __device__ __forceinline__ int64_t products_of(const Problem& problem) {
        if constexpr (Rows::kBatched) return problem.rows.count;
        return 1;
    }

    // Where a product's x, weight and rows of out begin.
    template <class T>
    static __device__ __forceinline__ const T* x_of(const Problem& problem, const T* x, int batch) {
        if constexpr (Rows::kBatched) return x + batch * problem.rows.x_step;
        return x;
    }
    template <class T>
    static __device__ __forceinline__ const T* weight_of(const Problem& problem, const T* weight, int batch) {
        if constexpr (Rows::kBatched) return weight + batch * problem.rows.weight_step;
        return weight;
    }
    static __device__ __forceinline__ int64_t rows_before(const Problem& problem, int batch) {
        return Rows::kBatched ? batch * problem.m : 0;
    }

    static __host__ __device__ __forceinline__ int64_t shared_tiles(const Problem& problem) {
        return tiles_m(problem) * tiles_n(problem) - problem.alone;
    }

    // Where the index-th of high * wide tiles is. Tiles are numbered band by band (kBand rows of tiles), and column by
    // column within a band: a full first band has tiles 0 to 7 in its first column, 8 to 15 in its second. Tiles that
    // run together thus share rows of x and of the weight through L2.
    struct Place {
        unsigned row, col;  // in tiles

        __device__ __forceinline__ Place(unsigned index, unsigned high, unsigned wide) {
            const unsigned band = index / (kBand * wide), in_band = index - band * kBand * wide;
            const unsigned rows = min(static_cast<unsigned>(kBand), high - band * kBand);
            row = band * kBand + in_band % rows;
            col = in_band / rows;
        }
    };

    // Where the block's tile begins. Without kSplits the last band may reach beyond M.
    static __device__ __forceinline__ Origin tile_origin(const Problem& problem) {
        const uint3 block = ptx::read_block_index();
        if constexpr (Rows::kBatched && !kSplits) {
            const unsigned bands = static_cast<unsigned>(bands_of(problem)), batch = block.z / bands;
            return {(static_cast<int64_t>(block.z - batch * bands) * gridDim.x + block.x) * kTileM,
                    static_cast<int64_t>(block.y) * kTileN, -1, static_cast<int>(batch)};
        }
        if constexpr (!kSplits) {
            return {(static_cast<int64_t>(block.z) * gridDim.x + block.x) * kTileM,
                    static_cast<int64_t>(block.y) * kTileN, -1};
        }
        const int alone = static_cast<int>(problem.alone), splits = static_cast<int>(problem.splits);
        const int beyond = static_cast<int>(block.x) - alone;    // index among the sharing blocks, or negative
        const int tile = beyond < 0 ? beyond : beyond / splits;  // counted from the first shared tile
        const Place at(static_cast<unsigned>(alone + tile), static_cast<unsigned>(tiles_m(problem)),
                       static_cast<unsigned>(tiles_n(problem)));
        return {static_cast<int64_t>(at.row) * kTileM, static_cast<int64_t>(at.col) * kTileN,
                beyond < 0 ? -1 : beyond - tile * splits, Rows::kBatched ? static_cast<int>(block.z) : 0};
    }

    static __device__ __forceinline__ int rows_of(const Problem& problem, const Origin& origin) {
        return static_cast<int>(problem.m - origin.row);
    }

    static __device__ __forceinline__ Share share_of(const Problem& problem, const Origin& origin) {
        if constexpr (!kSplits) return {0, static_cast<int>(problem.k)};
        const int whole = static_cast<int>(problem.k);
        const int share = origin.split < 0 ? whole : static_cast<int>(problem.split_tiles) * Config::kTileK;
        const int first = max(origin.split, 0) * share;
        return {first, min(share, whole - first)};
    }

    // If the tile is shared, hands in this block's part of the sums. True for one block, which then has the whole sums.
    static __device__ __forceinline__ bool collect(typename Loop::Sum& sum, const Problem& problem,
                                                   const SplitWorkspace& workspace) {
        using Part = SplitPart<Config>;
        const Origin origin = tile_origin(problem);
        if (origin.split < 0) return true;
        const unsigned splits = static_cast<unsigned>(problem.splits);
        int64_t tile = (ptx::read_block_index().x - static_cast<unsigned>(problem.alone)) / splits;
        if constexpr (Rows::kBatched) tile += origin.batch * shared_tiles(problem);
        return Part::collect(sum, workspace, tile, origin.split, static_cast<int>(splits), rows_of(problem, origin));
    }

    template <class Shape>
    static __device__ __forceinline__ void multiply(typename Loop::Sum& sum, const Problem& problem,
                                                    const Origin& origin, const Rows& rows, const Element* x,
                                                    const Element* weight, unsigned char* shared) {
        const uint32_t thread = ptx::read_thread_index();
        const int cols = static_cast<int>(problem.n - origin.col);
        const auto [first, k] = share_of(problem, origin);
        x = x_of(problem, x, origin.batch);
        weight = weight_of(problem, weight, origin.batch);
        LoopOf<Shape> loop(rows.template copy<CopyX>(x, origin.row, rows_of(problem, origin), first, k, thread),
                           rows.template copy_weight<Config::kWeightMajor, CopyW>(weight, problem.weight_stride,
                                                                                  origin.col, cols, first, k, thread),
                           thread);
        // Without kSplits, split_tiles counts all tiles of K. Computing that number would take a register, and large
        // tiles have none left.
        const int tiles = !kSplits && Shape::kSums == Sums::kPromoted ? static_cast<int>(problem.split_tiles)
                                                                      : (k + Shape::kTileK - 1) / Shape::kTileK;
        loop.run(sum, ptx::shared_address(shared), tiles, static_cast<int>(problem.block_tiles));
    }

    static __device__ __forceinline__ void stage(const typename Loop::Sum& sum, float* staging) {
        const uint32_t thread = ptx::read_thread_index(), lane = thread % 32;
        const int col = static_cast<int>(Config::warp_n(thread) + lane % 4 * 2);
        float* rows = staging + (Config::warp_m(thread) + lane / 4) * kStagingStride;
#pragma unroll
        for (int m = 0; m < Config::kMmasM; ++m) {
#pragma unroll
            for (int n = 0; n < Config::kMmasN; ++n) {
                const float(&d)[4] = sum.value[m][n];
                float* at = rows + m * kMmaM * kStagingStride + staged_col(col + n * kMmaN);
                *reinterpret_cast<float2*>(at) = make_float2(d[0], d[1]);
                *reinterpret_cast<float2*>(at + 8 * kStagingStride) = make_float2(d[2], d[3]);
            }
        }
    }

    // Applies the epilogue and writes the tile. A thread has one run of columns in every kRowStep-th row. It works on
    // kTogether rows per turn, so that their latencies hide each other. It reads operands kAhead turns ahead: those of
    // the first turns before the accumulators are staged. Operands that all rows share are read once, and values that
    // follow from them alone are computed once: without that, a batch normalisation's scale took more time than all the
    // rest of a pointwise convolution.
    static __device__ __forceinline__ void store(const Problem& problem, const Origin& origin,
                                                 const typename Loop::Sum& sum, float* staging, Output* out,
                                                 const Epilogue& epilogue) {
        constexpr int kRunsPerRow = kTileN / kVector, kRowStep = kThreads / kRunsPerRow;
        constexpr int kSteps = (kTileM + kRowStep - 1) / kRowStep;
        constexpr int kRunBytes = kVector * Epilogue::kElementBytes;
        constexpr int kTogether = kSteps == 1 ? 1 : kSteps == 2 || kRunBytes > 16 ? 2 : 4;
        constexpr int kTurns = (kSteps + kTogether - 1) / kTogether;
        // If rows do not divide evenly, the last turn also reads rows beyond the staged tile, but does not store them.
        constexpr bool kEven = kTileM == kRowStep * kTogether * kTurns;
        static_assert(kEven || (kTurns * kTogether + 1) * kRowStep * kStagingStride * 4 <= kSharedBytes);
        using Values = typename Epilogue::template RowValues<kVector, Position>;
        constexpr int kAhead = turns_ahead(kTurns, kTogether * kRunBytes);
        const uint32_t thread = ptx::read_thread_index();
        const int run = static_cast<int>(thread % kRunsPerRow * kVector), first = static_cast<int>(thread / kRunsPerRow);
        const int rows = static_cast<int>(min(static_cast<int64_t>(kTileM), problem.m - origin.row));
        const int count = static_cast<int>(min(static_cast<int64_t>(kVector), problem.n - origin.col - run));
        const int64_t top = rows_before(problem, origin.batch) + origin.row;
        const bool exists = count > 0 && (kThreads % kRunsPerRow == 0 || first < kRowStep);
        // Runs and rows beyond the end read what the last ones read, so that no branch separates the loads.
        const int64_t col = exists || !kWhole ? origin.col + run : problem.n - kVector;
        const auto load = [&](Values(&values)[kTogether], int turn) {
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int row = min(first + (turn * kTogether + i) * kRowStep, rows - 1);
                values[i] = epilogue.template load_rows<kRuns, kVector>(position(problem, top + row, col), count);
            }
        };
        const auto columns = epilogue.template load_columns<kRuns, kVector>(Position{0, 0, col}, count);
        Values ahead[kAhead][kTogether];
#pragma unroll
        for (int turn = 0; turn < kAhead; ++turn) load(ahead[turn], turn);
        __syncthreads();  // all threads have read the last tile
        stage(sum, staging);
        __syncthreads();
        const int turns = (rows - first + kTogether * kRowStep - 1) / (kTogether * kRowStep);
#pragma unroll 1
        for (int turn = 0; turn < turns; ++turn) {
            const int row = first + turn * kTogether * kRowStep;
            Values operands[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                operands[i] = ahead[0][i];
#pragma unroll
                for (int later = 1; later < kAhead; ++later) ahead[later - 1][i] = ahead[later][i];
            }
            if (turn + kAhead < kTurns) load(ahead[kAhead - 1], turn + kAhead);
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                float value[kVector];
                load_staged(value, staging + (row + i * kRowStep) * kStagingStride, run);
                epilogue.apply(value, columns, operands[i]);
                if (!exists || row + i * kRowStep >= rows) continue;
                store_run<Output, kVector, kWhole ? Runs::kWhole : Runs::kAnywhere>(
                    out + (top + row + i * kRowStep) * problem.out_stride + col, value, count);
            }
        }
    }

    // kVector: columns of a run, which a thread stores at once. kWhole: whether every run exists as a whole.
    static constexpr int kVector = kChunkBytes / static_cast<int>(sizeof(Output));
    static constexpr bool kWhole = Epilogue::kColumns % kVector == 0;
    static constexpr Runs kRuns = kWhole ? Runs::kWhole : Runs::kAligned;

    // How many turns' operands fit into 48 registers, beside the accumulators. `bytes`: that a turn reads of operands
    // which vary like the output.
    static constexpr int turns_ahead(int turns, int bytes) {
        const int fit = bytes == 0 ? 1 : 48 * 4 / bytes;
        return fit < 1 ? 1 : fit < turns ? fit : turns;
    }

    static __device__ __forceinline__ void load_staged(float (&value)[kVector], const float* row, int run) {
#pragma unroll
        for (int i = 0; i < kVector; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(row + staged_col(run + i));
            value[i] = four.x;
            value[i + 1] = four.y;
            value[i + 2] = four.z;
            value[i + 3] = four.w;
        }
    }

    static __device__ __forceinline__ Position position(const Problem& problem, int64_t row, int64_t col) {
        return position_in<Epilogue>(row, col, problem.rows_per_batch);
    }
};

// Gemm with split-K: Problem::splits thread blocks share a tile.
template <class Config, class Output, class Epilogue>
using SplitGemm = Gemm<Config, Output, Epilogue, true>;

}  // namespace fxfuse
