// PTX instructions that Hopper has and Ampere lacks, for kernels built for sm_90a.
//
// PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions", "Parallel Synchronization and
// Communication Instructions: mbarrier" and "Data Movement and Conversion Instructions: cp.async.bulk".
#pragma once

#include <cstdint>

namespace fxfuse::ptx {

// -------------------------------------------------------------------------------------------------- barriers

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the copy engine. Called by the thread that initialised them.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// Arrives, and makes the barrier's phase wait for `bytes` bytes of bulk copies.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase with this parity is over; a barrier begins in the phase of parity 0.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait;\n}\n" ::"r"(barrier), "r"(parity) : "memory");
}

// ------------------------------------------------------------------------------------------------- clusters

// Waits until all threads of the cluster are here. What they wrote to shared memory before is then visible.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;\n" ::
            : "memory");
}

// Reads from the same place in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ float2 load_of_block(const float2* place, uint32_t rank) {
    uint32_t there;
    float2 value;
    const auto here = static_cast<uint32_t>(__cvta_generic_to_shared(place));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(here), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];\n" : "=f"(value.x), "=f"(value.y) : "r"(there));
    return value;
}

// ----------------------------------------------------------------------------------------------------- copies

// `bytes` global -> shared by the copy engine, which then completes them at the barrier. Addresses and `bytes` are
// multiples of 16.
__device__ __forceinline__ void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

// Orders what this thread has written to shared memory before what tensor cores and copy engines read next.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// ------------------------------------------------------------------------------------------------- warpgroups

