// The input pixels under a tile of a direct convolution, on their way from x to shared memory.
//
// A patch is [word][image][row][kPatchCols columns]. It has as many 32-bit words as an instruction has in K: a word is
// a float channel, or a pair of 16-bit channels. Rows of x may start at any element. So a row is copied from the
// multiple of 16 bytes at or before the leftmost pixel that the tile needs, `skew` pixels early: all copies then take
// 16 bytes. Pixels outside the image are zero. (With rows at any element, padding is at most 1 column: all pieces but
// the first then begin inside the image.)
//
// Floats are copied to where they are read. If the first piece of a row includes pixels of the row before, those become
// zero after the piece has arrived. 16-bit channels, which are planes of x, are copied as they are, [channel][image]
// [row][column]. They are interleaved into words a stage later, when all threads' copies have arrived (PatchWords).
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
template <class Element>
struct PatchRow {
    static constexpr int kSize = static_cast<int>(sizeof(Element)), kPiece = 16 / kSize;  // pixels copied at a time

    const Element* start;  // of the row in x; not read unless `inside`
    int left;              // leftmost column that the tile needs, often negative
    bool inside;           // whether the row exists

    // `channel` and row `y` count in the patch, `image` in the tile.
    __device__ __forceinline__ PatchRow(const Conv2dProblem& problem, const Element* x, const PatchPosition& at,
                                        int channel, int image, int y) {
        const int row = at.row - static_cast<int>(problem.pad_h) + y;
        start = x + (at.image + image) * problem.x_image + (at.first_channel + channel) * problem.x_channel +
                row * problem.x_row;
        left = at.col - static_cast<int>(problem.pad_w);
        inside = 0 <= row && row < static_cast<int>(problem.height) && at.image + image < problem.images;
    }

    // Address of the leftmost pixel in elements, modulo 2^32; modulo kPiece it is the skew.
    __device__ __forceinline__ uint32_t place() const {
        return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(start) / kSize) + static_cast<uint32_t>(left);
    }
    __device__ __forceinline__ int skew() const { return static_cast<int>(place() % kPiece); }
    // The skew of all rows, if they start at multiples of 16 bytes.
    static __device__ __forceinline__ uint32_t aligned_skew(const Conv2dProblem& problem, const PatchPosition& at) {
        return static_cast<uint32_t>(at.col - static_cast<int>(problem.pad_w)) % kPiece;
    }
};

// The copies of one thread. kLanes threads copy the body of a row. The first and last pieces of all rows, the edges,
// are dealt to the threads one by one.
template <class Config>
class PatchCopy {
    using Element = typename Config::Element;
    using Row = PatchRow<Element>;
    static constexpr int kSize = Row::kSize, kPiece = Row::kPiece;
    static constexpr int kRows = Config::kImages * Config::kPatchRows;  // of one channel
    static constexpr int kPieces = Config::kPatchCols / kPiece, kLanes = kPieces - 2;
    static constexpr int kRowsPerPass = Config::kThreads / kLanes;
    static_assert(Config::kThreads % kLanes == 0 && kRows <= kRowsPerPass);
    static constexpr int kFit = kRowsPerPass / kRows;
    static constexpr int kChannelsPerPass = kFit >= 8 ? 8 : kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
    static constexpr int kBodyUnits = Config::kChannels / kChannelsPerPass;
    static constexpr int kEdges = Config::kChannels * kRows * 2;
    static constexpr int kEdgeUnits = (kEdges + Config::kThreads - 1) / Config::kThreads;

    static constexpr int kNothing = -64;  // `valid` in a row that does not exist: no skew makes it positive

    // A piece of 16 bytes: its place in x, how many of its bytes exist, how many of its elements are before the row.
    struct Piece {
        int offset;  // from `origin_`, in elements
        int valid, before;
    };

    const Conv2dProblem& problem_;
    const Element* x_;
    const Element* origin_;  // the first of the stage's channels
    int channels_left_;      // from there
    Piece body_, edge_[kEdgeUnits];
    int before_[2][kEdgeUnits];  // of the stage that was copied last, and of the one before

public:
    static constexpr int kUnits = kBodyUnits + kEdgeUnits;

    __device__ __forceinline__ PatchCopy(const Conv2dProblem& problem, const Element* x) : problem_(problem), x_(x) {}

