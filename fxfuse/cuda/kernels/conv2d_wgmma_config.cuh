// What the parts of Hopper's convolution (conv2d_wgmma.cuh) share: how a problem and shared memory are divided.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "divisor.cuh"
#include "mma.cuh"
#include "ptx_sm90.cuh"
#include "wgmma.cuh"

namespace fxfuse {

constexpr int kWgmmaSegment = 128;  // positions that an instruction multiplies

// A convolution and how the host cuts it up.
struct Conv2dWgmmaProblem {
    Conv2dProblem conv;
    int64_t segment_rows, row_segments;  // output rows in a segment of 128 positions, or segments in an output row
    int64_t patch_rows, patch_pitch;     // of a plane of the patch
    int64_t steps;                       // in a stage, each of 32 bytes of channels
    int64_t stages;
};

// Half of a block's warpgroups are consumers, half producers. A consumer computes 64 filters x 2 segments of pixels;
// kGroupsM x kGroupsN consumers work in step on a tile. With one consumer per block, a multiprocessor holds two blocks:
// while one stores, the other multiplies. Two consumers share what they read.
// kKernel: rows and columns of a filter with stride and dilation 1, or 0 for any filter.
// kTogether: positions whose channels of a step a producer's thread fetches at once.
// kStagedSegments: segments of results, 32 bits each, that fit where a warp stages them.
template <class Mma_, int kGroupsM_, int kGroupsN_, int kKernel_, int kTogether_, int kStagedSegments_>
struct Conv2dWgmmaConfig {
    using Mma = Mma_;
    using Element = typename Mma::Element;
    static constexpr int kGroupsM = kGroupsM_, kGroupsN = kGroupsN_, kKernel = kKernel_, kTogether = kTogether_;
    static constexpr int kStagedSegments = kStagedSegments_;
    static constexpr int kConsumers = kGroupsM * kGroupsN, kProducers = kConsumers, kBlocksPerSm = 2 / kConsumers;
    static constexpr int kThreads = (kConsumers + kProducers) * kWarpgroup;
    // Parts of each number: hi and, if it is split, lo (SplitTf32 in mma.cuh).
    static constexpr int kParts = Mma::kProducts > 1 ? 2 : 1;
    static constexpr int kGroupFilters = 64, kFilterTile = kGroupsM * kGroupFilters;
    static constexpr int kSegment = kWgmmaSegment, kGroupSegments = 2, kSegments = kGroupsN * kGroupSegments;
    static_assert(kConsumers == 1 || kConsumers == 2);

    // A multiprocessor has 65536 registers, and a warpgroup takes or gives multiples of 8 for each thread.
    static constexpr int kProducerRegisters = 64, kConsumerRegisters = 192;
    // A multiprocessor has 228 KB of shared memory. Each block takes one KB of it for itself.
    static constexpr int kLargestShared = (228 / kBlocksPerSm - 1) * 1024;

    static constexpr int kPiece = 16;  // bytes of channels that stand together
    static constexpr int kPieceChannels = kPiece / static_cast<int>(sizeof(Element));
    static constexpr int kStepPieces = 2, kStepChannels = kStepPieces * kPieceChannels;
    static constexpr int kPartPieces = kParts * kStepPieces;  // pieces of a step, of all parts

    // Shared memory: [barriers][offsets of taps][stages of patch and filters][results to be stored][for each producer,
    // where positions are in x].
    static constexpr int kMostStages = 8, kMostTaps = 64;
    static constexpr int kTapOffset = 256, kHeaderBytes = kTapOffset + kMostTaps * 4;
    // Warps store 8 filters at a time, of both their segments if there is room. A staged row is misaligned as its place
    // in memory is, by up to 7 elements. The pitch is 8 more than a multiple of 64: so the pairs that a warp, or half
    // of one, writes at once fall on 32 banks.
    static constexpr int kSliceFilters = 8;
    static constexpr int kWarpStagedBytes = kSliceFilters * (kStagedSegments * kSegment + 8) * 4;
    static constexpr int kStagedBytes = kConsumers * 4 * kWarpStagedBytes;
};

// All that the kernel must know, in the types that it uses. These are constants, which take no registers.
struct WgmmaCut {
    // Tiles along each. Filters run fastest, so that blocks which share a patch run together and find it in L2.
    FastDivisor filter_tiles, groups, col_tiles, row_tiles;
    unsigned tiles;
    int tile_rows, tile_cols, group_filters;

    int channels, height, width, x_channel, x_row, x_col;  // of a group; strides of x
    int64_t x_image;
    int out_channels, out_height, out_width;
    int64_t plane;  // out_height * out_width
    int kernel_width, taps, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;

