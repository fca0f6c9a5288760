// Convolutions on channels_last as matrix products (gemm.cuh): row m of x is what output pixel m sees through the filter,
// in the order (kernel row, kernel column, channel) of a channels_last filter. It is never stored: tiles are gathered
// from the images, with zeros outside.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "divisor.cuh"
#include "gemm.cuh"
#include "ptx.cuh"
#include "shared_tile.cuh"

namespace fxfuse {

// Strides and offsets are in elements, channels contiguous. A tap is one position of the filter.
struct WindowRows {
    static constexpr int kMostTaps = 15;  // of a side of the filter: see `visible`

    struct Host {
        int64_t height, width, channels;
        int64_t out_height, out_width;
        int64_t kernel_height, kernel_width;
        int64_t stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
        int64_t x_image, x_row, x_col;
    };

    FastDivisor image_pixels, out_width, channels, kernel_width;
    int height, width, kernel_height;
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    int64_t x_image;
    int x_row, x_col;
    ReductionDigits tile;  // a tile's length in (channel, kernel column, kernel row)

    static WindowRows make(const Host& host, int tile_k) {
        const auto narrow = [](int64_t value) { return static_cast<int>(value); };
        const int64_t taps = tile_k / host.channels;
        return {FastDivisor(static_cast<unsigned>(host.out_height * host.out_width)),
                FastDivisor(static_cast<unsigned>(host.out_width)),
                FastDivisor(static_cast<unsigned>(host.channels)),
                FastDivisor(static_cast<unsigned>(host.kernel_width)),
                narrow(host.height),
                narrow(host.width),
                narrow(host.kernel_height),
                narrow(host.stride_h),
                narrow(host.stride_w),
                narrow(host.pad_h),
                narrow(host.pad_w),
                narrow(host.dilation_h),
                narrow(host.dilation_w),
                host.x_image,
                narrow(host.x_row),
                narrow(host.x_col),
                {narrow(tile_k % host.channels), narrow(taps % host.kernel_width), narrow(taps / host.kernel_width)}};
    }

    // Of `extent` rows from `row` on, and of K from `first` on.
    template <class Copy, class Element>
    __device__ __forceinline__ Copy copy(const Element* x, int64_t row, int extent, int64_t first, int,
                                         uint32_t thread) const {
        return Copy(*this, x, static_cast<unsigned>(row), extent, static_cast<int>(first), thread);
    }

    // A thread's share of filling tile after tile along K, as TileCopy has it. Which taps of a pixel's window are inside
    // the image is the same for every channel: one bit per row and column of the filter, looked at instead of
    // coordinates. Beyond the end of K no tap is inside.
    template <class Tile, int kThreads, int kAccess>
    class Copy {
        using T = typename Tile::Element;
        static_assert(kAccess == kChunkBytes, "a piece has one tap");
        static constexpr int kPiecesPerRow = Tile::kRowBytes / kAccess;
        static constexpr int kRowsPerPass = kThreads / kPiecesPerRow;
        static constexpr int kPasses = Tile::kRows / kRowsPerPass;
        static constexpr int kPieceElements = kAccess / Tile::kElementBytes;
        static_assert(kThreads % kPiecesPerRow == 0 && Tile::kRows % kRowsPerPass == 0, "every pass must be full");

        const WindowRows& rows_;
        const char* image_;         // the tile's first, at its first pixel's first channel, moved by the padding
        uint32_t offset_[kPasses];  // from there to a pixel's window, in bytes
        uint32_t visible_[kPasses];
        ReductionDigits at_;        // this thread's pieces in (channel, kernel column, kernel row)

    public:
        __device__ __forceinline__ Copy(const WindowRows& rows, const T* x, unsigned row, int extent, int first,
                                        uint32_t thread)
            : rows_(rows) {
            const unsigned first_image = rows.image_pixels.divide(row);
            image_ = reinterpret_cast<const char*>(x + first_image * rows.x_image -
                                                   static_cast<int64_t>(rows.pad_h) * rows.x_row -
                                                   static_cast<int64_t>(rows.pad_w) * rows.x_col);
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass) {
                const int in_tile = static_cast<int>(thread / kPiecesPerRow) + pass * kRowsPerPass;
                unsigned rest = row + static_cast<unsigned>(min(in_tile, extent - 1));
                const unsigned image = rows.image_pixels.divide(rest);
                rest -= image * rows.image_pixels.divisor;
                const int x_out = static_cast<int>(rows.out_width.take(rest));
                const int y = static_cast<int>(rest) * rows.stride_h, x_in = x_out * rows.stride_w;
                offset_[pass] = (image - first_image) * static_cast<uint32_t>(rows.x_image) +
                                static_cast<uint32_t>(y) * static_cast<uint32_t>(rows.x_row) +
                                static_cast<uint32_t>(x_in) * static_cast<uint32_t>(rows.x_col);
                offset_[pass] *= Tile::kElementBytes;
                visible_[pass] = visible(y - rows.pad_h, rows.dilation_h, rows.kernel_height, rows.height) |
                                 visible(x_in - rows.pad_w, rows.dilation_w, taps_in_row(), rows.width) << 16;
            }
            unsigned piece = static_cast<unsigned>(first) + thread % kPiecesPerRow * kPieceElements;
            at_.fast = static_cast<int>(rows.channels.take(piece));
            at_.middle = static_cast<int>(rows.kernel_width.take(piece));
            at_.slow = static_cast<int>(piece);
        }

        // Starts to fill the tile at `shared` and goes on to the next one.
        __device__ __forceinline__ void start(uint32_t shared) {
            const int thread = static_cast<int>(ptx::read_thread_index());
            const int element =
                at_.slow * rows_.dilation_h * rows_.x_row + at_.middle * rows_.dilation_w * rows_.x_col + at_.fast;
            const char* tap = image_ + static_cast<int64_t>(element) * Tile::kElementBytes;
            const uint32_t needed = 1u << min(at_.slow, kMostTaps) | 0x10000u << at_.middle;
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass) {
                const uint32_t destination = shared + Tile::offset(thread / kPiecesPerRow + pass * kRowsPerPass,
                                                                   thread % kPiecesPerRow * kAccess);
                const bool inside = (visible_[pass] & needed) == needed;
                ptx::cp_async_16(destination, tap + offset_[pass], inside ? kAccess : 0);
            }
            at_.step(rows_.tile, static_cast<int>(rows_.channels.divisor), taps_in_row());
        }

    private:
        __device__ __forceinline__ int taps_in_row() const { return static_cast<int>(rows_.kernel_width.divisor); }

        // Bit i: whether begin + i * step is in [0, size), of the first `taps` (at most kMostTaps).
        static __device__ __forceinline__ uint32_t visible(int begin, int step, int taps, int size) {
            uint32_t bits = 0;
#pragma unroll 1
            for (int tap = taps; tap-- > 0;) {
                bits = bits * 2 + (static_cast<unsigned>(begin + tap * step) < static_cast<unsigned>(size));
            }
            return bits;
        }
    };
};

}  // namespace fxfuse
