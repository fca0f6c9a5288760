// bfloat16: the upper half of a float.
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
    uint16_t bits;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 value) { return __uint_as_float(uint32_t{value.bits} << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    const uint32_t bits = __float_as_uint(value);
    if (value != value) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return __floats2bfloat162_rn(__bfloat162float(a.x) + __bfloat162float(b.x),
                                 __bfloat162float(a.y) + __bfloat162float(b.y));
}
