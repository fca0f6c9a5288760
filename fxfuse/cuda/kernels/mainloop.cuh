// A thread block's loop over K: a ring of shared-memory stages filled by cp.async, fragments read one step ahead of
// the tensor cores, and partial sums added up in fp32 outside them.
#pragma once

#include <cstdint>

#include "mma.cuh"
#include "ptx.cuh"
#include "shared_tile.cuh"

namespace fxfuse {

// How products become a sum over K. A step is one instruction's worth of K, a tile kSteps of them. Tensor cores
// truncate when they accumulate: a running sum of 3xTF32 over K = 8192 is 36 (normal data) to 126 times (uniform) less
// accurate than cuBLAS fp32. What the others reach stands in cuda/gemm.py.
enum class Sums {
    kRunning,    // in the tensor cores only
    kPromoted,   // in the tensor cores for a block of tiles; blocks are added up in fp32
    kStepwise,   // in the tensor cores for one step only; steps are added up in fp32
    kBlockwise,  // the same, but steps are added up in fp32 to blocks and blocks to the total: like a tree
};

template <class Mma_, int kTileM_, int kTileN_, int kWarpsM_, int kWarpsN_, int kStages_, Sums kSums_>
struct MainloopShape {
    using Mma = Mma_;
    using Element = typename Mma::Element;
    static constexpr int kTileM = kTileM_, kTileN = kTileN_, kTileK = kTileBytesOfK / static_cast<int>(sizeof(Element));
    static constexpr int kStages = kStages_, kSteps = kTileBytesOfK / kMmaBytesOfK;
    static constexpr Sums kSums = kSums_;
    static constexpr int kUnroll = kSteps;  // steps of the loop's body
    static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kThreads = kWarpsM * kWarpsN * 32;
    static constexpr int kWarpTileM = kTileM / kWarpsM, kWarpTileN = kTileN / kWarpsN;
    static constexpr int kMmasM = kWarpTileM / kMmaM, kMmasN = kWarpTileN / kMmaN;
    static_assert(kTileM % (kWarpsM * kMmaM) == 0 && kTileN % (kWarpsN * 2 * kMmaN) == 0, "B is read in pairs");
    static_assert(kStages >= 2, "one stage is filled while another is used");

    // Where a warp's tile begins in the block's.
    static __device__ __forceinline__ uint32_t warp_m(uint32_t thread) { return thread / 32 % kWarpsM * kWarpTileM; }
    static __device__ __forceinline__ uint32_t warp_n(uint32_t thread) { return thread / 32 / kWarpsM * kWarpTileN; }
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
        float zero = 0.0f;  // or NaN: 0 * inf and 0 * NaN are
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

    // To columns from `first` on.
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

// CopyX and CopyW fill tiles (TileCopy), ReadX and ReadW read fragments of them (Fragments).
template <class Shape, class CopyX, class CopyW, class ReadX, class ReadW, uint32_t kBytesX, uint32_t kBytesW>
struct Mainloop {
    using Mma = typename Shape::Mma;
    static constexpr int kSteps = Shape::kSteps, kMmasM = Shape::kMmasM, kMmasN = Shape::kMmasN;
    static constexpr bool kHasBlocks = Shape::kSums == Sums::kPromoted || Shape::kSums == Sums::kBlockwise;
    static constexpr bool kStepwise = Shape::kSums == Sums::kStepwise || Shape::kSums == Sums::kBlockwise;
    static constexpr uint32_t kStageBytes = kBytesX + kBytesW;
    static constexpr int kSharedBytes = kStageBytes * Shape::kStages;

    CopyX copy_x;
    CopyW copy_w;
    ReadX read_x;
    ReadW read_w;

    __device__ __forceinline__ Mainloop(const CopyX& copy_x, const CopyW& copy_w, const ReadX& read_x,
                                        const ReadW& read_w)
        : copy_x(copy_x), copy_w(copy_w), read_x(read_x), read_w(read_w) {}

    using Sum = Accumulators<kMmasM, kMmasN>;

    // total = x * w over `tiles` tiles of K, in blocks of `block` tiles. `shared` is the address of kSharedBytes, a
    // multiple of 1024.
    __device__ __forceinline__ void run(Sum& total, uint32_t shared, int tiles, int block) {
        uint32_t fill = shared, use = shared;  // stages
#pragma unroll
        for (int i = 0; i < Shape::kStages - 1; ++i) {
            start_copy(fill);
            fill = next_stage(fill, shared);
        }
        wait_for_copy();
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) read_x.load(raw_x[m], use, m, 0);
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) read_w.load(raw_w[pair], use + kBytesX, pair, 0);

        Sum partial;
        total.clear();
        partial.clear();
        for (int tile = 0, left = block; tile < tiles; ++tile, --left) {
            if (kHasBlocks && left == 0) {
                total.add(partial);
                partial.clear();
                left = block;
            }
#pragma unroll Shape::kUnroll
            for (int step = 0; step < kSteps; ++step) {
                if (step == 0) {
                    start_copy(fill);  // over the previous tile
                    fill = next_stage(fill, shared);
                }
                if (step == kSteps - 1) {
                    wait_for_copy();  // of the next tile. Everyone has now read all of this one.
                    use = next_stage(use, shared);
                }
                multiply_add(kHasBlocks ? partial : total, use, (step + 1) % kSteps);
            }
        }
        if constexpr (kHasBlocks) total.add(partial);
        ptx::cp_async_wait<0>();
    }

private:
    static constexpr int kPairs = kMmasN / 2;  // of columns of MMA tiles: what one read of w is for
    uint32_t raw_x[kMmasM][4], raw_w[kPairs][4];

    static __device__ __forceinline__ uint32_t next_stage(uint32_t stage, uint32_t shared) {
        return stage == shared + (Shape::kStages - 1) * kStageBytes ? shared : stage + kStageBytes;
    }

    // After the last tile of K this fills in zeros that nobody multiplies.
    __device__ __forceinline__ void start_copy(uint32_t stage) {
        copy_x.start(stage);
        copy_w.start(stage + kBytesX);
        ptx::cp_async_commit();
    }

    // For the oldest copy in flight, of all threads.
    static __device__ __forceinline__ void wait_for_copy() {
        ptx::cp_async_wait<Shape::kStages - 2>();
        __syncthreads();
    }

    // Multiplies what was read, and reads the next step's fragments as soon as registers for them are free. Two columns
    // of MMA tiles at a time: enough independent ones to hide an instruction's latency, and few fragments of w alive
    // in their split form.
    __device__ __forceinline__ void multiply_add(Sum& sum, uint32_t next_stage, int next_step) {
        typename Mma::A a[kMmasM];
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) {
            a[m] = Mma::make_a(raw_x[m]);
            read_x.load(raw_x[m], next_stage, m, next_step);
        }
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
            const uint32_t(&w)[4] = raw_w[pair];
            const typename Mma::B b[2] = {Mma::make_b({w[0], w[1]}), Mma::make_b({w[2], w[3]})};
            read_w.load(raw_w[pair], next_stage + kBytesX, pair, next_step);
            if constexpr (kStepwise) {
                Accumulators<kMmasM, 2> products;
                products.clear();
                fxfuse::multiply_add<Mma>(products.value, 0, a, b);
                sum.add(products, pair * 2);
            } else {
                fxfuse::multiply_add<Mma>(sum.value, pair * 2, a, b);
            }
        }
    }
};

}  // namespace fxfuse
