// Direct 3x3 convolution, stride 1, NCHW, float32 operands rounded to TF32.
//
// A block computes kFilterTile channels of a tile of output pixels. 8 input channels at a time, the patch of x under
// the tile and the filters' 8 x 9 elements are copied to shared memory once and serve all nine taps: an implicit GEMM
// fetches every pixel nine times. Filters are the M operand, pixels the N operand, the 8 channels the K of one
// instruction. For each column of the filter, the fragments of its three rows stay in registers, and every input row
// that is read feeds up to three output rows.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse {

// kMmasM: channels per block, in 16s. kWarpsY x kWarpsX warps of 2 rows x 32 columns of pixels each.
// kBlocksPerSm: how many blocks the register allocation must leave room for.
// kXAccess, kWAccess: bytes per copy (4, 8 or 16) that divide x's address, strides and width, and w's address, stride
// and filter length; so what one copy fetches is inside or outside as a whole.
template <int kMmasM_, int kWarpsY_, int kWarpsX_, int kStages_, int kBlocksPerSm_, int kXAccess_, int kWAccess_>
struct Conv2dDirectConfig {
    static constexpr int kMmasM = kMmasM_, kWarpsY = kWarpsY_, kWarpsX = kWarpsX_;
    static constexpr int kStages = kStages_, kBlocksPerSm = kBlocksPerSm_;
    static constexpr int kXAccess = kXAccess_, kWAccess = kWAccess_;
    static_assert(kStages >= 3, "one stage is filled and one is rounded while another is used");

    static constexpr int kThreads = kWarpsY * kWarpsX * 32;
    static constexpr int kKernel = 3, kTaps = kKernel * kKernel;
    static constexpr int kChannels = 8;  // per stage: K of the instruction
    static constexpr int kWarpRows = 2, kMmasN = 4;
    static constexpr int kFilterTile = kMmasM * kMmaM;
    static constexpr int kTileRows = kWarpsY * kWarpRows, kTileCols = kWarpsX * kMmasN * kMmaN;

    // The patch starts at a multiple of the access, up to 3 columns early.
    static constexpr int kPatchRows = kTileRows + kKernel - 1, kPatchCols = kTileCols + 8;
    // The 4 channels x 8 pixels that a warp reads at once fall on 32 banks if channels are 8 or 24 banks apart.
    static constexpr int kUnpaddedPitch = kPatchRows * kPatchCols;
    static constexpr int kChannelPitch = kUnpaddedPitch + (kUnpaddedPitch % 16 == 0 ? 8 : 0);
    static_assert(kChannelPitch % 16 == 8);
    // Likewise the 8 filters x 4 channels: filters are 12 banks apart, channels 9.
    static constexpr int kFilterElements = kChannels * kTaps, kFilterPitch = kFilterElements + 4;

    static constexpr int kPatchBytes = kChannels * kChannelPitch * 4;
    static constexpr int kStageBytes = kPatchBytes + kFilterTile * kFilterPitch * 4;
    static constexpr int kStagedPitch = kTileRows * kTileCols + 8;
    static constexpr int kStagedBytes = kFilterTile * kStagedPitch * 4;
    static constexpr int kSharedBytes = kStages * kStageBytes > kStagedBytes ? kStages * kStageBytes : kStagedBytes;
    static_assert(kSharedBytes <= 163 * 1024, "an A100 block's limit");
};

