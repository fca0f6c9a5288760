// Convolution as an implicit GEMM: out[k, pixel] = sum over (c, r, s) of w[k, (c, r, s)] * im2col(x)[(c, r, s), pixel].
// In every layout the filters are the M operand, and the output pixels (of all images, flattened) the N operand.
// Layouts differ in the order of the reduction and in how the pixel tile lies in shared memory:
//
//   x NCHW   reduction (c, r, s), s fastest, as in a contiguous filter; tile [reduction][pixel], copied along pixels
//   x NHWC   reduction (r, s, c), c fastest, as in a channels_last filter; tile [pixel][reduction], along channels
//
// im2col is never stored: each tile is fetched from x itself, padding as zeros.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "device_pass.cuh"
#include "divisor.cuh"
#include "launch.cuh"
#include "mainloop.cuh"
#include "mma.cuh"
#include "ptx.cuh"
#include "shared_tile.cuh"
#include "split_k.cuh"

namespace fxfuse {

enum class Layout { kNchw, kNhwc };

// Whether filters lie in memory in the order of the reduction, or are gathered element by element.
enum class Filters { kContiguous, kStrided };

// kXAccess, kWAccess: bytes per copy that the alignment of x and of contiguous filters allows (2, 4, 8 or 16).
// In NCHW a copy of several elements needs a pointwise convolution: only then are a reduction row's pixels contiguous.
// kPointwise: 1x1 filters without padding. x in NCHW is then read without tests of image bounds.
// kBlocks: thread blocks per multiprocessor that the register allocation must leave room for.
template <class Mma_, int kTileM, int kTileN, int kWarpsM, int kWarpsN, int kStages, Sums kSums, Layout kInput_,
          Layout kOutput_, int kXAccess_, Filters kFilters_, int kWAccess_, bool kPointwise_ = false, int kBlocks_ = 1>
struct Conv2dConfig : MainloopShape<typename Mma_::Unguarded, kTileM, kTileN, kWarpsM, kWarpsN, kStages, kSums> {
    static constexpr Layout kInput = kInput_, kOutput = kOutput_;
    static constexpr int kXAccess = kXAccess_, kWAccess = kWAccess_;
    static constexpr Filters kFilters = kFilters_;
    static constexpr bool kPointwise = kPointwise_;
    static constexpr int kBlocks = kBlocks_;
    static_assert(kStages >= 3 || kXAccess >= 4, "copies through registers arrive one tile later");

    // Blocks whose sums are not finite compute them again with Guarded, see GemmConfig.
    static constexpr bool kGuarded = Mma_::kGuarded;
    struct Guarded : MainloopShape<Mma_, kTileM, kTileN, kWarpsM, kWarpsN, kStages, Sums::kStepwise> {
        static constexpr int kUnroll = 1;
    };
};

// Divisors with which a block finds its tile and its pixels: divisions were a tenth of a short sum's instructions.
struct Conv2dDivisors {
    FastDivisor splits, filter_tiles, groups;
    FastDivisor image_pixels, out_width;  // of the output
    unsigned filters;                     // of a group
    bool counted_in_31_bits;              // whether 31 bits can number all images' pixels

#ifndef __CUDACC_RTC__
    Conv2dDivisors(const Conv2dProblem& problem, int tile_filters, int tile_pixels)
        : splits(static_cast<unsigned>(problem.splits)),
          filter_tiles(static_cast<unsigned>((problem.out_channels / problem.groups + tile_filters - 1) / tile_filters)),
          groups(static_cast<unsigned>(problem.groups)),
          image_pixels(static_cast<unsigned>(problem.out_height * problem.out_width)),
          out_width(static_cast<unsigned>(problem.out_width)),
          filters(static_cast<unsigned>(problem.out_channels / problem.groups)),
          counted_in_31_bits(problem.images * problem.out_height * problem.out_width + tile_pixels < INT32_MAX) {}
#endif  // __CUDACC_RTC__
};

namespace detail {

template <class Config>
using FilterTile = OperandTile<typename Config::Element, Major::kK, Config::kTileM>;

template <class Config>
using PixelTile = OperandTile<typename Config::Element, Config::kInput == Layout::kNchw ? Major::kMN : Major::kK,
                              Config::kTileN>;

// The division is in 32 bits, because 64-bit divisions take long.
__device__ __forceinline__ int channels_of_group(const Conv2dProblem& problem) {
    return static_cast<int>(static_cast<unsigned>(problem.channels) / static_cast<unsigned>(problem.groups));
}

__device__ __forceinline__ int reduction_length(const Conv2dProblem& problem) {
    return channels_of_group(problem) * static_cast<int>(problem.kernel_height * problem.kernel_width);
}

// The order of the reduction in a layout, as the radices of its digits.
template <Layout kLayout>
struct Reduction {
    int fast_radix, middle_radix, slow_radix;

