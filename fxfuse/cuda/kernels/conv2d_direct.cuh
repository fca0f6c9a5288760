// Direct 3x3 convolution, stride 1, NCHW: float32 operands rounded to the nearest TF32 or split in two (3xTF32), or
// 16-bit operands.
//
// A block computes kFilterTile output channels of a tile of output pixels. It copies the patch of x under the tile to
// shared memory, 8 input channels at a time (16 if they have 16 bits). Every pixel is copied once and serves all nine
// taps; an implicit GEMM fetches it nine times. Filters are the M operand, pixels the N operand, the channels the K of
// one instruction. In shared memory a pixel has 8 words: one channel each, or the 16-bit channels 2i and 2i + 1. A warp
// keeps every row of pixels that it reads in registers for all columns of the filter; the row feeds up to three output
// rows. Blocks are persistent: while a tile is stored, the next tile's first channels are being copied.
//
// Shared memory bandwidth is the limit. So filters are packed in fragment order beforehand (16 bytes per lane and
// read), and x is rounded on its way to the tensor core, not in shared memory.
#pragma once

#include <cstdint>

#include "conv2d_direct_config.cuh"
#include "conv2d_direct_store.cuh"
#include "conv2d_patch.cuh"
#include "conv2d_problem.cuh"
#include "device_pass.cuh"
#include "filter_fragments.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kThreads, Kernel::Config::kBlocksPerSm)
    conv2d_direct_kernel(const __grid_constant__ Conv2dProblem problem, const __grid_constant__ Conv2dTiles tiles,
                         const typename Kernel::Element* __restrict__ x, const void* __restrict__ filters,
                         typename Kernel::Output* __restrict__ out,
                         const __grid_constant__ typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(problem, tiles, x, filters, out, epilogue));
}

template <class Config_, class Output_, class Epilogue_>
struct Conv2dDirect {
    using Config = Config_;
    using Mma = typename Config::Mma;
    using Element = typename Config::Element;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = Conv2dProblem;

    static constexpr bool kResident = Config::kResidentChunks > 0;
    static constexpr int kTensors = kResident ? 3 : 4;  // x, w, out, workspace
    static constexpr int kMmasM = Config::kMmasM, kMmasN = Config::kMmasN, kKernel = Config::kKernel;
    static constexpr int kWarpRows = Config::kWarpRows, kThreads = Config::kThreads;
    static constexpr int kInputRows = kWarpRows + kKernel - 1;
    static constexpr int kWindow = Config::kWindow;
    using PatchCopy = detail::PatchCopy<Config>;
    using PatchRow = detail::PatchRow<Element>;
    using PatchWords = detail::PatchWords<Config>;
    using Fragments = FilterFragments<Mma, Config::kFilterTile>;
    using Tile = detail::DirectTile<Config>;
    using Warp = detail::DirectWarp<Config>;
    using Store = detail::DirectStore<Config, Output, Epilogue>;
    using Sum = typename Store::Sum;

