// A thread block's loop over K in 3xTF32 (SplitTf32 in mma.cuh) by Hopper's warpgroup products. They read x from
// registers, where x is split, and the weight from shared memory, where the weight is split.
//
// One warpgroup produces: it copies tiles of both and splits those of the weight. Where K is contiguous, each thread
// splits what it has copied itself. The other warpgroups multiply, 64 rows each, independently: while one adds a tile's
// products to its sums, tensor cores work for the other.
#pragma once

#include <cstdint>

#include "mainloop.cuh"
#include "mma.cuh"
#include "ptx.cuh"
#include "ptx_sm90.cuh"
#include "shared_tile.cuh"
#include "wgmma.cuh"

namespace fxfuse {

// The shape of this mainloop, as MainloopShape is of Mainloop. (Tiles with infinities are left to Mainloop: see
// WgmmaTf32x3Config::Guarded.) kThreads: the threads that multiply.
template <int kTileM_, int kTileN_, int kStages_, Sums kSums_>
struct WgmmaTf32x3Shape
    : MainloopShape<Tf32x3::Unguarded, kTileM_, kTileN_, kTileM_ / kMmaM, 1, kStages_, kSums_> {
    static constexpr int kGroupColumns = kTileN_;
    static constexpr int kBlockThreads = kTileM_ / kMmaM * 32 + kWarpgroup;
    static constexpr int kCopiesAhead = kStages_ - 2;  // beside the stage being multiplied and the one being split
    static constexpr int kSplitStages = 2;             // for these two
    static constexpr int kLeastBlocks = 1, kSharedLimit = 227 * 1024;
    // Per thread. ptxas gives each of 384 threads 168 registers.
    static constexpr int kProducerRegisters = 72, kConsumerRegisters = 216;
    static_assert(kTileM_ == 128 && kCopiesAhead > 0);
};

// Two rings of stages in shared memory, and a position in them. A stage has a tile of x and a tile of the weight as
// they are. A split stage has the weight's remainders (lo) and, where K is not contiguous in the weight, also the
// weight transposed: products take rows along K.
template <class Shape, class TileX, class TileW>
struct Tf32x3Ring {
    using SplitTile = OperandTile<float, Major::kK, Shape::kTileN>;
    static constexpr bool kTurned = TileW::kMajor == Major::kMN;
    static constexpr uint32_t kStageBytes = TileX::kBytes + TileW::kBytes;
    static constexpr uint32_t kSplitBytes = SplitTile::kBytes * (kTurned ? 2 : 1);
    static constexpr uint32_t kSplits = Shape::kStages * kStageBytes;
    static constexpr uint32_t kBarriers = kSplits + Shape::kSplitStages * kSplitBytes;
    static constexpr uint32_t kBarrierBytes = 8;
    static constexpr int kSharedBytes = kBarriers + (Shape::kStages * 2 + 1) * kBarrierBytes;

    uint32_t shared;  // address of shared memory, a multiple of 1024
    uint32_t stage = 0, split = 0, phase = 0;

    __device__ __forceinline__ explicit Tf32x3Ring(uint32_t shared) : shared(shared) {}

    __device__ __forceinline__ uint32_t x() const { return shared + stage * kStageBytes; }
    __device__ __forceinline__ uint32_t weight() const { return x() + TileX::kBytes; }
    __device__ __forceinline__ uint32_t remainders() const { return shared + kSplits + split * kSplitBytes; }
    __device__ __forceinline__ uint32_t turned() const { return remainders() + SplitTile::kBytes; }
    // Barriers: full, products may read the stage; empty, copies may fill it; copied, where the producer's warps meet.
    __device__ __forceinline__ uint32_t full() const { return shared + kBarriers + stage * 2 * kBarrierBytes; }
    __device__ __forceinline__ uint32_t empty() const { return full() + kBarrierBytes; }
    __device__ __forceinline__ uint32_t copied() const {
        return shared + kBarriers + Shape::kStages * 2 * kBarrierBytes;
    }

    __device__ __forceinline__ void advance() {
        split = split == Shape::kSplitStages - 1 ? 0 : split + 1;
        stage = stage == Shape::kStages - 1 ? 0 : stage + 1;
        if (stage == 0) phase ^= 1;
    }

    // Initialises the barriers: by one thread, before the others go on.
    static __device__ __forceinline__ void init(uint32_t shared) {
        Tf32x3Ring ring(shared);
        ptx::barrier_init(ring.copied(), kWarpgroup / 32);
#pragma unroll 1
        for (int i = 0; i < Shape::kStages; ++i, ring.advance()) {
            ptx::barrier_init(ring.full(), kWarpgroup / 32);
            ptx::barrier_init(ring.empty(), Shape::kThreads / 32);
        }
    }
};

// The warpgroup that produces. Products take a number's upper part (hi) by themselves, because they ignore the lower
// bits. So hi is truncated, not rounded, and the remainder has up to 13 bits. Rounding the remainder to 11 bits leaves
// an error of at most 2^-22 of the number, and of nothing on average.
template <class Shape, class TileX, class TileW>
struct Tf32x3Producer {
    using Ring = Tf32x3Ring<Shape, TileX, TileW>;
    using SplitTile = typename Ring::SplitTile;

