// The pass that splits both operands of a float32 GEMM into halves, for gemm_fp16x3.cuh.
//
// A row of x, and the weights of one output feature (called a row here, too), are multiplied by the power of two that
// brings their largest magnitude into [2^14, 2^15), and each number becomes hi + lo (HalfPair in mma.cuh). A number
// keeps 22 significant bits down to 2^-18 of its row's largest; below that lo is subnormal, and bits are lost.
//
// Halves are written as the shared-memory images of the GEMM's tiles (OperandTile, K-major): image after image along K
// for the first tile of rows, then for the next. K is padded with zeros; rows beyond the last one stay undefined.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "launch.cuh"
#include "mma.cuh"
#include "ptx.cuh"
#include "shared_tile.cuh"

namespace fxfuse {

constexpr int kSplitThreads = 256;
constexpr int kNotFinite = 1 << 20;  // in place of an exponent: the row has an infinity or NaN

// A matrix to split: `rows` rows of x or features of the weight, K elements each.
struct SplitOperand {
    const float* source;
    int64_t stride;  // between rows (Major::kK) or between elements of K (Major::kMN)
    int rows, tile_rows;
    bool is_weight;
    HalfPair* halves;
    int* exponents;  // value = (hi + lo) * 2^exponent

    // 16 bytes of a row's halves, the i-th along K.
    __device__ __forceinline__ uint4* vector(int row, int padded_k, int i) const {
        constexpr int kPerTile = kTileBytesOfK / kChunkBytes;
        const int64_t image_row = static_cast<int64_t>(row / tile_rows) * (padded_k / 32) * tile_rows + row % tile_rows;
        return reinterpret_cast<uint4*>(halves) + (image_row + i / kPerTile * static_cast<int64_t>(tile_rows)) * kPerTile +
               (i % kPerTile ^ row % kPerTile);
    }
};

// Of numbers whose largest magnitude has these bits. Below 2^-113 the scale stays at 2^127, which keeps all of their
// bits: halves have multiples of 2^-24, and subnormal floats times 2^127 are multiples of 2^-22.
struct RowScale {
    static constexpr int kLargestExponent = 14, kBias = 127, kLeastBiased = 14, kNotFiniteBiased = 255;
    int biased;

    __device__ __forceinline__ explicit RowScale(uint32_t largest)
        : biased(max(static_cast<int>(largest >> 23), kLeastBiased)) {}
    __device__ __forceinline__ float scale() const {
        return __uint_as_float(static_cast<uint32_t>(2 * kBias + kLargestExponent - biased) << 23);
    }
    __device__ __forceinline__ int exponent() const {
        return biased == kNotFiniteBiased ? kNotFinite : biased - kBias - kLargestExponent;
    }
};

// Magnitudes compare like their bits: infinity is above all numbers, and NaN above infinity.
__device__ __forceinline__ uint32_t magnitude(float value) { return __float_as_uint(value) & 0x7fffffff; }

// Half i of a vector's eight numbers: hi if i is even, lo if it is odd.
__device__ __forceinline__ uint4 split_half(const float* value, float scale, bool lo) {
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float a = value[2 * j] * scale, b = value[2 * j + 1] * scale;
        __half2 half = __floats2half2_rn(a, b);
        if (lo) half = __floats2half2_rn(a - __low2float(half), b - __high2float(half));
        packed[j] = *reinterpret_cast<const uint32_t*>(&half);
    }
    return {packed[0], packed[1], packed[2], packed[3]};
}

