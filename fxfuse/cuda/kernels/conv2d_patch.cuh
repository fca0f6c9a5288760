// The input pixels under a tile of a direct convolution, on their way from x to shared memory.
//
// A patch is 8 channels of [image][row][kPatchCols columns]. Rows of x may start at any element: a row of the patch
// starts at the multiple of 16 bytes at or before the leftmost pixel that the tile needs, `skew` pixels early, so that
// everything is copied 16 bytes at a time. Pixels outside the image are zero; where the first piece of a row has pixels
// of the row before, they become zero when it has arrived. (With rows at any element, padding is therefore at
// most 1 column: later pieces then begin inside the image.)
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "ptx.cuh"

namespace fxfuse::detail {

// Where the tile's output pixels begin, and the first channel of x that they depend on.
struct PatchPosition {
    int image, first_channel, row, col;
};

// One row of one channel and image of a patch.
struct PatchRow {
    const float* start;  // of the row in x; not read unless `inside`
    int left;            // leftmost column that the tile needs, often negative
    bool inside;         // whether the row exists

    // `channel` of the patch's, `image` of the tile's and row `y` of the patch.
    __device__ __forceinline__ PatchRow(const Conv2dProblem& problem, const float* x, const PatchPosition& at,
                                        int channel, int image, int y) {
        const int row = at.row - static_cast<int>(problem.pad_h) + y;
        start = x + (at.image + image) * problem.x_image + (at.first_channel + channel) * problem.x_channel +
                row * problem.x_row;
        left = at.col - static_cast<int>(problem.pad_w);
        inside = 0 <= row && row < static_cast<int>(problem.height) && at.image + image < problem.images;
    }

    __device__ __forceinline__ int skew() const {
        return static_cast<int>(reinterpret_cast<uintptr_t>(start) / 4 + static_cast<unsigned>(left)) & 3;
    }
    // The same for all rows, if they start at multiples of 16 bytes.
    static __device__ __forceinline__ uint32_t aligned_skew(const Conv2dProblem& problem, const PatchPosition& at) {
        return static_cast<uint32_t>(at.col - static_cast<int>(problem.pad_w)) & 3;
    }
};

// The copies of one thread. The body of each row is copied kLanes threads to a row; its first and last piece, by
// whatever threads come next.
template <class Config>
class PatchCopy {
    static constexpr int kRows = Config::kImages * Config::kPatchRows;  // of one channel
    static constexpr int kPieces = Config::kPatchCols / 4, kLanes = kPieces - 2;
    static constexpr int kRowsPerPass = Config::kThreads / kLanes;
    static_assert(Config::kThreads % kLanes == 0 && kRows <= kRowsPerPass);
    static constexpr int kFit = kRowsPerPass / kRows;
    static constexpr int kChannelsPerPass = kFit >= 8 ? 8 : kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
    static constexpr int kBodyUnits = Config::kChannels / kChannelsPerPass;
    static constexpr int kEdges = Config::kChannels * kRows * 2;
    static constexpr int kEdgeUnits = (kEdges + Config::kThreads - 1) / Config::kThreads;

    static constexpr int kNothing = -64;  // bytes that exist, in a row that does not

    // A piece of 16 bytes: where it stands in the image, how many bytes of it exist, how many elements are of no use.
    struct Piece {
        int offset;  // from `origin_`, in elements
        int valid, before;
    };

    const Conv2dProblem& problem_;
    const float* x_;
    const float* origin_;  // the first of the 8 channels
    int channels_left_;    // from there
    Piece body_, edge_[kEdgeUnits];
    int before_[2][kEdgeUnits];  // of the stage that was copied last, and of the one before

public:
    static constexpr int kUnits = kBodyUnits + kEdgeUnits;

    __device__ __forceinline__ PatchCopy(const Conv2dProblem& problem, const float* x) : problem_(problem), x_(x) {}

    // At the first channels of a tile.
    __device__ __forceinline__ void aim(const PatchPosition& at, int channels) {
        origin_ = x_ + at.image * problem_.x_image + at.first_channel * problem_.x_channel;
        channels_left_ = channels;
        body_ = body(at);
#pragma unroll
        for (int i = 0; i < kEdgeUnits; ++i) edge_[i] = piece(at, edge_channel(i), edge_row(i), edge_piece(i));
    }

    // To the next 8 channels.
    __device__ __forceinline__ void advance() {
        origin_ += Config::kChannels * problem_.x_channel;
        channels_left_ -= Config::kChannels;
#pragma unroll
        for (int i = 0; i < kEdgeUnits; ++i) {
            before_[1][i] = before_[0][i];
            before_[0][i] = edge_[i].before;
        }
    }

