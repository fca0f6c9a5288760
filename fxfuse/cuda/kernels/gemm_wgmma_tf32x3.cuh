// The matrix products of gemm.cuh, and convolutions on channels_last, in 3xTF32 by Hopper's warpgroup products
// (mainloop_wgmma_tf32x3.cuh). Built for sm_90a. Every read of x and of the weight takes 16 bytes.
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "gemm.cuh"
#include "launch.cuh"
#include "mainloop_wgmma_tf32x3.cuh"
#include "ptx.cuh"
#include "ptx_sm90.cuh"
#include "split_k.cuh"
#include "tile_after_tile.cuh"
#include "windows.cuh"

namespace fxfuse {

// See WgmmaTf32x3Shape.
template <int kTileM, int kTileN, int kStages, Sums kSums, Major kWeightMajor_, class Rows_ = MatrixRows>
struct WgmmaTf32x3Config : WgmmaTf32x3Shape<kTileM, kTileN, kStages, kSums> {
    static constexpr Major kWeightMajor = kWeightMajor_;
    static constexpr int kAccessX = kChunkBytes, kAccessW = kChunkBytes;
    static constexpr int kWeights = 1;
    using Rows = Rows_;

    // For thread blocks that find their sums not finite. It uses mma, whose accumulator fragments are the same.
    static constexpr bool kGuarded = true;
    struct Guarded : MainloopShape<Tf32x3, kTileM, kTileN, kTileM / kMmaM, 1, kStages, Sums::kStepwise> {
        static constexpr int kUnroll = 1;
    };
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kBlockThreads, 1)
    wgmma_tf32x3_kernel(const typename Kernel::Problem problem, const typename Kernel::Rows rows,
                        const float* __restrict__ x, const typename Kernel::Weights weights,
                        typename Kernel::Output* __restrict__ out, const typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(problem, rows, x, weights.of[0], out, epilogue));
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kBlockThreads, 1)
    split_wgmma_tf32x3_kernel(const typename Kernel::Problem problem, const typename Kernel::Rows rows,
                              const float* __restrict__ x, const float* __restrict__ weight,
                              typename Kernel::Output* __restrict__ out, const SplitWorkspace workspace,
                              const typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(problem, rows, x, weight, out, workspace, epilogue));
}

// The roles of warpgroups in both kernels below, producer and consumer. Base is SplitGemm or TileAfterTile.
template <class Base>
struct Tf32x3Roles {
    using Config = typename Base::Config;
    using TileX = typename Base::TileX;
    using TileW = typename Base::TileW;
    using CopyX = typename Base::Rows::template Copy<TileX, kWarpgroup, Config::kAccessX, Config::kThreads>;
    using CopyW = TileCopy<TileW, kWarpgroup, Config::kAccessW, Base::Rows::kRagged>;
    using Ring = Tf32x3Ring<Config, TileX, TileW>;
    using Producer = Tf32x3Producer<Config, TileX, TileW>;
    using Consumer = Tf32x3Consumer<Config, TileX, TileW>;

    // Calls `produce` with a Producer or `consume` with a Consumer. The producer's threads then end; barriers of the
    // block do not wait for ended threads.
    template <class Produce, class Consume>
    static __device__ __forceinline__ void run(const unsigned char* memory, Produce produce, Consume consume) {
        const uint32_t thread = ptx::read_thread_index();
        uint32_t shared = ptx::shared_address(memory);
        ptx::forget(shared);  // keeps the number: it would be derived again for every tile
        if (thread == 0) Ring::init(shared);
        __syncthreads();
        if (thread >= Config::kThreads) {
            ptx::give_registers<Config::kProducerRegisters>();
            produce(Producer(shared, thread - Config::kThreads));
        } else {
            ptx::take_registers<Config::kConsumerRegisters>();
            consume(Consumer(shared, thread));
        }
    }

    // Copies of the weight: for columns of the result from `col` on, `k` elements of K from `first` on.
    template <class Problem>
    static __device__ __forceinline__ CopyW copy_w(const Problem& problem, const float* weight, int64_t col, int64_t first,
                                                   int k, uint32_t thread) {
        const int64_t stride = problem.weight_stride;
        weight += Config::kWeightMajor == Major::kK ? col * stride + first : first * stride + col;
        return CopyW(weight, stride, static_cast<int>(problem.n - col), k, thread);
    }

