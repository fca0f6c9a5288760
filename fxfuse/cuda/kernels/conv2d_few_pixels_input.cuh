// How conv2d_few_pixels.cuh divides a convolution, and how its warps copy x to shared memory and read it from there.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "divisor.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse {

// kRows, kCols: a filter's size. kStages: chunks of x that a warp has in flight or in use. kPlane: with several taps,
// the elements that a stage has for the part of a channel which a tile sees, chosen so that groups of channels are 8
// banks apart. 0 with one tap.
template <class Mma_, int kRows_, int kCols_, int kFilters_, int kPixels_, int kWarps_, int kStages_, int kPlane_>
struct Conv2dFewPixelsConfig {
    using Mma = Mma_;
    using Element = typename Mma::Element;
    static constexpr int kRows = kRows_, kCols = kCols_, kTaps = kRows * kCols;
    static constexpr int kFilters = kFilters_, kPixels = kPixels_;
    static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps;
    static constexpr int kStages = kStages_, kPlane = kPlane_;
    static constexpr int kPieceBytes = 16, kPiece = kPieceBytes / static_cast<int>(sizeof(Element));
    // kGroup: channels of a lane's group, as many as its registers hold with all taps. kGroups, kChunk: groups and
    // channels of a chunk.
    static constexpr int kGroup = kTaps == 1 ? 8 : kPiece, kGroups = 4, kChunk = kGroup * kGroups;
    // Chunks whose weights are in flight. With one tap, registers hold as many as x has stages, with little code each.
    static constexpr int kDepth = kTaps == 1 ? kStages : 1;
    static_assert(kFilters % kMmaN == 0 && kPixels % kMmaM == 0);
    static_assert(kTaps == 1 ? kPlane == 0 : kGroup * kPlane % 32 == 8);
};

// How an image is divided, and what a warp copies of it, as cuda/conv2d_few_pixels.py packs it.
struct Conv2dFewPixelsProblem {
    Conv2dProblem conv;
    int64_t tile_pixels;
    int64_t whole_planes;
    int64_t run;    // elements of a copy: of a plane, or (whole_planes) of all planes of a group
    int64_t group;  // elements between groups of channels in shared memory: 8 banks more than a multiple of 32
};

// Conv2dFewPixelsProblem as the device needs it.
struct Conv2dFewPixelsTiling {
    FastDivisor tiles, images, out_width, width;  // width: columns of x that a tile sees (several taps)
    int tile_pixels;
    bool whole_planes;
    int run;
    int lanes;  // that share a run
    int group;
    int stage_bytes;  // bytes of one stage of a warp

#ifndef __CUDACC_RTC__
    template <class Config>
    static Conv2dFewPixelsTiling of(const Conv2dFewPixelsProblem& problem) {
        const Conv2dProblem& conv = problem.conv;
        const int64_t pixels = conv.out_height * conv.out_width;
        Conv2dFewPixelsTiling tiling{};
        tiling.tiles = FastDivisor(static_cast<unsigned>((pixels + problem.tile_pixels - 1) / problem.tile_pixels));
        tiling.images = FastDivisor(static_cast<unsigned>(conv.images));
        tiling.out_width = FastDivisor(static_cast<unsigned>(conv.out_width));
        tiling.width = FastDivisor(static_cast<unsigned>((conv.out_width - 1) * conv.stride_w + Config::kCols));
        tiling.tile_pixels = static_cast<int>(problem.tile_pixels);
        tiling.whole_planes = problem.whole_planes != 0;
        tiling.run = static_cast<int>(problem.run);
        tiling.lanes = 32;
        while (tiling.lanes > 8 && tiling.lanes / 2 * Config::kPiece >= tiling.run) tiling.lanes /= 2;
        tiling.group = static_cast<int>(problem.group);
        tiling.stage_bytes = Config::kGroups * tiling.group * static_cast<int>(sizeof(typename Config::Element));
        return tiling;
    }
#endif  // __CUDACC_RTC__
};

