// The kernel that splits both operands of a float32 GEMM into halves, for gemm_fp16x3.cuh.
//
// A row is a row of x, or the weights of one output feature. It is multiplied by the power of two that brings its
// largest magnitude into [2^14, 2^15). Then each number becomes hi + lo (HalfPair in mma.cuh). A number keeps 22
// significant bits down to 2^-18 of its row's largest; below that lo is subnormal, and bits are lost.
//
// Halves are written as images of the GEMM's tiles in shared memory (OperandTile, K-major): all images along K for the
// first tile of rows, then those for the next. K is padded with zeros; rows beyond the last one stay undefined.
#pragma once

#include <cstdint>

#include "device_pass.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "ptx.cuh"
#include "shared_tile.cuh"

namespace fxfuse {

constexpr int kNumbersPerTile = kTileBytesOfK / static_cast<int>(sizeof(HalfPair));
constexpr int kSplitThreads = 512;
constexpr int kNotFinite = 1 << 20;  // in place of an exponent: the row has an infinity or NaN

// A matrix to split: `rows` rows of x or features of the weight, K elements each.
struct SplitOperand {
    const float* source;
    int64_t stride;  // between rows (Major::kK) or between elements of K (Major::kMN)
    int rows, tile_rows;
    HalfPair* halves;
    int* exponents;  // value = (hi + lo) * 2^exponent

    // The i-th 16 bytes of a row's halves.
    __device__ __forceinline__ uint4* vector(int row, int padded_k, int i) const {
        constexpr int kPerTile = kTileBytesOfK / kChunkBytes;
        const int tile = i / kPerTile, tiles = padded_k / kNumbersPerTile;
        const int64_t image = static_cast<int64_t>(row / tile_rows) * tiles + tile;
        uint4* in_image = reinterpret_cast<uint4*>(halves) + (image * tile_rows + row % tile_rows) * kPerTile;
        return in_image + (i % kPerTile ^ row % kPerTile);  // as OperandTile swizzles
    }
};

// The scale of a row, from the bits of its largest magnitude. Below 2^-113 the scale stays at 2^127. That keeps all
// bits: halves are multiples of 2^-24, and subnormal floats times 2^127 are multiples of 2^-22.
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

// The bits of |value|. They compare like magnitudes: infinity is above all numbers, and NaN above infinity.
__device__ __forceinline__ uint32_t magnitude(float value) { return __float_as_uint(value) & 0x7fffffff; }

// The i-th 16 bytes of a row's halves: two such vectors of hi, two of lo, and so on. `numbers`, in shared memory, are
// the row's, or those from a multiple of 16 on: i counts from there.
__device__ __forceinline__ uint4 split_vector(const float* numbers, int i, float scale) {
    const auto* from = reinterpret_cast<const float4*>(numbers + (i / 4 * 2 + i % 2) * 8);
    const float4 low = from[0], high = from[1];
    const float value[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const bool lo = i % 4 >= 2;
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float a = value[2 * j] * scale, b = value[2 * j + 1] * scale;
        packed[j] = ptx::cvt_rn_f16x2(a, b);
        if (lo) {
            const float hi_a = ptx::cvt_f32_f16(static_cast<uint16_t>(packed[j]));
            const float hi_b = ptx::cvt_f32_f16(static_cast<uint16_t>(packed[j] >> 16));
            packed[j] = ptx::cvt_rn_f16x2(a - hi_a, b - hi_b);
        }
    }
    return {packed[0], packed[1], packed[2], packed[3]};
}

// A row of up to so many elements stays in shared memory until its scale is known. Of a longer row, only the first
// piece stays; the others are read again.
constexpr int kPieceElements = 16 * 1024;
constexpr int kSplitRowBytes = 32 * 1024;  // several short rows share a thread block, up to so much shared memory

// The threads of a block that split one row, and their piece of the row in shared memory.
struct RowGroup {
    int thread, threads;
    float* piece;

