// How a direct convolution (conv2d_direct.cuh) is cut into tiles, stages and warps; all its parts share this.
#pragma once

#include <cstdint>

#include "conv2d_patch.cuh"
#include "conv2d_problem.cuh"
#include "divisor.cuh"
#include "mma.cuh"

namespace fxfuse {

constexpr int kAnySkew = -1;

// A warp computes 16 * kMmasM filters of kWarpRows rows of 8 * kMmasN pixels. kWarpsM x kWarpsY x kWarpsX warps share
// a patch. Where feature maps are small, a tile has kImages patches, one from each of kImages images.
// kBlocksPerSm: how many blocks the register allocation must leave room for.
// kResidentChunks: if not 0, a block packs all filters that it needs itself and keeps them in shared memory: up to
// kChannels * kResidentChunks channels of them. If 0, filters are packed into the workspace and streamed.
// kSkew: if all rows of x start at multiples of 16 bytes, the number of pixels between such a multiple and the leftmost
// pixel that a tile needs, which follows it. Else kAnySkew.
template <class Mma_, int kMmasM_, int kWarpRows_, int kMmasN_, int kWarpsM_, int kWarpsY_, int kWarpsX_, int kImages_,
          int kStages_, int kBlocksPerSm_, int kResidentChunks_, int kSkew_>
struct Conv2dDirectConfig {
    using Mma = Mma_;
    using Element = typename Mma::Element;
    static constexpr int kSize = static_cast<int>(sizeof(Element));
    // Whether a word has two channels. They are then copied to planes of their own, and interleaved a stage later.
    static constexpr bool kPairs = kSize == 2;
    static constexpr int kMmasM = kMmasM_, kWarpRows = kWarpRows_, kMmasN = kMmasN_;
    static constexpr int kWarpsM = kWarpsM_, kWarpsY = kWarpsY_, kWarpsX = kWarpsX_, kImages = kImages_;
    static constexpr int kStages = kStages_, kBlocksPerSm = kBlocksPerSm_, kResidentChunks = kResidentChunks_;
    static constexpr int kSkew = kSkew_;
    static constexpr bool kAlignedRows = kSkew != kAnySkew;
    static_assert(kStages == 2 || (kStages == 3 && !kPairs), "PatchCopy remembers what it copied two stages ago");
    // Whether the stage after the one in use is complete, too: its first fragments are then read before the barrier.
    static constexpr bool kReadsAhead = kStages == 3 && kResidentChunks == 0 && Mma::kProducts == 1;
    static constexpr int kPendingStages = kReadsAhead ? 0 : kStages - 2;  // that may be in flight at the barrier

    static constexpr int kThreads = kWarpsM * kWarpsY * kWarpsX * kImages * 32;
    static constexpr int kKernel = 3, kTaps = kKernel * kKernel;
    static constexpr int kWords = kMmaBytesOfK / 4, kChannels = kMmaBytesOfK / kSize;  // per stage
    static constexpr int kFilterTile = kWarpsM * kMmasM * kMmaM;
    static constexpr int kTileRows = kWarpsY * kWarpRows, kTileCols = kWarpsX * kMmasN * kMmaN;

    // The skew of a row of words. Interleaving removes the skew if rows may have different ones.
    static constexpr int kWordSkew = kPairs && !kAlignedRows ? 0 : kSkew;
    static constexpr bool kAlignedWords = kWordSkew != kAnySkew;

    // pixel(n, c): the pixel of a row that column c of a warp's n-th instruction has. With kWindow = 4:
    //
    //   pixel   0  1  2  3   4  5  6  7  ...  28 29 30 31  32
    //   n       0  1  2  3   0  1  2  3  ...   0  1  2  3   4
    //   c       0  0  0  0   1  1  1  1  ...   7  7  7  7   0
    //
    // Unaligned pixels are read one by one. Those that are kWindow apart fall on few banks, so kWindow is 2 for them.
    static constexpr int kWindow = kAlignedWords && kMmasN % 4 == 0 ? 4 : 2;
    static_assert(kMmasN % kWindow == 0);
    static __device__ __forceinline__ constexpr int pixel(int n, int c) {
        return (n / kWindow * kMmaN + c) * kWindow + n % kWindow;
    }

    // A row of the patch is copied from a multiple of 16 bytes in x: up to 3 columns early, or 7 with 16-bit elements.
    static constexpr int kPatchRows = kTileRows + kKernel - 1, kPatchCols = kTileCols + 2 * (16 / kSize);
    static constexpr int kImagePitch = kPatchRows * kPatchCols;
    // The 4 words x 8 pixels that a warp reads at once fall on 32 banks if channels are 8 or 24 banks apart.
    static constexpr int kUnpaddedPitch = kImages * kImagePitch;
    static constexpr int kChannelPitch = kUnpaddedPitch + (40 - kUnpaddedPitch % 16) % 16;
    static_assert(kChannelPitch % 16 == 8);

    // A stage's address is that of its [patch][filters]. Planes to be interleaved lie before this address.
    static constexpr int kPlanePitch = kUnpaddedPitch;
    static constexpr int kPlaneBytes = kPairs ? kChannels * kPlanePitch * kSize : 0;
    static constexpr int kPatchBytes = kWords * kChannelPitch * 4;
    static constexpr int kFilterBytes = kTaps * kFilterTile * kWords * 4 * (Mma::kProducts > 1 ? 2 : 1);
    static constexpr int kUsedBytes = kPatchBytes + (kResidentChunks == 0 ? kFilterBytes : 0);
    static constexpr int kStageBytes = kPlaneBytes + kUsedBytes;
    static constexpr int kSharedBytes = kStages * kStageBytes + kResidentChunks * kFilterBytes;
    static_assert(kSharedBytes <= 163 * 1024, "an A100 block's limit");

    // Accumulators are staged in the stage that was multiplied last, 16 or 8 filters of every warp at a time. Staged
    // rows are 4 columns longer than the tile's, because spans of outputs start up to 3 columns late (see Span). Half a
    // warp writes 4 filters x 4 pairs of pixels at once. Two of these share a bank; fewer is impossible, because spans
    // are multiples of 16 bytes.
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

namespace detail {

// The tile that a block computes in one turn. It may reach beyond the image, the last image, the last filter.
template <class Config>
struct DirectTile : PatchPosition {
    int channel, filters;  // the first output channel, and how many there are
    unsigned packed;       // number of the packed filters

    __device__ __forceinline__ DirectTile(const Conv2dProblem& problem, const Conv2dTiles& tiles, unsigned index) {
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

// Where this thread's warp stands in the tile: warps of the same pixels are adjacent (m runs fastest).
template <class Config>
struct DirectWarp {
    int m, row, col, image;

    __device__ __forceinline__ explicit DirectWarp(uint32_t thread) {
        int warp = static_cast<int>(thread) / 32;
        m = warp % Config::kWarpsM;
        warp /= Config::kWarpsM;
        col = warp % Config::kWarpsX * (Config::kMmasN * kMmaN);
        warp /= Config::kWarpsX;
        row = warp % Config::kWarpsY * Config::kWarpRows;
        image = warp / Config::kWarpsY;
    }
};

}  // namespace detail

}  // namespace fxfuse
