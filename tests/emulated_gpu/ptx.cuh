// The functions of cuda/kernels/ptx.cuh on the emulated GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fxfuse::ptx {

// Shared memory goes by its offset, in 32 bits as on a GPU.
inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - emulation::shared);
}

inline unsigned char* at(uint32_t address, int bytes) {
    if (address % bytes != 0 || address + bytes > emulation::shared_bytes) emulation::fail("a bad address in shared memory");
    return emulation::shared + address;
}

inline uint32_t read_thread_index() { return threadIdx.x; }
inline uint32_t read_zero() { return 0; }
inline uint3 read_block_index() { return blockIdx; }

inline void copy_async(uint32_t destination, const void* source, int bytes, int valid) {
    if (valid > 0 && reinterpret_cast<uintptr_t>(source) % bytes != 0) emulation::fail("cp.async from a misaligned address");
    emulation::begin_copy({at(destination, bytes), static_cast<const unsigned char*>(source), bytes, std::max(valid, 0)});
}
inline void cp_async_16(uint32_t destination, const void* source, int valid = 16) {
    copy_async(destination, source, 16, valid);
}
template <int kBytes>
void cp_async_small(uint32_t destination, const void* source, int valid = kBytes) {
    copy_async(destination, source, kBytes, valid);
}
inline void cp_async_commit() { emulation::commit_copies(); }
template <int kPending>
void cp_async_wait() {
    emulation::wait_for_copies(kPending);
}

inline float2 load_l2_8(const void* source, bool exists) {
    return exists ? *static_cast<const float2*>(source) : float2{0.0f, 0.0f};
}

inline void forget(uint32_t&) {}
inline uint16_t load_read_only_2(const void* source) { return *static_cast<const uint16_t*>(source); }

inline void store_global_16(uint64_t address, uint4 value) {
    if (address % 16 != 0) emulation::fail("a misaligned store");
    *reinterpret_cast<uint4*>(address) = value;
}

template <class T>
T load_shared(uint32_t address) {
    T value;
    std::memcpy(&value, at(address, sizeof(T)), sizeof(T));
    return value;
}
template <class T>
void store_shared(uint32_t address, T value) {
    std::memcpy(at(address, sizeof(T)), &value, sizeof(T));
}
inline uint32_t load_shared_4(uint32_t address) { return load_shared<uint32_t>(address); }
inline uint2 load_shared_8(uint32_t address) { return load_shared<uint2>(address); }
inline uint4 load_shared_16(uint32_t address) { return load_shared<uint4>(address); }
inline void store_shared_2(uint32_t address, uint16_t value) { store_shared(address, value); }
inline void store_shared_4(uint32_t address, uint32_t value) { store_shared(address, value); }
inline void store_shared_8(uint32_t address, uint2 value) { store_shared(address, value); }
inline void store_shared_16(uint32_t address, uint4 value) { store_shared(address, value); }

