// What every kernel's store shares: where an output element stands, how operands are read there, and how
// a run of finished values is written.
//
// Every output is seen as three dimensions (batch, row, col), col innermost in memory:
//   linear, matmul   batch = leading dimensions, row = the last of them, col = output feature
//   conv2d, NCHW     batch = image, row = channel, col = pixel (y * width + x)
//   conv2d, NHWC     batch = image, row = pixel,   col = channel
// cuda/codegen.py generates `struct Epilogue` on top of this: its operands and the expression.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fxfuse {

struct Position {
    int64_t batch, row, col;
};

// A run that may end one row and begin the next: its first `split` elements start at `first`, the others at `second`.
// `second` is `first` where no element of the run is there.
struct Straddle {
    Position first, second;
    int split;
};

// How one operand is laid out, as the host packs it. A stride of zero broadcasts.
struct OperandStrides {
    int64_t batch, row, col;  // in elements
};

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(bool value) { return value ? 1.0f : 0.0f; }
__device__ __forceinline__ float to_float(uint8_t value) { return static_cast<float>(value); }
__device__ __forceinline__ float to_float(int8_t value) { return static_cast<float>(value); }
__device__ __forceinline__ float to_float(int16_t value) { return static_cast<float>(value); }
__device__ __forceinline__ float to_float(int32_t value) { return static_cast<float>(value); }
__device__ __forceinline__ float to_float(int64_t value) { return static_cast<float>(value); }

template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) { return value; }
template <>
__device__ __forceinline__ __half from_float<__half>(float value) { return __float2half_rn(value); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) { return __float2bfloat16_rn(value); }