    __device__ __forceinline__ explicit Reduction(const Conv2dProblem& problem) {
        const int channels = channels_of_group(problem);
        const int rows = static_cast<int>(problem.kernel_height), cols = static_cast<int>(problem.kernel_width);
        if constexpr (kLayout == Layout::kNchw) {
            fast_radix = cols, middle_radix = rows, slow_radix = channels;
        } else {
            fast_radix = channels, middle_radix = cols, slow_radix = rows;
        }
    }

    __device__ __forceinline__ ReductionDigits digits(int index) const {
        return ReductionDigits::of(index, fast_radix, middle_radix);
    }
    static __device__ __forceinline__ int channel(const ReductionDigits& at) {
        return kLayout == Layout::kNchw ? at.slow : at.fast;
    }
    static __device__ __forceinline__ int row(const ReductionDigits& at) {
        return kLayout == Layout::kNchw ? at.middle : at.slow;
    }
    static __device__ __forceinline__ int col(const ReductionDigits& at) {
        return kLayout == Layout::kNchw ? at.fast : at.middle;
    }
};

// Fills the pixel tile. A thread keeps its pixels and walks along the reduction.
template <class Config, bool kPointwise = Config::kPointwise>
class PixelCopy {
    using T = typename Config::Element;
    using Tile = PixelTile<Config>;
    static constexpr bool kNchw = Config::kInput == Layout::kNchw;
    // cp.async moves at least 4 bytes: single halves go through registers, two neighbouring pixels at a time in NCHW.
    static constexpr bool kThroughRegisters = Config::kXAccess < 4;
    static constexpr int kNeighbours = kNchw && kThroughRegisters ? 2 : 1;
    static constexpr int kPiece = Config::kXAccess / static_cast<int>(sizeof(T));  // elements per copy
    static constexpr int kUnit = kPiece * kNeighbours;  // elements of a thread that are contiguous in the tile
    // Lanes along a row of the tile: up to 32 along pixels, or up to 8 along channels (128 bytes at 16 bytes each).
    static constexpr int kLanesAtMost = kNchw ? 32 : 8;
    static constexpr int kUnitsPerRow = Tile::kCols / kUnit;
    static constexpr int kLanes = kUnitsPerRow < kLanesAtMost ? kUnitsPerRow : kLanesAtMost;
    static constexpr int kUnitsPerThread = kUnitsPerRow / kLanes;
    static constexpr int kRowsPerPass = Config::kThreads / kLanes;
    static constexpr int kPasses = Tile::kRows / kRowsPerPass;
    static_assert(Config::kThreads % kLanes == 0 && Tile::kRows % kRowsPerPass == 0, "every pass must be full");

    static constexpr int kPixels = kNchw ? kUnitsPerThread * kNeighbours : kPasses;
    static constexpr int kReductions = kNchw ? kPasses : kUnitsPerThread;
    static constexpr int kReductionStep = kNchw ? kRowsPerPass : kLanes * kUnit;
    static constexpr int kOutside = -(1 << 30);  // an input row that no filter row brings back inside

