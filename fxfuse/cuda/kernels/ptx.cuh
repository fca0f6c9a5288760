// One PTX instruction per function and nothing else: the only file with inline assembly.
// Everything here is sm_80 (Ampere) and assembles with CUDA 12.1.
#pragma once

#include <cstdint>

namespace fxfuse::ptx {

// Address of a shared-memory object as the 32-bit value that ldmatrix and cp.async take.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// threadIdx.x and blockIdx (below), read anew at each call. So values derived from them are derived again after a long
// loop, and do not occupy registers during it.
__device__ __forceinline__ uint32_t read_thread_index() {
    uint32_t value;
    asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(value));
    return value;
}

// Zero, because no block has a second dimension; nvcc and ptxas do not know that.
__device__ __forceinline__ uint32_t read_zero() {
    uint32_t value;
    asm volatile("mov.u32 %0, %%tid.y;\n" : "=r"(value));
    return value;
}

__device__ __forceinline__ uint3 read_block_index() {
    uint3 value;
    asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(value.x));
    asm volatile("mov.u32 %0, %%ctaid.y;\n" : "=r"(value.y));
    asm volatile("mov.u32 %0, %%ctaid.z;\n" : "=r"(value.z));
    return value;
}

// 16 bytes global -> shared, bypassing L1. `valid` of them are read, the rest is filled with zeros;
// source must be 16-byte aligned. `valid` = 0 reads nothing (source is not dereferenced).
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source, int valid = 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(destination), "l"(source),
                 "r"(valid));
}

// kBytes (4 or 8) global -> shared through L1, zero-filled as above; source aligned to kBytes.
template <int kBytes>
__device__ __forceinline__ void cp_async_small(uint32_t destination, const void* source, int valid = kBytes) {
    static_assert(kBytes == 4 || kBytes == 8, "cp.async moves 4, 8 or 16 bytes");
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(destination), "l"(source), "n"(kBytes),
                 "r"(valid));
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::); }

// Waits until at most kPending of this thread's committed groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending));
}

// Reads 8 bytes that other multiprocessors may have written, from L2, which all share. Zeros unless `exists`.
__device__ __forceinline__ float2 load_l2_8(const void* source, bool exists) {
    float2 value = {0.0f, 0.0f};
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p ld.global.cg.v2.f32 {%0, %1}, [%2];\n}\n"
                 : "+f"(value.x), "+f"(value.y)
                 : "l"(source), "r"(static_cast<uint32_t>(exists)));
    return value;
}

// Makes `value` opaque to the compiler, without an instruction. In a loop, values derived from it are then derived
// again after this point, and do not occupy registers during all of the loop.
__device__ __forceinline__ void forget(uint32_t& value) { asm volatile("" : "+r"(value)); }

// Two bytes that nothing writes while the kernel runs.
__device__ __forceinline__ uint16_t load_read_only_2(const void* source) {
    uint16_t value;
    asm("ld.global.nc.b16 %0, [%1];" : "=h"(value) : "l"(source));
    return value;
}

// One store of 16 bytes. Written in C++ among other stores, compilers make it four stores of 4 bytes.
__device__ __forceinline__ void store_global_16(uint64_t address, uint4 value) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(address), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w));
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
    uint2 value;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n" : "=r"(value.x), "=r"(value.y) : "r"(address));
    return value;
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address));
    return value;
}

__device__ __forceinline__ void store_shared_2(uint32_t address, uint16_t value) {
    asm volatile("st.shared.b16 [%0], %1;\n" ::"r"(address), "h"(value));
}

__device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(address), "r"(value));
}

__device__ __forceinline__ void store_shared_16(uint32_t address, uint4 value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w));
}

// Four 8x8 matrices of 16-bit elements; lane 8i..8i+7 gives the row addresses of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Rounds to the nearest TF32, ties to even. One instruction, unlike cvt.rna, which sm_80 has, too.
__device__ __forceinline__ uint32_t cvt_rn_tf32(uint32_t bits) {
    uint32_t result;
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(result) : "r"(bits));
    return result;
}
#endif

__device__ __forceinline__ float cvt_f32_f16(uint16_t bits) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
    return result;
}

__device__ __forceinline__ float cvt_f32_bf16(uint16_t bits) {
    float result;
#if __CUDA_ARCH__ >= 900
    asm("cvt.f32.bf16 %0, %1;" : "=f"(result) : "h"(bits));
#else  // the upper half of a float
    asm("mov.b32 %0, {0, %1};" : "=f"(result) : "h"(bits));
#endif
    return result;
}

// To the nearest f16 or bf16, ties to even.
__device__ __forceinline__ uint16_t cvt_rn_f16(float value) {
    uint16_t result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}
__device__ __forceinline__ uint16_t cvt_rn_bf16(float value) {
    uint16_t result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}

// Two floats to the nearest f16 or bf16, the first in the lower half.
__device__ __forceinline__ uint32_t cvt_rn_f16x2(float first, float second) {
    uint32_t result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
    return result;
}
__device__ __forceinline__ uint32_t cvt_rn_bf16x2(float first, float second) {
    uint32_t result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
    return result;
}

// Adds two pairs, element by element.
__device__ __forceinline__ uint32_t add_f16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("add.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
__device__ __forceinline__ uint32_t add_bf16x2(uint32_t a, uint32_t b) {
    uint32_t result;
#if __CUDA_ARCH__ >= 900
    asm("add.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
#else  // a * 1 + b
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(0x3f803f80), "r"(b));
#endif
    return result;
}

// d = a * b + d, one warp: a 16xK row-major, b Kx8 column-major, d 16x8 float32.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k8_f16(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}

__device__ __forceinline__ void mma_m16n8k8_bf16(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Special functions, one instruction each. 2^x and 1 / x take subnormal numbers as zero. Errors: 2^x 2 ulp,
// 1 / x 1 ulp, tanh(x) 2^-11 of it.
__device__ __forceinline__ float exp2(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ float reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ float tanh(float x) {
    float result;
    asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// The smaller and the larger of two numbers, NaN if either is NaN (fminf and fmaxf drop it).
__device__ __forceinline__ float min_nan(float a, float b) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ __forceinline__ float max_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

}  // namespace fxfuse::ptx