// The same of numbers in shared memory, 16-byte aligned.
__device__ __forceinline__ uint4 split_staged_half(const float* staged, float scale, bool lo) {
    const float4 low = reinterpret_cast<const float4*>(staged)[0], high = reinterpret_cast<const float4*>(staged)[1];
    const float value[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    return split_half(value, scale, lo);
}

// Rows are read once: they stay in shared memory until their scale is known. Of longer rows the rest is read again.
constexpr int kHeldElements = 16 * 1024;
constexpr int kSplitRowBytes = 32 * 1024;  // several short rows share a thread block, up to so much shared memory

// Splits rows that are contiguous along K: `rows_together` (1, 2, 4 or 8) of them from `first` on.
template <class Mma>
__device__ __forceinline__ void split_rows(const SplitOperand& operand, int first, int rows_together, int k,
                                           int padded_k, float* shared) {
    constexpr int kWarps = kSplitThreads / 32;
    __shared__ uint32_t largest_of_warp[kWarps];
    const int warps = kWarps / rows_together, threads = warps * 32;  // per row
    const int slot = static_cast<int>(threadIdx.x) / threads, thread = static_cast<int>(threadIdx.x) % threads;
    const int row = first + slot;
    const bool exists = row < operand.rows;
    const float* source = operand.source + row * operand.stride;
    const int held = exists ? min(k, kHeldElements) : 0, padded = exists ? min(padded_k, kHeldElements) : 0;
    float* staged = shared + slot * min(padded_k, kHeldElements);

    const uint32_t destination = ptx::shared_address(staged);
    const int vectors = reinterpret_cast<uintptr_t>(source) % kChunkBytes == 0 ? held / 4 : 0;
    for (int i = thread; i < vectors; i += threads) ptx::cp_async_16(destination + i * kChunkBytes, source + i * 4);
    for (int i = vectors * 4 + thread; i < held; i += threads) ptx::cp_async_small<4>(destination + i * 4, source + i);
    ptx::cp_async_commit();
    uint32_t largest = 0;
    for (int i = held + thread; exists && i < k; i += threads) largest = max(largest, magnitude(source[i]));
    for (int i = held + thread; i < padded; i += threads) staged[i] = 0.0f;
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
    // Two threads share eight numbers, so that a warp writes whole lines.
    for (int i = thread; i < padded / 4; i += threads) {
        *operand.vector(row, padded_k, i) = split_staged_half(staged + Mma::block_of(i) * 8, scale.scale(), Mma::is_lo(i, operand.is_weight));
    }
    for (int i = padded / 4 + thread; i < padded_k / 4; i += threads) {
        float value[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int at = Mma::block_of(i) * 8 + j;
            value[j] = at < k ? source[at] : 0.0f;
        }
        *operand.vector(row, padded_k, i) = split_half(value, scale.scale(), Mma::is_lo(i, operand.is_weight));
    }
}

constexpr int kStripColumns = 16, kStripK = 128, kStripStride = kStripK + 4;

// Splits kStripColumns features from `first` on, whose elements along K are `stride` apart, and transposes them. They
// are read twice, because shared memory is too small for them.
template <class Mma>
__device__ __forceinline__ void split_columns(const SplitOperand& operand, int first, int k, int padded_k,
                                              float* shared) {
    constexpr int kGroups = kSplitThreads / kStripColumns, kReads = kStripK / kGroups;
    __shared__ uint32_t largest_of_group[kGroups][kStripColumns];
    const int column = static_cast<int>(threadIdx.x) % kStripColumns;
    const int group = static_cast<int>(threadIdx.x) / kStripColumns;
    const bool exists = first + column < operand.rows;
    const float* source = operand.source + first + (exists ? column : 0);

    uint32_t largest = 0;
#pragma unroll 16
    for (int i = group; i < k; i += kGroups) largest = max(largest, magnitude(__ldg(source + i * operand.stride)));
    largest_of_group[group][column] = largest;
    __syncthreads();
    const auto scale_of = [](int of_column) {
        uint32_t bits = 0;
        for (int i = 0; i < kGroups; ++i) bits = max(bits, largest_of_group[i][of_column]);
        return RowScale(bits);
    };
    if (group == 0 && exists) operand.exponents[first + column] = scale_of(column).exponent();

    constexpr int kVectors = kStripK / 4, kRowsPerPass = kSplitThreads / kVectors;
    constexpr int kPasses = kStripColumns / kRowsPerPass;
    const int vector = static_cast<int>(threadIdx.x) % kVectors, row = static_cast<int>(threadIdx.x) / kVectors;
    float scale[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) scale[pass] = scale_of(row + pass * kRowsPerPass).scale();
    float read[kReads];
    const auto read_piece = [&](int begin) {
#pragma unroll
        for (int i = 0; i < kReads; ++i) {
            const int at = begin + group + i * kGroups;
            read[i] = at < k ? __ldg(source + at * operand.stride) : 0.0f;
        }
    };
    read_piece(0);
    for (int begin = 0; begin < padded_k; begin += kStripK) {
        __syncthreads();  // everyone has read the previous piece
#pragma unroll
        for (int i = 0; i < kReads; ++i) shared[column * kStripStride + group + i * kGroups] = read[i];
        __syncthreads();
        read_piece(begin + kStripK);
        if (begin + vector * 4 >= padded_k) continue;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int of_row = row + pass * kRowsPerPass;
            if (first + of_row >= operand.rows) break;
            *operand.vector(first + of_row, padded_k, begin / 4 + vector) =
                split_staged_half(shared + of_row * kStripStride + Mma::block_of(vector) * 8, scale[pass], Mma::is_lo(vector, true));
        }
    }
}

