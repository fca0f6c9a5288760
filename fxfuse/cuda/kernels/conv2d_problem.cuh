// What the convolution kernels share: the problem as the host packs it, how the reduction over (channel, row,
// column) of the filter is counted, and how output tiles leave shared memory.
//
//   out[n, k, oy, ox] = epilogue(sum over c, r, s of
//       x[n, c, oy * stride_h - pad_h + r * dilation_h, ox * stride_w - pad_w + s * dilation_w] * w[k, c, r, s])
//
// x is zero outside its bounds; c runs over the channels of k's group. Outputs are contiguous, NCHW or NHWC.
#pragma once

#include <cstdint>

#include "epilogue.cuh"
#include "ptx.cuh"

namespace fxfuse {

// Strides are in elements. x and w are addressed by their strides, so slices and permuted tensors need no copy.
// 32-bit offsets are used within one image and within one filter: the host refuses larger ones.
struct Conv2dProblem {
    int64_t images, channels, height, width;
    int64_t out_channels, out_height, out_width;
    int64_t kernel_height, kernel_width;
    int64_t stride_h, stride_w;
    int64_t pad_h, pad_w;  // before the first row and column; what follows the last is implied by the output size
    int64_t dilation_h, dilation_w;
    int64_t groups;
    int64_t x_image, x_channel, x_row, x_col;
    int64_t w_filter, w_channel, w_row, w_col;
    int64_t block_tiles;  // tiles of the reduction in a block, for Sums that have blocks
    int64_t splits, split_tiles;  // thread blocks that share a tile of the output, and tiles of the reduction in each
};

// A position of the reduction in mixed radix, `fast` running fastest: (s, r, c) or (c, s, r).
// Stepping by a fixed distance costs additions with carry instead of divisions.
struct ReductionDigits {
    int fast, middle, slow;

    __device__ __forceinline__ static ReductionDigits of(int index, int fast_radix, int middle_radix) {
        const int rest = index / fast_radix;
        return {index % fast_radix, rest % middle_radix, rest / middle_radix};
    }

    __device__ __forceinline__ void step(const ReductionDigits& by, int fast_radix, int middle_radix) {
        fast += by.fast;
        middle += by.middle;
        slow += by.slow;
        if (fast >= fast_radix) {
            fast -= fast_radix;
            ++middle;
        }
        if (middle >= middle_radix) {
            middle -= middle_radix;
            ++slow;
        }
    }
};

// Consecutive outputs: their accumulators in shared memory, and where they belong in the output.
template <class Output>
struct OutputSpan {
    const float* staged;
    Output* destination;
    Position at;
    int length;
};

// Where a column of a tile begins in the output; null if it does not exist.
template <class Output>
struct RowStart {
    Output* destination;
    Position at;
};

// Whether spans that start `steps` apart, the first at `out`, all start at multiples of 16 bytes.
template <class Output, class... Steps>
__device__ __forceinline__ bool all_aligned(const Output* out, Steps... steps) {
    constexpr int kVector = 16 / static_cast<int>(sizeof(Output));
    return reinterpret_cast<uintptr_t>(out) % 16 == 0 && ((steps % kVector == 0) && ...);
}

// Applies the epilogue to `spans` spans of at most `longest` outputs and stores them. Spans are cut so that every
// run but the first and last of a span is one aligned 16-byte store, however the span itself is aligned.
// `locate(i)` gives span i; `aligned` says that all of them start at multiples of 16 bytes. Called by all kThreads
// threads, after the barrier that completes the staging.
//
// The runs of a span that fill whole warps come first: a warp per span walks along them. Then comes the rest of every
// span, with as few lanes per span as it takes: a span of 33 runs would leave a warp's second round to one lane. Lanes
// work on kTogether spans at once, so that the latencies of one hide those of the others.
template <int kThreads, class Output, class Epilogue, class Locate>
__device__ __forceinline__ void store_spans(int spans, int longest, bool aligned, const Epilogue& epilogue,
                                            Locate locate) {
    constexpr int kVector = 16 / static_cast<int>(sizeof(Output));
    constexpr int kTogether = 16 / kVector;
    constexpr int kWarp = 32;
    // If rows of the output are aligned, so are the columns of whole runs. If not, operands may still be aligned.
    constexpr Runs kRuns = Epilogue::kColumns % kVector == 0 ? Runs::kAligned : Runs::kAnywhere;
    const int thread = static_cast<int>(threadIdx.x);
    const int runs = (longest + (aligned ? 0 : kVector - 1) + kVector - 1) / kVector;  // of the worst span
    const int warp_runs = runs / kWarp * kWarp;
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
        const int first_run = part == 0 ? 0 : warp_runs, last_run = part == 0 ? warp_runs : runs;
        if (first_run == last_run) continue;
        int lanes = 1;
        while (lanes < kWarp && lanes < last_run - first_run) lanes *= 2;
        const int step = kThreads / lanes;
        for (int first = thread / lanes; first < spans; first += step * kTogether) {
            OutputSpan<Output> span[kTogether];
            int cut[kTogether], end[kTogether];  // where this lane's run begins, and where this part of the span ends
            bool more = false;
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                span[i] = locate(min(first + i * step, spans - 1));
                const int misaligned =
                    static_cast<int>(reinterpret_cast<uintptr_t>(span[i].destination) / sizeof(Output) % kVector);
                cut[i] = (first_run + thread % lanes) * kVector - misaligned;
                end[i] = first + i * step < spans ? min(last_run * kVector - misaligned, span[i].length) : 0;
                more |= cut[i] < end[i];
            }
            while (more) {
                more = false;
                alignas(16) float value[kTogether][kVector];
                int count[kTogether];
                // Operands of aligned runs are read first, so that nothing waits for them. For others this would need
                // branches on the alignment; they take registers, and a multiprocessor would hold one block less.
                typename Epilogue::template Values<kVector, Position> operands[kTogether];
                const auto load = [&](int i) {
                    const Position& at = span[i].at;
                    operands[i] = epilogue.template load<kRuns, kVector>(
                        Position{at.batch, at.row, at.col + max(cut[i], 0)}, count[i]);
                };
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    // A run that does not exist has no elements: no branch then separates it from the others.
                    const int begin = min(max(cut[i], 0), end[i]);
                    count[i] = min(cut[i] + kVector, end[i]) - begin;
                    if (kRuns == Runs::kAligned) load(i);
                }
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    const int begin = min(max(cut[i], 0), end[i]);
                    const float* staged = span[i].staged + begin;
                    if (reinterpret_cast<uintptr_t>(staged) % 16 == 0) {  // floats past `count` are read but not used
#pragma unroll
                        for (int j = 0; j < kVector; j += 4) {
                            *reinterpret_cast<float4*>(value[i] + j) = *reinterpret_cast<const float4*>(staged + j);
                        }
                    } else {
#pragma unroll
                        for (int j = 0; j < kVector; ++j) value[i][j] = staged[j];
                    }
                }
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    if (kRuns != Runs::kAligned) load(i);
                    epilogue.apply(value[i], operands[i]);
                }
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    store_run<Output, kVector, Runs::kAligned>(span[i].destination + max(cut[i], 0), value[i], count[i]);
                    cut[i] += lanes * kVector;
                    more |= cut[i] < end[i];
                }
            }
        }
    }
}