    Ring fill, use;
    uint32_t thread;  // of the warpgroup

    __device__ __forceinline__ Tf32x3Producer(uint32_t shared, uint32_t thread)
        : fill(shared), use(shared), thread(thread) {}

    // Copies and splits `tiles` tiles of K. `start(x, weight)` starts the copies of the next tile to these addresses,
    // 16 bytes at a time by each thread of the warpgroup (TileCopy).
    template <class Start>
    __device__ __forceinline__ void run(int64_t tiles, Start start) {
        int64_t left = tiles;
        const auto copy = [&] {
            // Also after the last tile: it shows that tile t - 2 is done, whose split stage is for tile t, split next.
            ptx::barrier_wait(fill.empty(), fill.phase ^ 1);
            if (--left >= 0) start(fill.x(), fill.weight());
            fill.advance();
            ptx::cp_async_commit();
        };
#pragma unroll 1
        for (int i = 0; i < Shape::kCopiesAhead; ++i) copy();
#pragma unroll 1
        for (int64_t tile = 0; tile < tiles; ++tile, use.advance()) {
            copy();
            ptx::cp_async_wait<Shape::kCopiesAhead>();
            if constexpr (Ring::kTurned) {
                arrive(use.copied());
                ptx::barrier_wait(use.copied(), static_cast<uint32_t>(tile % 2));
                split_turned();
            } else {
                split_own();
            }
            ptx::async_proxy_fence();
            arrive(use.full());
        }
    }

private:
    __device__ __forceinline__ void arrive(uint32_t barrier) const {
        __syncwarp();
        if (thread % 32 == 0) ptx::barrier_arrive(barrier);
    }

    // Splits what this thread has copied.
    __device__ __forceinline__ void split_own() const {
        constexpr int kRowPieces = TileW::kRowBytes / kChunkBytes, kRowsPerPass = kWarpgroup / kRowPieces;
        constexpr int kPasses = TileW::kRows / kRowsPerPass, kTogether = kPasses % 4 == 0 ? 4 : 3;
        static_assert(kRowsPerPass % 8 == 0 && kPasses % kTogether == 0);
        const uint32_t own = TileW::offset(thread / kRowPieces, thread % kRowPieces * kChunkBytes);
#pragma unroll
        for (int first = 0; first < kPasses; first += kTogether) {
            uint4 raw[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                raw[i] = ptx::load_shared_16(use.weight() + own + (first + i) * kRowsPerPass * TileW::kRowBytes);
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const uint32_t at = own + (first + i) * kRowsPerPass * TileW::kRowBytes;
                ptx::store_shared_16(use.remainders() + at, remainder_of(raw[i]));
            }
        }
    }

    // Transposes and splits pieces of 16 bytes along K of a column n: neighbouring threads have neighbouring columns.
    __device__ __forceinline__ void split_turned() const {
        constexpr int kPieceK = kChunkBytes / 4, kPieces = Shape::kTileK / kPieceK;
        constexpr int kAtOnce = kWarpgroup / Shape::kTileN, kTurns = kPieces / kAtOnce;
        static_assert(kWarpgroup % Shape::kTileN == 0);
        const uint32_t n = thread % Shape::kTileN, first = thread / Shape::kTileN;
        uint32_t from[kPieceK];
#pragma unroll
        for (int i = 0; i < kPieceK; ++i) from[i] = use.weight() + TileW::offset(first * kPieceK + i, n * 4);
#pragma unroll 2
        for (int turn = 0; turn < kTurns; ++turn) {
            constexpr uint32_t kStep = kAtOnce * kPieceK * TileW::kRowBytes;
            uint4 raw;
            raw.x = ptx::load_shared_4(from[0] + turn * kStep);
            raw.y = ptx::load_shared_4(from[1] + turn * kStep);
            raw.z = ptx::load_shared_4(from[2] + turn * kStep);
            raw.w = ptx::load_shared_4(from[3] + turn * kStep);
            const uint32_t at = SplitTile::offset(n, (first + turn * kAtOnce) * kChunkBytes);
            ptx::store_shared_16(use.turned() + at, raw);
            ptx::store_shared_16(use.remainders() + at, remainder_of(raw));
        }
    }