// A warp's view of x. A word is one register of a fragment: for slot s, which is pixel lane / 4 + 8 * s, one channel of
// 4 bytes, or two of 2 bytes, of the lane's group (lane % 4). Slots beyond the last pixel repeat it: nobody stores
// their results.
//
// With one tap, planes are contiguous. If they start at multiples of 16 bytes, the part that the tile needs is copied.
// Else planes must follow one another, and those of a group have a multiple of 16 bytes: they are copied whole.
template <class Config, bool kSeveralTaps = (Config::kTaps > 1)>
class FewPixelsInput {
    using Element = typename Config::Element;
    using Tiling = Conv2dFewPixelsTiling;
    static constexpr int kSize = static_cast<int>(sizeof(Element)), kPiece = Config::kPiece;
    static constexpr int kSlots = Config::kPixels / 8;

    const Tiling& tiling_;
    const Element* next_;  // where copies start in the chunk's first channel
    int channel_stride_, channels_left_, plane_left_;  // left: from next_ on
    unsigned char* stages_;
    int lane_, pitch_;  // pitch: between channels in a stage
    int at_[kSlots];    // offset of a slot's pixel in a stage, in elements, for this lane's group

public:
    // The view of the image at `x`, from `channel` on. The warp's stages in shared memory begin at `stages`.
    __device__ __forceinline__ FewPixelsInput(const Element* x, const Conv2dProblem& problem, const Tiling& tiling,
                                              int first_pixel, int pixels, int channel, unsigned char* stages, int lane)
        : tiling_(tiling),
          channel_stride_(static_cast<int>(problem.x_channel)),
          channels_left_(static_cast<int>(problem.channels) - channel),
          stages_(stages),
          lane_(lane) {
        const int width = static_cast<int>(problem.width), plane = static_cast<int>(problem.height) * width;
        const int row_step = static_cast<int>(problem.stride_h) * width, col_step = static_cast<int>(problem.stride_w);
        const auto in_plane = [&](int pixel) {
            unsigned row = static_cast<unsigned>(pixel);
            const unsigned col = tiling.out_width.take(row);
            return static_cast<int>(row) * row_step + static_cast<int>(col) * col_step;
        };
        const int start = tiling.whole_planes ? 0 : in_plane(first_pixel) / kPiece * kPiece;
        plane_left_ = plane - start;
        pitch_ = tiling.whole_planes ? plane : tiling.run;
        next_ = x + channel * problem.x_channel + start;
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            at_[slot] = lane % 4 * tiling.group + in_plane(first_pixel + min(lane / 4 + slot * 8, pixels - 1)) - start;
        }
    }

    // Starts to copy the next chunk to a stage. Channels that do not exist become zeros.
    __device__ __forceinline__ void start(int stage) {
        const uint32_t shared = ptx::shared_address(stages_ + stage * tiling_.stage_bytes);
        const int channels = tiling_.whole_planes ? Config::kGroup : 1;  // that a run covers
        const int length = tiling_.whole_planes ? tiling_.run : min(tiling_.run, plane_left_);
        const int first = lane_ / tiling_.lanes, step = 32 / tiling_.lanes;
#pragma unroll 1
        for (int channel = first * channels; channel < Config::kChunk; channel += step * channels) {
            const int group = channel / Config::kGroup * tiling_.group;
            const uint32_t to = shared + (group + channel % Config::kGroup * tiling_.run) * kSize;
            const Element* from = next_ + channel * channel_stride_;
            const int valid = channel < channels_left_ ? Config::kPieceBytes : 0;
#pragma unroll 1
            for (int at = lane_ % tiling_.lanes * kPiece; at < length; at += tiling_.lanes * kPiece) {
                ptx::cp_async_16(to + at * kSize, from + at, valid);
            }
        }
        next_ += int64_t{Config::kChunk} * channel_stride_;
        channels_left_ -= Config::kChunk;
    }

    __device__ __forceinline__ uint32_t word(int stage, int slot, int, int index) const {
        using Bits = Word<kSize>;
        const Bits* bits = reinterpret_cast<const Bits*>(stages_ + stage * tiling_.stage_bytes) + at_[slot];
        if constexpr (kSize == 4) {
            return bits[index * pitch_];
        } else {
            return bits[2 * index * pitch_] | static_cast<uint32_t>(bits[(2 * index + 1) * pitch_]) << 16;
        }
    }
};