// Sets the registers per thread of this warpgroup from here on. The warpgroups of a block together may not have more
// than at its launch.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// Needed before the first product, and whenever sums have been touched since the last product.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
// Waits until at most kPending committed groups of products are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// No instruction: the compiler reads sums no earlier than here. It does not know that products go on writing sums until
// wgmma_wait.
template <int kSums>
__device__ __forceinline__ void sums_fence(float (&d)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Descriptors of the matrices in shared memory that products read. `low`, the lower half, differs between matrices:
// adding n to it moves a matrix by n times 16 bytes. Both matrices of a product are of one kind.

// Without a swizzle: rows of 16 bytes in groups of eight. A group's rows follow one another, and groups are 128 bytes
// apart. The second 16 bytes of K lie `along_k` bytes from the first.
struct Matrix {
    uint32_t low;
    static constexpr uint32_t kHigh = 128 >> 4;

    Matrix() = default;
    __device__ __forceinline__ Matrix(uint32_t address, uint32_t along_k)
        : low((address & 0x3ffff) >> 4 | (along_k & 0x3ffff) >> 4 << 16) {}
    __device__ __forceinline__ explicit Matrix(uint32_t low) : low(low) {}
    __device__ __forceinline__ Matrix operator+(uint32_t rows) const { return Matrix(low + rows); }
};

// With the 128-byte swizzle: rows of 128 bytes that follow one another. In a row, pieces of 16 bytes are permuted by
// XOR with the row's number modulo 8 (OperandTile in shared_tile.cuh). The first row is at a multiple of 1024; a
// product's part of K begins at `address`.
// K-major: a row is of one m or n. MN-major: a row is of one k and 64 m or n; the next 64 are `slab` bytes further on.
// Products need to be told which (kTurned: MN-major).
struct SwizzledMatrix {
    uint32_t low;
    static constexpr uint32_t kHigh = 1024 >> 4 | 1u << 30;  // from 8 rows to the next 8, and the kind of permutation

    __device__ __forceinline__ explicit SwizzledMatrix(uint32_t address, uint32_t slab = 0)
        : low((address & 0x3ffff) >> 4 | slab >> 4 << 16) {}
    __device__ __forceinline__ SwizzledMatrix operator+(uint32_t pieces) const {
        SwizzledMatrix moved = *this;
        moved.low += pieces;
        return moved;
    }
};

// d = a * b + d, or a * b unless `adds`. With N = 2 * sums columns (64, 96 or 128), a is 64 rows x 32 bytes of K, b is
// N columns x 32 bytes of K, and d is 64 rows x N columns in float32. Warp w of the group has rows 16 w to 16 w + 15.
// d[4 n + i] is d[i] of mma.cuh for columns 8 n to 8 n + 7. In 16 bits, a and b may each be turned (MN-major, see
// SwizzledMatrix).
#define FXFUSE_NAMES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FXFUSE_NAMES_48 \
    FXFUSE_NAMES_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FXFUSE_NAMES_64 \
    FXFUSE_NAMES_48 ", " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FXFUSE_SUMS_32 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define FXFUSE_SUMS_48 \
    FXFUSE_SUMS_32, \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define FXFUSE_SUMS_64 \
    FXFUSE_SUMS_48, \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
// at_...: the assembly's operand numbers that follow the sums.
#define FXFUSE_WGMMA(name, sums, columns, kind, turns, at_a, at_b, at_high, at_adds, at_turned_a, at_turned_b) \
    template <bool kTurnedA = false, bool kTurnedB = false, class Matrix> \
    __device__ __forceinline__ void name(float (&d)[sums], Matrix a, Matrix b, bool adds) { \
        asm volatile( \
            "{\n.reg .pred adds;\n.reg .b64 a, b;\nmov.b64 a, {" at_a ", " at_high "};\nmov.b64 b, {" at_b ", " at_high "};\n" \
            "setp.ne.b32 adds, " at_adds ", 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n" columns kind " {" FXFUSE_NAMES_##sums "}, a, b, adds, 1, 1" \
            turns(at_turned_a, at_turned_b) ";\n}\n" \
            : FXFUSE_SUMS_##sums \
            : "r"(a.low), "r"(b.low), "n"(Matrix::kHigh), "r"(static_cast<uint32_t>(adds)), "n"(int{kTurnedA}), \
              "n"(int{kTurnedB})); \
    }
#define FXFUSE_WGMMAS(name, kind, turns) \
    FXFUSE_WGMMA(name, 32, "64", kind, turns, "%32", "%33", "%34", "%35", "%36", "%37") \
    FXFUSE_WGMMA(name, 48, "96", kind, turns, "%48", "%49", "%50", "%51", "%52", "%53") \
    FXFUSE_WGMMA(name, 64, "128", kind, turns, "%64", "%65", "%66", "%67", "%68", "%69")
#define FXFUSE_NO_TURNS(a, b) ""
#define FXFUSE_TURNS(a, b) ", " a ", " b
FXFUSE_WGMMAS(wgmma_tf32, "k8.f32.tf32.tf32", FXFUSE_NO_TURNS)
FXFUSE_WGMMAS(wgmma_f16, "k16.f32.f16.f16", FXFUSE_TURNS)
FXFUSE_WGMMAS(wgmma_bf16, "k16.f32.bf16.bf16", FXFUSE_TURNS)
#undef FXFUSE_TURNS
#undef FXFUSE_NO_TURNS
#undef FXFUSE_WGMMAS
#undef FXFUSE_WGMMA

// The same with a in registers: each warp has the A fragment of its 16 rows (mma.cuh). The registers may not change
// before the product has been waited for.
#define FXFUSE_WGMMA(name, sums, columns, kind, at_a, at_b, at_high, at_adds) \
    template <class Matrix> \
    __device__ __forceinline__ void name(float (&d)[sums], const uint32_t (&a)[4], Matrix b, bool adds) { \
        asm volatile( \
            "{\n.reg .pred adds;\n.reg .b64 b;\nmov.b64 b, {" at_b ", " at_high "};\nsetp.ne.b32 adds, " at_adds ", 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n" columns kind " {" FXFUSE_NAMES_##sums "}, {" at_a "}, b, adds, 1, 1;\n}\n" \
            : FXFUSE_SUMS_##sums \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "n"(Matrix::kHigh), \
              "r"(static_cast<uint32_t>(adds))); \
    }
FXFUSE_WGMMA(wgmma_tf32, 32, "64", "k8.f32.tf32.tf32", "%32, %33, %34, %35", "%36", "%37", "%38")
FXFUSE_WGMMA(wgmma_tf32, 48, "96", "k8.f32.tf32.tf32", "%48, %49, %50, %51", "%52", "%53", "%54")
FXFUSE_WGMMA(wgmma_tf32, 64, "128", "k8.f32.tf32.tf32", "%64, %65, %66, %67", "%68", "%69", "%70")
#undef FXFUSE_WGMMA
#undef FXFUSE_SUMS_64
#undef FXFUSE_SUMS_48
#undef FXFUSE_SUMS_32
#undef FXFUSE_NAMES_64
#undef FXFUSE_NAMES_48
#undef FXFUSE_NAMES_32

}  // namespace fxfuse::ptx
