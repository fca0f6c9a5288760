// Convolutions on channels_last, and the gradients of their filters, as matrix products (gemm.cuh): implicit GEMMs of
// windows. The window of an output pixel has the order (kernel row, kernel column, channel) of a channels_last filter.
// Windows are never stored: their tiles are gathered from the images, with zeros outside.
//
//   the convolution         row m of x is the window of output pixel m           WindowRows
//   the filters' gradient   row k of the weight is the window of output pixel k  WindowColumns
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "divisor.cuh"
#include "gemm.cuh"
#include "ptx.cuh"
#include "shared_tile.cuh"

namespace fxfuse {

// Strides and offsets are in elements, channels contiguous. A tap is one position of the filter.
struct WindowRows : MatrixWeight {
    static constexpr Major kMajor = Major::kK;
    static constexpr bool kBatched = false, kRagged = false;

    // Blocks per multiprocessor that registers must allow. With 0 (ptxas decides), ptxas spills in a 64x64 tile of
    // halves rather than use more than 96 registers. With 1, it spills in large tiles of floats.
    template <class Element>
    static constexpr int kLeastBlocks = sizeof(Element) == 2 ? 1 : 0;

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
    int x_row, x_col, tap_row, tap_col;  // tap_row, tap_col: from one tap to the next
    ReductionDigits tile;  // a tile's length in (channel, kernel column, kernel row)

    static WindowRows make(const Host& host, int tile_k) {
        const auto narrow = [](int64_t value) { return static_cast<int>(value); };
        const int64_t taps = tile_k / host.channels;
        return {{},
                FastDivisor(static_cast<unsigned>(host.out_height * host.out_width)),
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
                narrow(host.dilation_h * host.x_row),
                narrow(host.dilation_w * host.x_col),
                {narrow(tile_k % host.channels), narrow(taps % host.kernel_width), narrow(taps / host.kernel_width)}};
    }

    // The copy of `extent` rows from `row` on, and of K from `first` on.
    template <class Copy, class Element>
    __device__ __forceinline__ Copy copy(const Element* x, int64_t row, int extent, int64_t first, int,
                                         uint32_t thread) const {
        return Copy(*this, x, static_cast<unsigned>(row), extent, static_cast<int>(first), thread);
    }

    // A thread's share of filling tile after tile along K, with the interface of TileCopy. The same taps of a pixel's
    // window are inside the image for every channel. So a lane has one bit per row and per column of the filter, and
    // tests bits instead of coordinates. Beyond the end of K no tap is inside. The threads from kFirstThread on copy.
    template <class Tile, int kThreads, int kAccess, int kFirstThread = 0>
    class Copy {
        using T = typename Tile::Element;
        static constexpr int kLanes = 32;
        // cp.async moves at least 4 bytes: halves go through registers, two at a time.
        static constexpr int kTogether = kAccess < 4 ? 2 : 1;
        static constexpr int kPieceBytes = kAccess * kTogether, kElements = kAccess / Tile::kElementBytes;
        static constexpr int kPiecesPerRow = Tile::kRowBytes / kPieceBytes;
        static constexpr int kRowsPerPass = kLanes / kPiecesPerRow, kRowsPerWarp = Tile::kRows * kLanes / kThreads;
        static constexpr int kPasses = kRowsPerWarp / kRowsPerPass;
        // A lane holds the data of one of its warp's rows; others get them by shuffles, for lack of registers in large
        // tiles.
        static_assert(kPiecesPerRow <= kLanes && kRowsPerWarp <= kLanes && kPasses >= 1);
        // A window's bits: whether a row, or a column, of the filter is inside the image. Bit 15 is never set, so that
        // a side has at most kSideBits - 1 taps (MOST_TAPS in gemm.py).
        //
        //   bit  31 ... 16 + s ... 16 |  15   | 14 ... r ... 0
        //        column s is inside   | never | row r is inside
        static constexpr int kSideBits = 16;

        const WindowRows* rows_;
        const char* image_;              // the tile's first image, moved up and left by the padding
        uint32_t offset_;                // bytes from image_ to the first tap of the lane's row
        uint32_t visible_;               // the bits of that row
        ReductionDigits at_[kTogether];  // (channel, kernel column, kernel row) of this thread's pieces

