// Direct 3x3 convolution, stride 1, NCHW: float32 operands rounded to the nearest TF32, or 16-bit operands.
//
// A block computes kFilterTile channels of a tile of output pixels. 8 input channels at a time, or 16 of 16 bits, the
// patch of x under the tile is copied to shared memory once and serves all nine taps: an implicit GEMM fetches every
// pixel nine times. Filters are the M operand, pixels the N operand, the channels the K of one instruction. In shared
// memory a pixel has 8 words: the channels, or pairs of 16-bit channels, 2i and 2i + 1. Every row of pixels that a warp
// reads stays in registers for all columns of the filter and feeds up to three output rows. Blocks are persistent: the
// copies of the next tile's first channels are under way while a tile is stored.
//
// Shared memory's bandwidth is what runs short: filters are packed in the order of fragments beforehand (16 bytes per
// lane and read), and x is rounded on the way to the tensor core, not in shared memory.
#pragma once

#include <cstdint>

#include "conv2d_patch.cuh"
#include "conv2d_problem.cuh"
#include "divisor.cuh"
#include "filter_fragments.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse {

constexpr int kAnySkew = -1;

// A warp computes 16 * kMmasM filters of kWarpRows rows of 8 * kMmasN pixels. kWarpsM x kWarpsY x kWarpsX warps share
// a patch; kImages patches, of as many images, make up a tile where feature maps are small.
// kBlocksPerSm: how many blocks the register allocation must leave room for.
// kResidentChunks: if not 0, all filters that a block needs are packed by itself and stay in shared memory, up to
// kChannels * kResidentChunks channels of them. If 0, they are packed into the workspace and streamed.
// kSkew: how many pixels after a multiple of 16 bytes the leftmost pixel stands that a tile needs, if all rows of x
// start at multiples of 16 bytes; else kAnySkew.
template <class Mma_, int kMmasM_, int kWarpRows_, int kMmasN_, int kWarpsM_, int kWarpsY_, int kWarpsX_, int kImages_,
          int kStages_, int kBlocksPerSm_, int kResidentChunks_, int kSkew_>
struct Conv2dDirectConfig {
    using Mma = Mma_;
    using Element = typename Mma::Element;
    static constexpr int kSize = static_cast<int>(sizeof(Element));
    // Whether two channels make a word: they are then copied to planes of their own, and a stage later interleaved.
    static constexpr bool kPairs = kSize == 2;
    static constexpr int kMmasM = kMmasM_, kWarpRows = kWarpRows_, kMmasN = kMmasN_;
    static constexpr int kWarpsM = kWarpsM_, kWarpsY = kWarpsY_, kWarpsX = kWarpsX_, kImages = kImages_;
    static constexpr int kStages = kStages_, kBlocksPerSm = kBlocksPerSm_, kResidentChunks = kResidentChunks_;
    static constexpr int kSkew = kSkew_;
    static constexpr bool kAlignedRows = kSkew != kAnySkew;
    static_assert(kStages == 2 || (kStages == 3 && !kPairs), "PatchCopy remembers what it copied two stages ago");
    // Whether the stage after the one in use is complete, too, so that its first fragments are read before the barrier.
    static constexpr bool kReadsAhead = kStages == 3 && kResidentChunks == 0;
    static constexpr int kPendingStages = kReadsAhead ? 0 : kStages - 2;  // that may be under way at the barrier

    static constexpr int kThreads = kWarpsM * kWarpsY * kWarpsX * kImages * 32;
    static constexpr int kKernel = 3, kTaps = kKernel * kKernel;
    static constexpr int kWords = kMmaBytesOfK / 4, kChannels = kMmaBytesOfK / kSize;  // per stage
    static constexpr int kFilterTile = kWarpsM * kMmasM * kMmaM;
    static constexpr int kTileRows = kWarpsY * kWarpRows, kTileCols = kWarpsX * kMmasN * kMmaN;

    // The skew of a row of words: interleaving removes it where it is not the same for all.
    static constexpr int kWordSkew = kPairs && !kAlignedRows ? 0 : kSkew;
    static constexpr bool kAlignedWords = kWordSkew != kAnySkew;

    // Column c of a warp's n-th instruction is this pixel of its row. Single pixels that stand kWindow apart share few
    // banks: where they are not aligned, so that they are read one by one, it is 2.
    static constexpr int kWindow = kAlignedWords && kMmasN % 4 == 0 ? 4 : 2;
    static_assert(kMmasN % kWindow == 0);
    static __device__ __forceinline__ constexpr int pixel(int n, int c) {
        return (n / kWindow * kMmaN + c) * kWindow + n % kWindow;
    }