// The elements that one store of `store_rows` writes: as many as 16 bytes hold, or as the output's rows are aligned to.
// 0 if they have less than 4 bytes: such stores would take more instructions than `store_spans`.
template <class Output, class Epilogue>
constexpr int row_vector() {
    constexpr int kBytes = static_cast<int>(sizeof(Output)), kAligned = Epilogue::kColumns * kBytes;
    return kAligned > 16 ? 16 / kBytes : kAligned < 4 ? 0 : Epilogue::kColumns;
}
template <class Output, class Epilogue>
constexpr int kRowVector = row_vector<Output, Epilogue>();

// Applies the epilogue to a tile of rows of kCols columns, kPitch floats apart in shared memory, and stores it. A
// thread has the same run of kRowVector columns in several rows, so that it locates them only once: `store_spans` takes
// twice the instructions. `locate(col)` gives the RowStart of that column in the first row; rows are `row_stride`
// elements apart. Called by all kThreads threads, after the barrier that completes the staging.
template <int kThreads, int kCols, int kPitch, class Output, class Epilogue, class Locate>
__device__ __forceinline__ void store_rows(const float* staged, int rows, int64_t row_stride, const Epilogue& epilogue,
                                           Locate locate) {
    constexpr int kVector = kRowVector<Output, Epilogue>, kRuns = kCols / kVector, kStep = kThreads / kRuns;
    constexpr int kTogether = kVector > 4 ? 2 : 4;  // rows, so that the latencies of one hide those of the others
    static_assert(kVector > 0 && kThreads % kRuns == 0);
    using Values = typename Epilogue::template Values<kVector, Position>;
    const int thread = static_cast<int>(threadIdx.x), col = thread % kRuns * kVector;
    const RowStart<Output> first = locate(col);
    if (first.destination == nullptr) return;
#pragma unroll 1
    for (int row = thread / kRuns; row < rows; row += kStep * kTogether) {
        Values operands[kTogether];
        alignas(16) float value[kTogether][kVector];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            // Rows beyond the last read the last one's values, so that no branch separates them from the others.
            const int nearest = min(row + i * kStep, rows - 1);
            operands[i] = epilogue.template load<Runs::kWhole, kVector>(
                Position{first.at.batch, first.at.row + nearest, first.at.col}, kVector);
            constexpr int kRead = kVector < 4 ? kVector : 4;
            using Word = fxfuse::Word<kRead * 4>;
#pragma unroll
            for (int j = 0; j < kVector; j += kRead) {
                *reinterpret_cast<Word*>(value[i] + j) =
                    *reinterpret_cast<const Word*>(staged + nearest * kPitch + col + j);
            }
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) epilogue.apply(value[i], operands[i]);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            if (row + i * kStep >= rows) continue;
            store_run<Output, kVector, Runs::kWhole>(first.destination + (row + i * kStep) * row_stride, value[i],
                                                     kVector);
        }
    }
}

}  // namespace fxfuse
