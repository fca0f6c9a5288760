// The store of Hopper's convolution (conv2d_wgmma.cuh). Each warp stores its 16 filters of its segments by itself, 8
// filters at a time. They go through shared memory, because rows of NCHW may start at any element.
#pragma once

#include <cstdint>

#include "conv2d_problem.cuh"
#include "conv2d_wgmma_config.cuh"
#include "epilogue.cuh"
#include "ptx.cuh"

namespace fxfuse {

template <bool kCondition, class Then, class Else>
struct If {
    using Type = Then;
};
template <class Then, class Else>
struct If<false, Then, Else> {
    using Type = Else;
};

// One warp's store of a tile. It is made before the sums are complete, so that operands have arrived by then.
template <class Config, class Output, class Epilogue>
class WgmmaStore {
    using Tile = WgmmaTile<Config>;
    static constexpr int kFilters = Config::kSliceFilters, kSlices = 2 * Config::kGroupSegments;
    static constexpr int kVector = 16 / static_cast<int>(sizeof(Output));
    // Half the filters of a segment are a slice. It is stored a part at a time: beside all sums, only a part's values
    // have registers. Lane 4g + t has 8 values of a part: filter g's positions 2t, 2t + 1, 2t + 8, 2t + 9, …, 2t + 25.
    //
    //   position           0        32       64       96     127
    //   filters 0 to 7     | part 0 | part 1 | part 2 | part 3 |    a slice
    //   filters 8 to 15    | part 0 | part 1 | part 2 | part 3 |    a slice
    static constexpr int kParts = 4, kPart = Config::kSegment / kParts, kValues = kPart / 4;
    // Whether results are staged, or sums. Where operands vary along columns, sums are: so operands are read along
    // columns.
    static constexpr bool kStagesResults = !Epilogue::kVariesAlongCols;
    using Staged = typename If<kStagesResults, Output, float>::Type;
    using Values = typename Epilogue::template Values<kValues, Position>;
    static constexpr int kStagedVector = kStagesResults ? kVector : 4;  // a staged row starts as in memory, modulo it
    static constexpr bool kSamePlace = Epilogue::kColumns % kVector == 0;  // whether planes are multiples of 16 bytes
    // Whether both segments' results are staged together where they are adjacent in memory. Memory is written in
    // sectors of 32 bytes; if a sector is written only in part, its rest is read first.
    static constexpr int kBoth = Config::kGroupSegments * Config::kSegment;
    static constexpr bool kStagesBoth = kStagesResults && Config::kStagedSegments == Config::kGroupSegments;
    static constexpr int kPitch = (kStagesBoth ? kBoth : Config::kSegment) + 8;
    static_assert(kFilters * kPitch * static_cast<int>(sizeof(Staged)) <= Config::kWarpStagedBytes);

    const WgmmaCut& cut_;
    int row_, col_, image_;
    int channel_, filters_;  // the warp's first, and how many there are from it on
    Values operands_[2];     // of the lane's filter in either half, if results are staged

    // A segment's part of 8 filters' planes: rows of the output, or a part of one row.
    struct Span {
        int rows, cols, pixel;
        Output* to;

        __device__ __forceinline__ int length() const { return rows * cols; }
        // The misalignment of the span in the index-th filter's plane: its address in elements, modulo `unit`.
        __device__ __forceinline__ int late(const WgmmaCut& cut, int index, int unit) const {
            const uint32_t planes = kSamePlace ? 0 : index * static_cast<uint32_t>(cut.plane);
            const uint32_t place = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(to) / sizeof(Output));
            return static_cast<int>(place + planes) & (unit - 1);
        }
    };

public:
    using Sum = float[Config::kGroupSegments][Config::kSegment / 2];