    // A row of the patch is copied from a multiple of 16 bytes in x, up to 3 columns early, or 7 of 16 bits.
    static constexpr int kPatchRows = kTileRows + kKernel - 1, kPatchCols = kTileCols + 2 * (16 / kSize);
    static constexpr int kImagePitch = kPatchRows * kPatchCols;
    // The 4 words x 8 pixels that a warp reads at once fall on 32 banks if channels are 8 or 24 banks apart.
    static constexpr int kUnpaddedPitch = kImages * kImagePitch;
    static constexpr int kChannelPitch = kUnpaddedPitch + (40 - kUnpaddedPitch % 16) % 16;
    static_assert(kChannelPitch % 16 == 8);

    // A stage is [patch][filters] at the address by which it goes. Planes to be interleaved lie before it.
    static constexpr int kPlanePitch = kUnpaddedPitch;
    static constexpr int kPlaneBytes = kPairs ? kChannels * kPlanePitch * kSize : 0;
    static constexpr int kPatchBytes = kWords * kChannelPitch * 4;
    static constexpr int kFilterBytes = kTaps * kFilterTile * kWords * 4;
    static constexpr int kUsedBytes = kPatchBytes + (kResidentChunks == 0 ? kFilterBytes : 0);
    static constexpr int kStageBytes = kPlaneBytes + kUsedBytes;
    static constexpr int kSharedBytes = kStages * kStageBytes + kResidentChunks * kFilterBytes;
    static_assert(kSharedBytes <= 163 * 1024, "an A100 block's limit");

    // Accumulators leave through the stage that was multiplied last, 16 or 8 filters of every warp at a time. Rows are
    // 4 columns longer, because spans of outputs start up to 3 late (see Span). Half a warp writes 4 filters x 4 pairs
    // of pixels at once: two share a bank, and no fewer could, because spans are multiples of 16 bytes.
    static constexpr int kStagedCols = kTileCols + 4, kUnpaddedSpanPitch = kTileRows * kStagedCols;
    static constexpr int kSpanPitch =
        kWindow == 4 ? kUnpaddedSpanPitch + (12 - kUnpaddedSpanPitch % 8) % 8
                     : kUnpaddedSpanPitch + (48 - kUnpaddedSpanPitch % 32) % 32;
    static constexpr int kHalfSliceBytes = kWarpsM * 8 * kImages * kSpanPitch * 4;
    static constexpr int kRoom = kUsedBytes - 32;  // spans are read in pieces of up to 8 elements
    static constexpr int kHalvesPerSlice = 2 * kHalfSliceBytes <= kRoom ? 2 : 1;
    static constexpr int kSliceBytes = kHalvesPerSlice * kHalfSliceBytes;
    static constexpr int kSlices = 2 * kMmasM / kHalvesPerSlice;
    static constexpr int kSliceBuffers = 2 * kSliceBytes <= kRoom ? 2 : 1;
    static_assert(kSliceBytes <= kRoom);
};

// How tiles are numbered: filters run fastest, so that blocks which share a patch run together and find it in L2.
struct Conv2dTiles {
    FastDivisor filters, groups, cols, rows;  // tiles of each
    unsigned count;
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kThreads, Kernel::Config::kBlocksPerSm)
    conv2d_direct_kernel(const __grid_constant__ Conv2dProblem problem, const __grid_constant__ Conv2dTiles tiles,
                         const typename Kernel::Element* __restrict__ x, const void* __restrict__ filters,
                         typename Kernel::Output* __restrict__ out,
                         const __grid_constant__ typename Kernel::Epilogue epilogue) {
    Kernel::run(problem, tiles, x, filters, out, epilogue);
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
    static constexpr int kVector = 16 / static_cast<int>(sizeof(Output));  // outputs per store
    // Whether results are staged instead of accumulators: where they are half as large and an accumulator's filter is
    // all that the epilogue must know of its place.
    static constexpr bool kStagesResults = sizeof(Output) == 2 && !Epilogue::kVariesAlongCols;
    using Sum = float[kWarpRows][kMmasM][kMmasN][4];  // D fragments, see mma.cuh

    // `filters`: the problem's if they are to be resident, else packed ones.
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
                __syncthreads();  // everyone's copies are complete, and everyone has read the stage before
                multiply(sum, operands, stream, shared, use, chunk, skews);
                use = next_stage(use);
            }
            __syncthreads();  // everyone has read the last stage
            const uint32_t last = use == 0 ? (Config::kStages - 1) * Config::kStageBytes : use - Config::kStageBytes;
            store(problem, Tile(problem, tiles, index), sum, shared + last, out, epilogue);
        }
        ptx::cp_async_wait<0>();
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        constexpr auto kKernel = &conv2d_direct_kernel<Conv2dDirect>;
        const auto tiles_of = [](int64_t extent, int tile) { return static_cast<unsigned>((extent + tile - 1) / tile); };
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
        kKernel<<<blocks < tiles.count ? blocks : tiles.count, kThreads, Config::kSharedBytes, stream>>>(
            problem, tiles, reinterpret_cast<const Element*>(pointers[0]), filters,
            reinterpret_cast<Output*>(pointers[2]), epilogue);
        return cudaGetLastError();
    }