    const T* source_[kPixels];        // what filter element (0, 0, 0) multiplies
    int y_[kPixels], x_[kPixels];     // input row and column of filter element (0, 0)
    Reduction<Config::kInput> reduction_;
    ReductionDigits digits_, step_;
    int channel_stride_, row_stride_, col_stride_;  // from one filter element to the next, in x
    int height_, width_, dilation_h_, dilation_w_;
    uint16_t held_[kThroughRegisters ? kReductions * kPixels : 1];
    uint32_t held_for_ = 0;

public:
    // The tile has `pixels` pixels, from number `pixel` of image `image` on, in this and later images. `first`: the
    // first index of the reduction.
    __device__ __forceinline__ PixelCopy(const T* x, const Conv2dProblem& problem, const Conv2dDivisors& divisors,
                                         int group, int64_t image, int pixel, int64_t pixels, int first)
        : reduction_(problem) {
        const int thread = static_cast<int>(threadIdx.x);
        x += group * channels_of_group(problem) * problem.x_channel;
#pragma unroll
        for (int i = 0; i < kPixels; ++i) {
            const int in_tile = kNchw ? thread % kLanes * kUnit + i / kNeighbours * kLanes * kUnit + i % kNeighbours
                                      : thread / kLanes + i * kRowsPerPass;
            unsigned later = static_cast<unsigned>(pixel + in_tile);
            unsigned out_y = divisors.image_pixels.take(later);
            const unsigned out_x = divisors.out_width.take(out_y);
            const int y = static_cast<int>(out_y) * static_cast<int>(problem.stride_h);
            y_[i] = in_tile < pixels ? y - static_cast<int>(problem.pad_h) : kOutside;
            x_[i] = static_cast<int>(out_x * static_cast<unsigned>(problem.stride_w)) - static_cast<int>(problem.pad_w);
            source_[i] = x + (image + later) * problem.x_image + y_[i] * problem.x_row + x_[i] * problem.x_col;
        }
        digits_ = reduction_.digits(first + (kNchw ? thread / kLanes : thread % kLanes * kUnit));
        step_ = reduction_.digits(kReductionStep);
        height_ = static_cast<int>(problem.height);
        width_ = static_cast<int>(problem.width);
        dilation_h_ = static_cast<int>(problem.dilation_h);
        dilation_w_ = static_cast<int>(problem.dilation_w);
        channel_stride_ = static_cast<int>(problem.x_channel);
        row_stride_ = static_cast<int>(problem.x_row) * dilation_h_;
        col_stride_ = static_cast<int>(problem.x_col) * dilation_w_;
    }

    // Starts to fill the tile at `shared`, then moves on to the next tile. Elements that go through registers are
    // loaded now. The next call writes them to shared memory, when they have arrived.
    __device__ __forceinline__ void start(uint32_t shared) {
        if constexpr (kThroughRegisters) {
            if (held_for_ != 0) write_held();
            held_for_ = shared;
        }
#pragma unroll
        for (int k = 0; k < kReductions; ++k) {
            const int dy = reduction_.row(digits_) * dilation_h_, dx = reduction_.col(digits_) * dilation_w_;
            const int offset = reduction_.channel(digits_) * channel_stride_ + reduction_.row(digits_) * row_stride_ +
                               reduction_.col(digits_) * col_stride_;
            const bool exists = digits_.slow < reduction_.slow_radix;
#pragma unroll
            for (int i = 0; i < kPixels; ++i) {
                const bool inside = exists && static_cast<unsigned>(y_[i] + dy) < static_cast<unsigned>(height_) &&
                                    static_cast<unsigned>(x_[i] + dx) < static_cast<unsigned>(width_);
                const T* source = source_[i] + offset;
                if constexpr (kThroughRegisters) {
                    held_[k * kPixels + i] = inside ? __ldg(reinterpret_cast<const uint16_t*>(source)) : uint16_t{0};
                } else if constexpr (Config::kXAccess == 16) {
                    ptx::cp_async_16(shared + destination(k, i), source, inside ? 16 : 0);
                } else {
                    ptx::cp_async_small<Config::kXAccess>(shared + destination(k, i), source,
                                                          inside ? Config::kXAccess : 0);
                }
            }
            digits_.step(step_, reduction_.fast_radix, reduction_.middle_radix);
        }
    }

private:
    static __device__ __forceinline__ int destination(int k, int pixel) {
        const int thread = static_cast<int>(threadIdx.x);
        const int pass = kNchw ? k : pixel, unit = kNchw ? pixel / kNeighbours : k;
        return Tile::offset(thread / kLanes + pass * kRowsPerPass,
                            (thread % kLanes + unit * kLanes) * kUnit * static_cast<int>(sizeof(T)));
    }

