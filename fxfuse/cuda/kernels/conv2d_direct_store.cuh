// The store of a direct convolution (conv2d_direct.cuh). Rows of NCHW may start at any element. Accumulators therefore
// go through shared memory, and leave as long runs of aligned 16 bytes.
//
// Where the epilogue reads operands along columns, or outputs are as large as accumulators, accumulators are staged,
// and the epilogue is applied to runs (Span, store_runs). Otherwise the epilogue is applied to accumulators, and its
// results are staged (ResultSlice).
#pragma once

#include <cstdint>

#include "conv2d_direct_config.cuh"
#include "epilogue.cuh"
#include "mma.cuh"
#include "ptx.cuh"

namespace fxfuse::detail {

template <class Config, class Output, class Epilogue>
struct DirectStore {
    using Problem = Conv2dProblem;
    using Tile = DirectTile<Config>;
    using Sum = float[Config::kWarpRows][Config::kMmasM][Config::kMmasN][4];  // D fragments, see mma.cuh

    // Called by all threads of a block, after all of them have read the stage at `shared`, which is overwritten.
    static __device__ __forceinline__ void store(const Problem& problem, const Tile& tile, const Sum& sum,
                                                 unsigned char* shared, Output* out, const Epilogue& epilogue) {
        const Spans spans(problem, tile, out);
        if constexpr (kStagesResults) {
            constexpr int kRowLanes = Config::kTileCols >= 32 * kVector ? 32 : 2 * kVector;
            Output* staged = reinterpret_cast<Output*>(shared);
            for (int number = 0; number < ResultSlice::kSlices; ++number) {
                const ResultSlice slice{spans, number};
                if (number > 0) __syncthreads();  // all threads have read the previous slice
                stage_results(problem, tile, sum, slice, staged, epilogue);
                __syncthreads();
                if (spans.whole_rows) {
                    store_results<32>(problem, tile, slice, staged, out + spans.first);
                } else {
                    store_results<kRowLanes>(problem, tile, slice, staged, out + spans.first);
                }
            }
            return;
        }
        const bool in_pairs = (spans.place | spans.width) % 2 == 0;
        out += spans.first;
        // Not unrolled, so that there is one copy of the epilogue: four would not stay in the instruction cache.
#pragma unroll 1
        for (int slice = 0; slice < Config::kSlices; ++slice) {
            float* staged = reinterpret_cast<float*>(shared + slice % Config::kSliceBuffers * Config::kSliceBytes);
            if (Config::kSliceBuffers == 1 && slice > 0) __syncthreads();  // all threads have read the previous slice
#pragma unroll
            for (int known = 0; known < Config::kSlices; ++known) {  // a constant: registers cannot be indexed
                if (slice != known) continue;
                if (in_pairs) {
                    stage<2>(sum, known, spans, staged);
                } else {
                    stage<1>(sum, known, spans, staged);
                }
            }
            __syncthreads();
            const int rows = spans.whole_rows ? 1 : spans.rows;
            for (int row = 0; row < rows; ++row) {
                store_ends(tile, spans, slice, row, staged, out, epilogue);
                store_runs(tile, spans, slice, row, staged, out, epilogue);
            }
        }
    }

private:
    using Warp = DirectWarp<Config>;
    static constexpr int kMmasM = Config::kMmasM, kMmasN = Config::kMmasN;
    static constexpr int kWarpRows = Config::kWarpRows, kThreads = Config::kThreads;
    static constexpr int kVector = 16 / static_cast<int>(sizeof(Output));  // outputs per store
    // Whether results are staged instead of accumulators: where they are half as large, and the epilogue does not
    // depend on an accumulator's column.
    static constexpr bool kStagesResults = sizeof(Output) == 2 && !Epilogue::kVariesAlongCols;