    // `filter`: the warp's first in the tile.
    __device__ __forceinline__ WgmmaStore(const WgmmaCut& cut, const Tile& tile, int filter, const Epilogue& epilogue)
        : cut_(cut), row_(tile.row), col_(tile.col), image_(tile.image), channel_(tile.channel + filter),
          filters_(tile.filters - filter) {
        if constexpr (kStagesResults) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int nearest = min(half * kFilters + static_cast<int>(threadIdx.x) % 32 / 4, filters_ - 1);
                operands_[half] = epilogue.template load<Runs::kAnywhere, kValues>(
                    Position{image_, max(channel_ + nearest, 0), 0}, kValues);
            }
        }
    }

    // Stores all the warp's results. `memory`: the warp's own. `first_segment`: the warp's first, among the tile's.
    __device__ __forceinline__ void all(const Sum& sum, int first_segment, float* memory, Output* out,
                                        const Epilogue& epilogue) const {
        Staged* staged = reinterpret_cast<Staged*>(memory);
        const int lane = static_cast<int>(ptx::read_thread_index()) % 32;
        if constexpr (kStagesResults) {
            const Span first = span_of(first_segment, out), second = span_of(first_segment + 1, out);
            const bool follows = second.length() == 0 || second.pixel == first.pixel + first.length();
            if (cut_.pairs && cut_.segment_rows == 1 && (follows || !kStagesBoth)) {
                store_pairs(first, second, lane, sum, staged, epilogue);
                return;
            }
        }
        store(first_segment, lane, sum, staged, out, epilogue);
    }

private:
    // Stores neighbours two at a time. It is unrolled: without moves, and with the registers of sums already stored.
    __device__ __forceinline__ void store_pairs(Span first, Span second, int lane, const Sum& sum, Staged* staged,
                                                const Epilogue& epilogue) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Staged* row = staged_row(first, lane, staged) + lane % 4 * 2;
