// A thread block's loop over K by Hopper's warpgroup products (wgmma), for 16-bit operands. Tensor cores read both
// operands from shared memory by themselves, so that warps only copy tiles.
#pragma once

#include <cstdint>

#include "mainloop.cuh"
#include "mma.cuh"
#include "ptx.cuh"
#include "ptx_sm90.cuh"
#include "shared_tile.cuh"
#include "wgmma.cuh"

namespace fxfuse {

template <class Shape, class CopyX, class CopyW, class TileX, class TileW>
struct WgmmaMainloop;

// The shape of a WgmmaMainloop, as MainloopShape is that of a Mainloop. A warpgroup has 64 rows, and a share of the
// columns if kGroupsN is not 1. kBlocksPerSm: thread blocks per multiprocessor that there are registers for; while one
// stores, another multiplies.
template <class Mma_, int kTileM_, int kTileN_, int kGroupsN_, int kStages_, int kBlocksPerSm_>
struct WgmmaShape {
    using Mma = Mma_;
    using Element = typename Mma::Element;
    static constexpr int kTileM = kTileM_, kTileN = kTileN_, kTileK = kTileBytesOfK / static_cast<int>(sizeof(Element));
    static constexpr int kStages = kStages_, kSteps = kTileBytesOfK / kMmaBytesOfK;
    static constexpr Sums kSums = Sums::kRunning;
    static constexpr int kGroupRows = 64, kGroupsM = kTileM / kGroupRows, kGroupsN = kGroupsN_;
    static constexpr int kThreads = kGroupsM * kGroupsN * kWarpgroup, kGroupColumns = kTileN / kGroupsN;
    static constexpr int kMmasM = 1, kMmasN = kGroupColumns / kMmaN;  // a warp has 16 rows
    static constexpr int kLeastBlocks = kBlocksPerSm_;
    static constexpr int kSharedLimit = 227 * 1024;
    static_assert(kTileM % kGroupRows == 0 && kTileN % (kGroupsN * 2 * kMmaN) == 0);
    static_assert(kStages >= 3);

    // Where a warp's tile begins in the block's.
    static __device__ __forceinline__ uint32_t warp_m(uint32_t thread) { return thread / 32 % (kGroupsM * 4) * kMmaM; }
    static __device__ __forceinline__ uint32_t warp_n(uint32_t thread) {
        return thread / 32 / (kGroupsM * 4) * kGroupColumns;
    }

    template <Major kMajor, int kExtent>
    using Tile = OperandTile<Element, kMajor, kExtent, kMajor == Major::kMN>;

    template <class Shape, class CopyX, class CopyW, class TileX, class TileW>
    using Loop = WgmmaMainloop<Shape, CopyX, CopyW, TileX, TileW>;
};

// A ring of stages in shared memory, each with a tile of x and one of w in SwizzledMatrix's order. Copies fill stages
// some tiles ahead of the products.
//
// Alone on a multiprocessor, a thread block waits for a tile while the products of the tile before are under way. After
// the barrier of tile t, products of tile t - 1 may still run, and the next copy refills stage (t - 2) % kStages. Where
// blocks share a multiprocessor, one multiplies while another waits, and stages are better spent on copies: products of
// tile t - 1 end before those of tile t begin, and the next copy refills stage (t - 1) % kStages.
template <class Shape, class TileX, class TileW>
struct WgmmaStages {
    using Mma = typename Shape::Mma;
    using Sum = Accumulators<Shape::kMmasM, Shape::kMmasN>;
    static constexpr uint32_t kStageBytes = TileX::kBytes + TileW::kBytes;
    static constexpr bool kAlone = Shape::kLeastBlocks == 1;
    static constexpr int kCopiesAhead = Shape::kStages - (kAlone ? 2 : 1);
    // Bytes per m or n in either order: 64 of them are 64 rows, or a slab of 64 rows of K.
    static constexpr int kRowBytes = TileX::kSlabRowBytes;
    static constexpr bool kTurnedX = TileX::kMajor == Major::kMN, kTurnedW = TileW::kMajor == Major::kMN;
    // Columns of one instruction.
    static constexpr int kColumns = Shape::kGroupColumns > 128 ? Shape::kGroupColumns / 2 : Shape::kGroupColumns;
    static constexpr int kProducts = Shape::kGroupColumns / kColumns, kSums = kColumns / 2;
    static_assert(!kTurnedW || kColumns % 64 == 0, "a product begins with a slab");

    // `shared`: the address of kStages * kStageBytes, a multiple of 1024.
    __device__ __forceinline__ WgmmaStages(uint32_t shared, uint32_t thread)
        : first_(shared),
          fill_(shared),
          use_(shared),
          used_(shared),
          first_row_(Shape::warp_m(thread / kWarpgroup * kWarpgroup)),
          first_column_(Shape::warp_n(thread)) {}