    static __device__ __forceinline__ int tiles_of(int k) { return (k + Config::kTileK - 1) / Config::kTileK; }
};

// As WgmmaGemm, by persistent thread blocks: as many as the device holds, each computing one tile after another. While
// some warps store a tile, the producer brings the next.
template <class Config_, class Output_, class Epilogue_>
struct WgmmaTf32x3Gemm : TileAfterTile<Config_, Output_, Epilogue_> {
    using Base = TileAfterTile<Config_, Output_, Epilogue_>;
    using Config = Config_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using typename Base::Problem, typename Base::Rows, typename Base::Origin, typename Base::Store;
    using typename Base::Columns, typename Base::RowsOfTurn, typename Base::Sum;
    using Base::kThreads, Base::tile_count;
    using Roles = Tf32x3Roles<Base>;
    using CopyX = typename Roles::CopyX;
    using CopyW = typename Roles::CopyW;

    static constexpr bool kFetchesAhead = Config::kSums != Sums::kBlockwise;
    // Where warps stage their results: behind the ring.
    static constexpr int kStagedAt = (Roles::Ring::kSharedBytes + 127) / 128 * 128;
    static constexpr int kSharedBytes = kStagedAt + kThreads / 32 * Base::kStagedBytes;
    static_assert(kSharedBytes <= Config::kSharedLimit && Base::Base::kSharedBytes <= kSharedBytes);

    static __device__ __forceinline__ void run(const Problem& problem, const Rows& rows, const float* x,
                                               const float* weight, Output* out, const Epilogue& epilogue) {
        extern __shared__ __align__(1024) unsigned char memory[];
        const unsigned tiles = tile_count(problem);
        const int k = static_cast<int>(problem.k), tiles_k = Roles::tiles_of(k);
        const auto produce = [&](typename Roles::Producer producer) {
            const auto copy_x = [&](const Origin& at) {
                const int extent = static_cast<int>(problem.m - at.row);
                return rows.template copy<CopyX>(Base::x_of(problem, x, at.batch), at.row, extent, 0, k, producer.thread);
            };
            const auto copy_w = [&](const Origin& at) {
                return Roles::copy_w(problem, Base::weight_of(problem, weight, at.batch), at.col, 0, k, producer.thread);
            };
            unsigned tile = blockIdx.x;
            int left = tiles_k;
            CopyX of_x = copy_x(Origin(problem, tile));
            CopyW of_w = copy_w(Origin(problem, tile));
            const int64_t own = (tiles - 1 - tile) / gridDim.x + 1;
            producer.run(own * tiles_k, [&](uint32_t to_x, uint32_t to_w) {
                if (left == 0) {
                    tile += gridDim.x;
                    of_x = copy_x(Origin(problem, tile));
                    of_w = copy_w(Origin(problem, tile));
                    left = tiles_k;
                }
                --left;
                of_x.start(to_x);
                of_w.start(to_w);
            });
        };
        const auto consume = [&](typename Roles::Consumer consumer) {
            uint32_t not_finite = 0;  // bit i: any of this block's tiles i, i + 32, …
            uint32_t bit = 1;
#pragma unroll 1
            for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                Sum sum;
                const bool more = tile + gridDim.x < tiles;
                consumer.begin(sum, static_cast<int>(problem.block_tiles));
                // The store's operands are fetched before the last products, where there are registers for them.
                consumer.run(sum, kFetchesAhead ? tiles_k - 1 : tiles_k, kFetchesAhead || more);
                const Store store(problem, Origin(problem, tile), out, epilogue);
                RowsOfTurn rows_ahead;
                store.fetch(rows_ahead, 0, 0);
                const Columns columns = store.fetch_columns(0);
                if constexpr (kFetchesAhead) consumer.run(sum, 1, more);
                consumer.end(sum);
                if (!sum.all_finite()) not_finite |= bit;
                bit = bit << 1 | bit >> 31;
                store.all(sum, columns, rows_ahead, memory + kStagedAt);
            }
            if (__syncthreads_or(not_finite != 0)) {
                repeat(not_finite, problem, rows, x, weight, out, epilogue, memory);
            }
        };
        Roles::run(memory, produce, consume);
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        return Base::template launch_kernel<&wgmma_tf32x3_kernel<WgmmaTf32x3Gemm>>(
            problem, pointers, epilogue, stream, Config::kBlockThreads, kSharedBytes);
    }
