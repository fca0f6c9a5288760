// Device functions that the op table's C++ text calls: float to float, NaN and infinities as torch has them.
// cpu/kernels/math.h has the same names. CUDA's own functions are within 2 ulp (CUDA C++ Programming Guide, appendix
// "Mathematical Functions"); the ones it lacks are composed here. None of the often used ones branches: a branch keeps
// the work on neighbouring elements from overlapping.
//
// Some exist several times, and generated sources say which they use:
//
//     math_float                  for results of float
//     math_tf32                   for float from products of TF32, whose operands are rounded to 2^-11: error <= 2^-17
//     math_half, math_bfloat16    for results of these types: error <= an eighth of the result's ulp
//
// tests/test_cuda_math.py measures them:
//
//     float   sigmoid 2.0 ulp, silu 2.4, mish 3.9, gelu 2.4 and gelu_tanh 2.5 for x > -1, tanhshrink 4.3, the others 2.5
#pragma once

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
__device__ __forceinline__ float log(float x) { return logf(x); }
__device__ __forceinline__ float log1p(float x) { return log1pf(x); }
__device__ __forceinline__ float sin(float x) { return sinf(x); }
__device__ __forceinline__ float cos(float x) { return cosf(x); }
__device__ __forceinline__ float erf(float x) { return erff(x); }
__device__ __forceinline__ float floor(float x) { return floorf(x); }
__device__ __forceinline__ float ceil(float x) { return ceilf(x); }
__device__ __forceinline__ float trunc(float x) { return truncf(x); }
__device__ __forceinline__ float round_half_to_even(float x) { return rintf(x); }

// a / b, within 2 ulp for |b| from 2^-126 to 2^126. For larger |b| it is 0: there a sigmoid is 0 or subnormal.
__device__ __forceinline__ float divide(float a, float b) { return a * ptx::reciprocal(b); }

__device__ __forceinline__ float round_to_half(float x) { return ptx::cvt_f32_f16(ptx::cvt_rn_f16(x)); }
__device__ __forceinline__ float round_to_bfloat16(float x) { return ptx::cvt_f32_bf16(ptx::cvt_rn_bf16(x)); }

namespace detail {

constexpr float kLog2E = 1.44269504f;

// coefficients[0] + coefficients[1] * x + … Comments above its uses name the approximated function, the interval and
// the error.
template <int kCount>
__device__ __forceinline__ float polynomial(float x, const float (&coefficients)[kCount]) {
    float sum = coefficients[kCount - 1];
#pragma unroll
    for (int i = kCount - 2; i >= 0; --i) sum = fmaf(sum, x, coefficients[i]);
    return sum;
}

// exp(x) for x on [-87, 88], within 1 ulp; CUDA's is within 2. By Cody and Waite: exp(x) = 2^n exp(r), |r| <= ln(2) / 2.
__device__ __forceinline__ float exp_within_87(float x) {
    constexpr float kToInteger = 0x1.8p23f;  // adding it rounds to an integer, which stands in the sum's last bits
    const float shifted = fmaf(x, kLog2E, kToInteger), n = shifted - kToInteger;
    const float r = fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, x));
    // (exp(r) - 1 - r) / r^2: 2^-23, a sixteenth of which is left in the result
    const float tail = polynomial(r, {0.5f, 0.16666576f, 0.041666854f, 0.0083633f, 0.0013901347f});
    const float scale = __int_as_float((__float_as_int(shifted) << 23) + 0x3f800000);
    return fmaf(fmaf(tail, r, 1.0f), r, 1.0f) * scale;
}

// a / b for the same b as divide(), almost correctly rounded.
__device__ __forceinline__ float divide_exactly(float a, float b) {
    const float inverse = ptx::reciprocal(b), quotient = a * inverse;
    return fmaf(fmaf(-quotient, b, a), inverse, quotient);
}