    // `filters`: the problem's own if kResident, else the packed ones.
    static __device__ __forceinline__ void run(const Problem& problem, const Conv2dTiles& tiles, const Element* x,
                                               const void* filters, Output* out, const Epilogue& epilogue) {
        extern __shared__ __align__(1024) unsigned char memory[];
        unsigned char* shared = memory + Config::kPlaneBytes;  // the first stage
        Stream stream(problem, tiles, x, filters, ptx::shared_address(shared));
        if constexpr (kResident) {
            const Tile tile(problem, tiles, blockIdx.x);  // all of a block's tiles have the same filters
            for (int chunk = 0; chunk < Config::kResidentChunks; ++chunk) {
                Fragments::template pack<kThreads>(
                    problem, static_cast<const Element*>(filters), stream.channels(), tile.channel, tile.filters, chunk,
                    reinterpret_cast<uint4*>(shared + resident_offset() + chunk * Config::kFilterBytes));
            }
        }
        stream.begin();
        uint32_t use = 0;  // offset of the stage to multiply
        for (unsigned index = blockIdx.x; index < tiles.count; index += gridDim.x) {
            Sum sum = {};
            const uint32_t skews = Skews::of(problem, Tile(problem, tiles, index), x);
            Operands operands;
            for (int chunk = 0; chunk < stream.chunks(); ++chunk) {
                stream.complete(Config::kReadsAhead ? next_stage(use) : use);
                __syncthreads();  // all threads' copies are complete, and all have read the previous stage
                if constexpr (Mma::kProducts > 1) {
                    multiply_split(sum, stream, shared, use, chunk, skews);
                } else {
                    multiply(sum, operands, stream, shared, use, chunk, skews);
                }
                use = next_stage(use);
            }
            __syncthreads();  // everyone has read the last stage
            const uint32_t last = use == 0 ? (Config::kStages - 1) * Config::kStageBytes : use - Config::kStageBytes;
            Store::store(problem, Tile(problem, tiles, index), sum, shared + last, out, epilogue);
        }
        ptx::cp_async_wait<0>();
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        constexpr auto kKernel = &conv2d_direct_kernel<Conv2dDirect>;
        const auto tiles_of = [](int64_t extent, int tile) {
            return static_cast<unsigned>((extent + tile - 1) / tile);
        };
        const unsigned filter_tiles = tiles_of(problem.out_channels / problem.groups, Config::kFilterTile);
        const unsigned groups = static_cast<unsigned>(problem.groups);
        const unsigned rows = tiles_of(problem.out_height, Config::kTileRows);
        const unsigned cols = tiles_of(problem.out_width, Config::kTileCols);
        const int64_t count = static_cast<int64_t>(tiles_of(problem.images, Config::kImages)) * rows * cols * groups *
                              filter_tiles;
        if (count == 0) return cudaSuccess;
        if (count > INT32_MAX / 2) return cudaErrorInvalidConfiguration;
        const Conv2dTiles tiles{FastDivisor(filter_tiles), FastDivisor(groups), FastDivisor(cols), FastDivisor(rows),
                                static_cast<unsigned>(count)};
        cudaError_t error = allow_shared_memory<kKernel>(Config::kSharedBytes);
        if (error != cudaSuccess) return error;
        unsigned blocks = 0;
        error = resident_blocks<kKernel>(kThreads, Config::kSharedBytes, &blocks);
        if (error != cudaSuccess) return error;
        const void* filters = reinterpret_cast<const void*>(pointers[1]);
        if constexpr (kResident) {
            const unsigned kinds = filter_tiles * groups;
            blocks = blocks < kinds ? kinds : blocks - blocks % kinds;
        } else {
            uint4* packed = reinterpret_cast<uint4*>(pointers[3]);
            error = Fragments::launch(problem, static_cast<const Element*>(filters), packed, stream);
            if (error != cudaSuccess) return error;
            filters = packed;
        }
        return queue(kKernel, blocks < tiles.count ? blocks : tiles.count, kThreads, Config::kSharedBytes, stream,
                     problem, tiles, reinterpret_cast<const Element*>(pointers[0]), filters,
                     reinterpret_cast<Output*>(pointers[2]), epilogue);
    }
#endif  // __CUDACC_RTC__

private:
    // One thread's copies: tile after tile, kChannels channels at a time, kStages - 1 stages ahead of their use. Planes
    // to be interleaved (kPairs) are copied one stage further ahead; their words and filters follow a stage later.
    class Stream {
        static constexpr int kFilterUnits =
            kResident ? 0 : (Config::kFilterBytes / 16 + kThreads - 1) / kThreads;

        const Problem& problem_;
        const Conv2dTiles& tiles_;
        const Element* x_;
        const unsigned char* packed_;  // this thread's part of all packed filters
        uint32_t shared_, fill_;       // the stages, and the offset of the one being filled
        PatchCopy patch_;
        PatchWords words_;
        const unsigned char* patch_filters_;  // this thread's part of those that belong to the patch
        const unsigned char* filters_;        // the part to be copied next; with kPairs a stage behind
        unsigned index_;  // of the tile
        int channels_, chunk_;

