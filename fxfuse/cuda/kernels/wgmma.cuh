// Hopper's warpgroup products by precision, shared by the convolution and the GEMM that use them.
#pragma once

#include "mma.cuh"
#include "ptx_sm90.cuh"

namespace fxfuse {

constexpr int kWarpgroup = 128;  // threads

// Starts d = a * b + d, or d = a * b unless `adds` (ptx_sm90.cuh). kTurnedA, kTurnedB: the rows of a, or b, are of one
// k each (MN-major).
template <int kSums, class Matrix>
__device__ __forceinline__ void start_product(Tf32, float (&d)[kSums], Matrix a, Matrix b, bool adds) {
    ptx::wgmma_tf32(d, a, b, adds);
}
template <bool kTurnedA = false, bool kTurnedB = false, int kSums, class Matrix>
__device__ __forceinline__ void start_product(Fp16, float (&d)[kSums], Matrix a, Matrix b, bool adds) {
    ptx::wgmma_f16<kTurnedA, kTurnedB>(d, a, b, adds);
}
template <bool kTurnedA = false, bool kTurnedB = false, int kSums, class Matrix>
__device__ __forceinline__ void start_product(Bf16, float (&d)[kSums], Matrix a, Matrix b, bool adds) {
    ptx::wgmma_bf16<kTurnedA, kTurnedB>(d, a, b, adds);
}

}  // namespace fxfuse