    // Reads `count` elements and adds zeros up to `padded`. Each thread waits for the elements that it reads itself,
    // and returns their largest magnitude.
    __device__ __forceinline__ uint32_t read(const float* source, int count, int padded) const {
        const uint32_t destination = ptx::shared_address(piece);
        const int vectors = reinterpret_cast<uintptr_t>(source) % kChunkBytes == 0 ? count / 4 : 0;
        for (int i = thread; i < vectors; i += threads) ptx::cp_async_16(destination + i * kChunkBytes, source + i * 4);
        for (int i = vectors * 4 + thread; i < count; i += threads) {
            ptx::cp_async_small<4>(destination + i * 4, source + i);
        }
        ptx::cp_async_commit();
        for (int i = count + thread; i < padded; i += threads) piece[i] = 0.0f;
        ptx::cp_async_wait<0>();
        uint32_t largest = 0;
        for (int i = thread; i < vectors; i += threads) {
            const float4 four = reinterpret_cast<const float4*>(piece)[i];
            largest = max(max(largest, max(magnitude(four.x), magnitude(four.y))),
                          max(magnitude(four.z), magnitude(four.w)));
        }
        for (int i = vectors * 4 + thread; i < count; i += threads) largest = max(largest, magnitude(piece[i]));
        return largest;
    }
};

// Splits `rows_together` rows from `first` on that are contiguous along K. rows_together is a power of two, and 1 if
// rows have several pieces.
__device__ __forceinline__ void split_rows(const SplitOperand& operand, int first, int rows_together, int k,
                                           int padded_k, float* shared) {
    constexpr int kWarps = kSplitThreads / 32;
    __shared__ uint32_t largest_of_warp[kWarps];
    const int warps = kWarps / rows_together, threads = warps * 32;  // per row
    const int slot = static_cast<int>(threadIdx.x) / threads;
    const int row = first + slot;
    const bool exists = row < operand.rows;
    const float* source = operand.source + row * operand.stride;
    const RowGroup group{static_cast<int>(threadIdx.x) % threads, threads,
                         shared + slot * min(padded_k, kPieceElements)};

    const int pieces = (padded_k + kPieceElements - 1) / kPieceElements;
    const auto read = [&](int piece) {
        const int begin = piece * kPieceElements;
        return group.read(source + begin, min(k - begin, kPieceElements), min(padded_k - begin, kPieceElements));
    };
    uint32_t largest = 0;
    for (int piece = pieces - 1; exists && piece >= 0; --piece) {
        if (piece < pieces - 1) __syncthreads();  // other threads write zeros where this piece goes
        largest = max(largest, read(piece));
    }
    largest = __reduce_max_sync(0xffffffff, largest);
    if (threadIdx.x % 32 == 0) largest_of_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    if (!exists) return;
    for (int i = 0; i < warps; ++i) largest = max(largest, largest_of_warp[slot * warps + i]);

    const RowScale scale(largest);
    if (group.thread == 0) operand.exponents[row] = scale.exponent();
    for (int piece = 0; piece < pieces; ++piece) {
        if (piece > 0) {
            __syncthreads();
            read(piece);
            __syncthreads();
        }
        const int begin = piece * (kPieceElements / 4), vectors = min(padded_k / 4 - begin, kPieceElements / 4);
        for (int i = group.thread; i < vectors; i += threads) {
            *operand.vector(row, padded_k, begin + i) = split_vector(group.piece, i, scale.scale());
        }
    }
}

constexpr int kStripColumns = 32, kStripK = 128, kStripStride = kStripK + 4;

// Splits kStripColumns features from `first` on, whose elements along K are `stride` apart, and transposes them. The
// features are read twice, because shared memory is too small for them.
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
                split_vector(shared + of_row * kStripStride, vector, scale[pass]);
        }
    }
}

// The first `blocks_x` thread blocks split x by rows; the others split the weight.
template <Major kWeightMajor>
__global__ void __launch_bounds__(kSplitThreads)
    split_kernel(const SplitOperand x, const SplitOperand weight, int k, int padded_k, int rows_together,
                 int blocks_x) {
    extern __shared__ __align__(16) float staged[];
    wait_for_predecessors();
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

#ifndef __CUDACC_RTC__
template <Major kWeightMajor>
cudaError_t launch_split(const SplitOperand& x, const SplitOperand& weight, int k, int padded_k, cudaStream_t stream) {
    constexpr auto kKernel = &split_kernel<kWeightMajor>;
    constexpr int kFloat = static_cast<int>(sizeof(float));
    constexpr int kStripBytes = kWeightMajor == Major::kK ? 0 : kStripColumns * kStripStride * kFloat;
    // The attribute is set once: for the most that any size takes.
    if (const cudaError_t error = allow_shared_memory<kKernel>(kPieceElements * kFloat); error != cudaSuccess) {
        return error;
    }
    const int row_bytes = (padded_k < kPieceElements ? padded_k : kPieceElements) * kFloat;
    int rows_together = kSplitThreads / 32;
    while (rows_together > 1 && rows_together * row_bytes > kSplitRowBytes) rows_together /= 2;
    const int bytes = rows_together * row_bytes > kStripBytes ? rows_together * row_bytes : kStripBytes;
    const int rows_of_weight = kWeightMajor == Major::kK ? rows_together : kStripColumns;
    const int blocks_x = (x.rows + rows_together - 1) / rows_together;
    const int blocks_weight = (weight.rows + rows_of_weight - 1) / rows_of_weight;
    const unsigned blocks = static_cast<unsigned>(blocks_x) + static_cast<unsigned>(blocks_weight);
    return queue(kKernel, blocks, kSplitThreads, bytes, stream, x, weight, k, padded_k, rows_together, blocks_x);
}
#endif  // __CUDACC_RTC__

}  // namespace fxfuse
