// Tensor-core multiply-accumulate: one struct per precision, all with the same interface.
//
// Every precision consumes 32 bytes of K per instruction (8 float or 16 half), and ldmatrix, which moves
// 16-byte rows, delivers the fragments of every precision alike. With g = lane / 4 and t = lane % 4, a register
// holds the 4 bytes (one float, or two consecutive halves) at
//
//   A, 16 rows (m) x 32 bytes (k)    raw[0]: row g,      bytes 4t      raw[2]: row g,      bytes 16 + 4t
//                                    raw[1]: row g + 8,  bytes 4t      raw[3]: row g + 8,  bytes 16 + 4t
//   B,  8 columns (n) x 32 bytes     raw[0]: column g,   bytes 4t      raw[1]: column g,   bytes 16 + 4t
//   D, 16 rows x 8 columns, float    d[0], d[1]: row g, columns 2t, 2t + 1      d[2], d[3]: the same of row g + 8
//
// A precision has
//   Element                 the type in global and shared memory
//   A, B                    a fragment, ready to be multiplied
//   make_a(raw), make_b(raw)  the fragment of raw registers: rounded or split where the precision asks for it
//   kProducts, product<i>(d, a, b)   d += the i-th of the products that make up a * b
//   kGuarded, Unguarded     whether infinite operands take extra work, and the precision without that work: there, an
//                           infinite operand makes its sums NaN. For kernels that check them and start again.
#pragma once

#include <cstdint>

#include "half.cuh"
#include "ptx.cuh"

namespace fxfuse {

constexpr int kMmaM = 16;         // rows of D
constexpr int kMmaN = 8;          // columns of D
constexpr int kMmaBytesOfK = 32;  // of a row of A and of a column of B

// One product of fp32 operands rounded to the nearest TF32 (11 significant bits).
struct Tf32 {
    using Element = float;
    static constexpr bool kGuarded = false;
    using Unguarded = Tf32;
    struct A {
        uint32_t value[4];
    };
    struct B {
        uint32_t value[2];
    };
    static constexpr int kProducts = 1;

    template <class Fragment, int kRegisters>
    static __device__ __forceinline__ Fragment rounded(const uint32_t (&raw)[kRegisters]) {
        Fragment fragment;
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) fragment.value[i] = round_to_tf32(raw[i]);
        return fragment;
    }
    static __device__ __forceinline__ A make_a(const uint32_t (&raw)[4]) { return rounded<A>(raw); }
    static __device__ __forceinline__ B make_b(const uint32_t (&raw)[2]) { return rounded<B>(raw); }

    template <int kProduct>
    static __device__ __forceinline__ void product(float (&d)[4], const A& a, const B& b) {
        ptx::mma_m16n8k8_tf32(d, a.value, b.value);
    }

    // sm_80 has no instruction for this. The tensor core ignores the lower 13 bits, so adding half of the last bit that
    // it reads rounds. Infinities and NaN stay as they are: the addition would change them.
    static __device__ __forceinline__ uint32_t round_to_tf32(uint32_t bits) {
#if __CUDA_ARCH__ >= 900
        return ptx::cvt_rn_tf32(bits);
#else
        return rounds_to_finite(bits) ? bits + kHalfUlp : bits;
#endif
    }
    static __device__ __forceinline__ bool rounds_to_finite(uint32_t bits) {
        return fabsf(__uint_as_float(bits)) < __uint_as_float(kRoundsToInfinity);
    }
    static constexpr uint32_t kHalfUlp = 0x1000;
    static constexpr uint32_t kUpperBits = 0xffffe000;
    static constexpr uint32_t kRoundsToInfinity = 0x7f7ff000;  // and everything above it
};

// fp32-level accuracy: x = hi + lo exactly, both TF32, and x * y = lo * hi + hi * lo + hi * hi up to
// lo * lo <= 2^-24 * x * y. (Ootomo & Yokota 2022; the tensor core truncates when it accumulates, so that long sums
// must be taken in pieces: see Mainloop.) hi is the TF32 nearest to x: lo then has 11 bits, and none is lost.
//
// kGuarded: an infinity becomes hi = +-1, lo = +-inf. So every product keeps its sign, and neither inf - inf nor
// inf * 0 arises where fp32 has none. NaN is carried by lo.
template <bool kGuarded_>
struct SplitTf32 {
    using Element = float;
    static constexpr bool kGuarded = kGuarded_;
    using Unguarded = SplitTf32<false>;
    struct A {
        uint32_t hi[4], lo[4];
    };
    struct B {
        uint32_t hi[2], lo[2];
    };
    static constexpr int kProducts = 3;