// x - tanh(x), given tanh(x). For small x the digits cancel: there a polynomial is used.
__device__ __forceinline__ float tanhshrink(float x, float tanh) {
    const float square = x * x;
    // (x - tanh(x)) / x^3 on [0, 1.2]: 2^-23
    const float small =
        x * square * polynomial(square, {0.33333331f, -0.13333119f, 0.05393757f, -0.021697937f, 0.0083767930f,
                                         -0.0028018160f, 0.00066804671f, -0.000078909106f});
    return fabsf(x) < 1.2f ? small : x - tanh;
}

// exp(-x^2 / 2), given x^2. Rounding x^2 has the effect of an error of x by a quarter ulp.
__device__ __forceinline__ float bell(float square) { return ptx::exp2(-0.5f * kLog2E * square); }

// The part of a standard normal distribution below x, given the part above |x|.
__device__ __forceinline__ float below(float x, float above) { return x > 0.0f ? 1.0f - above : above; }

// 2 u of gelu_tanh(x) = x (1 + tanh(u)) / 2 = x sigmoid(2 u).
__device__ __forceinline__ float gelu_tanh_argument(float x) {
    return 1.59576912f * fmaf(0.044715f * x * x, x, x);
}

}  // namespace detail

namespace math_float {

__device__ __forceinline__ float exp(float x) { return expf(x); }
__device__ __forceinline__ float expm1(float x) { return expm1f(x); }

// x / c for a c that is the same for many x (a number in the source, or a sum of a row), with c and 1 / c normal. The
// inverse is computed once. The result is correctly rounded (Markstein 1990)
// where |x| is at least 2^-100 and the quotient normal, else an ulp off. IEEE division would branch.
__device__ __forceinline__ float divide_by_constant(float x, float c) {
    const float inverse = 1.0f / c, quotient = x * inverse;
    const float nearest = fmaf(fmaf(-quotient, c, x), inverse, quotient);
    return fabsf(quotient) < infinity() ? nearest : quotient;
}

// Returns 0 below -87.3, where the sigmoid is subnormal.
__device__ __forceinline__ float sigmoid(float x) {
    return detail::divide_exactly(1.0f, 1.0f + detail::exp_within_87(maximum(minimum(-x, 88.0f), -87.0f)));
}

// x * tanh(log(1 + e)) with e = exp(x) is x * n / (n + 2) with n = e * (e + 2). From x = 20 on the quotient is 1. The
// result is 0 below -87.
__device__ __forceinline__ float mish(float x) {
    const float e = x < -87.0f ? 0.0f : detail::exp_within_87(minimum(x, 20.0f)), n = e * (e + 2.0f);
    return x * detail::divide_exactly(n, n + 2.0f);
}

__device__ __forceinline__ float tanh(float x) {
    const float square = x * x;
    // (1 - tanh(x) / x) / x^2 on [0, 0.6]: 2^-23
    const float small = fmaf(
        -x * square,
        detail::polynomial(square, {0.33333331f, -0.13332915f, 0.053873982f, -0.021111101f, 0.0062693157f}), x);
    const float large = fmaf(-2.0f, ptx::reciprocal(expf(2.0f * fabsf(x)) + 1.0f), 1.0f);
    return fabsf(x) < 0.55f ? small : copysignf(large, x);
}

// x * Phi(x). Computed as 0.5 * (1 + erf(x / sqrt(2))), Phi would lose all digits below x = -5.
__device__ __forceinline__ float gelu(float x) {
    const float square = x * x;
    // ((Phi(x) - 0.5) / x - 1 / sqrt(2 pi)) / x^2 on [0, 1.3]: 2^-22, a fifth of which is left in Phi
    const float middle =
        fmaf(x * square,
             detail::polynomial(square, {-0.066490367f, 0.0099731283f, -0.0011853083f, 0.00011204252f, -7.0412366e-6f}),
             fmaf(x, 0.39894228f, 0.5f));
    // (1 - Phi(x)) * exp(x^2 / 2) / t as a polynomial in t - 0.4, for x on [1.1, 14.2]: 2^-24
    const float t = ptx::reciprocal(fmaf(0.45f, fabsf(x), 1.0f));
    const float tail = detail::bell(square) * t *
                       detail::polynomial(t - 0.4f, {0.27746329f, 0.3129825f, 0.16056901f, -0.069998182f, -0.10645028f,
                                                     0.056865171f, 0.072043449f, -0.067090809f});
    return x * (fabsf(x) < 1.25f ? middle : detail::below(x, tail));
}

__device__ __forceinline__ float tanhshrink(float x) { return detail::tanhshrink(x, tanh(x)); }

__device__ __forceinline__ float gelu_tanh(float x) { return x * sigmoid(detail::gelu_tanh_argument(x)); }

}  // namespace math_float

