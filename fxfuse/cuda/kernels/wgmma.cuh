// Hopper's warpgroups and their products by precision: what the convolution and the matrix product that use them share.
#pragma once

#include "mma.cuh"
#include "ptx_sm90.cuh"

namespace fxfuse {

constexpr int kWarpgroup = 128;  // threads

// Starts d = a * b + d, or a * b unless `adds` (ptx_sm90.cuh). kTurned: of operands whose rows are of one k each.
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