    static __device__ __forceinline__ uint32_t remainder(uint32_t bits) {
        return ptx::cvt_rn_tf32(__float_as_uint(__uint_as_float(bits) - __uint_as_float(bits & Tf32::kUpperBits)));
    }
    static __device__ __forceinline__ uint4 remainder_of(uint4 raw) {
        return {remainder(raw.x), remainder(raw.y), remainder(raw.z), remainder(raw.w)};
    }
};

// A warpgroup that multiplies. Tensor cores truncate when they accumulate, so partial sums are added up in float32
// (Sums in mainloop.cuh). A tile's small products, hi times lo, come first: they then lose nothing, and the large
// products are truncated kSteps times instead of three times as often. This order multiplies the error by 0.6 (normal
// data) or 0.4 (uniform).
template <class Shape, class TileX, class TileW>
struct Tf32x3Consumer {
    using Ring = Tf32x3Ring<Shape, TileX, TileW>;
    using Mma = typename Shape::Mma;
    using Sum = Accumulators<Shape::kMmasM, Shape::kMmasN>;
    static constexpr int kSteps = Shape::kSteps, kSums = Shape::kMmasN * 4, kPieces = kMmaBytesOfK / kChunkBytes;
    static constexpr bool kHasBlocks = Shape::kSums == Sums::kBlockwise;
    // A tile's sum is taken in parts, each truncated less often: kParts accumulators side by side, or kTurns in
    // sequence.
    static constexpr int kParts = kHasBlocks ? 3 : 1, kTurns = Shape::kSums == Sums::kHalved ? 2 : 1;
    static_assert(Shape::kSums == Sums::kPromoted || kTurns > 1 || kHasBlocks);
    static_assert(Shape::kMmasM == 1 && Ring::SplitTile::kRowBytes == 128);

    Ring use;
    Fragments<TileX, Side::kA> read_x;

    __device__ __forceinline__ Tf32x3Consumer(uint32_t shared, uint32_t thread)
        : use(shared), read_x(Shape::warp_m(thread), thread % 32) {
#pragma unroll
        for (Sum& part : parts_) part.clear();
        of_block_.clear();
        read();
    }

    // Begins a new sum, in blocks of `block` tiles.
    __device__ __forceinline__ void begin(Sum& total, int block) {
        total.clear();
        block_ = left_ = block;
    }

    // total += x * w over the next `tiles` tiles of K. `more`: whether tiles follow, of this or another sum.
    __device__ __forceinline__ void run(Sum& total, int tiles, bool more) {
#pragma unroll 1
        for (int tile = 1; tile <= tiles; ++tile) {
            typename Mma::A x[kSteps];
#pragma unroll
            for (int step = 0; step < kSteps; ++step) x[step] = Mma::make_a(raw_x_[step]);
            if constexpr (kTurns > 1) {
                multiply(x, 0);
                finish();
                total.add(parts_[0]);
            }
            multiply(x, kTurns - 1);
            const uint32_t done = use.empty();
            use.advance();
            if (more || tile < tiles) read();
            finish();
            if (ptx::read_thread_index() % 32 == 0) ptx::barrier_arrive(done);
#pragma unroll
            for (int part = 1; part < kParts; ++part) parts_[0].add(parts_[part]);
            if constexpr (kHasBlocks) {
                of_block_.add(parts_[0]);
                if (--left_ == 0) {
                    left_ = block_;
                    end(total);
                }
            } else {
                total.add(parts_[0]);
            }
        }
    }

    __device__ __forceinline__ void end(Sum& total) {
        if constexpr (kHasBlocks) {
            total.add(of_block_);
            of_block_.clear();
        }
    }

private:
    uint32_t raw_x_[kSteps][4];  // of the next tile
    Sum parts_[kParts];
    Sum of_block_;
    int block_, left_;  // tiles

    static __device__ __forceinline__ float (&sums_of(Sum& part))[kSums] {
        return *reinterpret_cast<float(*)[kSums]>(&part);
    }

    // Reads x of the next tile, once it is there.
    __device__ __forceinline__ void read() {
        ptx::barrier_wait(use.full(), use.phase);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) read_x.load(raw_x_[step], use.x(), 0, step);
    }

    // Waits for all products.
    __device__ __forceinline__ void finish() {
        ptx::wgmma_wait<0>();
#pragma unroll
        for (Sum& part : parts_) ptx::sums_fence(sums_of(part));
    }

    // Starts the products of one turn's share of a tile.
    __device__ __forceinline__ void multiply(const typename Mma::A (&x)[kSteps], int turn) {
        constexpr int kShare = kSteps / kTurns;
        const int first = turn * kShare;
        // Shuffled from lane 0, so that the compiler knows the value to be the same in the warp: then it goes to
        // uniform registers, of which descriptors are made.
        const ptx::SwizzledMatrix upper(__shfl_sync(~0u, Ring::kTurned ? use.turned() : use.weight(), 0));
        const ptx::SwizzledMatrix remainders(__shfl_sync(~0u, use.remainders(), 0));
        ptx::wgmma_fence();
#pragma unroll
        for (int step = first; step < first + kShare; ++step) {
            ptx::wgmma_tf32(sums_of(parts_[0]), x[step].lo, upper + step * kPieces, step > first);
            ptx::wgmma_tf32(sums_of(parts_[0]), x[step].hi, remainders + step * kPieces, true);
        }
#pragma unroll
        for (int step = first; step < first + kShare; ++step) {
            const int part = step * kParts / kSteps;  // part 0 also takes the small products
            const bool is_first = part > 0 && part != (step - 1) * kParts / kSteps;
            ptx::wgmma_tf32(sums_of(parts_[part]), x[step].hi, upper + step * kPieces, !is_first);
        }
        ptx::wgmma_commit();
    }
};

}  // namespace fxfuse
