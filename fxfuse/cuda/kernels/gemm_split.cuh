// float32 GEMM at the speed of fp16 tensor cores: out[m, n] = epilogue(sum over k of x[m, k] * weight[n, k]) from
// operands that a pass over both splits into halves first, at every launch.
//
// Ootomo & Yokota 2022, with scales: a row of x, and the weights of one output feature, are multiplied by the power of
// two that brings their largest magnitude into [2^14, 2^15), and each number becomes hi + lo, two halves (HalfPair in
// mma.cuh). The products' sum is multiplied by the inverse scales, which is exact. A number keeps 22 significant bits
// down to 2^-18 of its row's largest (below that, lo is subnormal) and as many fewer as it is smaller.
//
// The workspace holds x as (M, padded K) and the weight as (N, padded K) in halves, then M + N exponents.
#pragma once

#include <cstdint>

#include "gemm.cuh"

namespace fxfuse {

constexpr int kSplitTileK = kTileBytesOfK / static_cast<int>(sizeof(HalfPair));  // K is padded to multiples of it
constexpr int kSplitThreads = 256;
constexpr int kExponentPadding = 16;  // of each array of exponents, so that runs of columns may end beyond N
constexpr int kNotFinite = 1 << 20;   // in place of an exponent: the row has an infinity or NaN

__host__ __device__ constexpr int64_t padded_to(int64_t size, int64_t multiple) {
    return (size + multiple - 1) / multiple * multiple;
}

// A matrix to split: `rows` rows of x or features of the weight, K elements each.
struct SplitOperand {
    const float* source;
    int64_t stride;  // between rows (Major::kK) or between elements of K (Major::kMN)
    int rows;
    HalfPair* halves;
    int* exponents;  // value = halves * 2^exponent
};

// Of the numbers whose largest magnitude has these bits. Below 2^-113 the scale stays at 2^127, which keeps all of
// their bits: halves have multiples of 2^-24, and subnormal floats times 2^127 are multiples of 2^-22.
struct RowScale {
    static constexpr int kMaxHalfExponent = 14, kBias = 127, kLeastBiased = 14, kNotFiniteBiased = 255;
    int biased;

    __device__ __forceinline__ explicit RowScale(uint32_t largest)
        : biased(max(static_cast<int>(largest >> 23), kLeastBiased)) {}
    __device__ __forceinline__ float scale() const {
        return __uint_as_float(static_cast<uint32_t>(2 * kBias + kMaxHalfExponent - biased) << 23);
    }
    __device__ __forceinline__ int exponent() const {
        return biased == kNotFiniteBiased ? kNotFinite : biased - kBias - kMaxHalfExponent;
    }
};

// Magnitudes compare like their bits, infinity above all numbers and NaN above infinity.
__device__ __forceinline__ uint32_t magnitude(float value) { return __float_as_uint(value) & 0x7fffffff; }

// hi or lo of eight numbers.
__device__ __forceinline__ uint4 split_half(const float (&value)[8], float scale, bool lo) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float a = value[2 * i] * scale, b = value[2 * i + 1] * scale;
        __half2 half = __floats2half2_rn(a, b);
        if (lo) half = __floats2half2_rn(a - __low2float(half), b - __high2float(half));
        packed[i] = *reinterpret_cast<const uint32_t*>(&half);
    }
    return {packed[0], packed[1], packed[2], packed[3]};
}

// Rows are read once: they stay in shared memory until their scale is known. Of longer rows the rest is read again.
constexpr int kHeldElements = 16 * 1024;
constexpr int kSplitRowBytes = 32 * 1024;  // several short rows share a thread block up to so much shared memory