    public:
        static constexpr int kUnits = PatchCopy::kUnits + kFilterUnits;
        static constexpr bool kPairs = Config::kPairs;

        __device__ __forceinline__ Stream(const Problem& problem, const Conv2dTiles& tiles, const Element* x,
                                          const void* filters, uint32_t shared)
            : problem_(problem), tiles_(tiles), x_(x),
              packed_(static_cast<const unsigned char*>(filters) + (kResident ? 0 : threadIdx.x * 16)),
              shared_(shared), fill_(kPairs ? Config::kStageBytes : 0), patch_(problem, x), words_(problem),
              index_(blockIdx.x),
              channels_(static_cast<int>(tiles.groups.divide(problem.channels))), chunk_(0) {
            aim();
        }

        __device__ __forceinline__ int channels() const { return channels_; }
        __device__ __forceinline__ int chunks() const {
            return (channels_ + Config::kChannels - 1) / Config::kChannels;
        }

        // Fills all stages but one.
        __device__ __forceinline__ void begin() {
            if constexpr (kPairs) {
#pragma unroll
                for (int unit = 0; unit < PatchCopy::kUnits; ++unit) copy(unit);
                ptx::cp_async_commit();
                advance();
                ptx::cp_async_wait<0>();
                __syncthreads();
#pragma unroll
                for (int unit = 0; unit < PatchWords::kUnits; ++unit) interleave(unit);
            }
#pragma unroll
            for (int stage = 0; stage < Config::kStages - 1; ++stage) {
#pragma unroll
                for (int unit = 0; unit < kUnits; ++unit) copy(unit);
                ptx::cp_async_commit();
                advance();
            }
            if (Config::kReadsAhead) complete<1>(0);
        }

        // Waits for this thread's copies to `stage`. kPending stages have been filled after it.
        template <int kPending = Config::kPendingStages>
        __device__ __forceinline__ void complete(uint32_t stage) const {
            ptx::cp_async_wait<kPending>();
            patch_.template clear_before<kPending>(shared_ + stage);
        }

        // Makes the unit-th of a stage's kUnits copies.
        __device__ __forceinline__ void copy(int unit) const {
            if (unit < PatchCopy::kUnits) {
                patch_.copy(shared_ + (kPairs ? next_stage(fill_) - Config::kPlaneBytes : fill_), unit);
            } else {
                const int piece = (unit - PatchCopy::kUnits) * kThreads;
                const bool all = Config::kFilterBytes / 16 % kThreads == 0 || unit < kUnits - 1;
                if (all || piece + static_cast<int>(threadIdx.x) < Config::kFilterBytes / 16) {
                    ptx::cp_async_16(shared_ + fill_ + Config::kPatchBytes + (threadIdx.x + piece) * 16,
                                     filters_ + piece * 16);
                }
            }
        }

        // Interleaves the unit-th of PatchWords::kUnits parts of a stage's words. All threads' copies have arrived.
        __device__ __forceinline__ void interleave(int unit) const {
            words_.interleave(shared_ + fill_ - Config::kPlaneBytes, shared_ + fill_, unit);
        }

        // Does the slot-th of kSlots parts of the work for the stages ahead. If the next barrier waits for copies, they
        // come first.
        template <int kSlots>
        __device__ __forceinline__ void work(int slot) const {
            constexpr int kCopySlots = Config::kPendingStages == 0 ? kSlots / 2 : kSlots;
            // ptxas puts three idle instructions between reads of shared memory and a copy, but none before copies that
            // directly follow another copy. So copies go out in groups.
            constexpr int kGroup = 6, kGroups = (kUnits + kGroup - 1) / kGroup;
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit) {
                if (unit / kGroup * kCopySlots / kGroups == slot) copy(unit);
            }
            if constexpr (kPairs) {
#pragma unroll
                for (int unit = 0; unit < PatchWords::kUnits; ++unit) {
                    if (unit * kSlots / PatchWords::kUnits == slot) interleave(unit);
                }
            }
        }