    __device__ __forceinline__ void copy(uint32_t stage, int unit) const {
        if (!exists(unit)) return;
        if (unit < kBodyUnits) {
            const int channel = unit * kChannelsPerPass;
            const float* source = origin_ + body_.offset + channel * problem_.x_channel;
            int valid = body_.valid;
            if constexpr (!Config::kAlignedRows) {
                // `offset` is where the piece would start if its channel's rows had no skew, `valid` up to the end.
                const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(source) / 4) & 3;
                source -= skew;
                valid = min(max(valid + skew * 4, 0), 16);
            }
            ptx::cp_async_16(stage + destination(unit), source,
                             body_channel() + channel < channels_left_ ? valid : 0);
        } else {
            const int i = unit - kBodyUnits;
            ptx::cp_async_16(stage + destination(unit), origin_ + edge_[i].offset,
                             edge_channel(i) < channels_left_ ? edge_[i].valid : 0);
        }
    }

    // Puts zeros before the rows whose edges this thread has copied to `stage`, behind which kSince stages have been
    // filled since; the copies must have arrived.
    template <int kSince>
    __device__ __forceinline__ void clear_before(uint32_t stage) const {
        if constexpr (!Config::kAlignedRows) {
#pragma unroll
            for (int i = 0; i < kEdgeUnits; ++i) {
                const int before = exists(kBodyUnits + i) ? before_[kSince][i] : 0;
#pragma unroll
                for (int element = 0; element < 3; ++element) {
                    if (element < before) ptx::store_shared_4(stage + destination(kBodyUnits + i) + element * 4, 0);
                }
            }
        }
    }

private:
    static __device__ __forceinline__ int body_lane() { return static_cast<int>(threadIdx.x) % kLanes; }
    static __device__ __forceinline__ int body_row() { return static_cast<int>(threadIdx.x) / kLanes % kRows; }
    static __device__ __forceinline__ int body_channel() { return static_cast<int>(threadIdx.x) / kLanes / kRows; }

    static __device__ __forceinline__ int edge(int i) { return static_cast<int>(threadIdx.x) + i * Config::kThreads; }
    static __device__ __forceinline__ int edge_piece(int i) { return edge(i) % 2 * (kPieces - 1); }
    static __device__ __forceinline__ int edge_row(int i) { return edge(i) / 2 % kRows; }
    static __device__ __forceinline__ int edge_channel(int i) { return edge(i) / 2 / kRows; }

    static __device__ __forceinline__ bool exists(int unit) {
        if (unit < kBodyUnits) return kRowsPerPass == kRows * kChannelsPerPass || body_channel() < kChannelsPerPass;
        return kEdges % Config::kThreads == 0 || edge(unit - kBodyUnits) < kEdges;
    }

    static __device__ __forceinline__ uint32_t destination(int unit) {
        const bool body = unit < kBodyUnits;
        const int i = unit - kBodyUnits;
        const int channel = body ? body_channel() + unit * kChannelsPerPass : edge_channel(i);
        const int row = body ? body_row() : edge_row(i), piece = body ? 1 + body_lane() : edge_piece(i);
        return static_cast<uint32_t>((channel * Config::kChannelPitch + row * Config::kPatchCols + piece * 4) * 4);
    }

    __device__ __forceinline__ Piece body(const PatchPosition& at) const {
        const int index = 1 + body_lane();
        if constexpr (Config::kAlignedRows) return piece(at, body_channel(), body_row(), index);
        const PatchRow row(problem_, x_, at, body_channel(), body_row() / Config::kPatchRows,
                           body_row() % Config::kPatchRows);
        const int col = row.left + index * 4;
        return {static_cast<int>(row.start - origin_) + col,
                row.inside ? max(min(static_cast<int>(problem_.width) - col, 4), -4) * 4 : kNothing, 0};
    }

    __device__ __forceinline__ Piece piece(const PatchPosition& at, int channel, int row, int index) const {
        const PatchRow patch_row(problem_, x_, at, channel, row / Config::kPatchRows, row % Config::kPatchRows);
        const int skew = Config::kAlignedRows ? static_cast<int>(PatchRow::aligned_skew(problem_, at)) : patch_row.skew();
        const int col = patch_row.left - skew + index * 4, width = static_cast<int>(problem_.width);
        const bool inside = patch_row.inside && -4 < col && col < width;
        return {static_cast<int>(patch_row.start - origin_) + col, inside ? min(width - col, 4) * 4 : 0, inside ? max(-col, 0) : 0};
    }
};

}  // namespace fxfuse::detail