// x by its rows, with the first `blocks_x` thread blocks, and the weight with the others.
template <class Mma, Major kWeightMajor>
__global__ void __launch_bounds__(kSplitThreads)
    split_kernel(const SplitOperand x, const SplitOperand weight, int k, int padded_k, int rows_together,
                 int blocks_x) {
    extern __shared__ __align__(16) float staged[];
    const bool is_x = static_cast<int>(blockIdx.x) < blocks_x;
    const int block = static_cast<int>(blockIdx.x) - (is_x ? 0 : blocks_x);
    if (kWeightMajor == Major::kK || is_x) {
        SplitOperand operand = x;
        if (!is_x) operand = weight;
        split_rows<Mma>(operand, block * rows_together, rows_together, k, padded_k, staged);
    } else {
        split_columns<Mma>(weight, block * kStripColumns, k, padded_k, staged);
    }
}

#ifndef __CUDACC_RTC__
template <class Mma, Major kWeightMajor>
cudaError_t launch_split(const SplitOperand& x, const SplitOperand& weight, int k, int padded_k, cudaStream_t stream) {
    constexpr auto kKernel = &split_kernel<Mma, kWeightMajor>;
    constexpr int kFloat = static_cast<int>(sizeof(float));
    constexpr int kStripBytes = kWeightMajor == Major::kK ? 0 : kStripColumns * kStripStride * kFloat;
    // The attribute is set once: for the most that any size takes.
    if (const cudaError_t error = allow_shared_memory<kKernel>(kHeldElements * kFloat); error != cudaSuccess) {
        return error;
    }
    const int row_bytes = (padded_k < kHeldElements ? padded_k : kHeldElements) * kFloat;
    int rows_together = kSplitThreads / 32;
    while (rows_together > 1 && rows_together * row_bytes > kSplitRowBytes) rows_together /= 2;
    const int bytes = rows_together * row_bytes > kStripBytes ? rows_together * row_bytes : kStripBytes;
    const int rows_of_weight = kWeightMajor == Major::kK ? rows_together : kStripColumns;
    const int blocks_x = (x.rows + rows_together - 1) / rows_together;
    const int blocks_weight = (weight.rows + rows_of_weight - 1) / rows_of_weight;
    const unsigned blocks = static_cast<unsigned>(blocks_x) + static_cast<unsigned>(blocks_weight);
    kKernel<<<blocks, kSplitThreads, bytes, stream>>>(x, weight, k, padded_k, rows_together, blocks_x);
    return cudaGetLastError();
}
#endif  // __CUDACC_RTC__

}  // namespace fxfuse