        // Goes on to the next stage, after the last copy of this one.
        __device__ __forceinline__ void advance() {
            fill_ = next_stage(fill_);
            patch_.advance();
            words_.advance();
            if constexpr (!kResident) {
                filters_ = patch_filters_;
                patch_filters_ += Config::kFilterBytes;
                if constexpr (!kPairs) filters_ = patch_filters_;
            }
            if (++chunk_ < chunks()) return;
            chunk_ = 0;
            index_ += gridDim.x;
            aim();
        }

    private:
        // Aims at tile index_. After the block's last tile, it aims at its first once more: then no patch is read, and
        // nobody multiplies the filters.
        __device__ __forceinline__ void aim() {
            const bool exists = index_ < tiles_.count;
            const Tile tile(problem_, tiles_, exists ? index_ : blockIdx.x);
            patch_.aim(tile, exists ? channels_ : 0);
            words_.aim(tile, x_);
            if constexpr (!kResident) {
                patch_filters_ = packed_ + static_cast<int64_t>(tile.packed) * chunks() * Config::kFilterBytes;
                if constexpr (!kPairs) filters_ = patch_filters_;
            }
        }
    };

    static __device__ __forceinline__ uint32_t next_stage(uint32_t stage) {
        return stage == (Config::kStages - 1) * Config::kStageBytes ? 0 : stage + Config::kStageBytes;
    }
    static __device__ __forceinline__ constexpr int resident_offset() {
        return Config::kStages * Config::kStageBytes - Config::kPlaneBytes;
    }

    // The skews of a warp's rows of pixels: how far into its row of the patch each starts, 2 bits each. 0 if skews are
    // known at compile time. Channels that are 4 apart have the same skew; a lane reads only such ones.
    struct Skews {
        static_assert(2 * kInputRows <= 32);

        static __device__ __forceinline__ uint32_t of(const Problem& problem, const Tile& tile, const Element* x) {
            if constexpr (Config::kAlignedWords) {
                return 0;
            } else {
                const Warp warp(threadIdx.x);
                uint32_t skews = 0;
#pragma unroll
                for (int y = 0; y < kInputRows; ++y) {
                    const PatchRow row(problem, x, tile, static_cast<int>(threadIdx.x) % 4, warp.image, warp.row + y);
                    skews |= static_cast<uint32_t>(row.skew()) << (2 * y);
                }
                return skews;
            }
        }
        static __device__ __forceinline__ int of_row(uint32_t skews, int y) {
            return Config::kAlignedWords ? 0 : static_cast<int>(skews >> (2 * y) & 3);
        }
    };

    // A row of a warp's pixels in registers. A lane's columns of kWindow instructions are adjacent pixels. With the two
    // pixels after them, they serve all columns of the filter, and take few reads.
    struct Pixels {
        static constexpr int kLength = kWindow + kKernel - 1, kSkew = Config::kWordSkew;

        typename Mma::B window[kMmasN / kWindow][kLength];

        // The operand of instruction n for the filter's column s.
        __device__ __forceinline__ const typename Mma::B& operand(int n, int s) const {
            return window[n / kWindow][n % kWindow + s];
        }

        // `first`: the pixel of column 0 in the patch; if rows are aligned, the pixel kSkew before it.
        __device__ __forceinline__ void load(const uint32_t* first) {
#pragma unroll
            for (int i = 0; i < kMmasN / kWindow; ++i) {
                uint32_t raw[2][kLength];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    read(raw[half], first + i * (kWindow * kMmaN) + half * 4 * Config::kChannelPitch);
                }
#pragma unroll
                for (int j = 0; j < kLength; ++j) window[i][j] = Mma::make_b({apart(raw[0][j]), apart(raw[1][j])});
            }
        }

    private:
        // Detaches `bits` from the registers that a wide read has filled. The addition changes nothing but the sign of
        // zero. Without it, ptxas leaves the word in place, rounded or not, and at each use moves it to the pair of
        // registers that the instruction takes.
        static __device__ __forceinline__ uint32_t apart(uint32_t bits) {
            if constexpr (Config::kPairs) return Mma::add(bits, 0);
#if __CUDA_ARCH__ >= 900
            if constexpr (Config::kAlignedWords && Mma::kProducts == 1) {
                return __float_as_uint(__fadd_rn(__uint_as_float(bits), 0.0f));
            }
#endif
            return bits;
        }

        static __device__ __forceinline__ void read(uint32_t (&raw)[kLength], const uint32_t* first) {
            if constexpr (Config::kAlignedWords) {
#pragma unroll
                for (int piece = 0; piece < kSkew + kLength; piece += kWindow) {
                    read_piece(raw, first, piece, max(piece, kSkew), min(piece + kWindow, kSkew + kLength));
                }
            } else {
#pragma unroll
                for (int j = 0; j < kLength; ++j) raw[j] = first[j];
            }
        }

        // Reads pixels `begin` to `end` (excluded) of the kWindow pixels from `piece` on, a multiple of kWindow words.
        static __device__ __forceinline__ void read_piece(uint32_t (&raw)[kLength], const uint32_t* first, int piece,
                                                          int begin, int end) {
            if (end - begin == 1) {
                raw[begin - kSkew] = first[begin];
            } else if (begin < end && end - begin <= 2 && begin % 2 == 0) {
                const uint2 two = *reinterpret_cast<const uint2*>(first + begin);
                raw[begin - kSkew] = two.x;
                raw[begin + 1 - kSkew] = two.y;
            } else if (begin < end) {
                const uint4 four = *reinterpret_cast<const uint4*>(first + piece);
                const uint32_t value[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = begin; j < end; ++j) raw[j - kSkew] = value[j - piece];
            }
        }
    };

    // The operands of the next products.
    struct Operands {
        typename Mma::A a[kMmasM];
        Pixels rows[kInputRows];
    };

    static __device__ __forceinline__ typename Mma::A load_filters(const uint4* w, int tap, int m) {
        const uint4 raw = w[Fragments::index(tap % kKernel, tap / kKernel, m) * 32];
        return {{raw.x, raw.y, raw.z, raw.w}};
    }

    // Multiplies the stage at `use` where each product is the sum of several (3xTF32). Operands take twice the
    // registers, so they are read only when they are needed, one row of the filter after the other; other warps hide
    // the latency. Tensor cores truncate the accumulators that they add to, so each tap has its own.
    static __device__ __forceinline__ void multiply_split(Sum& sum, Stream& stream, const unsigned char* shared,
                                                          uint32_t use, int chunk, uint32_t skews) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const Warp warp(threadIdx.x);
        const uint32_t* x = reinterpret_cast<const uint32_t*>(shared + use) + lane % 4 * Config::kChannelPitch +
                            warp.image * Config::kImagePitch + warp.row * Config::kPatchCols + warp.col +
                            lane / 4 * kWindow;
        const uint4* w = reinterpret_cast<const uint4*>(
                             kResident ? shared + resident_offset() + chunk * Config::kFilterBytes
                                       : shared + use + Config::kPatchBytes) + warp.m * kMmasM * Fragments::kParts * 32 + lane;
        stream.template work<1>(0);