namespace detail {

// One copy of kBytes, `valid` of them from `source` and the others zero.
template <int kBytes>
__device__ __forceinline__ void copy_piece(uint32_t destination, const float* source, int valid) {
    if constexpr (kBytes == 16) {
        ptx::cp_async_16(destination, source, valid);
    } else {
        ptx::cp_async_small<kBytes>(destination, source, valid);
    }
}

// Rounds a piece that this thread has copied itself, so that no other thread need have finished.
template <int kBytes>
__device__ __forceinline__ void round_piece(uint32_t address) {
    if constexpr (kBytes == 16) {
        uint4 piece = ptx::load_shared_16(address);
        piece.x = Tf32::round_to_tf32(piece.x);
        piece.y = Tf32::round_to_tf32(piece.y);
        piece.z = Tf32::round_to_tf32(piece.z);
        piece.w = Tf32::round_to_tf32(piece.w);
        ptx::store_shared_16(address, piece);
    } else {
#pragma unroll
        for (int byte = 0; byte < kBytes; byte += 4) {
            ptx::store_shared_4(address + byte, Tf32::round_to_tf32(ptx::load_shared_4(address + byte)));
        }
    }
}

// Copies the patch of x, 8 channels after 8 channels: kLanes threads per row of a channel.
template <class Config>
class PatchCopy {
    static constexpr int kAccess = Config::kXAccess, kPiece = kAccess / 4;
    static constexpr int kLanes = 8;
    static constexpr int kRows = Config::kChannels * Config::kPatchRows;
    static constexpr int kRowsPerPass = Config::kThreads / kLanes;
    static constexpr int kPasses = (kRows + kRowsPerPass - 1) / kRowsPerPass;
    static constexpr int kPiecesPerRow = Config::kPatchCols / kPiece;
    static constexpr int kPiecesPerLane = (kPiecesPerRow + kLanes - 1) / kLanes;

    const float* source_[kPasses];  // this thread's first piece
    int channels_left_[kPasses];    // from that piece's channel; none if the row is outside the image
    int64_t stride_;                // from 8 channels to the next
    int col_, width_;               // of the first piece, in the image

public:
    static constexpr int kUnits = kPasses * kPiecesPerLane;

    // `x` points to the image's first channel of the group; (row, col) of the image is the patch's corner.
    __device__ __forceinline__ PatchCopy(const Conv2dProblem& problem, const float* x, int channels, int row, int col)
        : stride_(Config::kChannels * problem.x_channel), width_(static_cast<int>(problem.width)) {
        col_ = col + lane() * kPiece;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int channel = row_of(pass) / Config::kPatchRows, y = row + row_of(pass) % Config::kPatchRows;
            source_[pass] = x + channel * problem.x_channel + y * problem.x_row + col_;
            channels_left_[pass] = 0 <= y && y < static_cast<int>(problem.height) ? channels - channel : 0;
        }
    }

    // The unit-th copy of this thread's kUnits per stage.
    __device__ __forceinline__ void start(uint32_t stage, int unit) const {
        const int pass = unit / kPiecesPerLane, step = unit % kPiecesPerLane * kLanes;
        if (!exists(unit)) return;
        const bool inside = channels_left_[pass] > 0 &&
                            static_cast<unsigned>(col_ + step * kPiece) < static_cast<unsigned>(width_);
        copy_piece<kAccess>(stage + destination(unit), source_[pass] + step * kPiece, inside ? kAccess : 0);
    }

    __device__ __forceinline__ void round(uint32_t stage, int unit) const {
        if (exists(unit)) round_piece<kAccess>(stage + destination(unit));
    }

    __device__ __forceinline__ void advance() {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            source_[pass] += stride_;
            channels_left_[pass] -= Config::kChannels;
        }
    }

private:
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
    static __device__ __forceinline__ int row_of(int pass) {
        return static_cast<int>(threadIdx.x) / kLanes + pass * kRowsPerPass;
    }
    static __device__ __forceinline__ bool exists(int unit) {
        const int pass = unit / kPiecesPerLane, step = unit % kPiecesPerLane * kLanes;
        return (kRows % kRowsPerPass == 0 || pass < kPasses - 1 || row_of(pass) < kRows) &&
               (step + kLanes <= kPiecesPerRow || step + lane() < kPiecesPerRow);
    }
    static __device__ __forceinline__ uint32_t destination(int unit) {
        const int row = row_of(unit / kPiecesPerLane), step = unit % kPiecesPerLane * kLanes;
        const int element = row / Config::kPatchRows * Config::kChannelPitch +
                            row % Config::kPatchRows * Config::kPatchCols + (lane() + step) * kPiece;
        return static_cast<uint32_t>(element * 4);
    }
};