    public:
        __device__ __forceinline__ Copy(const WindowRows& rows, const T* x, unsigned row, int extent, int first,
                                        uint32_t thread)
            : rows_(&rows) {
            const unsigned first_image = rows.image_pixels.divide(row);
            image_ = reinterpret_cast<const char*>(x + first_image * rows.x_image -
                                                   static_cast<int64_t>(rows.pad_h) * rows.x_row -
                                                   static_cast<int64_t>(rows.pad_w) * rows.x_col);
            const int lane = static_cast<int>(thread % kLanes);
            const int in_tile = static_cast<int>(thread / kLanes) * kRowsPerWarp + lane % kRowsPerWarp;
            look(row + static_cast<unsigned>(min(in_tile, extent - 1)), first_image);
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                unsigned k = static_cast<unsigned>(first + (lane % kPiecesPerRow * kTogether + i) * kElements);
                at_[i].fast = static_cast<int>(rows.channels.take(k));
                at_[i].middle = static_cast<int>(rows.kernel_width.take(k));
                at_[i].slow = static_cast<int>(k);
            }
        }

        // Starts to fill the tile at `shared` and goes on to the next one.
        __device__ __forceinline__ void start(uint32_t shared) {
            const int thread = static_cast<int>(ptx::read_thread_index()) - kFirstThread, lane = thread % kLanes;
            const char* tap[kTogether];
            uint32_t needed[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int element = at_[i].slow * rows_->tap_row + at_[i].middle * rows_->tap_col + at_[i].fast;
                tap[i] = image_ + static_cast<int64_t>(element) * Tile::kElementBytes;
                needed[i] = 1u << min(at_[i].slow, kSideBits - 1) | 1u << kSideBits << at_[i].middle;
                at_[i].step(rows_->tile, static_cast<int>(rows_->channels.divisor), taps_in_row());
            }
            constexpr int kUnroll = kTogether == 1 ? kPasses : kPasses < 8 ? kPasses : 8;
#pragma unroll kUnroll
            for (int pass = 0; pass < kPasses; ++pass) {
                const int in_warp = pass * kRowsPerPass + lane / kPiecesPerRow;
                const uint32_t offset = of_row(offset_, in_warp), visible = of_row(visible_, in_warp);
                const uint32_t destination = shared + Tile::offset(thread / kLanes * kRowsPerWarp + in_warp,
                                                                   lane % kPiecesPerRow * kPieceBytes);
                const auto inside = [&](int i) { return (visible & needed[i]) == needed[i]; };
                if constexpr (kTogether == 2) {
                    uint32_t half[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        half[i] = inside(i) ? __ldg(reinterpret_cast<const uint16_t*>(tap[i] + offset)) : 0;
                    }
                    ptx::store_shared_4(destination, half[0] | half[1] << 16);
                } else if constexpr (kAccess == kChunkBytes) {
                    ptx::cp_async_16(destination, tap[0] + offset, inside(0) ? kAccess : 0);
                } else {
                    ptx::cp_async_small<kAccess>(destination, tap[0] + offset, inside(0) ? kAccess : 0);
                }
            }
        }

    private:
        __device__ __forceinline__ int taps_in_row() const { return static_cast<int>(rows_->kernel_width.divisor); }

        // The `value` of the lane that holds one of the warp's rows.
        static __device__ __forceinline__ uint32_t of_row(uint32_t value, int row) {
            return __shfl_sync(0xffffffff, value, row);
        }

        // Sets offset_ and visible_ to the window of `pixel`.
        __device__ __forceinline__ void look(unsigned pixel, unsigned first_image) {
            const unsigned image = rows_->image_pixels.divide(pixel);
            unsigned row = pixel - image * rows_->image_pixels.divisor;
            const int x = static_cast<int>(rows_->out_width.take(row)) * rows_->stride_w;
            const int y = static_cast<int>(row) * rows_->stride_h;
            visible_ = visible(y - rows_->pad_h, rows_->dilation_h, rows_->kernel_height, rows_->height) |
                       visible(x - rows_->pad_w, rows_->dilation_w, taps_in_row(), rows_->width) << kSideBits;
            const uint32_t offset = (image - first_image) * static_cast<uint32_t>(rows_->x_image) +
                                    static_cast<uint32_t>(y) * static_cast<uint32_t>(rows_->x_row) +
                                    static_cast<uint32_t>(x) * static_cast<uint32_t>(rows_->x_col);
            offset_ = offset * Tile::kElementBytes;
        }

        // Bit i, for i < taps: whether begin + i * step is in [0, size).
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

// x is the gradient of the convolution's result, (output pixels, filters).
struct WindowColumns : MatrixColumns {
    struct Host {
        int64_t stride;  // of MatrixColumns
        WindowRows::Host windows;
    };