#pragma unroll
            for (int segment = 0; segment < Config::kGroupSegments; ++segment) {
                const Span& span = segment == 0 ? first : second;
                if (segment > 0) row = kStagesBoth ? row + first.length() : staged_row(span, lane, staged) + lane % 4 * 2;
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    // Before part 0: all lanes have read the previous slice, or staged what segment 1 overwrites (the
                    // end of segment 0). Before the others: so that the compiler does not compute several parts at
                    // once, for which there are no registers.
                    __syncwarp();
                    float value[kValues];
#pragma unroll
                    for (int i = 0; i < kValues; ++i) {
                        value[i] = sum[segment][(part * (kPart / 8) + i / 2) * 4 + half * 2 + i % 2];
                    }
                    epilogue.apply(value, operands_[half]);
#pragma unroll
                    for (int i = 0; i < kValues; i += 2) put_pair(row + part * kPart + i * 4, value[i], value[i + 1]);
                }
                if (segment == 0 && kStagesBoth) continue;
                __syncwarp();
                if constexpr (kStagesBoth) {
                    send_results<kBoth, true>(first, first.length() + second.length(), half, staged, lane);
                } else {
                    send_results<Config::kSegment, true>(span, span.length(), half, staged, lane);
                }
            }
            first.to += kFilters * cut_.plane;
            second.to += kFilters * cut_.plane;
        }
    }

    // Stores all other cases: any width, several output rows in a segment, operands along columns.
    __device__ __forceinline__ void store(int first_segment, int lane, const Sum& sum, Staged* staged, Output* out,
                                          const Epilogue& epilogue) const {
#pragma unroll 1
        for (int segment = 0; segment < Config::kGroupSegments; ++segment) {
            Span span = span_of(first_segment + segment, out);
            if (span.length() == 0) continue;
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                Values operands;
                if constexpr (kStagesResults) {
                    operands = operands_[0];
                    if (half == 1) operands = operands_[1];
                }
                Staged* row = staged_row(span, lane, staged);
                __syncwarp();  // all lanes have read the previous slice
#pragma unroll 1
                for (int part = 0; part < kParts; ++part) {
                    float value[kValues];
                    take(value, sum, (segment * 2 + half) * kParts + part);
                    if constexpr (kStagesResults) epilogue.apply(value, operands);
                    put(span, value, part * kPart + lane % 4 * 2, row);
                }
                __syncwarp();
                if constexpr (kStagesResults) {
                    send_results<Config::kSegment, false>(span, span.length(), half, staged, lane);
                } else {
                    send_sums(span, half, staged, lane, epilogue);
                }
                span.to += kFilters * cut_.plane;
            }
        }
    }

    // A segment's span in the plane of the warp's first filter.
    __device__ __forceinline__ Span span_of(int segment, Output* out) const {
        const WgmmaSegment at(cut_, segment);
        const int row = row_ + at.row, col = col_ + at.col;
        Span span;
        // Segments below the tile's last row are empty: a row may have fewer segments than a tile.
        span.rows = at.row < cut_.tile_rows ? max(min(cut_.segment_rows, cut_.out_height - row), 0) : 0;
        span.cols = max(min(Config::kSegment, cut_.out_width - col), 0);  // less than a segment that has several rows
        span.pixel = row * cut_.out_width + col;
        span.to = out + ((image_ * static_cast<int64_t>(cut_.out_channels) + channel_) * cut_.plane + span.pixel);
        return span;
    }

    // Where the lane's filter is staged.
    __device__ __forceinline__ Staged* staged_row(const Span& span, int lane, Staged* staged) const {
        return staged + lane / 4 * kPitch + span.late(cut_, lane / 4, kStagedVector);
    }

    // Takes the index-th part of all slices' sums. Registers cannot be indexed, so each part has its own code.
    template <int kIndex = 0>
    static __device__ __forceinline__ void take(float (&value)[kValues], const Sum& sum, int index) {
        if constexpr (kIndex < kSlices * kParts) {
            if (index != kIndex) return take<kIndex + 1>(value, sum, index);
            constexpr int kSlice = kIndex / kParts, kFirst = kIndex % kParts * (kPart / 8);
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                value[i] = sum[kSlice / 2][(kFirst + i / 2) * 4 + kSlice % 2 * 2 + i % 2];
            }
        }
    }

    // Stages a lane's values in its filter's row: pairs at positions `first`, `first` + 8, …
    __device__ __forceinline__ void put(const Span& span, const float (&value)[kValues], int first, Staged* row) const {
        if (cut_.segment_rows > 1) {  // only positions that exist may be staged
            const int multiplier = 65536 / cut_.pitch + 1;  // divides numbers below 128
            const auto put_inside = [&](int position, auto put_at) {
                const int y = position * multiplier >> 16, x = position - y * cut_.pitch;
                if (x < span.cols && y < span.rows) put_at(row + y * span.cols + x);
            };
            if (cut_.pairs) {
#pragma unroll
                for (int i = 0; i < kValues; i += 2) {
                    put_inside(first + i * 4, [&](Staged* at) { put_pair(at, value[i], value[i + 1]); });
                }
            } else {
#pragma unroll
                for (int i = 0; i < kValues; ++i) {
                    put_inside(first + i / 2 * 8 + i % 2, [&](Staged* at) { *at = from_float<Staged>(value[i]); });
                }
            }
        } else if (cut_.pairs) {
#pragma unroll
            for (int i = 0; i < kValues; i += 2) put_pair(row + first + i * 4, value[i], value[i + 1]);
        } else {
#pragma unroll
            for (int i = 0; i < kValues; ++i) row[first + i / 2 * 8 + i % 2] = from_float<Staged>(value[i]);
        }
    }

    static __device__ __forceinline__ void put_pair(float* to, float first, float second) {
        *reinterpret_cast<float2*>(to) = {first, second};
    }
    template <class Half>
    static __device__ __forceinline__ void put_pair(Half* to, float first, float second) {
        *reinterpret_cast<uint32_t*>(to) = pack_two<Half>(first, second);
    }

    // Copies `length` <= kRun results of each filter to memory: first the aligned pieces of 16 bytes, one per lane,
    // then up to 15 bytes at either end.
    template <int kRun, bool kPairs>
    __device__ __forceinline__ void send_results(const Span& span, int length, int half, const Output* staged,
                                                 int lane) const {
        constexpr int kPieces = kRun / kVector, kLanes = kPieces < 32 ? kPieces : 32, kPasses = kPieces / kLanes;
        constexpr int kAtOnce = 32 / kLanes, kTimes = kFilters / kAtOnce * kPasses;
        constexpr int kTogether = 2, kSize = static_cast<int>(sizeof(Output));  // kTogether: pieces in registers
        const auto late = [&](int row) { return span.late(cut_, row, kVector); };
        const auto head = [&](int row) { return -late(row) & (kVector - 1); };
        const int filters = filters_ - half * kFilters;
        const int first = lane / kLanes, nth = lane % kLanes * kVector + (kSamePlace ? head(0) : 0);
        // An integer: if these were pointers, compilers would compute each anew.
        uint64_t to = reinterpret_cast<uint64_t>(span.to + first * cut_.plane + nth);
        const uint64_t step = kAtOnce * cut_.plane * kSize;
        const uint32_t from = ptx::shared_address(staged + first * kPitch + nth) + (kSamePlace ? late(0) * kSize : 0);
#pragma unroll
        for (int time = 0; time < kTimes; time += kTogether) {
            uint4 piece[kTogether];
            int more[kTogether];  // head(), where it differs between planes
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int row = (time + i) / kPasses * kAtOnce, col = (time + i) % kPasses * kLanes * kVector;
                more[i] = kSamePlace ? 0 : head(row + first);
                const int at = row * kPitch + col + (kSamePlace ? 0 : late(row + first) + more[i]);
                piece[i] = ptx::load_shared_16(from + at * kSize);
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int row = (time + i) / kPasses * kAtOnce, col = (time + i) % kPasses * kLanes * kVector;
                if (row + first < filters && nth + more[i] + col + kVector <= length) {
                    ptx::store_global_16(to + (more[i] + col) * kSize, piece[i]);
                }
                if ((time + i) % kPasses == kPasses - 1) to += step;
            }
        }
        const int index = lane / 4, begin = min(head(index), length);
        const int end = begin + (length - begin) / kVector * kVector;
        if (index >= filters || (begin == 0 && end == length)) return;
        constexpr int kWord = kPairs ? 2 : 1;
        using Ends = Word<kWord * kSize>;
        Output* row = span.to + index * cut_.plane;
        const Output* results = staged + index * kPitch + late(index);
        const auto copy = [&](int col) {
            *reinterpret_cast<Ends*>(row + col) = *reinterpret_cast<const Ends*>(results + col);
        };