    __device__ __forceinline__ void write_held() const {
#pragma unroll
        for (int k = 0; k < kReductions; ++k) {
#pragma unroll
            for (int i = 0; i < kPixels; i += kNeighbours) {
                const uint16_t* held = held_ + k * kPixels + i;
                if constexpr (kNeighbours == 2) {
                    ptx::store_shared_4(held_for_ + destination(k, i), held[0] | static_cast<uint32_t>(held[1]) << 16);
                } else {
                    ptx::store_shared_2(held_for_ + destination(k, i), held[0]);
                }
            }
        }
    }
};

// PixelCopy for a pointwise convolution in NCHW. Pixels beyond the last are copies of the tile's first pixel, since
// their results are never stored.
template <class Config>
class PixelCopy<Config, true> {
    using T = typename Config::Element;
    using Tile = PixelTile<Config>;
    static constexpr int kAccess = Config::kXAccess;
    static constexpr int kPiece = kAccess / static_cast<int>(sizeof(T));  // elements per copy
    static constexpr int kPiecesPerRow = Tile::kCols / kPiece;
    static constexpr int kLanes = kPiecesPerRow < 32 ? kPiecesPerRow : 32;
    static constexpr int kPieces = kPiecesPerRow / kLanes;  // of a thread in a row
    static constexpr int kRowsPerPass = Config::kThreads / kLanes;
    static constexpr int kPasses = Tile::kRows / kRowsPerPass;
    static_assert(Config::kInput == Layout::kNchw && kAccess >= 4);
    static_assert(Config::kThreads % kLanes == 0 && Tile::kRows % kRowsPerPass == 0, "every pass must be full");

    const T* source_[kPieces];
    int64_t tile_stride_;  // from a tile's channels to the next one's
    int channel_stride_, channels_left_;

public:
    __device__ __forceinline__ PixelCopy(const T* x, const Conv2dProblem& problem, const Conv2dDivisors& divisors,
                                         int group, int64_t image, int pixel, int64_t pixels, int first) {
        const int thread = static_cast<int>(threadIdx.x), row = thread / kLanes;
        const int channels = channels_of_group(problem);
        channel_stride_ = static_cast<int>(problem.x_channel);
        tile_stride_ = Tile::kRows * problem.x_channel;
        channels_left_ = channels - first - row;
        x += (static_cast<int64_t>(group) * channels + first + row) * problem.x_channel;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const int in_tile = (thread % kLanes + i * kLanes) * kPiece;
            unsigned later = static_cast<unsigned>(pixel + (in_tile < pixels ? in_tile : 0));
            unsigned in_image = divisors.image_pixels.take(later);
            source_[i] = x + (image + later) * problem.x_image;
            if constexpr (kPiece > 1) {
                source_[i] += in_image;
            } else {
                const unsigned out_x = divisors.out_width.take(in_image);  // leaves the row
                source_[i] += in_image * problem.stride_h * problem.x_row + out_x * problem.stride_w * problem.x_col;
            }
        }
    }

    __device__ __forceinline__ void start(uint32_t shared) {
        const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int bytes = pass * kRowsPerPass < channels_left_ ? kAccess : 0;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                const T* source = source_[i] + pass * kRowsPerPass * channel_stride_;
                const uint32_t destination = shared + Tile::offset(thread / kLanes + pass * kRowsPerPass,
                                                                   (thread % kLanes + i * kLanes) * kAccess);
                if constexpr (kAccess == 16) {
                    ptx::cp_async_16(destination, source, bytes);
                } else {
                    ptx::cp_async_small<kAccess>(destination, source, bytes);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kPieces; ++i) source_[i] += tile_stride_;
        channels_left_ -= Tile::kRows;
    }
};

// Fills the filter tile from filters that lie in the order of the reduction.
template <class Config, Filters = Config::kFilters>
struct FilterCopy : TileCopy<FilterTile<Config>, Config::kThreads, Config::kWAccess> {
    using Base = TileCopy<FilterTile<Config>, Config::kThreads, Config::kWAccess>;
    // `w` points to the tile's first filter; `filters` exist from there. `first`: the first index of the reduction.
    __device__ __forceinline__ FilterCopy(const typename Config::Element* w, const Conv2dProblem& problem, int filters,
                                          int first)
        : Base(w + first, problem.w_filter, filters, reduction_length(problem) - first, threadIdx.x) {}
};

// FilterCopy from filters in any other order.
template <class Config>
class FilterCopy<Config, Filters::kStrided> {
    using T = typename Config::Element;
    using Tile = FilterTile<Config>;
    static constexpr int kLanes = 8;
    static constexpr int kReductions = Tile::kCols / kLanes;
    static constexpr int kRowsPerPass = Config::kThreads / kLanes;
    static constexpr int kPasses = Tile::kRows / kRowsPerPass;
    static_assert(Tile::kRows % kRowsPerPass == 0, "every pass must be full");