#pragma unroll 1
        for (int r = 0; r < kKernel; ++r) {
            Pixels rows[kWarpRows];
#pragma unroll
            for (int y = 0; y < kWarpRows; ++y) rows[y].load(x + (r + y) * Config::kPatchCols + Skews::of_row(skews, r + y));
#pragma unroll
            for (int s = 0; s < kKernel; ++s) {
#pragma unroll
                for (int m = 0; m < kMmasM; ++m) {
                    const uint4 hi = w[Fragments::index(s, r, m) * 32], lo = w[(Fragments::index(s, r, m) + 1) * 32];
                    const typename Mma::A a = {{hi.x, hi.y, hi.z, hi.w}, {lo.x, lo.y, lo.z, lo.w}};
#pragma unroll
                    for (int y = 0; y < kWarpRows; ++y) {
                        float tap[kMmasN][4] = {};
                        add_products<0>(tap, a, rows[y], s);
#pragma unroll
                        for (int n = 0; n < kMmasN; ++n) {
#pragma unroll
                            for (int i = 0; i < 4; ++i) sum[y][m][n][i] += tap[n][i];
                        }
                    }
                }
            }
        }
        ptx::cp_async_commit();
        stream.advance();
    }

    // Issues one product for all pixels before the next product: those of one pixel depend on each other.
    template <int kProduct>
    static __device__ __forceinline__ void add_products(float (&tap)[kMmasN][4], const typename Mma::A& a,
                                                        const Pixels& row, int s) {
        if constexpr (kProduct < Mma::kProducts) {
#pragma unroll
            for (int n = 0; n < kMmasN; ++n) Mma::template product<kProduct>(tap[n], a, row.operand(n, s));
            add_products<kProduct + 1>(tap, a, row, s);
        }
    }

    // Multiplies the stage at `use`. Operands are read as soon as their registers are free. The other work on the
    // stages is spread over the multiplications: all at once after the barrier, it would keep tensor cores waiting.
    static __device__ __forceinline__ void multiply(Sum& sum, Operands& operands, Stream& stream,
                                                    const unsigned char* shared, uint32_t use, int chunk,
                                                    uint32_t skews) {
        constexpr int kSlots = Config::kTaps * kMmasM;
        // Rows of the next stage that have registers at the end of this one.
        constexpr int kRowsAhead = kWindow == 4 ? kKernel - 1 : 0;
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const Warp warp(threadIdx.x);
        const int x_offset = lane % 4 * Config::kChannelPitch + warp.image * Config::kImagePitch +
                             warp.row * Config::kPatchCols + warp.col + lane / 4 * kWindow;
        const int w_offset = warp.m * kMmasM * 32 + lane;
        const auto pixels = [&](uint32_t stage, int y) {
            return reinterpret_cast<const uint32_t*>(shared + stage) + x_offset + y * Config::kPatchCols +
                   Skews::of_row(skews, y);
        };
        const auto filters = [&](uint32_t stage) {
            const unsigned char* first = kResident ? shared + resident_offset() + chunk * Config::kFilterBytes
                                                   : shared + stage + Config::kPatchBytes;
            return reinterpret_cast<const uint4*>(first) + w_offset;
        };
        const bool ahead = Config::kReadsAhead && chunk > 0;  // the previous stage has read this one's first operands
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) {
            if (!ahead) operands.a[m] = load_filters(filters(use), 0, m);
        }
