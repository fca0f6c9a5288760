// The functions that the op table's C++ text calls, on the device: float to float, NaN and infinities as torch has them.
// cpu/kernels/math.h has the same names. CUDA's own functions are within 2 ulp (CUDA C++ Programming Guide, appendix
// "Mathematical Functions"); the ones it lacks are composed here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx.cuh"

namespace fxfuse {

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

__device__ __forceinline__ float minimum(float a, float b) { return ptx::min_nan(a, b); }
__device__ __forceinline__ float maximum(float a, float b) { return ptx::max_nan(a, b); }

__device__ __forceinline__ float abs(float x) { return fabsf(x); }
__device__ __forceinline__ float sqrt(float x) { return sqrtf(x); }
__device__ __forceinline__ float rsqrt(float x) { return rsqrtf(x); }
__device__ __forceinline__ float pow(float x, float y) { return powf(x, y); }
__device__ __forceinline__ float exp(float x) { return expf(x); }
__device__ __forceinline__ float expm1(float x) { return expm1f(x); }
__device__ __forceinline__ float log(float x) { return logf(x); }
__device__ __forceinline__ float log1p(float x) { return log1pf(x); }
__device__ __forceinline__ float sin(float x) { return sinf(x); }
__device__ __forceinline__ float cos(float x) { return cosf(x); }
__device__ __forceinline__ float tanh(float x) { return tanhf(x); }
__device__ __forceinline__ float erf(float x) { return erff(x); }

// IEEE division has a slow path, and the branch to it keeps neighbouring elements from overlapping. This one is within
// 2 ulp for |b| from 2^-126 to 2^126 and gives 0 beyond, where a sigmoid is 0 or subnormal.
__device__ __forceinline__ float divide(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ float sigmoid(float x) { return divide(1.0f, 1.0f + expf(-x)); }

__device__ __forceinline__ float round_to_half(float x) { return __half2float(__float2half_rn(x)); }
__device__ __forceinline__ float round_to_bfloat16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

}  // namespace fxfuse
