// The matrix products of gemm.cuh, convolutions on channels_last, and the gradients of their filters, by Hopper's wgmma
// (mainloop_wgmma.cuh), built for sm_90a. x and the weight have 16-bit elements, and every read has 16 bytes.
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "epilogue.cuh"
#include "gemm.cuh"
#include "launch.cuh"
#include "mainloop_wgmma.cuh"
#include "ptx.cuh"
#include "tile_after_tile.cuh"
#include "windows.cuh"

namespace fxfuse {

// See WgmmaShape, and TileAfterTile for kWeights.
template <class Mma, int kTileM, int kTileN, int kGroupsN, int kStages, int kBlocksPerSm, Major kWeightMajor_,
          class Rows_ = MatrixRows, int kWeights_ = 1>
struct WgmmaGemmConfig : WgmmaShape<Mma, kTileM, kTileN, kGroupsN, kStages, kBlocksPerSm> {
    static constexpr Major kWeightMajor = kWeightMajor_;
    static_assert(kWeights_ == 1 || kWeightMajor == Major::kK, "two weights share a tile's rows");
    static constexpr int kAccessX = kChunkBytes, kAccessW = kChunkBytes;
    static constexpr bool kGuarded = false;
    static constexpr int kWeights = kWeights_;
    using Rows = Rows_;
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kThreads, Kernel::kLeastBlocks)
    wgmma_gemm_kernel(const typename Kernel::Problem problem, const typename Kernel::Rows rows,
                      const typename Kernel::Element* __restrict__ x, const typename Kernel::Weights weights,
                      typename Kernel::Output* __restrict__ out, const typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(problem, rows, x, weights, out, epilogue));
}

// Gemm by persistent thread blocks, as many as the device holds. Each computes one tile after another: while a block
// stores a tile, copies for its next tile are under way. Results go out through a stage that is free meanwhile, where
// each warp stores its own part by itself.
template <class Config_, class Output_, class Epilogue_>
struct WgmmaGemm : TileAfterTile<Config_, Output_, Epilogue_> {
    using Base = TileAfterTile<Config_, Output_, Epilogue_>;
    using Config = Config_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using typename Base::CopyX, typename Base::Element, typename Base::Problem, typename Base::Rows, typename Base::Weights;
    using typename Base::Columns, typename Base::Origin, typename Base::RowsOfTurn, typename Base::Store, typename Base::Sum;
    using Base::kFetchesAhead, Base::kStagedBytes, Base::kThreads, Base::kWeights, Base::tile_count;
    using Stages = WgmmaStages<Config, typename Base::TileX, typename Base::TileW>;
    using TileOfOne = typename Config::template Tile<Config::kWeightMajor, Base::kTileCols>;
    using CopyOfOne = typename Rows::template WeightCopy<TileOfOne, kThreads, Config::kAccessW>;

    struct CopyW {
        CopyOfOne first, last;  // the same if there is one weight

        __device__ __forceinline__ void start(uint32_t shared) {
            first.start(shared);
            if constexpr (kWeights == 2) last.start(shared + TileOfOne::kBytes);
        }
    };

    static constexpr int kSharedBytes = Stages::kStageBytes * Config::kStages;

    static __device__ __forceinline__ void run(const Problem& problem, const Rows& rows, const Element* x,
                                               const Weights& weights, Output* out, const Epilogue& epilogue) {
        extern __shared__ __align__(1024) unsigned char shared[];
        static_assert(kThreads / 32 * kStagedBytes <= static_cast<int>(Stages::kStageBytes));
        const uint32_t thread = ptx::read_thread_index();
        const unsigned tiles = tile_count(problem);
        const int tiles_k = static_cast<int>((problem.k + Config::kTileK - 1) / Config::kTileK);
        Stages stages(ptx::shared_address(shared), thread);

        // Copies are ahead of the products: at output tile `ahead`, of which `left` tiles of K are still to be copied.
        unsigned ahead = blockIdx.x;
        int left = tiles_k;
        const auto copy_x = [&] {
            const Origin at(problem, ahead);
            return rows.template copy<CopyX>(Base::x_of(problem, x, at.batch), at.row,
                                             static_cast<int>(problem.m - at.row), 0, static_cast<int>(problem.k),
                                             thread);
        };
        const auto copy_w = [&] {
            const Origin at(problem, ahead);
            const auto copy = [&](const Element* weight) {
                return rows.template copy_weight<Config::kWeightMajor, CopyOfOne>(
                    Base::weight_of(problem, weight, at.batch), problem.weight_stride, at.col,
                    static_cast<int>(problem.n - at.col), 0, static_cast<int>(problem.k), thread);
            };
            return CopyW{copy(weights.of[0]), copy(weights.of[kWeights - 1])};
        };
        CopyX of_x = copy_x();
        CopyW of_w = copy_w();
        const auto copy = [&] {
            if (left == 0) {
                ahead += gridDim.x;
                if (ahead >= tiles) return stages.start_nothing();
                of_x = copy_x();
                of_w = copy_w();
                left = tiles_k;
            }
            --left;
            stages.start(of_x, of_w);
        };
        stages.begin(copy);
#pragma unroll 1
        for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const Store store(problem, Origin(problem, tile), out, epilogue);
            // While copies are of the same output tile as the products, they need not test for its end.
            const int same = ahead == tile ? left : 0;
            Sum sum;
            sum.clear();
            stages.run(sum, same, [&] { stages.start(of_x, of_w); });
            left -= same;
            RowsOfTurn rows_ahead;
            if constexpr (kFetchesAhead) store.fetch(rows_ahead, 0, 0);
            stages.run(sum, tiles_k - same, copy);
            if constexpr (!kFetchesAhead) store.fetch(rows_ahead, 0, 0);
            const Columns columns = store.fetch_columns(0);
            stages.end();
            __syncthreads();  // all warps' products have read the last stage
            store.all(sum, columns, rows_ahead, shared + (stages.free_stage() - ptx::shared_address(shared)));
        }
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        constexpr auto kKernel = &wgmma_gemm_kernel<WgmmaGemm>;
        return Base::template launch_kernel<kKernel>(problem, pointers, epilogue, stream, kThreads, kSharedBytes);
    }
#endif  // __CUDACC_RTC__
};

}  // namespace fxfuse