#pragma unroll
        for (int y = 0; y < kWarpRows; ++y) {
            if (!ahead || y >= kRowsAhead) operands.rows[y].load(pixels(use, y));
        }

#pragma unroll
        for (int tap = 0; tap < Config::kTaps; ++tap) {
            const int r = tap / kKernel, s = tap % kKernel;
            if (r < kKernel - 1) {
                if (s == 1) operands.rows[r + kWarpRows].load(pixels(use, r + kWarpRows));
            } else if (Config::kReadsAhead && s < kRowsAhead) {  // unused after the last chunk
                operands.rows[s].load(pixels(next_stage(use), s));
            }
#pragma unroll
            for (int m = 0; m < kMmasM; ++m) {
#pragma unroll
                for (int y = 0; y < kWarpRows; ++y) {
#pragma unroll
                    for (int n = 0; n < kMmasN; ++n) {
                        Mma::template product<0>(sum[y][m][n], operands.a[m], operands.rows[r + y].operand(n, s));
                    }
                }
                if (tap < Config::kTaps - 1) {
                    operands.a[m] = load_filters(filters(use), tap + 1, m);
                } else if (Config::kReadsAhead) {
                    operands.a[m] = load_filters(filters(next_stage(use)), 0, m);
                }
                stream.template work<kSlots>(tap * kMmasM + m);
            }
        }
        ptx::cp_async_commit();
        stream.advance();
    }
};

}  // namespace fxfuse
