// Halves, as the CPU's compiler has them.
#pragma once

#include "cuda_runtime.h"

struct __half {
    _Float16 value;
};
struct __half2 {
    __half x, y;
};

inline float __half2float(__half value) { return static_cast<float>(value.value); }
inline __half __float2half_rn(float value) { return {static_cast<_Float16>(value)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float __low2float(__half2 value) { return __half2float(value.x); }
inline float __high2float(__half2 value) { return __half2float(value.y); }
inline __half2 __hadd2(__half2 a, __half2 b) {
    return __floats2half2_rn(__half2float(a.x) + __half2float(b.x), __half2float(a.y) + __half2float(b.y));
}