    // Starts the first copies. `copy` calls `start` for the next tile, or `start_nothing`.
    template <class Copy>
    __device__ __forceinline__ void begin(Copy copy) {
#pragma unroll 1
        for (int i = 0; i < kCopiesAhead; ++i) copy();
    }

    // sum += x * w over the next `tiles` tiles of K. On return, their products are under way or done.
    template <class Copy>
    __device__ __forceinline__ void run(Sum& sum, int tiles, Copy copy) {
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            ptx::cp_async_wait<kCopiesAhead - 1>();
            ptx::async_proxy_fence();
            if constexpr (!kAlone) ptx::wgmma_wait<0>();
            __syncthreads();
            multiply(sum, use_);
            used_ = use_;
            use_ = after(use_);
            copy();
            if constexpr (kAlone) ptx::wgmma_wait<1>();
        }
    }
    static __device__ __forceinline__ void end() { ptx::wgmma_wait<0>(); }

    template <class CopyX, class CopyW>
    __device__ __forceinline__ void start(CopyX& copy_x, CopyW& copy_w) {
        copy_x.start(fill_);
        copy_w.start(fill_ + TileX::kBytes);
        fill_ = after(fill_);
        start_nothing();
    }
    static __device__ __forceinline__ void start_nothing() { ptx::cp_async_commit(); }

    // After end(): a stage that nothing is copied to before the next run's first barrier.
    __device__ __forceinline__ uint32_t free_stage() const { return used_; }

private:
    uint32_t first_, fill_, use_, used_;  // stages' addresses
    uint32_t first_row_, first_column_;   // of the warpgroup

    __device__ __forceinline__ uint32_t after(uint32_t stage) const {
        return stage == first_ + (Shape::kStages - 1) * kStageBytes ? first_ : stage + kStageBytes;
    }

    // Bytes from a product's part of K to the next one's: within a row (K-major), or rows further on (MN-major).
    template <class Tile>
    static constexpr int step_bytes() {
        const int elements = kMmaBytesOfK / static_cast<int>(sizeof(typename Shape::Element));
        return Tile::kMajor == Major::kK ? kMmaBytesOfK : elements * kRowBytes;
    }
    template <class Tile>
    static constexpr uint32_t slab() {
        return Tile::kMajor == Major::kK ? 0 : Tile::kSlabBytes;
    }

    __device__ __forceinline__ void multiply(Sum& sum, uint32_t stage) const {
        // The first lane's value, for the whole warp: such values go to the registers that descriptors are made of.
        const ptx::SwizzledMatrix a(__shfl_sync(~0u, stage + first_row_ * kRowBytes, 0), slab<TileX>());
        const ptx::SwizzledMatrix b(__shfl_sync(~0u, stage + TileX::kBytes + first_column_ * kRowBytes, 0),
                                    slab<TileW>());
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < Shape::kSteps; ++step) {
#pragma unroll
            for (int i = 0; i < kProducts; ++i) {
                float(&part)[kSums] = *reinterpret_cast<float(*)[kSums]>(&sum.value[0][i * kColumns / kMmaN]);
                start_product<kTurnedX, kTurnedW>(
                    Mma{}, part, a + step * step_bytes<TileX>() / kChunkBytes,
                    b + (step * step_bytes<TileW>() + i * kColumns * kRowBytes) / kChunkBytes, true);
            }
        }
        ptx::wgmma_commit();
    }
};

// Mainloop by wgmma instead of mma: one run, for a thread block that computes one tile of the result.
template <class Shape, class CopyX, class CopyW, class TileX, class TileW>
struct WgmmaMainloop {
    using Stages = WgmmaStages<Shape, TileX, TileW>;
    using Sum = typename Stages::Sum;
    static constexpr int kSharedBytes = Stages::kStageBytes * Shape::kStages;

    CopyX copy_x;
    CopyW copy_w;
    uint32_t thread;

    __device__ __forceinline__ WgmmaMainloop(const CopyX& copy_x, const CopyW& copy_w, uint32_t thread)
        : copy_x(copy_x), copy_w(copy_w), thread(thread) {}

    __device__ __forceinline__ void run(Sum& sum, uint32_t shared, int tiles, int) {
        Stages stages(shared, thread);
        const auto copy = [&] { stages.start(copy_x, copy_w); };  // after the last tile: zeros that are not multiplied
        stages.begin(copy);
        sum.clear();
        stages.run(sum, tiles, copy);
        stages.end();
        ptx::cp_async_wait<0>();
    }
};

}  // namespace fxfuse