    // How a tile of outputs lies in memory: as spans of consecutive outputs. If the tile is at least as wide as the
    // image, a span is all of the tile's rows of one image and filter; if it is narrower, one such row.
    struct Spans {
        static constexpr int kOfWarp = 8 * Config::kHalvesPerSlice;  // filters of a slice that a warp has computed
        static constexpr int kFilters = Config::kWarpsM * kOfWarp;   // of a slice
        static constexpr int kCount = Config::kImages * kFilters;
        static constexpr int kLongest = Config::kTileRows * Config::kTileCols;

        bool whole_rows;
        int rows, length, pitch;  // pitch: between staged rows
        int width;                // outputs in a row of an image
        uint32_t plane;           // outputs in a channel
        int64_t image;            // outputs in an image
        int64_t first;            // the tile's first output
        uint32_t place;           // address of output `first`, in units of Output, modulo 2^32
        int filters, images;      // that exist from the tile's first on

        __device__ __forceinline__ Spans(const Problem& problem, const Tile& tile, const Output* out)
            : width(static_cast<int>(problem.out_width)),
              plane(static_cast<uint32_t>(problem.out_height * problem.out_width)),
              image(problem.out_channels * plane), filters(tile.filters) {
            const int cols = min(Config::kTileCols, width - tile.col);
            rows = min(Config::kTileRows, static_cast<int>(problem.out_height) - tile.row);
            whole_rows = cols == width;
            length = whole_rows ? rows * cols : cols;
            pitch = whole_rows ? width : Config::kStagedCols;
            first = tile.image * image + tile.channel * static_cast<int64_t>(plane) + tile.row * width + tile.col;
            place = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(out) / sizeof(Output) + first);
            images = static_cast<int>(min(problem.images - tile.image, static_cast<int64_t>(Config::kImages)));
        }

        // Whether spans may be too short to contain 16 aligned bytes.
        __device__ __forceinline__ bool short_ones() const { return length < 2 * kVector - 1; }

        // The tile's filter, and its image, for number `index` of a slice.
        static __device__ __forceinline__ int filter(int slice, int index) {
            if constexpr (Config::kImages > 1) index %= kFilters;
            const int warp = Config::kWarpsM == 1 ? 0 : index / kOfWarp;
            return warp * (kMmasM * kMmaM - kOfWarp) + slice * kOfWarp + index;
        }
        static __device__ __forceinline__ int image_of(int index) {
            return Config::kImages == 1 ? 0 : index / kFilters;
        }
    };

    // One span of a slice: the outputs of one image, one filter and, unless spans have whole rows, one row. Its number
    // in the slice is `index` + `more`; numbers `index` and `index` + `more` are filters of the same warp and image.
    //
    //   a span of 23 float16 outputs that starts 3 outputs behind a multiple of 16 bytes:
    //
    //     outputs   0-4     5-12         13-20        21-22
    //               head    a run of 16 bytes each    tail
    struct Span {
        int row, image, filter;  // in the tile
        bool exists;
        int64_t offset;  // from the first output of the tile
        int head;        // outputs before the first that is aligned to 16 bytes
        int staged;      // where its first output is staged: runs aligned in memory are so here, too

        // Terms of `more` and of `index` are summed separately: the former are the same for all spans of a thread.
        __device__ __forceinline__ Span(const Spans& spans, int slice, int index, int more, int row)
            : row(row), image(Spans::image_of(index)) {
            const int first = Spans::filter(slice, index), before = spans.whole_rows ? 0 : row * spans.width;
            filter = first + more;
            exists = first < spans.filters - more && (Config::kImages == 1 || image < spans.images);
            offset = times(more, spans.plane) + before + times(first, spans.plane);
            if constexpr (Config::kImages > 1) offset += image * spans.image;
            uint32_t place = spans.place + more * spans.plane + before + static_cast<uint32_t>(first) * spans.plane;
            if constexpr (Config::kImages > 1) place += static_cast<uint32_t>(image * spans.image);
            head = static_cast<int>(-place % kVector);
            staged = more * Config::kSpanPitch + row * spans.pitch + static_cast<int>(place % 4) +
                     index * Config::kSpanPitch;
        }