    static __device__ __forceinline__ uint32_t upper(uint32_t bits) {
        constexpr uint32_t kTurnsInfinityIntoOne = 0xbfffffff;
#if __CUDA_ARCH__ >= 900
        const uint32_t nearest = ptx::cvt_rn_tf32(bits);
#else
        const uint32_t nearest = (bits + Tf32::kHalfUlp) & Tf32::kUpperBits;
#endif
        return kGuarded && !Tf32::rounds_to_finite(bits) ? bits & Tf32::kUpperBits & kTurnsInfinityIntoOne : nearest;
    }

    template <class Fragment, int kRegisters>
    static __device__ __forceinline__ Fragment split(const uint32_t (&raw)[kRegisters]) {
        Fragment fragment;
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) {
            fragment.hi[i] = upper(raw[i]);
            fragment.lo[i] = __float_as_uint(__uint_as_float(raw[i]) - __uint_as_float(fragment.hi[i]));
        }
        return fragment;
    }
    static __device__ __forceinline__ A make_a(const uint32_t (&raw)[4]) { return split<A>(raw); }
    static __device__ __forceinline__ B make_b(const uint32_t (&raw)[2]) { return split<B>(raw); }

    // Small products first: they then do not lose bits to the large one.
    template <int kProduct>
    static __device__ __forceinline__ void product(float (&d)[4], const A& a, const B& b) {
        if constexpr (kProduct == 0) {
            ptx::mma_m16n8k8_tf32(d, a.lo, b.hi);
        } else if constexpr (kProduct == 1) {
            ptx::mma_m16n8k8_tf32(d, a.hi, b.lo);
        } else {
            ptx::mma_m16n8k8_tf32(d, a.hi, b.hi);
        }
    }
};

using Tf32x3 = SplitTf32<true>;

// More accurate than fp32's own sums, for short sums and for outputs that cuBLAS sums up as trees. x is the sum of
// three bf16 exactly. Of the nine products of parts, the three smallest are left out (2^-25 * x * y at most). A product
// of the largest parts has 16 bits, not 22 as with TF32, so few lose bits where tensor cores align eight of them to the
// largest. The others are smaller by 2^-8, and so is their loss if they have accumulators of their own: see
// kSmallProducts.
struct SplitBf16 {
    using Element = float;
    static constexpr bool kGuarded = false;
    using Unguarded = SplitBf16;
    struct A {
        uint32_t part[3][2];  // k = t and t + 4 of row g, and of row g + 8
    };
    struct B {
        uint32_t part[3];  // k = t and t + 4 of column g
    };
    static constexpr int kProducts = 4;

    static __device__ __forceinline__ void split(uint32_t (&part)[3], uint32_t first, uint32_t second) {
        float x = __uint_as_float(first), y = __uint_as_float(second);
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            part[i] = ptx::cvt_rn_bf16x2(x, y);
            x -= __uint_as_float(part[i] << 16);
            y -= __uint_as_float(part[i] & 0xffff0000);
        }
    }
    static __device__ __forceinline__ A make_a(const uint32_t (&raw)[4]) {
        A a;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            uint32_t part[3];
            split(part, raw[row], raw[row + 2]);
#pragma unroll
            for (int i = 0; i < 3; ++i) a.part[i][row] = part[i];
        }
        return a;
    }
    static __device__ __forceinline__ B make_b(const uint32_t (&raw)[2]) {
        B b;
        split(b.part, raw[0], raw[1]);
        return b;
    }

    // An instruction for 16 k takes two products of 8 k.
    template <int kProduct>
    static __device__ __forceinline__ void product(float (&d)[4], const A& a, const B& b) {
        if constexpr (kProduct == 0) {
            add_two(d, a.part[0], b.part[2], a.part[2], b.part[0]);
        } else if constexpr (kProduct == 1) {
            ptx::mma_m16n8k8_bf16(d, a.part[1], b.part[1]);
        } else if constexpr (kProduct == 2) {
            add_two(d, a.part[0], b.part[1], a.part[1], b.part[0]);
        } else {
            ptx::mma_m16n8k8_bf16(d, a.part[0], b.part[0]);
        }
    }

private:
    static __device__ __forceinline__ void add_two(float (&d)[4], const uint32_t (&a0)[2], uint32_t b0,
                                                   const uint32_t (&a1)[2], uint32_t b1) {
        const uint32_t a[4] = {a0[0], a0[1], a1[0], a1[1]}, b[2] = {b0, b1};
        ptx::mma_m16n8k16_bf16(d, a, b);
    }
};

