// A thread block's loop over K: a ring of shared-memory stages filled by cp.async, fragments read and split ahead of
// their products, and partial sums added up in fp32 outside the tensor cores.
#pragma once

#include <cstdint>

#include "mma.cuh"
#include "ptx.cuh"
#include "shared_tile.cuh"

namespace fxfuse {

// How products become a sum over K. A step is one instruction's worth of K; a tile has kSteps steps. Tensor cores
// truncate when they accumulate: a running sum of 3xTF32 over K = 8192 is 36 (normal data) to 126 times (uniform) less
// accurate than cuBLAS fp32. cuda/gemm_accuracy.py has the accuracy of the others.
enum class Sums {
    kRunning,    // in the tensor cores only
    kPromoted,   // in the tensor cores for a block of tiles; blocks are added up in fp32
    kHalved,     // in the tensor cores for half a tile; halves are added up in fp32 (WgmmaTf32x3Config only)
    kStepwise,   // in the tensor cores for one step only; steps are added up in fp32
    kBlockwise,  // in the tensor cores for one step only; steps add up to blocks, blocks to the total, in fp32: a tree
};

template <class Shape, class CopyX, class CopyW, class ReadX, class ReadW, uint32_t kBytesX, uint32_t kBytesW>
struct Mainloop;

// kHoldsK: every tile of K has a stage of its own, so that all copies are in flight before the first product.
template <class Mma_, int kTileM_, int kTileN_, int kWarpsM_, int kWarpsN_, int kStages_, Sums kSums_,
          bool kHoldsK_ = false>
struct MainloopShape {
    using Mma = Mma_;
    using Element = typename Mma::Element;
    static constexpr int kTileM = kTileM_, kTileN = kTileN_, kTileK = kTileBytesOfK / static_cast<int>(sizeof(Element));
    static constexpr int kStages = kStages_, kSteps = kTileBytesOfK / kMmaBytesOfK;
    static constexpr Sums kSums = kSums_;
    static constexpr bool kHoldsK = kHoldsK_;
    static constexpr int kUnroll = kSteps;  // steps in the loop's unrolled body
    static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kThreads = kWarpsM * kWarpsN * 32;
    static constexpr int kWarpTileM = kTileM / kWarpsM, kWarpTileN = kTileN / kWarpsN;
    static constexpr int kMmasM = kWarpTileM / kMmaM, kMmasN = kWarpTileN / kMmaN;
    static constexpr int kLeastBlocks = 0;  // blocks per multiprocessor that registers must allow; 0: ptxas decides
    static constexpr int kSharedLimit = 163 * 1024;  // bytes of a thread block: an A100's limit
    static_assert(kTileM % (kWarpsM * kMmaM) == 0 && kTileN % (kWarpsN * 2 * kMmaN) == 0, "B is read in pairs");
    static_assert(kStages >= 2 || kHoldsK, "one stage is filled while another is used");

    // Where a warp's tile begins in the block's.
    static __device__ __forceinline__ uint32_t warp_m(uint32_t thread) { return thread / 32 % kWarpsM * kWarpTileM; }
    static __device__ __forceinline__ uint32_t warp_n(uint32_t thread) { return thread / 32 / kWarpsM * kWarpTileN; }

    template <Major kMajor, int kExtent>
    using Tile = OperandTile<Element, kMajor, kExtent>;

    // The mainloop of Shape, which is this struct or derived from it.
    template <class Shape, class CopyX, class CopyW, class TileX, class TileW>
    using Loop = Mainloop<Shape, CopyX, CopyW, Fragments<TileX, Side::kA>, Fragments<TileW, Side::kB>, TileX::kBytes,
                          TileW::kBytes>;
};

// D fragments (see mma.cuh) of kMmasM x kMmasN MMA tiles.
template <int kMmasM, int kMmasN>
struct Accumulators {
    float value[kMmasM][kMmasN][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) {
#pragma unroll
            for (int n = 0; n < kMmasN; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) value[m][n][i] = 0.0f;
            }
        }
    }

    __device__ __forceinline__ bool all_finite() const {
        float zero = 0.0f;  // becomes NaN at a value that is not finite: 0 * inf and 0 * NaN are NaN
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) {
#pragma unroll
            for (int n = 0; n < kMmasN; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) zero = fmaf(value[m][n][i], 0.0f, zero);
            }
        }
        return zero == 0.0f;
    }

    // Adds `other` to the columns of MMA tiles from `first` on.
    template <int kColumns>
    __device__ __forceinline__ void add(const Accumulators<kMmasM, kColumns>& other, int first = 0) {
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) {
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) value[m][first + n][i] += other.value[m][n][i];
            }
        }
    }
};