// Splits rows that are contiguous along K: `rows_together` (1, 2, 4 or 8) of them from `first` on.
__device__ __forceinline__ void split_rows(const SplitOperand& operand, int first, int rows_together, int k,
                                           int padded_k, float* shared) {
    constexpr int kWarps = kSplitThreads / 32;
    __shared__ uint32_t largest_of_warp[kWarps];
    const int warps = kWarps / rows_together, threads = warps * 32;  // per row
    const int slot = static_cast<int>(threadIdx.x) / threads, thread = static_cast<int>(threadIdx.x) % threads;
    const int row = first + slot;
    const bool exists = row < operand.rows;
    const float* source = operand.source + row * operand.stride;
    const int held = exists ? min(k, kHeldElements) : 0;
    float* staged = shared + slot * min(padded_k, kHeldElements);

    const uint32_t destination = ptx::shared_address(staged);
    const int vectors = reinterpret_cast<uintptr_t>(source) % kChunkBytes == 0 ? held / 4 : 0;
    for (int i = thread; i < vectors; i += threads) ptx::cp_async_16(destination + i * kChunkBytes, source + i * 4);
    for (int i = vectors * 4 + thread; i < held; i += threads) ptx::cp_async_small<4>(destination + i * 4, source + i);
    ptx::cp_async_commit();
    uint32_t largest = 0;
    if (exists) {
        for (int i = held + thread; i < k; i += threads) largest = max(largest, magnitude(source[i]));
        for (int i = k + thread; i < min(padded_k, kHeldElements); i += threads) staged[i] = 0.0f;
    }
    ptx::cp_async_wait<0>();
    for (int i = thread; i < vectors; i += threads) {  // what this thread has copied
        const float4 four = reinterpret_cast<const float4*>(staged)[i];
        largest = max(max(largest, max(magnitude(four.x), magnitude(four.y))),
                      max(magnitude(four.z), magnitude(four.w)));
    }
    for (int i = vectors * 4 + thread; i < held; i += threads) largest = max(largest, magnitude(staged[i]));
    largest = __reduce_max_sync(0xffffffff, largest);
    if (threadIdx.x % 32 == 0) largest_of_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    if (!exists) return;
    for (int i = 0; i < warps; ++i) largest = max(largest, largest_of_warp[slot * warps + i]);

    const RowScale scale(largest);
    if (thread == 0) operand.exponents[row] = scale.exponent();
    uint4* halves = reinterpret_cast<uint4*>(operand.halves + static_cast<int64_t>(row) * padded_k);
    // Two threads share eight numbers, so that a warp's writes are contiguous.
    for (int i = thread; i < padded_k / 4; i += threads) {
        const int begin = i / 2 * 8;
        float value[8];
        if (begin < kHeldElements) {
            const float4 low = *reinterpret_cast<const float4*>(staged + begin);
            const float4 high = *reinterpret_cast<const float4*>(staged + begin + 4);
            value[0] = low.x, value[1] = low.y, value[2] = low.z, value[3] = low.w;
            value[4] = high.x, value[5] = high.y, value[6] = high.z, value[7] = high.w;
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) value[j] = begin + j < k ? source[begin + j] : 0.0f;
        }
        halves[i] = split_half(value, scale.scale(), i % 2 != 0);
    }
}

constexpr int kStripColumns = 32, kStripK = 64;