// The bf16 split. Infinities are left to the TF32 split.
struct Bf16x6 : Tf32x3 {
    using Unguarded = SplitBf16;
};

// How many of a precision's first products are so much smaller than the others that they have accumulators of their own
// (see Mainloop): there, tensor cores lose little when they truncate.
template <class Mma>
constexpr int kSmallProducts = 0;
template <>
constexpr int kSmallProducts<SplitBf16> = 3;

// What fp16 and bf16 share: the raw registers are the fragments.
template <class T>
struct Half {
    using Element = T;
    struct A {
        uint32_t value[4];
    };
    struct B {
        uint32_t value[2];
    };
    static constexpr int kProducts = 1;

    static __device__ __forceinline__ A make_a(const uint32_t (&raw)[4]) { return {{raw[0], raw[1], raw[2], raw[3]}}; }
    static __device__ __forceinline__ B make_b(const uint32_t (&raw)[2]) { return {{raw[0], raw[1]}}; }
};

struct Fp16 : Half<Float16> {
    static constexpr bool kGuarded = false;
    using Unguarded = Fp16;

    template <int kProduct>
    static __device__ __forceinline__ void product(float (&d)[4], const A& a, const B& b) {
        ptx::mma_m16n8k16_f16(d, a.value, b.value);
    }

    // The product over half as much of K: raw[0] and raw[1] of A, raw[0] of B.
    static __device__ __forceinline__ void half_product(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
        ptx::mma_m16n8k8_f16(d, a, b);
    }

    static __device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) { return ptx::add_f16x2(a, b); }
};

struct Bf16 : Half<BFloat16> {
    static constexpr bool kGuarded = false;
    using Unguarded = Bf16;

    template <int kProduct>
    static __device__ __forceinline__ void product(float (&d)[4], const A& a, const B& b) {
        ptx::mma_m16n8k16_bf16(d, a.value, b.value);
    }

    // The product over half as much of K: raw[0] and raw[1] of A, raw[0] of B.
    static __device__ __forceinline__ void half_product(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
        ptx::mma_m16n8k8_bf16(d, a, b);
    }

    static __device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) { return ptx::add_bf16x2(a, b); }
};

// A float32 number as hi + lo, two halves with 22 significant bits; lo is the remainder that hi leaves. In a tile in
// memory, 16 numbers along K are 32 bytes of hi and 32 bytes of lo. See split_halves.cuh.
struct HalfPair {
    uint32_t bits;
};

// fp32-level accuracy from pairs of halves. An instruction's worth of K takes two reads of raw registers, hi and lo.
struct Fp16x3 {
    using Element = HalfPair;
    static constexpr bool kGuarded = false;
    using Unguarded = Fp16x3;
    struct A {
        uint32_t hi[4], lo[4];
    };
    struct B {
        uint32_t hi[2], lo[2];
    };
    static constexpr int kProducts = 3;

    template <int kProduct>
    static __device__ __forceinline__ void product(float (&d)[4], const A& a, const B& b) {
        if constexpr (kProduct == 0) {
            ptx::mma_m16n8k16_f16(d, a.lo, b.hi);
        } else if constexpr (kProduct == 1) {
            ptx::mma_m16n8k16_f16(d, a.hi, b.lo);
        } else {
            ptx::mma_m16n8k16_f16(d, a.hi, b.hi);
        }
    }
};

// d[m][first + n] += a[m] * b[n], by the precision's products from kProduct to kEnd (excluded). Each product is issued
// for all MMA tiles before the next one: a tile's products depend on each other, and other tiles hide their latency.
template <class Mma, int kProduct, int kEnd, int kMmasM, int kColumns, int kMmasN>
__device__ __forceinline__ void multiply_add(float (&d)[kMmasM][kColumns][4], int first,
                                             const typename Mma::A (&a)[kMmasM], const typename Mma::B (&b)[kMmasN]) {
    if constexpr (kProduct < kEnd) {
#pragma unroll
        for (int n = 0; n < kMmasN; ++n) {
#pragma unroll
            for (int m = 0; m < kMmasM; ++m) Mma::template product<kProduct>(d[m][first + n], a[m], b[n]);
        }
        multiply_add<Mma, kProduct + 1, kEnd>(d, first, a, b);
    }
}

}  // namespace fxfuse