// The loop over K. CopyX and CopyW fill tiles (TileCopy), ReadX and ReadW read fragments of them (Fragments). With
// kStages = 3:
//
//   multiplied    copied meanwhile
//   tile 0        tile 2 to stage 2
//   tile 1        tile 3 to stage 0, which held tile 0
//   tile 2        tile 4 to stage 1, which held tile 1
//
// Every instruction other than a product costs the tensor cores about a cycle (a product takes 6, measured on an H200),
// because both use the ports of the register file. So the loop has little overhead: addresses are constants or advance
// once per tile, and sums restart at fixed steps of a block's first tile instead of under predicates. Fragments are
// split while the products of the previous step run.
template <class Shape, class CopyX, class CopyW, class ReadX, class ReadW, uint32_t kBytesX, uint32_t kBytesW>
struct Mainloop {
    using Mma = typename Shape::Mma;
    static constexpr int kSteps = Shape::kSteps, kMmasM = Shape::kMmasM, kMmasN = Shape::kMmasN;
    static constexpr bool kHasBlocks = Shape::kSums == Sums::kPromoted || Shape::kSums == Sums::kBlockwise;
    static constexpr bool kStepwise = Shape::kSums == Sums::kStepwise || Shape::kSums == Sums::kBlockwise;
    static constexpr uint32_t kStageBytes = kBytesX + kBytesW;
    static constexpr int kSharedBytes = kStageBytes * Shape::kStages;
    static constexpr int kPairs = kMmasN / 2;  // of columns of MMA tiles; one read of w serves a pair
    // Steps from reading fragments to multiplying them. The products of a single pair are too few to hide a read, but
    // leave registers for the fragments of a second step.
    static constexpr int kAhead = kPairs == 1 ? 2 : 1;
    static constexpr int kCopiesAhead = Shape::kHoldsK ? Shape::kStages : Shape::kStages - 1;  // tiles, of the products
    static constexpr bool kSumsSmallApart = kSmallProducts<Mma> > 0;
    static_assert(kSteps > kAhead, "a step starts a copy, another waits for one");
    static_assert(Shape::kSums == Sums::kBlockwise || !kSumsSmallApart);

    CopyX copy_x;
    CopyW copy_w;
    ReadX read_x;
    ReadW read_w;

    __device__ __forceinline__ Mainloop(const CopyX& copy_x, const CopyW& copy_w, uint32_t thread)
        : copy_x(copy_x),
          copy_w(copy_w),
          read_x(Shape::warp_m(thread), thread % 32),
          read_w(Shape::warp_n(thread), thread % 32) {}

    using Sum = Accumulators<kMmasM, kMmasN>;

    // total = x * w over `tiles` tiles of K, in blocks of `block` tiles. `shared` is the address of kSharedBytes bytes
    // of shared memory, a multiple of 1024.
    __device__ __forceinline__ void run(Sum& total, uint32_t shared, int tiles, int block) {
        first_stage_ = fill_ = use_ = shared;
#pragma unroll
        for (int i = 0; i < kCopiesAhead; ++i) {
            copy_x.start(fill_);
            start_copy_w<true>();
        }
        wait_for_copy();
        read_first_fragments();
        total.clear();
        partial_.clear();
        small_.clear();
        if constexpr (kHasBlocks) {
            for (int tile = 0; tile < tiles;) {
                const int end = min(tile + block, tiles);
                multiply_tile<true>(total, partial_);
                while (++tile < end) multiply_tile<false>(total, partial_);
            }
            if constexpr (kSumsSmallApart) partial_.add(small_);
            total.add(partial_);
        } else {
            for (int tile = 0; tile < tiles; ++tile) multiply_tile<false>(total, total);
        }
        ptx::cp_async_wait<0>();
    }

private:
    uint32_t first_stage_, fill_, use_;  // addresses of stages in shared memory
    uint32_t raw_x_[kMmasM][4], raw_w_[kPairs][4];
    typename Mma::A a_[kMmasM];  // of this step
    typename Mma::B b_[2];       // of this pair
    Sum partial_;                // of this block
    Sum small_;                  // of small products, if they have accumulators of their own

    __device__ __forceinline__ uint32_t after(uint32_t stage) const {
        return stage == first_stage_ + (Shape::kStages - 1) * kStageBytes ? first_stage_ : stage + kStageBytes;
    }

    // Starts the copy of w and commits the tile's copies as a group. Without copies it commits an empty group, so that
    // wait_for_copy always finds the same number of groups in flight.
    template <bool kCopies>
    __device__ __forceinline__ void start_copy_w() {
        if constexpr (kCopies) {
            copy_w.start(fill_ + kBytesX);
            fill_ = after(fill_);
        }
        ptx::cp_async_commit();
    }

    // Waits until all threads' copies of the oldest tile in flight are complete.
    static __device__ __forceinline__ void wait_for_copy() {
        ptx::cp_async_wait<kCopiesAhead - 1>();
        __syncthreads();
    }