    const T* source_;
    int64_t filter_stride_;
    int filters_left_;
    Reduction<Config::kInput> reduction_;
    ReductionDigits digits_, step_;
    int channel_stride_, row_stride_, col_stride_;

public:
    __device__ __forceinline__ FilterCopy(const T* w, const Conv2dProblem& problem, int filters, int first)
        : reduction_(problem) {
        const int thread = static_cast<int>(threadIdx.x);
        source_ = w + thread / kLanes * problem.w_filter;
        filter_stride_ = problem.w_filter;
        filters_left_ = filters - thread / kLanes;
        digits_ = reduction_.digits(first + thread % kLanes);
        step_ = reduction_.digits(kLanes);
        channel_stride_ = static_cast<int>(problem.w_channel);
        row_stride_ = static_cast<int>(problem.w_row);
        col_stride_ = static_cast<int>(problem.w_col);
    }

    __device__ __forceinline__ void start(uint32_t shared) {
        const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
        for (int k = 0; k < kReductions; ++k) {
            const int offset = reduction_.channel(digits_) * channel_stride_ + reduction_.row(digits_) * row_stride_ +
                               reduction_.col(digits_) * col_stride_;
            const bool exists = digits_.slow < reduction_.slow_radix;
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass) {
                const bool inside = exists && pass * kRowsPerPass < filters_left_;
                const T* source = source_ + pass * kRowsPerPass * filter_stride_ + offset;
                const uint32_t destination =
                    shared + Tile::offset(thread / kLanes + pass * kRowsPerPass,
                                          (thread % kLanes + k * kLanes) * static_cast<int>(sizeof(T)));
                if constexpr (sizeof(T) == 4) {
                    ptx::cp_async_small<4>(destination, source, inside ? 4 : 0);
                } else {
                    ptx::store_shared_2(destination,
                                        inside ? __ldg(reinterpret_cast<const uint16_t*>(source)) : uint16_t{0});
                }
            }
            digits_.step(step_, reduction_.fast_radix, reduction_.middle_radix);
        }
    }
};

// Reads pairs of B fragments from a tile of 4-byte elements whose rows run along pixels. ldmatrix cannot transpose
// 4-byte elements, and reading them one by one takes twice the instructions. So a lane reads two neighbouring pixels at
// once, one for either fragment of the pair:
//
//   pixel      0  1  2  3  ...  14  15
//   fragment   0  1  0  1  ...   0   1
//   column     0  0  1  1  ...   7   7
template <class Tile>
class PixelPairs {
    static constexpr int kStepBytes = kMmaBytesOfK / 4 * Tile::kRowBytes;
    static constexpr int kPairBytes = 2 * kMmaN * 4;
    uint32_t offset_;

public:
    __device__ __forceinline__ PixelPairs(uint32_t first, uint32_t lane) {
        offset_ = Tile::offset(lane % 4, (first + lane / 4 * 2) * 4);
    }

    __device__ __forceinline__ void load(uint32_t (&raw)[4], uint32_t shared, int index, int step) const {
        const uint32_t address = ((shared + offset_) ^ (index * kPairBytes)) + step * kStepBytes;
        const uint2 upper = ptx::load_shared_8(address), lower = ptx::load_shared_8(address + 4 * Tile::kRowBytes);
        raw[0] = upper.x, raw[1] = lower.x, raw[2] = upper.y, raw[3] = lower.y;
    }
};

// Whether PixelPairs reads the pixels.
template <class Config>
constexpr bool kPaired = Config::kInput == Layout::kNchw && sizeof(typename Config::Element) == 4;

template <class Config, bool kPaired>
struct ReadPixelsOf {
    using Type = Fragments<PixelTile<Config>, Side::kB>;
};
template <class Config>
struct ReadPixelsOf<Config, true> {
    using Type = PixelPairs<PixelTile<Config>>;
};