template <bool kTransposed>
void load_matrices(uint32_t (&r)[4], uint32_t address) {
    struct Item {
        uint32_t (*r)[4];
        uint32_t address;
    } mine = {&r, address};
    emulation::with_warp(mine, [](Item** all) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            uint16_t element[8][8];
            for (int row = 0; row < 8; ++row) std::memcpy(element[row], at(all[matrix * 8 + row]->address, 16), 16);
            for (int lane = 0; lane < emulation::kWarp; ++lane) {
                const int g = lane / 4, t = lane % 4 * 2;
                const uint16_t low = kTransposed ? element[t][g] : element[g][t];
                const uint16_t high = kTransposed ? element[t + 1][g] : element[g][t + 1];
                (*all[lane]->r)[matrix] = low | uint32_t{high} << 16;
            }
        }
    });
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { load_matrices<false>(r, address); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { load_matrices<true>(r, address); }

inline uint32_t cvt_rn_tf32(uint32_t bits) {
    const bool finite = (bits & 0x7f800000) != 0x7f800000;
    return finite ? (bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000 : bits;
}
inline float cvt_f32_f16(uint16_t bits) { return static_cast<float>(bits_as<_Float16>(bits)); }
inline float cvt_f32_bf16(uint16_t bits) { return __uint_as_float(uint32_t{bits} << 16); }
inline uint16_t cvt_rn_f16(float value) { return bits_as<uint16_t>(static_cast<_Float16>(value)); }
inline uint16_t cvt_rn_bf16(float value) {
    const uint32_t bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32_t cvt_rn_f16x2(float first, float second) { return cvt_rn_f16(first) | uint32_t{cvt_rn_f16(second)} << 16; }
inline uint32_t cvt_rn_bf16x2(float first, float second) {
    return cvt_rn_bf16(first) | uint32_t{cvt_rn_bf16(second)} << 16;
}

// Products that warps have started since this library was loaded.
inline int64_t warp_products = 0;
extern "C" __attribute__((used)) inline int64_t emulated_warp_products() { return warp_products; }

// d += a * b for a warp; Element gives the i-th value of a register, of kPerRegister.
template <int kPerRegister, int kARegisters, int kBRegisters, class Element>
void multiply_add(float (&d)[4], const uint32_t (&a)[kARegisters], const uint32_t (&b)[kBRegisters], Element element) {
    struct Item {
        float (*d)[4];
        uint32_t a[kARegisters], b[kBRegisters];
    } mine = {&d, {}, {}};
    std::copy(a, a + kARegisters, mine.a);
    std::copy(b, b + kBRegisters, mine.b);
    ++warp_products;
    emulation::with_warp(mine, [element](Item** all) {
        constexpr int kK = 4 * kPerRegister * kBRegisters;
        float left[16][kK], right[kK][8];
        for (int lane = 0; lane < emulation::kWarp; ++lane) {
            const int g = lane / 4, t = lane % 4;
            for (int half = 0; half < kBRegisters; ++half) {
                for (int i = 0; i < kPerRegister; ++i) {
                    const int k = half * 4 * kPerRegister + t * kPerRegister + i;
                    for (int row = 0; row < 2; ++row) left[g + row * 8][k] = element(all[lane]->a[half * 2 + row], i);
                    right[k][g] = element(all[lane]->b[half], i);
                }
            }
        }
        for (int lane = 0; lane < emulation::kWarp; ++lane) {
            for (int i = 0; i < 4; ++i) {
                double sum = (*all[lane]->d)[i];
                for (int k = 0; k < kK; ++k) {
                    sum += double{left[lane / 4 + i / 2 * 8][k]} * right[k][lane % 4 * 2 + i % 2];
                }
                (*all[lane]->d)[i] = static_cast<float>(sum);
            }
        }
    });
}

inline float tf32_of(uint32_t bits, int) { return __uint_as_float(bits & 0xffffe000); }
inline float bf16_of(uint32_t bits, int i) { return __uint_as_float(i == 0 ? bits << 16 : bits & 0xffff0000); }
inline float f16_of(uint32_t bits, int i) {
    return cvt_f32_f16(static_cast<uint16_t>(bits >> 16 * i));
}
inline uint32_t add_f16x2(uint32_t a, uint32_t b) {
    return cvt_rn_f16x2(f16_of(a, 0) + f16_of(b, 0), f16_of(a, 1) + f16_of(b, 1));
}
inline uint32_t add_bf16x2(uint32_t a, uint32_t b) {
    return cvt_rn_bf16x2(bf16_of(a, 0) + bf16_of(b, 0), bf16_of(a, 1) + bf16_of(b, 1));
}

inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    multiply_add<1>(d, a, b, tf32_of);
}
inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    multiply_add<2>(d, a, b, f16_of);
}
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    multiply_add<2>(d, a, b, bf16_of);
}
inline void mma_m16n8k8_f16(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
    const uint32_t only[1] = {b};
    multiply_add<2>(d, a, only, f16_of);
}
inline void mma_m16n8k8_bf16(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
    const uint32_t only[1] = {b};
    multiply_add<2>(d, a, only, bf16_of);
}

inline float exp2(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float tanh(float x) { return std::tanh(x); }
inline float min_nan(float a, float b) { return a != a || b != b ? NAN : std::min(a, b); }
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : std::max(a, b); }

}  // namespace fxfuse::ptx