// With several taps, x has any strides, and elements of 4 bytes. The part of a channel that a tile sees, with zeros
// outside the image, is copied element by element into kPlane elements, as rows of `width`. So tap (r, s) of a pixel is
// at the offset r * width + s from the start of its window.
template <class Config>
class FewPixelsInput<Config, true> {
    using Element = typename Config::Element;
    using Tiling = Conv2dFewPixelsTiling;
    static constexpr int kSlots = Config::kPixels / 8, kPlane = Config::kPlane;
    static_assert(sizeof(Element) == 4);

    const Tiling& tiling_;
    const Element* next_;  // the chunk's first channel
    int channel_stride_, channels_left_;
    int row_stride_, col_stride_, height_, width_;
    int top_, left_, rows_;  // of the part of the image that the tile sees
    float* stages_;
    int lane_;
    int at_[kSlots];  // where the window of a slot's pixel starts in a stage, for this lane's group

public:
    __device__ __forceinline__ FewPixelsInput(const Element* x, const Conv2dProblem& problem, const Tiling& tiling,
                                              int first_pixel, int pixels, int channel, unsigned char* stages, int lane)
        : tiling_(tiling),
          next_(x + channel * problem.x_channel),
          channel_stride_(static_cast<int>(problem.x_channel)),
          channels_left_(static_cast<int>(problem.channels) - channel),
          row_stride_(static_cast<int>(problem.x_row)),
          col_stride_(static_cast<int>(problem.x_col)),
          height_(static_cast<int>(problem.height)),
          width_(static_cast<int>(problem.width)),
          left_(-static_cast<int>(problem.pad_w)),
          stages_(reinterpret_cast<float*>(stages)),
          lane_(lane) {
        const int stride_h = static_cast<int>(problem.stride_h), stride_w = static_cast<int>(problem.stride_w);
        const int first_row = static_cast<int>(tiling.out_width.divide(first_pixel));
        const int last_row = static_cast<int>(tiling.out_width.divide(first_pixel + pixels - 1));
        top_ = first_row * stride_h - static_cast<int>(problem.pad_h);
        rows_ = (last_row - first_row) * stride_h + Config::kRows;
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            unsigned row = static_cast<unsigned>(first_pixel + min(lane / 4 + slot * 8, pixels - 1));
            const int col = static_cast<int>(tiling.out_width.take(row));
            const int later = (static_cast<int>(row) - first_row) * stride_h;
            at_[slot] = lane % 4 * Config::kGroup * kPlane + later * static_cast<int>(tiling.width.divisor) + col * stride_w;
        }
    }

    __device__ __forceinline__ void start(int stage) {
        const uint32_t shared = ptx::shared_address(stages_ + stage * Config::kChunk * kPlane);
        const int positions = rows_ * static_cast<int>(tiling_.width.divisor);
#pragma unroll 1
        for (int at = lane_; at < positions; at += 32) {
            unsigned row = static_cast<unsigned>(at);
            const int col = left_ + static_cast<int>(tiling_.width.take(row)), y = top_ + static_cast<int>(row);
            const bool inside = static_cast<unsigned>(y) < static_cast<unsigned>(height_) &&
                                static_cast<unsigned>(col) < static_cast<unsigned>(width_);
            const Element* from = next_ + (inside ? y * row_stride_ + col * col_stride_ : 0);
#pragma unroll
            for (int channel = 0; channel < Config::kChunk; ++channel) {
                const int valid = inside && channel < channels_left_ ? 4 : 0;
                ptx::cp_async_small<4>(shared + (channel * kPlane + at) * 4, from + channel * channel_stride_, valid);
            }
        }
        next_ += int64_t{Config::kChunk} * channel_stride_;
        channels_left_ -= Config::kChunk;
    }

    __device__ __forceinline__ uint32_t word(int stage, int slot, int tap, int index) const {
        const int row = tap / Config::kCols * static_cast<int>(tiling_.width.divisor);
        const float* pixel = stages_ + stage * Config::kChunk * kPlane + at_[slot] + row;
        return __float_as_uint(pixel[index * kPlane + tap % Config::kCols]);
    }
};

}  // namespace fxfuse