// Accumulators in shared memory as [filter][pixel] (NCHW) or [pixel][filter] (NHWC), the order of the output. Rows are
// padded so that the writes of fragments touch every bank once.
template <class Config>
struct StagedTile {
    static constexpr bool kNchw = Config::kOutput == Layout::kNchw;
    static constexpr int kRows = kNchw ? Config::kTileM : Config::kTileN;
    static constexpr int kPitch = kNchw ? Config::kTileN + (kPaired<Config> ? 16 : 8) : Config::kTileM + 4;
    static constexpr int kBytes = kRows * kPitch * static_cast<int>(sizeof(float));

    template <class Sum>
    static __device__ __forceinline__ void write(float* staged, const Sum& sum) {
        const uint32_t thread = threadIdx.x, lane = thread % 32;
        const int filter = static_cast<int>(Config::warp_m(thread) + lane / 4);
        const int pixel = static_cast<int>(Config::warp_n(thread) + lane % 4 * (kPaired<Config> ? 4 : 2));
#pragma unroll
        for (int m = 0; m < Config::kMmasM; ++m) {
#pragma unroll
            for (int n = 0; n < Config::kMmasN; n += 2) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = filter + m * kMmaM + half * 8, col = pixel + n * kMmaN;
                    const float(&first)[4] = sum.value[m][n], (&second)[4] = sum.value[m][n + 1];
                    const int i = half * 2;
                    if constexpr (kPaired<Config> && kNchw) {
                        *reinterpret_cast<float4*>(staged + row * kPitch + col) =
                            make_float4(first[i], second[i], first[i + 1], second[i + 1]);
                    } else if constexpr (kNchw) {
                        *reinterpret_cast<float2*>(staged + row * kPitch + col) = make_float2(first[i], first[i + 1]);
                        *reinterpret_cast<float2*>(staged + row * kPitch + col + kMmaN) =
                            make_float2(second[i], second[i + 1]);
                    } else {
                        constexpr int kNext = kPaired<Config> ? 2 : 1, kOther = kPaired<Config> ? 1 : kMmaN;
                        staged[col * kPitch + row] = first[i];
                        staged[(col + kNext) * kPitch + row] = first[i + 1];
                        staged[(col + kOther) * kPitch + row] = second[i];
                        staged[(col + kOther + kNext) * kPitch + row] = second[i + 1];
                    }
                }
            }
        }
    }
};

}  // namespace detail

// The launch bounds always have a number of blocks: without it, the compiler spills rather than pass 128 registers.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kThreads, Kernel::Config::kBlocks)
    conv2d_kernel(const __grid_constant__ Conv2dProblem problem, const __grid_constant__ Conv2dDivisors divisors,
                  const typename Kernel::Element* __restrict__ x, const typename Kernel::Element* __restrict__ w,
                  typename Kernel::Output* __restrict__ out, const SplitWorkspace workspace,
                  const typename Kernel::Epilogue epilogue) {
    FXFUSE_DEVICE_PASS(Kernel::run(problem, divisors, x, w, out, workspace, epilogue));
}

// kSplits: whether several thread blocks share an output tile's sums. Each takes `split_tiles` tiles of the reduction.
template <class Config_, class Output_, class Epilogue_, bool kSplits = false>
struct Conv2d {
    using Config = Config_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = Conv2dProblem;
    using Element = typename Config::Element;

    static constexpr int kTensors = kSplits ? 4 : 3;  // x, w, out, workspace

    static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kThreads = Config::kThreads;
    using FilterTile = detail::FilterTile<Config>;
    using PixelTile = detail::PixelTile<Config>;
    using FilterCopy = detail::FilterCopy<Config>;
    using PixelCopy = detail::PixelCopy<Config>;
    using ReadFilters = Fragments<FilterTile, Side::kA>;
    using ReadPixels = typename detail::ReadPixelsOf<Config, detail::kPaired<Config>>::Type;
    template <class Shape>
    using LoopOf =
        Mainloop<Shape, FilterCopy, PixelCopy, ReadFilters, ReadPixels, FilterTile::kBytes, PixelTile::kBytes>;
    using Loop = LoopOf<Config>;
    using Sum = typename Loop::Sum;
    using Staged = detail::StagedTile<Config>;
    static constexpr int kSharedBytes = Loop::kSharedBytes > Staged::kBytes ? Loop::kSharedBytes : Staged::kBytes;
    static_assert(kSharedBytes <= 163 * 1024, "an A100 block's limit");