// Copies the filters' elements of the same channels: contiguous (channel, row, column).
template <class Config>
class FilterSliceCopy {
    static constexpr int kAccess = Config::kWAccess, kPiece = kAccess / 4;
    static constexpr int kLanes = Config::kThreads / Config::kFilterTile;
    static constexpr int kPieces = Config::kFilterElements / kPiece;
    static_assert(Config::kThreads % Config::kFilterTile == 0);

    const float* source_;
    int elements_left_;  // from this thread's first piece to the end of its filter; none if there is no such filter

public:
    static constexpr int kUnits = (kPieces + kLanes - 1) / kLanes;

    // `w` points to the tile's first filter; `filters` exist from there.
    __device__ __forceinline__ FilterSliceCopy(const Conv2dProblem& problem, const float* w, int channels, int filters)
        : source_(w + filter() * problem.w_filter + lane() * kPiece),
          elements_left_(filter() < filters ? channels * Config::kTaps - lane() * kPiece : 0) {}

    __device__ __forceinline__ void start(uint32_t stage, int unit) const {
        if (!exists(unit)) return;
        const int element = unit * kLanes * kPiece;
        copy_piece<kAccess>(stage + destination(unit), source_ + element, element < elements_left_ ? kAccess : 0);
    }

    __device__ __forceinline__ void round(uint32_t stage, int unit) const {
        if (exists(unit)) round_piece<kAccess>(stage + destination(unit));
    }

    __device__ __forceinline__ void advance() {
        source_ += Config::kFilterElements;
        elements_left_ -= Config::kFilterElements;
    }

private:
    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
    static __device__ __forceinline__ int filter() { return static_cast<int>(threadIdx.x) / kLanes; }
    static __device__ __forceinline__ bool exists(int unit) {
        return (unit + 1) * kLanes <= kPieces || unit * kLanes + lane() < kPieces;
    }
    static __device__ __forceinline__ uint32_t destination(int unit) {
        return Config::kPatchBytes + (filter() * Config::kFilterPitch + (lane() + unit * kLanes) * kPiece) * 4;
    }
};

}  // namespace detail

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kThreads, Kernel::Config::kBlocksPerSm)
    conv2d_direct_kernel(const __grid_constant__ Conv2dProblem problem, const float* __restrict__ x,
                         const float* __restrict__ w, typename Kernel::Output* __restrict__ out,
                         const typename Kernel::Epilogue epilogue) {
    Kernel::run(problem, x, w, out, epilogue);
}

template <class Config_, class Output_, class Epilogue_>
struct Conv2dDirect {
    using Config = Config_;
    using Output = Output_;
    using Epilogue = Epilogue_;
    using Problem = Conv2dProblem;

    static constexpr int kTensors = 3;  // x, w, out
    static constexpr int kMmasM = Config::kMmasM, kMmasN = Config::kMmasN, kKernel = Config::kKernel;
    static constexpr int kWarpRows = Config::kWarpRows, kThreads = Config::kThreads;
    using PatchCopy = detail::PatchCopy<Config>;
    using FilterSliceCopy = detail::FilterSliceCopy<Config>;
    using Sum = float[kWarpRows][kMmasM][kMmasN][4];  // D fragments, see mma.cuh