#endif  // __CUDACC_RTC__

private:
    // Computes those tiles once more in which any thread found its sums not finite.
    static __device__ __forceinline__ void repeat(uint32_t not_finite, const Problem& problem, const Rows& rows,
                                                  const float* x, const float* weight, Output* out,
                                                  const Epilogue& epilogue, unsigned char* memory) {
        using Gemm = typename Base::Base;
        uint32_t bit = 1;
#pragma unroll 1
        for (unsigned tile = blockIdx.x; tile < tile_count(problem); tile += gridDim.x, bit = bit << 1 | bit >> 31) {
            // Also a barrier: all threads have stored the previous tile.
            if (!__syncthreads_or((not_finite & bit) != 0)) continue;
            const Origin at(problem, tile);
            const typename Gemm::Origin origin{at.row, at.col, 0, at.batch};
            Sum sum;
            Gemm::template multiply<typename Config::Guarded>(sum, problem, origin, rows, x, weight, memory);
            Gemm::store(problem, origin, sum, reinterpret_cast<float*>(memory), out, epilogue);
        }
    }
};

// As SplitGemm: each thread block computes its share of one tile.
template <class Config_, class Output_, class Epilogue_>
struct SplitWgmmaTf32x3Gemm : SplitGemm<Config_, Output_, Epilogue_> {
    using Base = SplitGemm<Config_, Output_, Epilogue_>;
    using Config = Config_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using typename Base::Problem, typename Base::Rows;
    using Base::tile_origin, Base::rows_of, Base::share_of;
    using Roles = Tf32x3Roles<Base>;
    using CopyX = typename Roles::CopyX;
    using CopyW = typename Roles::CopyW;

    static constexpr int kSharedBytes =
        Roles::Ring::kSharedBytes > Base::kSharedBytes ? Roles::Ring::kSharedBytes : Base::kSharedBytes;
    static_assert(kSharedBytes <= Config::kSharedLimit);

    static __device__ __forceinline__ void run(const Problem& problem, const Rows& rows, const float* x,
                                               const float* weight, Output* out, const SplitWorkspace& workspace,
                                               const Epilogue& epilogue) {
        extern __shared__ __align__(1024) unsigned char memory[];
        if (tile_origin(problem).row >= problem.m) return;
        const auto produce = [&](typename Roles::Producer producer) {
            const auto origin = tile_origin(problem);
            const auto [first, k] = share_of(problem, origin);
            CopyX copy_x = rows.template copy<CopyX>(Base::x_of(problem, x, origin.batch), origin.row,
                                                     rows_of(problem, origin), first, k, producer.thread);
            CopyW copy_w = Roles::copy_w(problem, Base::weight_of(problem, weight, origin.batch), origin.col, first, k,
                                         producer.thread);
            producer.run(Roles::tiles_of(k), [&](uint32_t to_x, uint32_t to_w) {
                copy_x.start(to_x);
                copy_w.start(to_w);
            });
        };
        const auto consume = [&](typename Roles::Consumer consumer) {
            const int tiles = Roles::tiles_of(share_of(problem, tile_origin(problem)).k);
            typename Base::Loop::Sum sum;
            consumer.begin(sum, static_cast<int>(problem.block_tiles));
            consumer.run(sum, tiles, false);
            consumer.end(sum);
            // Also a barrier: all threads have read the last tile.
            if (__syncthreads_or(!sum.all_finite())) {
                Base::template multiply<typename Config::Guarded>(sum, problem, tile_origin(problem), rows, x, weight,
                                                                  memory);
            }
            if (!Base::collect(sum, problem, workspace)) return;
            Base::store(problem, tile_origin(problem), sum, reinterpret_cast<float*>(memory), out, epilogue);
        };
        Roles::run(memory, produce, consume);
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        return Base::template launch_kernel<&split_wgmma_tf32x3_kernel<SplitWgmmaTf32x3Gemm>>(
            problem, pointers, epilogue, stream, Config::kBlockThreads, kSharedBytes);
    }
#endif  // __CUDACC_RTC__
};

}  // namespace fxfuse