    FastDivisor by_pitch, by_patch_rows, by_stride_w, by_row_segments;
    int segment_rows, row_segments, patch_rows, pitch, positions;
    bool pairs;  // whether neighbours are in one row and can be stored two at a time
    int steps, stages, chunks;
    uint32_t plane_bytes, patch_bytes, filter_bytes, stage_bytes;  // plane: 16 bytes of channels; others: of a stage
    uint32_t staged_at, sources_at;                                // in shared memory
    int shared_bytes;
};

#ifndef __CUDACC_RTC__
template <class Config>
WgmmaCut cut_up(const Conv2dWgmmaProblem& problem) {
    const Conv2dProblem& conv = problem.conv;
    const auto narrow = [](int64_t value) { return static_cast<int>(value); };
    const auto tiles_of = [](int64_t extent, int64_t tile) {
        return static_cast<unsigned>((extent + tile - 1) / tile);
    };
    const auto divisor = [](int64_t by) { return FastDivisor(static_cast<unsigned>(by)); };
    WgmmaCut cut;
    cut.segment_rows = narrow(problem.segment_rows);
    cut.row_segments = narrow(problem.row_segments);
    cut.pairs = conv.out_width % 2 == 0 && (problem.segment_rows == 1 || problem.patch_pitch % 2 == 0);
    cut.tile_rows = Config::kSegments / cut.row_segments * cut.segment_rows;
    cut.tile_cols = cut.row_segments * Config::kSegment;
    cut.group_filters = narrow(conv.out_channels / conv.groups);
    const unsigned filter_tiles = tiles_of(cut.group_filters, Config::kFilterTile);
    const unsigned row_tiles = tiles_of(conv.out_height, cut.tile_rows);
    const unsigned col_tiles = tiles_of(conv.out_width, cut.tile_cols);
    cut.filter_tiles = divisor(filter_tiles);
    cut.groups = divisor(conv.groups);
    cut.col_tiles = divisor(col_tiles);
    cut.row_tiles = divisor(row_tiles);
    cut.tiles = static_cast<unsigned>(conv.images * conv.groups * filter_tiles * row_tiles * col_tiles);
    cut.channels = narrow(conv.channels / conv.groups);
    cut.height = narrow(conv.height);
    cut.width = narrow(conv.width);
    cut.x_channel = narrow(conv.x_channel);
    cut.x_row = narrow(conv.x_row);
    cut.x_col = narrow(conv.x_col);
    cut.x_image = conv.x_image;
    cut.out_channels = narrow(conv.out_channels);
    cut.out_height = narrow(conv.out_height);
    cut.out_width = narrow(conv.out_width);
    cut.plane = conv.out_height * conv.out_width;
    cut.kernel_width = narrow(conv.kernel_width);
    cut.taps = narrow(conv.kernel_height * conv.kernel_width);
    cut.stride_h = narrow(conv.stride_h);
    cut.stride_w = narrow(conv.stride_w);
    cut.pad_h = narrow(conv.pad_h);
    cut.pad_w = narrow(conv.pad_w);
    cut.dilation_h = narrow(conv.dilation_h);
    cut.dilation_w = narrow(conv.dilation_w);
    cut.patch_rows = narrow(problem.patch_rows);
    cut.pitch = narrow(problem.patch_pitch);
    cut.by_pitch = divisor(problem.patch_pitch);
    cut.by_patch_rows = divisor(problem.patch_rows);
    cut.by_stride_w = divisor(conv.stride_w);
    cut.by_row_segments = divisor(problem.row_segments);
    cut.positions = cut.stride_h * cut.stride_w * cut.patch_rows * cut.pitch;
    cut.steps = narrow(problem.steps);
    cut.stages = narrow(problem.stages);
    const int stage_channels = cut.steps * Config::kStepChannels;
    cut.chunks = (cut.channels + stage_channels - 1) / stage_channels;
    cut.plane_bytes = cut.positions * Config::kPiece;
    cut.patch_bytes = cut.steps * Config::kPartPieces * cut.plane_bytes;
    cut.filter_bytes = cut.steps * cut.taps * Config::kPartPieces * Config::kFilterTile * Config::kPiece;
    cut.stage_bytes = cut.patch_bytes + cut.filter_bytes;
    cut.staged_at = Config::kHeaderBytes + cut.stages * cut.stage_bytes;
    cut.sources_at = cut.staged_at + Config::kStagedBytes;
    cut.shared_bytes = static_cast<int>(cut.sources_at) + Config::kProducers * cut.positions * 4;
    return cut;
}
#endif  // __CUDACC_RTC__

// What a block computes in one turn. The tile may reach beyond the image and the last filter.
template <class Config>
struct WgmmaTile {
    int image, row, col;   // of the output
    int first_channel;     // of x
    int channel, filters;  // of the output: the first, and how many there are
    unsigned packed;       // number of the packed filters

    __device__ __forceinline__ WgmmaTile(const WgmmaCut& cut, unsigned index) {
        const int filter_tile = static_cast<int>(cut.filter_tiles.take(index));
        const int group = static_cast<int>(cut.groups.take(index));
        col = static_cast<int>(cut.col_tiles.take(index)) * cut.tile_cols;
        row = static_cast<int>(cut.row_tiles.take(index)) * cut.tile_rows;
        image = static_cast<int>(index);
        first_channel = group * cut.channels;
        channel = group * cut.group_filters + filter_tile * Config::kFilterTile;
        filters = min(Config::kFilterTile, cut.group_filters - filter_tile * Config::kFilterTile);
        packed = group * cut.filter_tiles.divisor + filter_tile;
    }
};

// Where the index-th segment of a tile begins in the tile.
struct WgmmaSegment {
    int row, col;

    __device__ __forceinline__ WgmmaSegment(const WgmmaCut& cut, int index) {
        const int line = static_cast<int>(cut.by_row_segments.divide(static_cast<unsigned>(index)));
        row = line * cut.segment_rows;
        col = (index - line * cut.row_segments) * kWgmmaSegment;
    }
    // As a position in the patch.
    __device__ __forceinline__ uint32_t position(const WgmmaCut& cut) const { return row * cut.pitch + col; }
};

// The barriers of stages, and which stage is next. `full`: the stage may be multiplied; `empty`: it may be filled.
template <class Config>
struct WgmmaRing {
    uint32_t barriers;
    int stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ explicit WgmmaRing(uint32_t barriers) : barriers(barriers) {}
    __device__ __forceinline__ uint32_t full(int of) const { return barriers + of * 8; }
    __device__ __forceinline__ uint32_t empty(int of) const { return barriers + (Config::kMostStages + of) * 8; }
    __device__ __forceinline__ void advance(int stages) {
        if (++stage < stages) return;
        stage = 0;
        phase ^= 1;
    }
};

}  // namespace fxfuse