    static __device__ __forceinline__ void run(const Problem& problem, const Conv2dDivisors& divisors, const Element* x,
                                               const Element* w, Output* out, const SplitWorkspace& workspace,
                                               const Epilogue& epilogue) {
        extern __shared__ __align__(1024) unsigned char shared[];
        Sum sum;
        multiply<Config>(sum, problem, divisors, x, w, shared);
        if constexpr (Config::kGuarded) {
            // This is a barrier, too: all threads have read the last tile.
            if (__syncthreads_or(!sum.all_finite())) {
                multiply<typename Config::Guarded>(sum, problem, divisors, x, w, shared);
            }
        }
        if constexpr (kSplits) {
            const Origin at = origin(problem, divisors);
            const int splits = static_cast<int>(problem.splits);
            const int64_t tile = divisors.splits.divide(blockIdx.x);
            if (!SplitPart<Config>::collect(sum, workspace, tile, at.split, splits, at.filters)) return;
        }
        __syncthreads();
        float* staged = reinterpret_cast<float*>(shared);
        Staged::write(staged, sum);
        __syncthreads();
        store(problem, divisors, staged, out, epilogue);
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        constexpr auto kKernel = &conv2d_kernel<Conv2d>;
        const int64_t pixels = problem.images * problem.out_height * problem.out_width;
        const int64_t filter_tiles = (problem.out_channels / problem.groups + kTileM - 1) / kTileM;
        const int64_t output_tiles = (pixels + kTileN - 1) / kTileN * filter_tiles * problem.groups;
        const int64_t blocks = output_tiles * problem.splits;
        if (blocks == 0) return cudaSuccess;
        if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
        if (const cudaError_t error = allow_shared_memory<kKernel>(kSharedBytes); error != cudaSuccess) return error;
        SplitWorkspace workspace{};
        if constexpr (kSplits) workspace = SplitWorkspace::make(pointers[3], output_tiles);
        return queue(kKernel, static_cast<unsigned>(blocks), kThreads, kSharedBytes, stream, problem,
                     Conv2dDivisors(problem, kTileM, kTileN), reinterpret_cast<const Element*>(pointers[0]),
                     reinterpret_cast<const Element*>(pointers[1]), reinterpret_cast<Output*>(pointers[2]), workspace,
                     epilogue);
    }
#endif  // __CUDACC_RTC__

private:
    // The block's tile: `filters` output channels of a group, and `pixels` output pixels of `image` and later ones.
    struct Origin {
        int64_t channel, image;
        int group, filters, pixel, pixels;
        int split;  // which of the blocks that share the tile
    };

    // Blocks that share a tile have consecutive numbers, so that they start together. Next, filter tiles run fastest:
    // blocks that share pixels run together and find them in L2.
    static __device__ __forceinline__ Origin origin(const Problem& problem, const Conv2dDivisors& divisors) {
        unsigned block = blockIdx.x;  // each take() leaves the rest of the number here
        const int split = kSplits ? static_cast<int>(divisors.splits.take(block)) : 0;
        const int filter = static_cast<int>(divisors.filter_tiles.take(block)) * kTileM;
        const int group = static_cast<int>(divisors.groups.take(block));
        const int filters = static_cast<int>(divisors.filters);
        const uint32_t image_pixels = divisors.image_pixels.divisor;
        const int64_t image =
            divisors.counted_in_31_bits ? divisors.image_pixels.divide(block * kTileN) : image_of(block, image_pixels);
        const int64_t pixel = static_cast<int64_t>(block) * kTileN - image * image_pixels;
        const int64_t left = (problem.images - image) * image_pixels - pixel;
        return {static_cast<int64_t>(group) * filters + filter,
                image,
                group,
                min(kTileM, filters - filter),
                static_cast<int>(pixel),
                static_cast<int>(min(static_cast<int64_t>(kTileN), left)),
                split};
    }