    WindowRows windows;

    static WindowColumns make(const Host& host, int tile_k) {
        WindowColumns made;
        made.stride = host.stride;
        made.windows = WindowRows::make(host.windows, tile_k);
        return made;
    }

    // A thread's share of filling tile after tile along K, with the interface of TileCopy. Its pieces of a tile belong
    // to one tap and the same channels of different pixels.
    template <class Tile, int kThreads, int kAccess>
    class WeightCopy {
        using T = typename Tile::Element;
        static constexpr int kElements = kAccess / Tile::kElementBytes, kPiecesPerRow = Tile::kRowBytes / kAccess;
        static constexpr int kRowsPerPass = kThreads / kPiecesPerRow, kPasses = Tile::kRows / kRowsPerPass;
        static constexpr int kUnroll = kAccess == kChunkBytes ? kPasses : 4;  // see TileCopy
        static_assert(Tile::kMajor == Major::kMN && kAccess >= 4, "cp.async moves at least 4 bytes");
        static_assert(kThreads % kPiecesPerRow == 0 && Tile::kRows % kRowsPerPass == 0, "every pass must be full");

        const WindowRows* windows_;
        const T* images_;            // the first channel of this thread's pieces, in the first image's first pixel
        int y_, x_;                  // the row and column that its tap sees from output pixel (0, 0)
        int pixels_left_;            // from its next piece to the end of K
        int out_height_;
        uint32_t row_, byte_;        // of its first piece in the tile
        ReductionDigits at_, step_;  // (column, row, image) of the next piece's output pixel, and from it to the next

    public:
        __device__ __forceinline__ WeightCopy(const WindowRows& windows, const T* images, int64_t col, int extent,
                                              int64_t first, int k, uint32_t thread)
            : windows_(&windows), row_(thread / kPiecesPerRow), byte_(thread % kPiecesPerRow * kAccess) {
            // Columns beyond the last read what the first one reads: their results are never stored.
            const int in_tile = static_cast<int>(byte_) / Tile::kElementBytes;
            unsigned tap = static_cast<unsigned>(col) + static_cast<unsigned>(in_tile < extent ? in_tile : 0);
            images_ = images + windows.channels.take(tap);
            x_ = static_cast<int>(windows.kernel_width.take(tap)) * windows.dilation_w - windows.pad_w;
            y_ = static_cast<int>(tap) * windows.dilation_h - windows.pad_h;
            pixels_left_ = k - static_cast<int>(row_);
            const unsigned out_width = windows.out_width.divisor;
            out_height_ = static_cast<int>(windows.image_pixels.divisor / out_width);
            at_ = ReductionDigits::of(static_cast<int>(first) + static_cast<int>(row_), static_cast<int>(out_width),
                                      out_height_);
            step_ = ReductionDigits::of(kRowsPerPass, static_cast<int>(out_width), out_height_);
        }

        // Starts to fill the tile at `shared` and goes on to the next one.
        __device__ __forceinline__ void start(uint32_t shared) {
#pragma unroll kUnroll
            for (int pass = 0; pass < kPasses; ++pass) {
                const int y = y_ + at_.middle * windows_->stride_h, x = x_ + at_.fast * windows_->stride_w;
                const bool inside = pixels_left_ > 0 &&
                                    static_cast<unsigned>(y) < static_cast<unsigned>(windows_->height) &&
                                    static_cast<unsigned>(x) < static_cast<unsigned>(windows_->width);
                const T* source = images_ + at_.slow * windows_->x_image + (y * windows_->x_row + x * windows_->x_col);
                const uint32_t destination = shared + Tile::offset(row_ + pass * kRowsPerPass, byte_);
                if constexpr (kAccess == kChunkBytes) {
                    ptx::cp_async_16(destination, source, inside ? kAccess : 0);
                } else {
                    ptx::cp_async_small<kAccess>(destination, source, inside ? kAccess : 0);
                }
                at_.step(step_, static_cast<int>(windows_->out_width.divisor), out_height_);
                pixels_left_ -= kRowsPerPass;
            }
        }
    };

    template <Major kMajor, class Copy, class Element>
    __device__ __forceinline__ Copy copy_weight(const Element* images, int64_t, int64_t col, int extent, int64_t first,
                                                int k, uint32_t thread) const {
        return Copy(windows, images, col, extent, first, k, thread);
    }
};

}  // namespace fxfuse