    static __device__ __forceinline__ void run(const Problem& problem, const float* x, const float* w, Output* out,
                                               const Epilogue& epilogue) {
        extern __shared__ __align__(1024) unsigned char shared[];
        __shared__ Tile tile_in_shared;  // until the store: the loop needs all registers
        const Tile tile = Tile::of_block(problem);
        if (threadIdx.x == 0) tile_in_shared = tile;
        const int channels = static_cast<int>(divide(problem.channels, static_cast<unsigned>(problem.groups)));
        const int left = tile.col - static_cast<int>(problem.pad_w);
        constexpr int kPiece = Config::kXAccess / 4;
        const int patch_col = left & -kPiece;  // rounded down, also below zero
        PatchCopy patch(problem, x + tile.image * problem.x_image + tile.group * channels * problem.x_channel, channels,
                        tile.row - static_cast<int>(problem.pad_h), patch_col);
        FilterSliceCopy filters(problem, w + tile.channel * problem.w_filter, channels, tile.filters);

        Sum sum = {};
        multiply(sum, patch, filters, shared, left - patch_col, (channels + Config::kChannels - 1) / Config::kChannels);
        __syncthreads();  // everyone has read the last stage
        store(problem, tile_in_shared, sum, reinterpret_cast<float*>(shared), out, epilogue);
    }

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        constexpr auto kKernel = &conv2d_direct_kernel<Conv2dDirect>;
        const int64_t blocks =
            problem.images * tiles_y(problem) * tiles_x(problem) * problem.groups * filter_tiles(problem);
        if (blocks == 0) return cudaSuccess;
        if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
        const cudaError_t error = allow_shared_memory<kKernel>(Config::kSharedBytes);
        if (error != cudaSuccess) return error;
        kKernel<<<static_cast<unsigned>(blocks), kThreads, Config::kSharedBytes, stream>>>(
            problem, reinterpret_cast<const float*>(pointers[0]), reinterpret_cast<const float*>(pointers[1]),
            reinterpret_cast<Output*>(pointers[2]), epilogue);
        return cudaGetLastError();
    }
#endif  // __CUDACC_RTC__