    __device__ __forceinline__ void read_first_fragments() {
        read(0);
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) a_[m] = Mma::make_a(raw_x_[m]);
        make_b(b_, 0);
        if constexpr (kAhead == 2) read(1);
    }

    __device__ __forceinline__ void read(int step) {
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) read_w.load(raw_w_[pair], use_ + kBytesX, pair, step);
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) read_x.load(raw_x_[m], use_, m, step);
    }

    __device__ __forceinline__ void make_b(typename Mma::B (&b)[2], int pair) const {
        const uint32_t(&w)[4] = raw_w_[pair];
        b[0] = Mma::make_b({w[0], w[1]});
        b[1] = Mma::make_b({w[2], w[3]});
    }

    // kRestarts: this is the first tile of a block. The pairs of columns begin the block at different steps.
    template <bool kRestarts>
    __device__ __forceinline__ void multiply_tile(Sum& total, Sum& sum) {
#pragma unroll Shape::kUnroll
        for (int step = 0; step < kSteps; ++step) {
            // The copies overwrite the previous tile. After the last tile of K they write zeros that nobody multiplies.
            if (step == 0 && !Shape::kHoldsK) copy_x.start(fill_);
            if (step == 1) start_copy_w<!Shape::kHoldsK>();
            if (step == kSteps - kAhead) {
                wait_for_copy();  // of the next tile. All threads have now read all of this one.
                use_ = after(use_);
            }
            if constexpr (kAhead == 2) {
                multiply_small_step<kRestarts>(total, sum, step);
            } else {
                multiply_step<kRestarts>(total, sum, step);
            }
        }
    }

    // Multiplies the fragments of this step, and meanwhile reads and splits those of the next. It takes two columns of
    // MMA tiles at a time: enough independent products to hide an instruction's latency, and few split fragments of w
    // alive.
    template <bool kRestarts>
    __device__ __forceinline__ void multiply_step(Sum& total, Sum& sum, int step) {
        const int next_step = (step + 1) % kSteps;
        typename Mma::A next_a[kMmasM];
        read_w.load(raw_w_[0], use_ + kBytesX, 0, next_step);
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) read_x.load(raw_x_[m], use_, m, next_step);
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
            if (kRestarts && pair * kSteps / kPairs == step) restart(total, pair);
            const int next_pair = (pair + 1) % kPairs;
            typename Mma::B next_b[2];
            make_b(next_b, next_pair);
            if (next_pair != 0) read_w.load(raw_w_[next_pair], use_ + kBytesX, next_pair, next_step);
            multiply_pair(sum, pair);
            b_[0] = next_b[0];
            b_[1] = next_b[1];
#pragma unroll
            for (int m = pair * kMmasM / kPairs; m < (pair + 1) * kMmasM / kPairs; ++m) {
                next_a[m] = Mma::make_a(raw_x_[m]);
            }
        }
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) a_[m] = next_a[m];
    }

    // multiply_step for a single pair: the fragments of the next step were read during the previous one.
    template <bool kRestarts>
    __device__ __forceinline__ void multiply_small_step(Sum& total, Sum& sum, int step) {
        typename Mma::A next_a[kMmasM];
        typename Mma::B next_b[2];
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) next_a[m] = Mma::make_a(raw_x_[m]);
        make_b(next_b, 0);
        read((step + 2) % kSteps);
        if (kRestarts && step == 0) restart(total, 0);
        multiply_pair(sum, 0);
        b_[0] = next_b[0];
        b_[1] = next_b[1];
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) a_[m] = next_a[m];
    }

    __device__ __forceinline__ void multiply_pair(Sum& sum, int pair) {
        if constexpr (kStepwise) {
            Accumulators<kMmasM, 2> products;
            products.clear();
            multiply_add<Mma, 0, kSmallProducts<Mma>>(small_.value, pair * 2, a_, b_);
            multiply_add<Mma, kSmallProducts<Mma>, Mma::kProducts>(products.value, 0, a_, b_);
            sum.add(products, pair * 2);
        } else {
            multiply_add<Mma, 0, Mma::kProducts>(sum.value, pair * 2, a_, b_);
        }
    }

    // Adds a block's sums in two columns of MMA tiles to the total, and clears them.
    __device__ __forceinline__ void restart(Sum& total, int pair) {
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) {
#pragma unroll
            for (int n = pair * 2; n < pair * 2 + 2; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float block = partial_.value[m][n][i];
                    partial_.value[m][n][i] = 0.0f;
                    if constexpr (kSumsSmallApart) {
                        add_compensated(total.value[m][n][i], small_.value[m][n][i], block);
                    } else {
                        total.value[m][n][i] += block;
                    }
                }
            }
        }
    }

    // total + small += block. The part that is too small for the total stays among the small products (Kahan 1965).
    static __device__ __forceinline__ void add_compensated(float& total, float& small, float block) {
        const float addend = block + small, sum = total + addend;
        small = addend - (sum - total);
        total = sum;
    }
};

}  // namespace fxfuse