namespace math_half {

// As torch divides by a number on CUDA: at most an ulp off.
__device__ __forceinline__ float divide_by_constant(float x, float c) { return x * (1.0f / c); }

// Relative error |x| * 2^-24; results below 2^-126 are 0.
__device__ __forceinline__ float exp(float x) { return ptx::exp2(x * detail::kLog2E); }
__device__ __forceinline__ float sigmoid(float x) { return ptx::reciprocal(1.0f + exp(-x)); }

__device__ __forceinline__ float mish(float x) {
    const float e = exp(minimum(x, 20.0f)), n = e * (e + 2.0f);
    return x * divide(n, n + 2.0f);
}

__device__ __forceinline__ float expm1(float x) {
    const float small = x * detail::polynomial(x, {1.0f, 0.5f, 0.16666667f, 0.041666668f});
    return fabsf(x) < 0.25f ? small : exp(x) - 1.0f;
}

__device__ __forceinline__ float tanh(float x) {
    const float large = fmaf(-2.0f, ptx::reciprocal(exp(2.0f * x) + 1.0f), 1.0f);
    return fabsf(x) < 0.125f ? fmaf(x * x, -0.33333334f * x, x) : large;
}

__device__ __forceinline__ float tanhshrink(float x) { return detail::tanhshrink(x, tanh(x)); }

// As in math_float; (1 - Phi(x)) * exp(x^2 / 2) / t for x on [0, 14.2]: 2^-17
__device__ __forceinline__ float gelu(float x) {
    const float t = ptx::reciprocal(fmaf(0.3f, fabsf(x), 1.0f));
    const float tail =
        detail::bell(x * x) * t *
        detail::polynomial(t, {0.12006737f, 0.11381545f, 0.1439034f, -0.016401887f, 0.21555738f, -0.076937422f});
    return x * detail::below(x, tail);
}

__device__ __forceinline__ float gelu_tanh(float x) { return x * sigmoid(detail::gelu_tanh_argument(x)); }

}  // namespace math_half

namespace math_tf32 {

using math_float::exp;
using math_float::expm1;
using math_float::tanh;
using math_float::tanhshrink;
using math_half::divide_by_constant;
using math_half::gelu_tanh;
using math_half::mish;
using math_half::sigmoid;

// As in math_float; (1 - Phi(x)) * exp(x^2 / 2) / t for x on [0, 14.2]: 2^-19
__device__ __forceinline__ float gelu(float x) {
    const float t = ptx::reciprocal(fmaf(0.35f, fabsf(x), 1.0f));
    const float tail = detail::polynomial(t, {0.13976254f, 0.13713856f, 0.14131688f, 0.014863409f, 0.20141348f,
                                              -0.17674085f, 0.042245153f}) *
                       t * detail::bell(x * x);
    return x * detail::below(x, tail);
}

}  // namespace math_tf32

namespace math_bfloat16 {

using math_half::divide_by_constant;
using math_half::exp;
using math_half::expm1;
using math_half::gelu;
using math_half::gelu_tanh;
using math_half::mish;
using math_half::sigmoid;
using math_half::tanhshrink;

__device__ __forceinline__ float tanh(float x) { return ptx::tanh(x); }

}  // namespace math_bfloat16

}  // namespace fxfuse