    // Starts at the first channels of a tile.
    __device__ __forceinline__ void aim(const PatchPosition& at, int channels) {
        origin_ = x_ + at.image * problem_.x_image + at.first_channel * problem_.x_channel;
        channels_left_ = channels;
        body_ = body(at);
#pragma unroll
        for (int i = 0; i < kEdgeUnits; ++i) edge_[i] = piece(at, edge_channel(i), edge_row(i), edge_piece(i));
    }

    // Moves on to the next channels.
    __device__ __forceinline__ void advance() {
        origin_ += Config::kChannels * problem_.x_channel;
        channels_left_ -= Config::kChannels;
#pragma unroll
        for (int i = 0; i < kEdgeUnits; ++i) {
            before_[1][i] = before_[0][i];
            before_[0][i] = edge_[i].before;
        }
    }

    // Copies the unit-th unit to the patch at `patch`, or to the planes that become the patch later.
    __device__ __forceinline__ void copy(uint32_t patch, int unit) const {
        if (!exists(unit)) return;
        if (unit < kBodyUnits) {
            const int channel = unit * kChannelsPerPass;
            const Element* source = origin_ + body_.offset + channel * problem_.x_channel;
            int valid = body_.valid;
            if constexpr (!Config::kAlignedRows) {
                // `offset` is where the piece would start without skew; `valid` counts from there to the row's end.
                const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(source) / kSize % kPiece);
                source -= skew;
                valid = min(max(valid + skew * kSize, 0), 16);
            }
            ptx::cp_async_16(patch + destination(unit), source, body_channel() + channel < channels_left_ ? valid : 0);
        } else {
            const int i = unit - kBodyUnits;
            ptx::cp_async_16(patch + destination(unit), origin_ + edge_[i].offset,
                             edge_channel(i) < channels_left_ ? edge_[i].valid : 0);
        }
    }

    // Zeroes the elements before those rows whose edges this thread has copied to `patch`. The copies must have
    // arrived; kSince stages have been filled since.
    template <int kSince>
    __device__ __forceinline__ void clear_before(uint32_t patch) const {
        if constexpr (!Config::kAlignedRows && !Config::kPairs) {
#pragma unroll
            for (int i = 0; i < kEdgeUnits; ++i) {
                const int before = exists(kBodyUnits + i) ? before_[kSince][i] : 0;
#pragma unroll
                for (int element = 0; element < kPiece - 1; ++element) {
                    if (element < before) ptx::store_shared_4(patch + destination(kBodyUnits + i) + element * 4, 0);
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
        constexpr int kPitch = Config::kPairs ? Config::kPlanePitch : Config::kChannelPitch;
        return static_cast<uint32_t>((channel * kPitch + row * Config::kPatchCols + piece * kPiece) * kSize);
    }

    __device__ __forceinline__ Piece body(const PatchPosition& at) const {
        const int index = 1 + body_lane();
        if constexpr (Config::kAlignedRows) return piece(at, body_channel(), body_row(), index);
        const Row row(problem_, x_, at, body_channel(), body_row() / Config::kPatchRows,
                      body_row() % Config::kPatchRows);
        const int col = row.left + index * kPiece;
        return {static_cast<int>(row.start - origin_) + col,
                row.inside ? max(min(static_cast<int>(problem_.width) - col, kPiece), -kPiece) * kSize : kNothing, 0};
    }

    __device__ __forceinline__ Piece piece(const PatchPosition& at, int channel, int row, int index) const {
        const Row patch_row(problem_, x_, at, channel, row / Config::kPatchRows, row % Config::kPatchRows);
        const int skew = Config::kAlignedRows ? static_cast<int>(Row::aligned_skew(problem_, at)) : patch_row.skew();
        const int col = patch_row.left - skew + index * kPiece, width = static_cast<int>(problem_.width);
        const bool inside = patch_row.inside && -kPiece < col && col < width;
        return {static_cast<int>(patch_row.start - origin_) + col, inside ? min(width - col, kPiece) * kSize : 0,
                inside ? max(-col, 0) : 0};
    }
};

// One thread's interleaving: planes of 16-bit channels become words of two channels, the even channel in the lower
// half. Columns stay where they are if all rows start at multiples of 16 bytes; else the skew of each row is removed.
template <class Config>
class PatchWords {
    using Row = PatchRow<typename Config::Element>;
    static constexpr int kGroup = 4;  // pixels of two channels: 16 bytes of words
    static constexpr int kUsedCols = Config::kAlignedRows ? Config::kPatchCols : Config::kTileCols + kGroup;
    static constexpr int kRowGroups = kUsedCols / kGroup;
    static constexpr int kGroups = Config::kImages * Config::kPatchRows * kRowGroups;  // of a pair of channels
    static constexpr int kPairs = Config::kChannels / 2;
    // All threads work on one pair of channels while there is work for all; then on the groups left of all pairs.
    static constexpr int kPasses = kGroups / Config::kThreads, kLeft = kGroups % Config::kThreads;
    static constexpr int kLeftUnits = (kLeft * kPairs + Config::kThreads - 1) / Config::kThreads;

    const Conv2dProblem& problem_;
    uint32_t place_, copied_place_;  // PatchRow::place() of row 0: in the stage to interleave, in the one copied
    int left_, copied_left_;         // leftmost columns of both

public:
    static constexpr int kUnits = Config::kPairs ? kPasses * kPairs + kLeftUnits : 0;

    __device__ __forceinline__ explicit PatchWords(const Conv2dProblem& problem) : problem_(problem) {}

    // aim() and advance() are as PatchCopy's, which is a stage ahead.
    __device__ __forceinline__ void aim(const PatchPosition& at, const typename Config::Element* x) {
        if constexpr (!Config::kAlignedRows) {
            const Row row(problem_, x, at, 0, 0, 0);
            copied_place_ = row.place();
            copied_left_ = row.left;
        }
    }
    __device__ __forceinline__ void advance() {
        if constexpr (!Config::kAlignedRows) {
            place_ = copied_place_;
            left_ = copied_left_;
            copied_place_ += static_cast<uint32_t>(Config::kChannels * problem_.x_channel);
        }
    }

    __device__ __forceinline__ void interleave(uint32_t planes, uint32_t words, int unit) const {
        const int thread = static_cast<int>(ptx::read_thread_index());
        int pair, group;
        if (unit < kPasses * kPairs) {
            pair = unit % kPairs;
            group = unit / kPairs * Config::kThreads + thread;
        } else {
            constexpr int kDivisor = kLeft > 0 ? kLeft : 1;
            const int index = (unit - kPasses * kPairs) * Config::kThreads + thread;
            pair = index / kDivisor;
            group = kPasses * Config::kThreads + index % kDivisor;
            if (kLeft * kPairs % Config::kThreads != 0 && pair >= kPairs) return;
        }
        const int row = group / kRowGroups, col = group % kRowGroups * kGroup;
        const uint2 even = pixels(planes, 2 * pair, row, col), odd = pixels(planes, 2 * pair + 1, row, col);
        constexpr uint32_t kLower = 0x5410, kUpper = 0x7632;  // halves of `even` and `odd`
        ptx::store_shared_16(
            words + static_cast<uint32_t>(pair * Config::kChannelPitch + row * Config::kPatchCols + col) * 4,
            make_uint4(__byte_perm(even.x, odd.x, kLower), __byte_perm(even.x, odd.x, kUpper),
                       __byte_perm(even.y, odd.y, kLower), __byte_perm(even.y, odd.y, kUpper)));
    }

private:
    // Four pixels of a channel, from `col` on, a multiple of 4.
    __device__ __forceinline__ uint2 pixels(uint32_t planes, int channel, int row, int col) const {
        const int offset = channel * Config::kPlanePitch + row * Config::kPatchCols + col;
        if constexpr (Config::kAlignedRows) return ptx::load_shared_8(planes + static_cast<uint32_t>(offset) * 2);
        const uint32_t row_place = place_ + channel * static_cast<uint32_t>(problem_.x_channel) +
                                   row / Config::kPatchRows * static_cast<uint32_t>(problem_.x_image) +
                                   row % Config::kPatchRows * static_cast<uint32_t>(problem_.x_row);
        const uint32_t source = planes + (static_cast<uint32_t>(offset) + (row_place & 4)) * 2;
        const uint2 first = ptx::load_shared_8(source), second = ptx::load_shared_8(source + 8);
        const bool later = (row_place & 2) != 0;
        const uint32_t word[3] = {later ? first.y : first.x, later ? second.x : first.y, later ? second.y : second.x};
        const uint32_t shift = row_place % 2 * 16;
        const uint32_t before = left_ + col < 0 ? 0xffff0000 : 0xffffffff;  // at most one pixel is before the image
        return make_uint2(__funnelshift_r(word[0], word[1], shift) & before, __funnelshift_r(word[1], word[2], shift));
    }
};

}  // namespace fxfuse::detail