#endif  // __CUDACC_RTC__

private:
    // What a block computes in one turn. The tile may reach beyond the image, the last image, the last filter.
    struct Tile : detail::PatchPosition {
        int channel, filters;  // the first output channel, and how many there are
        unsigned packed;       // number of the packed filters

        __device__ __forceinline__ Tile(const Problem& problem, const Conv2dTiles& tiles, unsigned index) {
            const int filter_tile = static_cast<int>(tiles.filters.take(index));
            const int group = static_cast<int>(tiles.groups.take(index));
            col = static_cast<int>(tiles.cols.take(index)) * Config::kTileCols;
            row = static_cast<int>(tiles.rows.take(index)) * Config::kTileRows;
            image = static_cast<int>(index) * Config::kImages;
            const int group_filters = static_cast<int>(tiles.groups.divide(problem.out_channels));
            first_channel = group * static_cast<int>(tiles.groups.divide(problem.channels));
            channel = group * group_filters + filter_tile * Config::kFilterTile;
            filters = min(Config::kFilterTile, group_filters - filter_tile * Config::kFilterTile);
            packed = group * tiles.filters.divisor + filter_tile;
        }
    };

    // The copies that one thread makes, tile after tile and kChannels after kChannels, kStages - 1 ahead of use. Planes
    // to be interleaved are copied one further ahead, behind which words and filters follow.
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
        const unsigned char* patch_filters_;  // that belong to the patch
        const unsigned char* filters_;        // to be copied
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

        // Waits for this thread's copies to `stage`, behind which kPending stages have been filled since.
        template <int kPending = Config::kPendingStages>
        __device__ __forceinline__ void complete(uint32_t stage) const {
            ptx::cp_async_wait<kPending>();
            patch_.template clear_before<kPending>(shared_ + stage);
        }

        // The unit-th of the kUnits copies of a stage.
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

        // The unit-th of the PatchWords::kUnits parts of a stage's words. Everyone's copies have arrived.
        __device__ __forceinline__ void interleave(int unit) const {
            words_.interleave(shared_ + fill_ - Config::kPlaneBytes, shared_ + fill_, unit);
        }

        // The slot-th of kSlots parts of all that is to be done for the stages ahead. Copies come first, if they are
        // waited for at the next barrier.
        template <int kSlots>
        __device__ __forceinline__ void work(int slot) const {
            constexpr int kCopySlots = Config::kPendingStages == 0 ? kSlots / 2 : kSlots;
            // Where reads of shared memory have come before, ptxas puts three idle instructions before a copy, but not
            // before those that follow it directly.
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

        // After the last copy of a stage.
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
        // After the last tile the same one once more: its patch is not read, and nobody multiplies its filters.
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

    // Where this thread's warp stands in the tile: warps of the same filters are adjacent.
    struct Warp {
        int m, row, col, image;

        __device__ __forceinline__ explicit Warp(uint32_t thread) {
            int warp = static_cast<int>(thread) / 32;
            m = warp % Config::kWarpsM;
            warp /= Config::kWarpsM;
            col = warp % Config::kWarpsX * (kMmasN * kMmaN);
            warp /= Config::kWarpsX;
            row = warp % Config::kWarpsY * kWarpRows;
            image = warp / Config::kWarpsY;
        }
    };

    // How far into its row of the patch each row of a warp's pixels starts, 2 bits each, unless it is known beforehand.
    // It is the same for channels that are 4 apart, so for all that a lane reads.
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

    // A row of a warp's pixels in registers. A lane's columns of kWindow instructions are adjacent pixels: with the two
    // after them, they are what it needs for all columns of the filter, in one or two reads.
    struct Pixels {
        static constexpr int kLength = kWindow + kKernel - 1, kSkew = Config::kWordSkew;

        typename Mma::B window[kMmasN / kWindow][kLength];

        // Of instruction n, for the filter's column s.
        __device__ __forceinline__ const typename Mma::B& operand(int n, int s) const {
            return window[n / kWindow][n % kWindow + s];
        }

        // `first`: the pixel of column 0 in the patch; if rows are aligned, the aligned one before it.
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
        // The addition changes nothing but the sign of zero. Without it, ptxas leaves in place what a wide read has
        // brought, rounded or not, and moves it to the pair of registers that an instruction takes at each of its uses.
        static __device__ __forceinline__ uint32_t apart(uint32_t bits) {
            if constexpr (Config::kPairs) {
                using Two = typename Mma::Two;
                const uint32_t zero = 0;
                const Two sum = __hadd2(reinterpret_cast<const Two&>(bits), reinterpret_cast<const Two&>(zero));
                return reinterpret_cast<const uint32_t&>(sum);
            }
#if __CUDA_ARCH__ >= 900
            if constexpr (Config::kAlignedWords) return __float_as_uint(__fadd_rn(__uint_as_float(bits), 0.0f));
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

        // Those from `begin` to `end` of the kWindow pixels from `piece` on, which stand at a multiple of kWindow words.
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

    // What the next products take.
    struct Operands {
        typename Mma::A a[kMmasM];
        Pixels rows[kInputRows];
    };

    static __device__ __forceinline__ typename Mma::A load_filters(const uint4* w, int tap, int m) {
        const uint4 raw = w[Fragments::index(tap % kKernel, tap / kKernel, m) * 32];
        return {{raw.x, raw.y, raw.z, raw.w}};
    }

    // Multiplies the stage at `use`. Operands are read as soon as the registers are free that they go to, and what else
    // there is to do with the stages is spread over the multiplications: together after the barrier, it would keep the
    // tensor cores waiting.
    static __device__ __forceinline__ void multiply(Sum& sum, Operands& operands, Stream& stream,
                                                    const unsigned char* shared, uint32_t use, int chunk,
                                                    uint32_t skews) {
        constexpr int kSlots = Config::kTaps * kMmasM;
        // Rows of the next stage for which there are registers in the end.
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
        const bool ahead = Config::kReadsAhead && chunk > 0;  // whether the stage before has begun this one
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
            } else if (Config::kReadsAhead && s < kRowsAhead) {  // after the last chunk in vain
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

    // How a tile of outputs lies in memory: as spans of consecutive ones, each whole rows of one image and filter, or,
    // if the tile is narrower than the image, one row.
    struct Spans {
        static constexpr int kOfWarp = 8 * Config::kHalvesPerSlice;  // filters of a slice that a warp has computed
        static constexpr int kFilters = Config::kWarpsM * kOfWarp;   // of a slice
        static constexpr int kCount = Config::kImages * kFilters;
        static constexpr int kLongest = Config::kTileRows * Config::kTileCols;

        bool whole_rows;
        int rows, length, pitch;  // pitch: between staged rows
        int width;                // outputs of a row
        uint32_t plane;           // of a channel
        int64_t image;            // of an image
        int64_t first;            // the tile's first output
        uint32_t place;           // its address in units of Output, modulo 2^32
        int filters, images;      // that exist, from there

        __device__ __forceinline__ Spans(const Problem& problem, const Tile& tile, const Output* out)
            : width(static_cast<int>(problem.out_width)),
              plane(static_cast<uint32_t>(problem.out_height * problem.out_width)),
              image(problem.out_channels * plane), filters(tile.filters) {
            const int cols = min(Config::kTileCols, width - tile.col);
            rows = min(Config::kTileRows, static_cast<int>(problem.out_height) - tile.row);
            whole_rows = cols == width;
            length = whole_rows ? rows * cols : cols;
            pitch = whole_rows ? width : Config::kStagedCols;
            first = tile.image * image + tile.channel * static_cast<int64_t>(plane) + tile.row * width + tile.col;
            place = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(out) / sizeof(Output) + first);
            images = static_cast<int>(min(problem.images - tile.image, static_cast<int64_t>(Config::kImages)));
        }

        // Whether a span may have no 16 bytes that are aligned.
        __device__ __forceinline__ bool short_ones() const { return length < 2 * kVector - 1; }

        // Which of the tile's filters is the index-th of a slice, and in which image.
        static __device__ __forceinline__ int filter(int slice, int index) {
            if constexpr (Config::kImages > 1) index %= kFilters;
            const int warp = Config::kWarpsM == 1 ? 0 : index / kOfWarp;
            return warp * (kMmasM * kMmaM - kOfWarp) + slice * kOfWarp + index;
        }
        static __device__ __forceinline__ int image_of(int index) {
            return Config::kImages == 1 ? 0 : index / kFilters;
        }
    };

    // One span of a slice: the outputs of an image, a filter and, unless it has whole rows, a row. Its number in the
    // slice is `index` + `more`; with `more` it is still a filter of the same warp and image.
    struct Span {
        int row, image, filter;  // in the tile
        bool exists;
        int64_t offset;  // from the first output of the tile
        int head;        // outputs before the first that is aligned to 16 bytes
        int staged;      // where its first output is staged: aligned to 16 bytes as its place in memory is

        // What depends on `more` and on `index` is added up apart: the one is the same for all spans of a thread.
        __device__ __forceinline__ Span(const Spans& spans, int slice, int index, int more, int row)
            : row(row), image(Spans::image_of(index)) {
            const int first = Spans::filter(slice, index), before = spans.whole_rows ? 0 : row * spans.width;
            filter = first + more;
            exists = first < spans.filters - more && (Config::kImages == 1 || image < spans.images);
            offset = times(more, spans.plane) + before + times(first, spans.plane);
            if constexpr (Config::kImages > 1) offset += image * spans.image;
            uint32_t place = spans.place + more * spans.plane + before + static_cast<uint32_t>(first) * spans.plane;
            if constexpr (Config::kImages > 1) place += static_cast<uint32_t>(image * spans.image);
            head = static_cast<int>(-place % kVector);
            staged = more * Config::kSpanPitch + row * spans.pitch + static_cast<int>(place % 4) +
                     index * Config::kSpanPitch;
        }

        static __device__ __forceinline__ int64_t times(int number, uint32_t plane) {
            return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(number)) * plane);
        }

        // Of its first output; if the span does not exist, of one that does.
        __device__ __forceinline__ Position position(const Tile& tile, const Spans& spans) const {
            return {tile.image + (exists ? image : 0), tile.channel + (exists ? filter : 0),
                    (tile.row + row) * spans.width + tile.col};
        }
    };

    // Writes a slice of the accumulators to `staged`, kTogether columns at once.
    template <int kTogether>
    static __device__ __forceinline__ void stage(const Sum& sum, int slice, const Spans& spans, float* staged) {
        const uint32_t thread = ptx::read_thread_index();
        const int lane = static_cast<int>(thread % 32);
        const Warp warp(thread);
        const int cols = spans.whole_rows ? spans.width : spans.length;
#pragma unroll
        for (int y = 0; y < kWarpRows; ++y) {
            const int index = warp.image * Spans::kFilters + warp.m * Spans::kOfWarp;
            float* row = staged + Span(spans, slice, index, lane / 4, warp.row + y).staged;
#pragma unroll
            for (int i = 0; i < Config::kHalvesPerSlice; ++i) {
                const int half = slice * Config::kHalvesPerSlice + i, m = half / 2;
#pragma unroll
                for (int pair = 0; pair < kMmasN; ++pair) {
                    const int n = pair / 2 * 2, column = pair % 2, d = half % 2 * 2 + column;
                    const int col = warp.col + Config::pixel(n, lane % 4 * 2 + column);
                    float* to = row + i * 8 * Config::kSpanPitch + col;
                    if constexpr (kTogether == 2) {
                        if (col < cols) *reinterpret_cast<float2*>(to) = {sum[y][m][n][d], sum[y][m][n + 1][d]};
                    } else {
                        if (col < cols) to[0] = sum[y][m][n][d];
                        if (col + 1 < cols) to[1] = sum[y][m][n + 1][d];
                    }
                }
            }
        }
    }

    // How results are staged: as many filters at a time as fit. A lane's pairs of 4 words x 8 filters fall on 32 banks.
    struct ResultSlice {
        static constexpr int kCols = Config::kTileCols + kVector, kUnpaddedPitch = Config::kTileRows * kCols;
        static constexpr int kPitch = kUnpaddedPitch + (24 - kUnpaddedPitch % 16) % 16;  // of a filter's results
        static constexpr int kFilterBytes = Config::kImages * kPitch * static_cast<int>(sizeof(Output));
        static constexpr bool fits(int slices) {
            return Config::kFilterTile / slices * kFilterBytes <= Config::kUsedBytes;
        }
        static constexpr int kSlices = fits(1) ? 1 : fits(2) ? 2 : 4;
        static constexpr int kHalves = 2 * kMmasM / kSlices;  // of a warp's fragments, 8 filters each
        static constexpr int kFilters = Config::kWarpsM * kHalves * 8;
        static_assert(!kStagesResults || (fits(kSlices) && kMmasM % kSlices == 0));

        const Spans& spans;
        int slice;

        // Which of the tile's filters is the index-th of the slice.
        __device__ __forceinline__ int filter(int index) const {
            return index / (kHalves * 8) * (kMmasM * kMmaM) + slice * (kHalves * 8) + index % (kHalves * 8);
        }
        // Of the first output of a span, from the tile's first output; Integer may be as narrow as what is asked of it.
        template <class Integer>
        __device__ __forceinline__ Integer offset(const Problem& problem, int index, int image, int row) const {
            const Integer filters = image * static_cast<Integer>(problem.out_channels) + filter(index);
            const Integer start = filters * static_cast<Integer>(spans.plane);
            return spans.whole_rows ? start : start + row * static_cast<Integer>(spans.width);
        }
        // Outputs from the last one that is aligned to 16 bytes to the span's first.
        __device__ __forceinline__ int misaligned(const Problem& problem, int index, int image, int row) const {
            return static_cast<int>((spans.place + offset<uint32_t>(problem, index, image, row)) % kVector);
        }
        // Where a row of a span is staged: aligned to 16 bytes as the span's place in memory is.
        __device__ __forceinline__ int staged(const Problem& problem, int index, int image, int row) const {
            return (image * kFilters + index) * kPitch + row * (spans.whole_rows ? spans.width : kCols) +
                   misaligned(problem, index, image, row);
        }
    };

    // The accumulators of a warp's half-th 8 filters. Registers cannot be indexed, so each half has its own code.
    template <int kHalf, int kValues>
    static __device__ __forceinline__ void take_half(float (&value)[kValues], const Sum& sum, int half) {
        if constexpr (kHalf < 2 * kMmasM) {
            if (half != kHalf) return take_half<kHalf + 1>(value, sum, half);
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                value[i] = sum[i / (2 * kMmasN)][kHalf / 2][i / 2 % kMmasN][kHalf % 2 * 2 + i % 2];
            }
        }
    }

    // Applies the epilogue to a slice of the accumulators, 8 filters of each warp at a time, and stages the results.
    static __device__ __forceinline__ void stage_results(const Problem& problem, const Tile& tile, const Sum& sum,
                                                         const ResultSlice& slice, Output* staged,
                                                         const Epilogue& epilogue) {
        constexpr int kValues = kWarpRows * kMmasN * 2;
        const Spans& spans = slice.spans;
        const uint32_t thread = ptx::read_thread_index();
        const int lane = static_cast<int>(thread % 32);
        const Warp warp(thread);
        const int cols = spans.whole_rows ? spans.width : spans.length;
        const bool in_pairs = (spans.place | spans.width) % 2 == 0;
        const auto operands_of = [&](int half) {
            const int index = (warp.m * ResultSlice::kHalves + half) * 8 + lane / 4;
            return epilogue.template load<Runs::kAnywhere, kValues>(
                Position{min(tile.image + warp.image, static_cast<int>(problem.images) - 1),
                         tile.channel + min(slice.filter(index), tile.filters - 1), 0},
                kValues);
        };
        auto next = operands_of(0);
#pragma unroll 1
        for (int half = 0; half < ResultSlice::kHalves; ++half) {
            const auto operands = next;
            next = operands_of(min(half + 1, ResultSlice::kHalves - 1));
            const int index = (warp.m * ResultSlice::kHalves + half) * 8 + lane / 4;
            float value[kValues];
            take_half<0>(value, sum, slice.slice * ResultSlice::kHalves + half);
            epilogue.apply(value, operands);
#pragma unroll
            for (int y = 0; y < kWarpRows; ++y) {
                const int row = warp.row + y;
                Output* to = staged + slice.staged(problem, index, warp.image, row);
#pragma unroll
                for (int pair = 0; pair < kMmasN; ++pair) {
                    const int n = pair / 2 * 2, column = pair % 2;
                    const int col = warp.col + Config::pixel(n, lane % 4 * 2 + column);
                    const float first = value[(y * kMmasN + n) * 2 + column];
                    const float second = value[(y * kMmasN + n + 1) * 2 + column];
                    if (in_pairs) {
                        if (col < cols) *reinterpret_cast<uint32_t*>(to + col) = pack_two<Output>(first, second);
                    } else {
                        if (col < cols) to[col] = from_float<Output>(first);
                        if (col + 1 < cols) to[col + 1] = from_float<Output>(second);
                    }
                }
            }
        }
    }

    // Copies a slice's spans to memory, kLanes lanes to a span: what is aligned in pieces of 16 bytes, then the up to
    // kVector - 1 outputs at either end.
    template <int kLanes>
    static __device__ __forceinline__ void store_results(const Problem& problem, const Tile& tile,
                                                         const ResultSlice& slice, const Output* staged, Output* out) {
        constexpr int kSpans = ResultSlice::kFilters * Config::kImages;
        constexpr int kAtOnce = kThreads / kLanes, kTogether = 4;
        static_assert(kLanes >= 2 * kVector && kThreads % kLanes == 0);
        const Spans& spans = slice.spans;
        const int thread = static_cast<int>(ptx::read_thread_index()), lane = thread % kLanes;
        const int count = spans.whole_rows ? kSpans : kSpans * spans.rows;
        const bool aligned =
            ((spans.place | spans.plane | spans.length | (spans.whole_rows ? 0 : spans.width)) % kVector) == 0;
#pragma unroll 1
        for (int number = thread / kLanes; number < count; number += kAtOnce * kTogether) {
            int from[kTogether], head[kTogether];
            bool exists[kTogether];
            Output* to[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int each = min(number + i * kAtOnce, count - 1), span = each % kSpans, row = each / kSpans;
                const int index = span % ResultSlice::kFilters, image = span / ResultSlice::kFilters;
                exists[i] = number + i * kAtOnce < count && slice.filter(index) < tile.filters &&
                            tile.image + image < problem.images;
                head[i] = -slice.misaligned(problem, index, image, row) & (kVector - 1);
                from[i] = slice.staged(problem, index, image, row);
                to[i] = out + slice.template offset<int64_t>(problem, index, image, row);
            }
#pragma unroll 1
            for (int done = lane * kVector; done < spans.length; done += kLanes * kVector) {
                uint4 piece[kTogether];
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    piece[i] = *reinterpret_cast<const uint4*>(staged + from[i] + head[i] + done);
                }
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    const int col = head[i] + done;
                    if (exists[i] && col + kVector <= spans.length) *reinterpret_cast<uint4*>(to[i] + col) = piece[i];
                }
            }
            if (aligned) continue;
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int tail = max(spans.length - head[i], 0) % kVector;
                const int col = lane < kVector ? lane : spans.length - tail + lane - kVector;
                const int end = lane < kVector ? min(head[i], spans.length) : spans.length;
                if (exists[i] && col < end) to[i][col] = staged[from[i] + col];
            }
        }
    }

    static __device__ __forceinline__ void store(const Problem& problem, const Tile& tile, const Sum& sum,
                                                 unsigned char* shared, Output* out, const Epilogue& epilogue) {
        const Spans spans(problem, tile, out);
        if constexpr (kStagesResults) {
            constexpr int kRowLanes = Config::kTileCols >= 32 * kVector ? 32 : 2 * kVector;
            Output* staged = reinterpret_cast<Output*>(shared);
            for (int number = 0; number < ResultSlice::kSlices; ++number) {
                const ResultSlice slice{spans, number};
                if (number > 0) __syncthreads();  // everyone has read the slice before
                stage_results(problem, tile, sum, slice, staged, epilogue);
                __syncthreads();
                if (spans.whole_rows) {
                    store_results<32>(problem, tile, slice, staged, out + spans.first);
                } else {
                    store_results<kRowLanes>(problem, tile, slice, staged, out + spans.first);
                }
            }
            return;
        }
        const bool in_pairs = (spans.place | spans.width) % 2 == 0;
        out += spans.first;
        // One loop, so that there is one copy of the epilogue: with four, instructions would not stay cached.
#pragma unroll 1
        for (int slice = 0; slice < Config::kSlices; ++slice) {
            float* staged = reinterpret_cast<float*>(shared + slice % Config::kSliceBuffers * Config::kSliceBytes);
            if (Config::kSliceBuffers == 1 && slice > 0) __syncthreads();  // everyone has read the slice before
#pragma unroll
            for (int known = 0; known < Config::kSlices; ++known) {  // registers cannot be indexed
                if (slice != known) continue;
                if (in_pairs) {
                    stage<2>(sum, known, spans, staged);
                } else {
                    stage<1>(sum, known, spans, staged);
                }
            }
            __syncthreads();
            const int rows = spans.whole_rows ? 1 : spans.rows;
            for (int row = 0; row < rows; ++row) {
                store_ends(tile, spans, slice, row, staged, out, epilogue);
                store_runs(tile, spans, slice, row, staged, out, epilogue);
            }
        }
    }

    // The part of a slice's spans that fills whole, aligned 16 bytes: a run of 16 bytes per lane and pass.
    static __device__ __forceinline__ void store_runs(const Tile& tile, const Spans& spans, int slice, int row,
                                                      const float* staged, Output* out, const Epilogue& epilogue) {
        // Where planes of the output are multiples of 16 bytes, so are columns of runs; where not, operands may be.
        constexpr Runs kRuns = Epilogue::kColumns % kVector == 0 ? Runs::kWhole : Runs::kAnywhere;
        constexpr int kLongestRuns = (Spans::kLongest + kVector - 1) / kVector;
        constexpr int kLanes = kLongestRuns > 16 ? 32 : kLongestRuns > 8 ? 16 : 8;
        constexpr int kPass = kLanes * kVector, kMostPasses = (Spans::kLongest + kPass - 1) / kPass;
        constexpr int kAtOnce = kThreads / kLanes;
        static_assert(Spans::kOfWarp % kAtOnce == 0 && Spans::kCount % kAtOnce == 0);
        // Runs and what operands hold take registers, of which a multiprocessor has 65536.
        constexpr int kRegisters = 65536 / (kThreads * Config::kBlocksPerSm);
        constexpr int kRunsTogether = (kRegisters > 128 ? 4 : 2) / (Epilogue::kElementBytes > 0 ? 2 : 1);
        constexpr int kPasses = kMostPasses < kRunsTogether ? kMostPasses : kRunsTogether;
        constexpr int kMostSpans = Spans::kCount / kAtOnce, kSpansTogether = kRunsTogether / kPasses;
        constexpr int kSpans = kSpansTogether < kMostSpans ? kSpansTogether : kMostSpans;
        static_assert(Spans::kCount % (kAtOnce * kSpans) == 0);
        const int thread = static_cast<int>(ptx::read_thread_index()), group = thread / kLanes, lane = thread % kLanes;
        if (spans.short_ones()) return;
#pragma unroll 1
        for (int index = 0; index < Spans::kCount; index += kAtOnce * kSpans) {
            int begin = 0;
#pragma unroll 1
            do {
                alignas(16) float value[kSpans][kPasses][kVector];
                typename Epilogue::template Values<kVector, Position> operands[kSpans][kPasses];
                Output* destination[kSpans];
                int end[kSpans];  // of the part of the span that is stored, from the lane's first run of the passes
#pragma unroll
                for (int i = 0; i < kSpans; ++i) {
                    const Span span(spans, slice, index + i * kAtOnce, group, row);
                    const Position at = span.position(tile, spans);
                    const int first = begin + lane * kVector, whole = (spans.length - span.head) & -kVector;
                    destination[i] = out + span.offset + span.head + first;
                    end[i] = span.exists ? whole - first : 0;
                    // Lanes beyond the last run do it as well and do not store it: runs are then worked on side by
                    // side, without a branch between them.
#pragma unroll
                    for (int pass = 0; pass < kPasses; ++pass) {
                        const int col = span.head + min(first + pass * kPass, whole - kVector);
                        operands[i][pass] = epilogue.template load<kRuns, kVector>(
                            Position{at.batch, at.row, at.col + col}, kVector);
#pragma unroll
                        for (int j = 0; j < kVector; j += 4) {
                            *reinterpret_cast<float4*>(value[i][pass] + j) =
                                *reinterpret_cast<const float4*>(staged + span.staged + col + j);
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < kSpans; ++i) {
#pragma unroll
                    for (int pass = 0; pass < kPasses; ++pass) epilogue.apply(value[i][pass], operands[i][pass]);
                }
#pragma unroll
                for (int i = 0; i < kSpans; ++i) {
#pragma unroll
                    for (int pass = 0; pass < kPasses; ++pass) {
                        if (pass * kPass < end[i]) {
                            Elements<Output, kVector> packed;
                            packed.set(value[i][pass]);
                            // In C++ the stores of two runs, interleaved, end as stores of 4 bytes.
                            __stwb(reinterpret_cast<uint4*>(destination[i] + pass * kPass),
                                   reinterpret_cast<const uint4&>(packed));
                        }
                    }
                }
                begin += kPasses * kPass;
            } while (kPasses * kPass < Spans::kLongest && begin < spans.length);
        }
    }

    // What is left of them: up to kVector - 1 outputs at either end, or all of short spans.
    static __device__ __forceinline__ void store_ends(const Tile& tile, const Spans& spans, int slice, int row,
                                                      const float* staged, Output* out, const Epilogue& epilogue) {
        const bool aligned =
            ((spans.place | spans.plane | spans.length | (spans.whole_rows ? 0 : spans.width)) % kVector) == 0;
        if (aligned && !spans.short_ones()) return;
#pragma unroll 1
        for (int item = static_cast<int>(threadIdx.x); item < Spans::kCount * 2 * kVector; item += kThreads) {
            const int i = item % (2 * kVector);
            const Span span(spans, slice, item / (2 * kVector), 0, row);
            const int tail = (spans.length - span.head) % kVector;
            const bool in_tail = !spans.short_ones() && i >= kVector;
            const int col = in_tail ? spans.length - tail + i - kVector : i;
            if (col >= (in_tail || spans.short_ones() ? spans.length : span.head) || !span.exists) continue;
            float value[1] = {staged[span.staged + col]};
            Position at = span.position(tile, spans);
            at.col += col;
            epilogue.apply(value, at, 1);
            out[span.offset + col] = from_float<Output>(value[0]);
        }
    }
};

}  // namespace fxfuse