        static __device__ __forceinline__ int64_t times(int number, uint32_t plane) {
            return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(number)) * plane);
        }

        // The position of the span's first output; if the span does not exist, of one that does.
        __device__ __forceinline__ Position position(const Tile& tile, const Spans& spans) const {
            return {tile.image + (exists ? image : 0), tile.channel + (exists ? filter : 0),
                    (tile.row + row) * spans.width + tile.col};
        }
    };

    // Writes a slice of the accumulators to `staged`, kTogether columns at once.
    template <int kTogether>
    static __device__ __forceinline__ void stage(const Sum& sum, int slice, const Spans& spans, float* staged) {
        const uint32_t thread = ptx::read_thread_index();
        const int lane = static_cast<int>(thread % 32);
        const Warp warp(thread);
        const int cols = spans.whole_rows ? spans.width : spans.length;
#pragma unroll
        for (int y = 0; y < kWarpRows; ++y) {
            const int index = warp.image * Spans::kFilters + warp.m * Spans::kOfWarp;
            float* row = staged + Span(spans, slice, index, lane / 4, warp.row + y).staged;
#pragma unroll
            for (int i = 0; i < Config::kHalvesPerSlice; ++i) {
                const int half = slice * Config::kHalvesPerSlice + i, m = half / 2;
#pragma unroll
                for (int pair = 0; pair < kMmasN; ++pair) {
                    const int n = pair / 2 * 2, column = pair % 2, d = half % 2 * 2 + column;
                    const int col = warp.col + Config::pixel(n, lane % 4 * 2 + column);
                    float* to = row + i * 8 * Config::kSpanPitch + col;
                    if constexpr (kTogether == 2) {
                        if (col < cols) *reinterpret_cast<float2*>(to) = {sum[y][m][n][d], sum[y][m][n + 1][d]};
                    } else {
                        if (col < cols) to[0] = sum[y][m][n][d];
                        if (col + 1 < cols) to[1] = sum[y][m][n + 1][d];
                    }
                }
            }
        }
    }

    // A slice of staged results: as many filters as fit. A lane's pairs of 4 words x 8 filters fall on 32 banks.
    struct ResultSlice {
        static constexpr int kCols = Config::kTileCols + kVector, kUnpaddedPitch = Config::kTileRows * kCols;
        static constexpr int kPitch = kUnpaddedPitch + (24 - kUnpaddedPitch % 16) % 16;  // of a filter's results
        static constexpr int kFilterBytes = Config::kImages * kPitch * static_cast<int>(sizeof(Output));
        static constexpr bool fits(int slices) {
            return Config::kFilterTile / slices * kFilterBytes <= Config::kUsedBytes;
        }
        static constexpr int kSlices = fits(1) ? 1 : fits(2) ? 2 : 4;
        static constexpr int kHalves = 2 * kMmasM / kSlices;  // of a warp's fragments in a slice, 8 filters each
        static constexpr int kFilters = Config::kWarpsM * kHalves * 8;
        static_assert(!kStagesResults || (fits(kSlices) && kMmasM % kSlices == 0));

        const Spans& spans;
        int slice;

        // Which of the tile's filters is the index-th of the slice.
        __device__ __forceinline__ int filter(int index) const {
            return index / (kHalves * 8) * (kMmasM * kMmaM) + slice * (kHalves * 8) + index % (kHalves * 8);
        }
        // A span's first output, counted from the tile's first. Integer may be as narrow as the caller needs.
        template <class Integer>
        __device__ __forceinline__ Integer offset(const Problem& problem, int index, int image, int row) const {
            const Integer filters = image * static_cast<Integer>(problem.out_channels) + filter(index);
            const Integer start = filters * static_cast<Integer>(spans.plane);
            return spans.whole_rows ? start : start + row * static_cast<Integer>(spans.width);
        }
        // How many outputs the span's first output lies behind a multiple of 16 bytes.
        __device__ __forceinline__ int misaligned(const Problem& problem, int index, int image, int row) const {
            return static_cast<int>((spans.place + offset<uint32_t>(problem, index, image, row)) % kVector);
        }
        // Where a row of a span is staged: the span starts as far behind a multiple of 16 bytes as in memory.
        __device__ __forceinline__ int staged(const Problem& problem, int index, int image, int row) const {
            return (image * kFilters + index) * kPitch + row * (spans.whole_rows ? spans.width : kCols) +
                   misaligned(problem, index, image, row);
        }
    };

    // Copies the accumulators of a warp's `half`-th 8 filters. Registers cannot be indexed: each half has its own code.
    template <int kHalf, int kValues>
    static __device__ __forceinline__ void take_half(float (&value)[kValues], const Sum& sum, int half) {
        if constexpr (kHalf < 2 * kMmasM) {
            if (half != kHalf) return take_half<kHalf + 1>(value, sum, half);
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                value[i] = sum[i / (2 * kMmasN)][kHalf / 2][i / 2 % kMmasN][kHalf % 2 * 2 + i % 2];
            }
        }
    }

    // Applies the epilogue to a slice of the accumulators, 8 filters of each warp at a time, and stages the results.
    static __device__ __forceinline__ void stage_results(const Problem& problem, const Tile& tile, const Sum& sum,
                                                         const ResultSlice& slice, Output* staged,
                                                         const Epilogue& epilogue) {
        constexpr int kValues = kWarpRows * kMmasN * 2;
        const Spans& spans = slice.spans;
        const uint32_t thread = ptx::read_thread_index();
        const int lane = static_cast<int>(thread % 32);
        const Warp warp(thread);
        const int cols = spans.whole_rows ? spans.width : spans.length;
        const bool in_pairs = (spans.place | spans.width) % 2 == 0;
        const auto operands_of = [&](int half) {
            const int index = (warp.m * ResultSlice::kHalves + half) * 8 + lane / 4;
            return epilogue.template load<Runs::kAnywhere, kValues>(
                Position{min(tile.image + warp.image, static_cast<int>(problem.images) - 1),
                         tile.channel + min(slice.filter(index), tile.filters - 1), 0},
                kValues);
        };
        auto next = operands_of(0);
#pragma unroll 1
        for (int half = 0; half < ResultSlice::kHalves; ++half) {
            const auto operands = next;
            next = operands_of(min(half + 1, ResultSlice::kHalves - 1));
            const int index = (warp.m * ResultSlice::kHalves + half) * 8 + lane / 4;
            float value[kValues];
            take_half<0>(value, sum, slice.slice * ResultSlice::kHalves + half);
            epilogue.apply(value, operands);
#pragma unroll
            for (int y = 0; y < kWarpRows; ++y) {
                const int row = warp.row + y;
                Output* to = staged + slice.staged(problem, index, warp.image, row);
#pragma unroll
                for (int pair = 0; pair < kMmasN; ++pair) {
                    const int n = pair / 2 * 2, column = pair % 2;
                    const int col = warp.col + Config::pixel(n, lane % 4 * 2 + column);
                    const float first = value[(y * kMmasN + n) * 2 + column];
                    const float second = value[(y * kMmasN + n + 1) * 2 + column];
                    if (in_pairs) {
                        if (col < cols) *reinterpret_cast<uint32_t*>(to + col) = pack_two<Output>(first, second);
                    } else {
                        if (col < cols) to[col] = from_float<Output>(first);
                        if (col + 1 < cols) to[col + 1] = from_float<Output>(second);
                    }
                }
            }
        }
    }

    // Copies a slice's spans to memory, kLanes lanes to a span: first the aligned part in pieces of 16 bytes, then up
    // to kVector - 1 outputs at either end.
    template <int kLanes>
    static __device__ __forceinline__ void store_results(const Problem& problem, const Tile& tile,
                                                         const ResultSlice& slice, const Output* staged, Output* out) {
        constexpr int kSpans = ResultSlice::kFilters * Config::kImages;
        constexpr int kAtOnce = kThreads / kLanes, kTogether = 4;
        static_assert(kLanes >= 2 * kVector && kThreads % kLanes == 0);
        const Spans& spans = slice.spans;
        const int thread = static_cast<int>(ptx::read_thread_index()), lane = thread % kLanes;
        const int count = spans.whole_rows ? kSpans : kSpans * spans.rows;
        const bool aligned =
            ((spans.place | spans.plane | spans.length | (spans.whole_rows ? 0 : spans.width)) % kVector) == 0;
#pragma unroll 1
        for (int number = thread / kLanes; number < count; number += kAtOnce * kTogether) {
            int from[kTogether], head[kTogether];
            bool exists[kTogether];
            Output* to[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int each = min(number + i * kAtOnce, count - 1), span = each % kSpans, row = each / kSpans;
                const int index = span % ResultSlice::kFilters, image = span / ResultSlice::kFilters;
                exists[i] = number + i * kAtOnce < count && slice.filter(index) < tile.filters &&
                            tile.image + image < problem.images;
                head[i] = -slice.misaligned(problem, index, image, row) & (kVector - 1);
                from[i] = slice.staged(problem, index, image, row);
                to[i] = out + slice.template offset<int64_t>(problem, index, image, row);
            }
#pragma unroll 1
            for (int done = lane * kVector; done < spans.length; done += kLanes * kVector) {
                uint4 piece[kTogether];
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    piece[i] = *reinterpret_cast<const uint4*>(staged + from[i] + head[i] + done);
                }
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    const int col = head[i] + done;
                    if (exists[i] && col + kVector <= spans.length) {
                        ptx::store_global_16(reinterpret_cast<uint64_t>(to[i] + col), piece[i]);
                    }
                }
            }
            if (aligned) continue;
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int tail = max(spans.length - head[i], 0) % kVector;
                const int col = lane < kVector ? lane : spans.length - tail + lane - kVector;
                const int end = lane < kVector ? min(head[i], spans.length) : spans.length;
                if (exists[i] && col < end) to[i][col] = staged[from[i] + col];
            }
        }
    }

    // Stores the part of a slice's spans that fills whole, aligned 16 bytes: such a run per lane and pass.
    static __device__ __forceinline__ void store_runs(const Tile& tile, const Spans& spans, int slice, int row,
                                                      const float* staged, Output* out, const Epilogue& epilogue) {
        // Where planes of the output are multiples of 16 bytes, runs start at multiples of kVector columns. Where they
        // are not, each read of an operand tests its alignment.
        constexpr Runs kRuns = Epilogue::kColumns % kVector == 0 ? Runs::kWhole : Runs::kAnywhere;
        constexpr int kLongestRuns = (Spans::kLongest + kVector - 1) / kVector;
        constexpr int kLanes = kLongestRuns > 16 ? 32 : kLongestRuns > 8 ? 16 : 8;
        constexpr int kPass = kLanes * kVector, kMostPasses = (Spans::kLongest + kPass - 1) / kPass;
        constexpr int kAtOnce = kThreads / kLanes;
        static_assert(Spans::kOfWarp % kAtOnce == 0 && Spans::kCount % kAtOnce == 0);
        // Runs and their operands take registers, of which a multiprocessor has 65536.
        constexpr int kRegisters = 65536 / (kThreads * Config::kBlocksPerSm);
        constexpr int kRunsTogether = (kRegisters > 128 ? 4 : 2) / (Epilogue::kElementBytes > 0 ? 2 : 1);
        constexpr int kPasses = kMostPasses < kRunsTogether ? kMostPasses : kRunsTogether;
        constexpr int kMostSpans = Spans::kCount / kAtOnce, kSpansTogether = kRunsTogether / kPasses;
        constexpr int kSpans = kSpansTogether < kMostSpans ? kSpansTogether : kMostSpans;
        static_assert(Spans::kCount % (kAtOnce * kSpans) == 0);
        const int thread = static_cast<int>(ptx::read_thread_index()), group = thread / kLanes, lane = thread % kLanes;
        if (spans.short_ones()) return;
#pragma unroll 1
        for (int index = 0; index < Spans::kCount; index += kAtOnce * kSpans) {
            int begin = 0;
#pragma unroll 1
            do {
                alignas(16) float value[kSpans][kPasses][kVector];
                typename Epilogue::template Values<kVector, Position> operands[kSpans][kPasses];
                Output* destination[kSpans];
                int end[kSpans];  // of the span's stored part, counted from the lane's first run of these passes
#pragma unroll
                for (int i = 0; i < kSpans; ++i) {
                    const Span span(spans, slice, index + i * kAtOnce, group, row);
                    const Position at = span.position(tile, spans);
                    const int first = begin + lane * kVector, whole = (spans.length - span.head) & -kVector;
                    destination[i] = out + span.offset + span.head + first;
                    end[i] = span.exists ? whole - first : 0;
                    // Lanes beyond the last run compute that run as well, but do not store it. So no branch separates
                    // the runs, and they are computed side by side.
#pragma unroll
                    for (int pass = 0; pass < kPasses; ++pass) {
                        const int col = span.head + min(first + pass * kPass, whole - kVector);
                        operands[i][pass] = epilogue.template load<kRuns, kVector>(
                            Position{at.batch, at.row, at.col + col}, kVector);
#pragma unroll
                        for (int j = 0; j < kVector; j += 4) {
                            *reinterpret_cast<float4*>(value[i][pass] + j) =
                                *reinterpret_cast<const float4*>(staged + span.staged + col + j);
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < kSpans; ++i) {
#pragma unroll
                    for (int pass = 0; pass < kPasses; ++pass) epilogue.apply(value[i][pass], operands[i][pass]);
                }
#pragma unroll
                for (int i = 0; i < kSpans; ++i) {
#pragma unroll
                    for (int pass = 0; pass < kPasses; ++pass) {
                        if (pass * kPass < end[i]) {
                            Elements<Output, kVector> packed;
                            packed.set(value[i][pass]);
                            ptx::store_global_16(reinterpret_cast<uint64_t>(destination[i] + pass * kPass),
                                                 reinterpret_cast<const uint4&>(packed));
                        }
                    }
                }
                begin += kPasses * kPass;
            } while (kPasses * kPass < Spans::kLongest && begin < spans.length);
        }
    }

    // Stores the rest of a slice's spans: up to kVector - 1 outputs at either end, or all outputs of short spans.
    static __device__ __forceinline__ void store_ends(const Tile& tile, const Spans& spans, int slice, int row,
                                                      const float* staged, Output* out, const Epilogue& epilogue) {
        const bool aligned =
            ((spans.place | spans.plane | spans.length | (spans.whole_rows ? 0 : spans.width)) % kVector) == 0;
        if (aligned && !spans.short_ones()) return;
#pragma unroll 1
        for (int item = static_cast<int>(threadIdx.x); item < Spans::kCount * 2 * kVector; item += kThreads) {
            const int i = item % (2 * kVector);
            const Span span(spans, slice, item / (2 * kVector), 0, row);
            const int tail = (spans.length - span.head) % kVector;
            const bool in_tail = !spans.short_ones() && i >= kVector;
            const int col = in_tail ? spans.length - tail + i - kVector : i;
            if (col >= (in_tail || spans.short_ones() ? spans.length : span.head) || !span.exists) continue;
            float value[1] = {staged[span.staged + col]};
            Position at = span.position(tile, spans);
            at.col += col;
            epilogue.apply(value, at, 1);
            out[span.offset + col] = from_float<Output>(value[0]);
        }
    }
};

}  // namespace fxfuse::detail