// Reads kVector consecutive elements, `count` of them existing (the rest of `value` is left unset).
// 16-byte loads where the address allows: one branch per vector, uniform except at ragged edges.
template <class T, int kVector>
__device__ __forceinline__ void load_run(float (&value)[kVector], const T* __restrict__ source, int count) {
    constexpr int kBytes = kVector * static_cast<int>(sizeof(T));
    constexpr int kChunk = kBytes < 16 ? kBytes : 16;
    if constexpr (kVector > 1 && kBytes % kChunk == 0 && (kChunk == 4 || kChunk == 8 || kChunk == 16)) {
        if (count == kVector && reinterpret_cast<uintptr_t>(source) % kChunk == 0) {
            constexpr int kPerChunk = kChunk / static_cast<int>(sizeof(T));
#pragma unroll
            for (int chunk = 0; chunk < kBytes / kChunk; ++chunk) {
                alignas(16) T piece[kPerChunk];
                if constexpr (kChunk == 16) {
                    *reinterpret_cast<uint4*>(piece) = __ldg(reinterpret_cast<const uint4*>(source) + chunk);
                } else if constexpr (kChunk == 8) {
                    *reinterpret_cast<uint2*>(piece) = __ldg(reinterpret_cast<const uint2*>(source) + chunk);
                } else {
                    *reinterpret_cast<unsigned*>(piece) = __ldg(reinterpret_cast<const unsigned*>(source) + chunk);
                }
#pragma unroll
                for (int i = 0; i < kPerChunk; ++i) value[chunk * kPerChunk + i] = to_float(piece[i]);
            }
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        if (i < count) value[i] = to_float(source[i]);
    }
}

// Reads kVector consecutive elements, all of which exist, from an address that is a multiple of their bytes or of 16.
template <class T, int kVector>
__device__ __forceinline__ void load_vector(float (&value)[kVector], const T* source) {
    constexpr int kBytes = kVector * static_cast<int>(sizeof(T));
    constexpr int kChunk = kBytes < 16 ? kBytes : 16, kPerChunk = kChunk / static_cast<int>(sizeof(T));
#pragma unroll
    for (int chunk = 0; chunk < kBytes / kChunk; ++chunk) {
        alignas(16) T piece[kPerChunk];
        if constexpr (kChunk == 16) {
            *reinterpret_cast<uint4*>(piece) = reinterpret_cast<const uint4*>(source)[chunk];
        } else if constexpr (kChunk == 8) {
            *reinterpret_cast<uint2*>(piece) = reinterpret_cast<const uint2*>(source)[chunk];
        } else if constexpr (kChunk == 4) {
            *reinterpret_cast<unsigned*>(piece) = reinterpret_cast<const unsigned*>(source)[chunk];
        } else {
            piece[0] = source[chunk];
        }
#pragma unroll
        for (int i = 0; i < kPerChunk; ++i) value[chunk * kPerChunk + i] = to_float(piece[i]);
    }
}

// Writes `count` of kVector consecutive elements, 16 bytes at a time where the address allows.
template <class T, int kVector>
__device__ __forceinline__ void store_run(T* __restrict__ destination, const float (&value)[kVector], int count) {
    constexpr int kBytes = kVector * static_cast<int>(sizeof(T));
    constexpr int kChunk = kBytes < 16 ? kBytes : 16;
    if constexpr (kVector > 1 && kBytes % kChunk == 0 && (kChunk == 4 || kChunk == 8 || kChunk == 16)) {
        if (count == kVector && reinterpret_cast<uintptr_t>(destination) % kChunk == 0) {
            constexpr int kPerChunk = kChunk / static_cast<int>(sizeof(T));
#pragma unroll
            for (int chunk = 0; chunk < kBytes / kChunk; ++chunk) {
                alignas(16) T piece[kPerChunk];
#pragma unroll
                for (int i = 0; i < kPerChunk; ++i) piece[i] = from_float<T>(value[chunk * kPerChunk + i]);
                if constexpr (kChunk == 16) {
                    reinterpret_cast<uint4*>(destination)[chunk] = *reinterpret_cast<const uint4*>(piece);
                } else if constexpr (kChunk == 8) {
                    reinterpret_cast<uint2*>(destination)[chunk] = *reinterpret_cast<const uint2*>(piece);
                } else {
                    reinterpret_cast<unsigned*>(destination)[chunk] = *reinterpret_cast<const unsigned*>(piece);
                }
            }
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        if (i < count) destination[i] = from_float<T>(value[i]);
    }
}

// Dimensions along which an operand varies: the bits of Operand's kDims.
enum Dims : int { kCol = 1, kRow = 2, kBatch = 4 };

// An operand in device memory, element type T, varying along the dimensions in kDims (others broadcast).
// kDims is part of the kernel's identity, so that absent strides cost no arithmetic.
template <class T, int kDims>
struct Operand {
    const T* __restrict__ data;
    OperandStrides strides;

    static constexpr bool kUsesBatch = (kDims & kBatch) != 0;

    static Operand make(uint64_t pointer, const OperandStrides& strides) {
        return {reinterpret_cast<const T*>(pointer), strides};
    }

    // Values at `at` and the kVector - 1 columns after it, of which `count` exist.
    template <int kVector>
    __device__ __forceinline__ void load(float (&value)[kVector], const Position& at, int count) const {
        const T* source = row_of(at);
        if constexpr ((kDims & kCol) == 0) {
            const float broadcast = to_float(__ldg(reinterpret_cast<const T*>(source)));
#pragma unroll
            for (int i = 0; i < kVector; ++i) value[i] = broadcast;
        } else if (strides.col == 1) {
            load_run<T, kVector>(value, source + at.col, count);
        } else {
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                if (i < count) value[i] = to_float(source[(at.col + i) * strides.col]);
            }
        }
    }

    // The same for a run in two rows.
    template <int kVector>
    __device__ __forceinline__ void load(float (&value)[kVector], const Straddle& at, int count) const {
        if constexpr ((kDims & (kBatch | kRow)) == 0 && (kDims & kCol) == 0) {
            load(value, at.first, count);
        } else if constexpr ((kDims & kCol) == 0) {
            const float first = to_float(__ldg(row_of(at.first))), second = to_float(__ldg(row_of(at.second)));
#pragma unroll
            for (int i = 0; i < kVector; ++i) value[i] = i < at.split ? first : second;
        } else {
            const T* first = row_of(at.first) + at.first.col * strides.col;
            const T* second = row_of(at.second) + (at.second.col - at.split) * strides.col;
            if (strides.col == 1 && (at.split >= count || first == second)) {
                load_run<T, kVector>(value, first, count);
                return;
            }
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                if (i < count) value[i] = to_float(__ldg((i < at.split ? first : second) + i * strides.col));
            }
        }
    }

private:
    __device__ __forceinline__ const T* row_of(const Position& at) const {
        const T* row = data;
        if constexpr ((kDims & kBatch) != 0) row += at.batch * strides.batch;
        if constexpr ((kDims & kRow) != 0) row += at.row * strides.row;
        return row;
    }
};

// A number that the host knows at call time (a zero-dimensional CPU tensor): it travels in the pointer's place.
struct HostScalar {
    float scalar;

    static constexpr bool kUsesBatch = false;

    static HostScalar make(uint64_t bits, const OperandStrides&) {
        union {
            uint32_t from;
            float to;
        } cast = {static_cast<uint32_t>(bits)};
        return {cast.to};
    }

    template <int kVector, class At>
    __device__ __forceinline__ void load(float (&value)[kVector], const At&, int) const {
#pragma unroll
        for (int i = 0; i < kVector; ++i) value[i] = scalar;
    }
};

}  // namespace fxfuse