    // tile * kTileN / image_pixels, without a 64-bit division.
    static __device__ __forceinline__ int64_t image_of(uint32_t tile, uint32_t image_pixels) {
        if (image_pixels < UINT32_MAX / kTileN) {
            const uint32_t whole = tile / image_pixels;  // groups of kTileN images
            return static_cast<int64_t>(whole) * kTileN + (tile - whole * image_pixels) * kTileN / image_pixels;
        }
        int64_t image = 0;
        for (int64_t step = int64_t{1} << 30; step > 0; step /= 2) {
            if ((image + step) * image_pixels <= static_cast<int64_t>(tile) * kTileN) image += step;
        }
        return image;
    }

    template <class Shape>
    static __device__ __forceinline__ void multiply(Sum& sum, const Problem& problem, const Conv2dDivisors& divisors,
                                                    const Element* x, const Element* w, unsigned char* shared) {
        const Origin at = origin(problem, divisors);
        int first = 0, steps = (detail::reduction_length(problem) + Config::kTileK - 1) / Config::kTileK;
        if constexpr (kSplits) {
            // Tiles that are copied beyond the share are not multiplied.
            const int share = static_cast<int>(problem.split_tiles), before = at.split * share;
            first = before * Config::kTileK;
            steps = min(share, steps - before);
        }
        LoopOf<Shape> loop(FilterCopy(w + at.channel * problem.w_filter, problem, at.filters, first),
                           PixelCopy(x, problem, divisors, at.group, at.image, at.pixel, at.pixels, first),
                           threadIdx.x);
        loop.run(sum, ptx::shared_address(shared), steps, static_cast<int>(problem.block_tiles));
    }

    static __device__ __forceinline__ void store(const Problem& problem, const Conv2dDivisors& divisors,
                                                 const float* staged, Output* out, const Epilogue& epilogue) {
        const Origin tile = origin(problem, divisors);
        const int image_pixels = static_cast<int>(divisors.image_pixels.divisor);
        if constexpr (Config::kOutput == Layout::kNchw && kRowVector<Output, Epilogue> > 0) {
            store_rows<kThreads, kTileN, Staged::kPitch, Output>(
                staged, tile.filters, image_pixels, epilogue, [&](int col) {
                    unsigned later = static_cast<unsigned>(tile.pixel + col);
                    const unsigned pixel = divisors.image_pixels.take(later);
                    const Position at{tile.image + later, tile.channel, pixel};
                    Output* destination = out + (at.batch * problem.out_channels + at.row) * image_pixels + at.col;
                    return RowStart<Output>{col < tile.pixels ? destination : nullptr, at};
                });
        } else if constexpr (Config::kOutput == Layout::kNchw) {
            const int images = (tile.pixel + tile.pixels - 1) / image_pixels + 1;  // that the tile touches
            store_spans<kThreads, Output>(
                tile.filters * images, min(tile.pixels, image_pixels), all_aligned(out, image_pixels), epilogue,
                [&](int index) {
                    const int filter = images == 1 ? index : index / images;
                    const int later = index - filter * images;
                    const int begin = later == 0 ? 0 : later * image_pixels - tile.pixel;
                    const int end = min(tile.pixels, (later + 1) * image_pixels - tile.pixel);
                    const Position at{tile.image + later, tile.channel + filter, later == 0 ? tile.pixel : 0};
                    return OutputSpan<Output>{staged + filter * Staged::kPitch + begin,
                                              out + (at.batch * problem.out_channels + at.row) * image_pixels + at.col,
                                              at, end - begin};
                });
        } else {
            const bool aligned = all_aligned(out, problem.out_channels, tile.channel);
            store_spans<kThreads, Output>(tile.pixels, tile.filters, aligned, epilogue, [&](int index) {
                const int pixel = tile.pixel + index;
                const int later = pixel < image_pixels ? 0 : pixel / image_pixels;
                const Position at{tile.image + later, pixel - later * image_pixels, tile.channel};
                return OutputSpan<Output>{staged + index * Staged::kPitch,
                                          out + (at.batch * image_pixels + at.row) * problem.out_channels + at.col, at,
                                          tile.filters};
            });
        }
    }
};

// Conv2d in which Problem::splits thread blocks share each output tile.
template <class Config, class Output, class Epilogue>
using SplitConv2d = Conv2d<Config, Output, Epilogue, true>;

}  // namespace fxfuse