// Splits kStripColumns features from `first` on, whose elements along K are `stride` apart, and transposes them. They
// are read twice: a strip is larger than shared memory.
__device__ __forceinline__ void split_columns(const SplitOperand& operand, int first, int k, int padded_k,
                                              float* shared) {
    constexpr int kWarps = kSplitThreads / 32, kStride = kStripColumns + 1, kUnroll = 8;
    static_assert(kStripK == kWarps * kUnroll && kStripColumns == 32, "a warp reads one element of K of all columns");
    __shared__ uint32_t largest_of_warp[kWarps][kStripColumns];
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const bool exists = first + lane < operand.rows;
    const float* source = operand.source + first + (exists ? lane : 0);

    uint32_t largest = 0;
#pragma unroll 16
    for (int i = warp; i < k; i += kWarps) largest = max(largest, magnitude(__ldg(source + i * operand.stride)));
    largest_of_warp[warp][lane] = largest;
    __syncthreads();
    const auto scale_of = [](int column) {
        uint32_t bits = 0;
        for (int i = 0; i < kWarps; ++i) bits = max(bits, largest_of_warp[i][column]);
        return RowScale(bits);
    };
    if (warp == 0 && exists) operand.exponents[first + lane] = scale_of(lane).exponent();

    constexpr int kVectors = kStripK / 4;  // of a feature, as in split_rows
    constexpr int kColumnsPerPass = kSplitThreads / kVectors, kPasses = kStripColumns / kColumnsPerPass;
    const int vector = static_cast<int>(threadIdx.x) % kVectors, column = static_cast<int>(threadIdx.x) / kVectors;
    float scale[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) scale[pass] = scale_of(column + pass * kColumnsPerPass).scale();
    for (int begin = 0; begin < padded_k; begin += kStripK) {
        float read[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const int at = begin + warp + i * kWarps;
            read[i] = at < k ? __ldg(source + at * operand.stride) : 0.0f;
        }
        __syncthreads();  // everyone has read the previous piece
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) shared[(warp + i * kWarps) * kStride + lane] = read[i];
        __syncthreads();
        if (begin + vector * 4 >= padded_k) continue;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int row = first + column + pass * kColumnsPerPass;
            if (row >= operand.rows) break;
            float value[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                value[i] = shared[(vector / 2 * 8 + i) * kStride + column + pass * kColumnsPerPass];
            }
            uint4* halves = reinterpret_cast<uint4*>(operand.halves + static_cast<int64_t>(row) * padded_k + begin);
            halves[vector] = split_half(value, scale[pass], vector % 2 != 0);
        }
    }
}

// x by its rows, with the first `blocks_x` thread blocks, and the weight with the others.
template <Major kWeightMajor>
__global__ void __launch_bounds__(kSplitThreads)
    split_kernel(const SplitOperand x, const SplitOperand weight, int k, int padded_k, int rows_together,
                 int blocks_x) {
    extern __shared__ __align__(16) float staged[];
    const bool is_x = static_cast<int>(blockIdx.x) < blocks_x;
    const int block = static_cast<int>(blockIdx.x) - (is_x ? 0 : blocks_x);
    if (kWeightMajor == Major::kK || is_x) {
        SplitOperand operand = x;
        if (!is_x) operand = weight;
        split_rows(operand, block * rows_together, rows_together, k, padded_k, staged);
    } else {
        split_columns(weight, block * kStripColumns, k, padded_k, staged);
    }
}

// The generated epilogue on unscaled sums. Sums in which an infinity or NaN takes part are computed here, as float32
// has them, from the tensors themselves: slowly, but only in rows and columns that have one.
template <class Epilogue>
struct UnscalingEpilogue : Epilogue {
    const float *x, *weight;
    int64_t x_stride, weight_stride_n, weight_stride_k;
    int64_t rows_per_batch, k;
    const int *x_exponents, *weight_exponents;