#pragma unroll
        for (int i = lane % 4 * kWord; i < kVector; i += 4 * kWord) {
            if (i < begin) copy(i);
            if (end + i < length) copy(end + i);
        }
    }

    // Applies the epilogue to runs of staged sums and stores the results: aligned pieces, then both ends, as above.
    __device__ __forceinline__ void send_sums(const Span& span, int half, const float* staged, int lane,
                                              const Epilogue& epilogue) const {
        constexpr int kLanes = Config::kSegment / kVector, kAtOnce = 32 / kLanes;
        // Where planes of the output are multiples of 16 bytes, runs start at such columns, too. Elsewhere an operand
        // may still be aligned: its load looks at the address.
        constexpr Runs kRuns = kSamePlace ? Runs::kWhole : Runs::kAnywhere;
        const int length = span.length(), channel = channel_ + half * kFilters;
        const int filters = min(kFilters, filters_ - half * kFilters);
#pragma unroll 1
        for (int row = lane / kLanes; row < filters; row += kAtOnce) {
            const int col = (-span.late(cut_, row, kVector) & (kVector - 1)) + lane % kLanes * kVector;
            if (col + kVector > length) continue;
            const auto operands = epilogue.template load<kRuns, kVector>(
                Position{image_, channel + row, span.pixel + col}, kVector);
            const float* from = staged + row * kPitch + span.late(cut_, row, kStagedVector) + col;
            alignas(16) float value[kVector];
#pragma unroll
            for (int i = 0; i < kVector; i += 4) {
                *reinterpret_cast<float4*>(value + i) = *reinterpret_cast<const float4*>(from + i);
            }
            epilogue.apply(value, operands);
            store_run<Output, kVector, Runs::kWhole>(span.to + row * cut_.plane + col, value, kVector);
        }
        const int index = lane / 4, late = span.late(cut_, index, kVector);
        const int head = min(-late & (kVector - 1), length), tail = head + (length - head) / kVector * kVector;
        if (index >= filters || (head == 0 && tail == length)) return;
        const float* from = staged + index * kPitch + span.late(cut_, index, kStagedVector);
#pragma unroll 1
        for (int i = lane % 4; i < 2 * kVector; i += 4) {
            const int col = i < kVector ? i : tail + i - kVector;
            if (col >= (i < kVector ? head : length)) continue;
            float value[1] = {from[col]};
            epilogue.apply(value, Position{image_, channel + index, span.pixel + col}, 1);
            span.to[index * cut_.plane + col] = from_float<Output>(value[0]);
        }
    }
};

}  // namespace fxfuse