private:
    // 32 bits, because 64-bit divisions take long and each number fits.
    static __host__ __device__ unsigned divide(int64_t value, unsigned by) { return static_cast<unsigned>(value) / by; }
    static __host__ __device__ unsigned filters_of_group(const Problem& problem) {
        return divide(problem.out_channels, static_cast<unsigned>(problem.groups));
    }
    static __host__ __device__ unsigned tiles_y(const Problem& problem) {
        return divide(problem.out_height + Config::kTileRows - 1, Config::kTileRows);
    }
    static __host__ __device__ unsigned tiles_x(const Problem& problem) {
        return divide(problem.out_width + Config::kTileCols - 1, Config::kTileCols);
    }
    static __host__ __device__ unsigned filter_tiles(const Problem& problem) {
        return divide(filters_of_group(problem) + Config::kFilterTile - 1, Config::kFilterTile);
    }

    // What this block computes.
    struct Tile {
        int image, group, row, col;
        int channel, filters;  // the first output channel, and how many there are

        static __device__ __forceinline__ Tile of_block(const Problem& problem) {
            // Filters run fastest, so that blocks which share a patch run together and find it in L2.
            Tile tile;
            unsigned index = blockIdx.x;
            const int filter = static_cast<int>(take(index, filter_tiles(problem))) * Config::kFilterTile;
            tile.group = static_cast<int>(take(index, static_cast<unsigned>(problem.groups)));
            tile.col = static_cast<int>(take(index, tiles_x(problem))) * Config::kTileCols;
            tile.row = static_cast<int>(take(index, tiles_y(problem))) * Config::kTileRows;
            tile.image = static_cast<int>(index);
            const int filters = static_cast<int>(filters_of_group(problem));
            tile.channel = tile.group * filters + filter;
            tile.filters = min(Config::kFilterTile, filters - filter);
            return tile;
        }

        static __device__ __forceinline__ unsigned take(unsigned& index, unsigned radix) {
            const unsigned digit = index % radix;
            index /= radix;
            return digit;
        }
    };

    static __device__ __forceinline__ int warp_row() {
        return static_cast<int>(threadIdx.x) / 32 / Config::kWarpsX * kWarpRows;
    }
    static __device__ __forceinline__ int warp_col() {
        return static_cast<int>(threadIdx.x) / 32 % Config::kWarpsX * (kMmasN * kMmaN);
    }

    // skew: the column of the patch under the tile's first column and the filter's first.
    static __device__ __forceinline__ void multiply(Sum& sum, PatchCopy& patch, FilterSliceCopy& filters,
                                                    unsigned char* shared, int skew, int stages) {
        const uint32_t address = ptx::shared_address(shared);
        uint32_t fill = 0, use = 0;  // offsets of stages
#pragma unroll
        for (int stage = 0; stage < Config::kStages - 1; ++stage) {
            for (int part = 0; part < kKernel; ++part) start_part(patch, filters, address + fill, part);
            finish_start(patch, filters, fill);
        }
        ptx::cp_async_wait<Config::kStages - 2>();
        for (int part = 0; part < kKernel; ++part) round_part(patch, filters, address, part);

        for (int stage = 0; stage < stages; ++stage) {
            __syncthreads();  // this stage is rounded, and everyone has read the previous one
            const float* x = reinterpret_cast<const float*>(shared + use) + skew;
            const float* w = reinterpret_cast<const float*>(shared + use + Config::kPatchBytes);
            use = next_stage(use);
            // Copies and rounding are spread over the multiplications: together after the barrier, they would keep
            // the tensor cores waiting.
#pragma unroll
            for (int s = 0; s < kKernel; ++s) {
                start_part(patch, filters, address + fill, s);
                if (s == 0) wait_for_copy();
                round_part(patch, filters, address + use, s);
                multiply_column(sum, x, w, s);
            }
            finish_start(patch, filters, fill);
        }
        ptx::cp_async_wait<0>();
    }

    // For this thread's copies of the stage after the one in use: the parts of a stage that are started already are
    // not committed yet.
    static __device__ __forceinline__ void wait_for_copy() { ptx::cp_async_wait<Config::kStages - 3>(); }

    static __device__ __forceinline__ uint32_t next_stage(uint32_t stage) {
        return stage == (Config::kStages - 1) * Config::kStageBytes ? 0 : stage + Config::kStageBytes;
    }

    // After the last channels this fills in zeros that nobody multiplies.
    static __device__ __forceinline__ void start_part(const PatchCopy& patch, const FilterSliceCopy& filters,
                                                      uint32_t stage, int part) {
#pragma unroll
        for (int unit = 0; unit < PatchCopy::kUnits + FilterSliceCopy::kUnits; ++unit) {
            if (unit % kKernel != part) continue;
            if (unit < PatchCopy::kUnits) {
                patch.start(stage, unit);
            } else {
                filters.start(stage, unit - PatchCopy::kUnits);
            }
        }
    }

    static __device__ __forceinline__ void finish_start(PatchCopy& patch, FilterSliceCopy& filters, uint32_t& fill) {
        ptx::cp_async_commit();
        patch.advance();
        filters.advance();
        fill = next_stage(fill);
    }

    static __device__ __forceinline__ void round_part(const PatchCopy& patch, const FilterSliceCopy& filters,
                                                      uint32_t stage, int part) {
#pragma unroll
        for (int unit = 0; unit < PatchCopy::kUnits + FilterSliceCopy::kUnits; ++unit) {
            if (unit % kKernel != part) continue;
            if (unit < PatchCopy::kUnits) {
                patch.round(stage, unit);
            } else {
                filters.round(stage, unit - PatchCopy::kUnits);
            }
        }
    }

    // All products of column s of the filters.
    static __device__ __forceinline__ void multiply_column(Sum& sum, const float* x, const float* w, int s) {
        const int lane = static_cast<int>(threadIdx.x) % 32, group = lane / 4, in_group = lane % 4;
        x += in_group * Config::kChannelPitch + warp_row() * Config::kPatchCols + warp_col() + group + s;
        w += group * Config::kFilterPitch + in_group * Config::kTaps + s;
        Tf32::A a[kKernel][kMmasM];  // row r of the filters is used for input rows r to r + kWarpRows - 1
#pragma unroll
        for (int y = 0; y < kWarpRows + kKernel - 1; ++y) {
            if (y < kKernel) load_filter_row(a[y], w + y * kKernel);
            Tf32::B b[kMmasN];
#pragma unroll
            for (int n = 0; n < kMmasN; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    b[n].value[i] =
                        __float_as_uint(x[i * 4 * Config::kChannelPitch + y * Config::kPatchCols + n * kMmaN]);
                }
            }
#pragma unroll
            for (int r = 0; r < kKernel; ++r) {
                if (y - r < 0 || y - r >= kWarpRows) continue;
#pragma unroll
                for (int n = 0; n < kMmasN; ++n) {
#pragma unroll
                    for (int m = 0; m < kMmasM; ++m) Tf32::product<0>(sum[y - r][m][n], a[r][m], b[n]);
                }
            }
        }
    }

    static __device__ __forceinline__ void load_filter_row(Tf32::A (&a)[kMmasM], const float* w) {
#pragma unroll
        for (int m = 0; m < kMmasM; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int filter = m * kMmaM + i % 2 * 8, channel = i / 2 * 4;
                a[m].value[i] = __float_as_uint(w[filter * Config::kFilterPitch + channel * Config::kTaps]);
            }
        }
    }

    // Writes the accumulators of the first `cols` columns as [filter][row][column], kTogether columns at once.
    template <int kTogether>
    static __device__ __forceinline__ void stage(const Sum& sum, float* staged, int row_pitch, int cols) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
        for (int y = 0; y < kWarpRows; ++y) {
#pragma unroll
            for (int n = 0; n < kMmasN; ++n) {
                const int col = warp_col() + n * kMmaN + lane % 4 * 2;
                float* corner = staged + lane / 4 * Config::kStagedPitch + (warp_row() + y) * row_pitch + col;
#pragma unroll
                for (int m = 0; m < kMmasM; ++m) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float* at = corner + (m * kMmaM + half * 8) * Config::kStagedPitch;
                        const float first = sum[y][m][n][half * 2], second = sum[y][m][n][half * 2 + 1];
                        if constexpr (kTogether == 2) {
                            if (col < cols) *reinterpret_cast<float2*>(at) = make_float2(first, second);
                        } else {
                            if (col < cols) at[0] = first;
                            if (col + 1 < cols) at[1] = second;
                        }
                    }
                }
            }
        }
    }

    static __device__ __forceinline__ void store(const Problem& problem, const Tile& tile, const Sum& sum,
                                                 float* staged, Output* out, const Epilogue& epilogue) {
        const int out_width = static_cast<int>(problem.out_width);
        const int rows = min(Config::kTileRows, static_cast<int>(problem.out_height) - tile.row);
        const int cols = min(Config::kTileCols, out_width - tile.col);
        // Whole rows of the output follow each other in memory: one long run then replaces one per row.
        const bool whole_rows = cols == out_width;
        const int row_pitch = whole_rows ? out_width : Config::kTileCols;

        if (row_pitch % 2 == 0) {
            stage<2>(sum, staged, row_pitch, cols);
        } else {
            stage<1>(sum, staged, row_pitch, cols);
        }
        __syncthreads();

        const int spans = whole_rows ? 1 : rows;  // per channel
        const int length = whole_rows ? rows * cols : cols;
        const int64_t out_pixels = problem.out_height * problem.out_width;
        // Tiles of whole rows start a multiple of kTileRows rows after each other, others a multiple of rows.
        const bool aligned = all_aligned(out, out_pixels, whole_rows ? Config::kTileRows * out_width : out_width);
        store_spans<kThreads, Output>(tile.filters * spans, length, aligned, epilogue, [&](int index) {
            const int filter = whole_rows ? index : index / rows;
            const int row = index - filter * spans;
            const Position at{tile.image, tile.channel + filter,
                              static_cast<int64_t>(tile.row + row) * out_width + tile.col};
            return OutputSpan<Output>{staged + filter * Config::kStagedPitch + row * row_pitch,
                                      out + (at.batch * problem.out_channels + at.row) * out_pixels + at.col, at,
                                      length};
        });
    }
};

}  // namespace fxfuse