    template <int kVector>
    __device__ __forceinline__ void apply(float (&value)[kVector], const Position& at, int count) const {
        const int64_t row = Epilogue::kUsesBatch ? at.batch * rows_per_batch + at.row : at.row;
        const int x_exponent = __ldg(x_exponents + row);
        int exponent[kVector];
        int largest = 0;
#pragma unroll
        for (int i = 0; i < kVector; i += 4) {
            const int4 four = __ldg(reinterpret_cast<const int4*>(weight_exponents + at.col + i));
            exponent[i] = x_exponent + four.x;
            exponent[i + 1] = x_exponent + four.y;
            exponent[i + 2] = x_exponent + four.z;
            exponent[i + 3] = x_exponent + four.w;
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            value[i] = ldexpf(value[i], exponent[i]);
            largest = max(largest, i < count ? exponent[i] : 0);
        }
        if (largest > kNotFinite / 2) multiply_again(value, exponent, row, at.col, count);
        Epilogue::template apply<kVector>(value, at, count);
    }

private:
    template <int kVector>
    __device__ __forceinline__ void multiply_again(float (&value)[kVector], const int (&exponent)[kVector], int64_t row,
                                                   int64_t col, int count) const {
        float sum[kVector] = {};
        const float *x_row = x + row * x_stride, *weight_col = weight + col * weight_stride_n;
#pragma unroll 1
        for (int64_t i = 0; i < k; ++i) {
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
                const int64_t column = j < count ? j : 0;
                sum[j] = fmaf(x_row[i], weight_col[column * weight_stride_n + i * weight_stride_k], sum[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j) value[j] = exponent[j] > kNotFinite / 2 ? sum[j] : value[j];
    }
};

// kWeightMajor: of the weight as it comes; Config's is that of the halves, Major::kK.
template <class Config, Major kWeightMajor, class Output, class Epilogue_>
struct SplitGemm {
    using Epilogue = Epilogue_;
    using Product = Gemm<Config, Output, UnscalingEpilogue<Epilogue>>;
    using Problem = typename Product::Problem;  // with x and weight in float32

    static constexpr int kTensors = 4;  // x, weight, out, workspace

#ifndef __CUDACC_RTC__
    static cudaError_t launch(const Problem& problem, const uint64_t* pointers, const Epilogue& epilogue,
                              cudaStream_t stream) {
        const int64_t padded_k = padded_to(problem.k, kSplitTileK);
        auto* halves = reinterpret_cast<HalfPair*>(pointers[3]);
        int* exponents = reinterpret_cast<int*>(halves + (problem.m + problem.n) * padded_k);
        const SplitOperand x{reinterpret_cast<const float*>(pointers[0]), problem.x_stride,
                             static_cast<int>(problem.m), halves, exponents};
        const SplitOperand weight{reinterpret_cast<const float*>(pointers[1]), problem.weight_stride,
                                  static_cast<int>(problem.n), halves + problem.m * padded_k,
                                  exponents + padded_to(problem.m, kExponentPadding)};
        if (const cudaError_t error = split(x, weight, problem.k, padded_k, stream); error != cudaSuccess) return error;

        constexpr bool kContiguousK = kWeightMajor == Major::kK;
        const UnscalingEpilogue<Epilogue> unscaling{epilogue,
                                                    x.source,
                                                    weight.source,
                                                    problem.x_stride,
                                                    kContiguousK ? problem.weight_stride : 1,
                                                    kContiguousK ? 1 : problem.weight_stride,
                                                    problem.rows_per_batch,
                                                    problem.k,
                                                    x.exponents,
                                                    weight.exponents};
        Problem product = problem;
        product.k = product.x_stride = product.weight_stride = padded_k;
        const uint64_t split_pointers[] = {reinterpret_cast<uint64_t>(x.halves),
                                           reinterpret_cast<uint64_t>(weight.halves), pointers[2]};
        return Product::launch(product, split_pointers, unscaling, stream);
    }

private:
    static cudaError_t split(const SplitOperand& x, const SplitOperand& weight, int64_t k, int64_t padded_k,
                             cudaStream_t stream) {
        constexpr auto kKernel = &split_kernel<kWeightMajor>;
        constexpr int kFloat = static_cast<int>(sizeof(float));
        constexpr int kStripBytes = kWeightMajor == Major::kK ? 0 : kStripK * (kStripColumns + 1) * kFloat;
        const int row_bytes = static_cast<int>(padded_k < kHeldElements ? padded_k : kHeldElements) * kFloat;
        int rows_together = kSplitThreads / 32;
        while (rows_together > 1 && rows_together * row_bytes > kSplitRowBytes) rows_together /= 2;
        const int shared = rows_together * row_bytes > kStripBytes ? rows_together * row_bytes : kStripBytes;
        // The attribute is set once: for the most that any size takes.
        const int most = shared > kHeldElements * kFloat ? shared : kHeldElements * kFloat;
        if (const cudaError_t error = allow_shared_memory<kKernel>(most); error != cudaSuccess) return error;
        const int rows_per_block = kWeightMajor == Major::kK ? rows_together : kStripColumns;
        const int blocks_x = (x.rows + rows_together - 1) / rows_together;
        const int blocks_weight = (weight.rows + rows_per_block - 1) / rows_per_block;
        kKernel<<<static_cast<unsigned>(blocks_x) + static_cast<unsigned>(blocks_weight), kSplitThreads, shared,
                  stream>>>(x, weight, static_cast<int>(k), static_cast<int>(padded_k), rows_together, blocks_x);
        return cudaGetLastError();
    }
#endif  // __CUDACC_RTC__
};

}  // namespace fxfuse
