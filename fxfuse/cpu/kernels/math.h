// Elementary functions on float, written for the compiler's vectoriser.
//
// Each function is branch-free straight-line code on one float: inside a `#pragma omp simd` loop the compiler turns it
// into vector code, which a call into libm would prevent. No flag that weakens NaN or infinity is needed, only
// -fno-math-errno and -fno-trapping-math. The compiler must not contract a * b + c by itself (-ffp-contract=off): where
// a fused multiply-add is meant, the code calls multiply_add. (g++'s -ftree-pre should be off, too: it shares truth
// values between branches, and a loop that keeps one across a branch is not vectorised.)
//
// Results are as torch's: NaN and infinities in the same places, signed zeros and denormals kept. Errors against the
// exact value, in units in the last place over all floats (pow: sampled), with fused multiply-add:
//     exp 1.0   expm1 1.5   log 0.9   log1p 1.5   tanh 1.4   sigmoid 2.5   erf 1.5   sin 1.6   cos 1.6   pow 0.6
//
// The polynomials are minimax fits of the functions named beside them (iteratively reweighted least squares on a
// Chebyshev grid, weighted by the relative error of the result; coefficients rounded to float one by one, refitting
// the rest). `2^-k` beside them is the fit's largest relative error.
#pragma once

#include <cstdint>
#include <cstring>

// Always inlined, whatever its size: one call left in a loop makes the loop scalar.
#define FXFUSE_INLINE [[gnu::always_inline]] inline

namespace fxfuse {

// ------------------------------------------------------------------------------------------------ tools

FXFUSE_INLINE float infinity() { return __builtin_inff(); }
FXFUSE_INLINE float not_a_number() { return __builtin_nanf(""); }

// a / b for |b| from 2^-126 to 2^126; on the GPU this is faster than general division.
FXFUSE_INLINE float divide(float a, float b) { return a / b; }
FXFUSE_INLINE float divide_by_constant(float a, float b) { return a / b; }

namespace detail {

template <class To, class From>
FXFUSE_INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

FXFUSE_INLINE uint32_t bits(float x) { return bit_cast<uint32_t>(x); }
FXFUSE_INLINE float from_bits(uint32_t x) { return bit_cast<float>(x); }

constexpr uint32_t kSignBit = 0x80000000u;
constexpr uint32_t kOneBits = 0x3f800000u;  // 1.0f
constexpr uint32_t kSqrtHalfBits = 0x3f3504f3u;  // sqrt(1/2)
constexpr int kMantissaBits = 23;
constexpr uint32_t kExponentBias = 127;
constexpr float kSmallestNormal = 0x1p-126f;

// a * b + c with one rounding where the machine has the instruction; elsewhere fma() is a slow libm call.
FXFUSE_INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

FXFUSE_INLINE double multiply_add(double a, double b, double c) {
#if defined(__FMA__) || defined(__FP_FAST_FMA) || defined(__ARM_FEATURE_FMA)
    return __builtin_fma(a, b, c);
#else
    return a * b + c;
#endif
}

// Coefficients from the highest power to the lowest (Horner's scheme).
template <class Real>
FXFUSE_INLINE Real polynomial(Real, Real c) {
    return c;
}
template <class Real, class... Rest>
FXFUSE_INLINE Real polynomial(Real x, Real c1, Real c0, Rest... rest) {
    return polynomial(x, multiply_add(c1, x, c0), rest...);
}

FXFUSE_INLINE float magnitude(float x) { return from_bits(bits(x) & ~kSignBit); }
FXFUSE_INLINE float with_sign_of(float value, float sign) {
    return from_bits((bits(value) & ~kSignBit) | (bits(sign) & kSignBit));
}

// Bounds that let NaN through.
FXFUSE_INLINE float at_most(float x, float bound) { return x > bound ? bound : x; }
FXFUSE_INLINE float at_least(float x, float bound) { return x < bound ? bound : x; }

// 2^n for -126 <= n <= 127.
FXFUSE_INLINE float power_of_two(int32_t n) {
    return from_bits((static_cast<uint32_t>(n) + kExponentBias) << kMantissaBits);
}

// Added to a number below 2^22, this rounds it to an integer, and the low bits of the sum are that integer.
constexpr float kToInteger = 0x1.8p23f;
FXFUSE_INLINE int32_t rounded_integer(float shifted) { return static_cast<int32_t>(bits(shifted) - bits(kToInteger)); }

// exp(x) = 2^exponent * (1 + excess), |excess| < 0.42, for |x| < 2^20; NaN gives excess NaN.
struct ExpParts {
    int32_t exponent;
    float excess;
};

FXFUSE_INLINE ExpParts split_exp(float x) {
    constexpr float kLog2E = 1.442695041f;
    // ln 2 in two parts: the first has 15 bits, so that its product with an exponent is exact.
    constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 1.4286068e-06f;
    const float shifted = multiply_add(x, kLog2E, kToInteger);
    const float n = shifted - kToInteger;
    const float r = multiply_add(n, -kLn2Low, multiply_add(n, -kLn2High, x));
    // (expm1(r) - r) / r^2 on |r| <= ln(2) / 2: 2^-31
    const float tail = polynomial(r, 0x1.9e6ef4p-13f, 0x1.6d3a3ap-10f, 0x1.1112dap-7f, 0x1.5554f8p-5f, 0x1.555554p-3f,
                                  0.5f);
    return {rounded_integer(shifted), multiply_add(r * r, tail, r)};
}

// x = 2^exponent * mantissa with sqrt(1/2) <= mantissa < sqrt(2), for finite x > 0, denormals included.
struct LogParts {
    int32_t exponent;
    float mantissa;
};

FXFUSE_INLINE LogParts split_log(float x) {
    const bool denormal = x < kSmallestNormal;
    const uint32_t scaled = bits(denormal ? x * 0x1p23f : x);
    const int32_t exponent = static_cast<int32_t>(scaled - kSqrtHalfBits) >> kMantissaBits;
    return {exponent - (denormal ? 23 : 0), from_bits(scaled - (static_cast<uint32_t>(exponent) << kMantissaBits))};
}

// log(2^exponent * (1 + f)), sqrt(1/2) <= 1 + f < sqrt(2).
FXFUSE_INLINE float join_log(int32_t exponent, float f) {
    constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 1.4286068e-06f;
    const float e = static_cast<float>(exponent);
    const float f2 = f * f;
    // (log(1 + f) - f + f^2 / 2) / f^3: 2^-27
    float y = polynomial(f, -0x1.38c9d4p-4f, 0x1.055ec4p-3f, -0x1.0d8242p-3f, 0x1.22d92ep-3f, -0x1.54728ap-3f,
                         0x1.99a01cp-3f, -0x1.000226p-2f, 0x1.555554p-2f);
    y = multiply_add(e, kLn2Low, f * f2 * y);
    y = f + multiply_add(-0.5f, f2, y);
    return multiply_add(e, kLn2High, y);
}

// The logarithm `y` of argument x (shifted so that its pole is 0), corrected where it does not hold: if x is zero,
// negative, infinity or NaN.
FXFUSE_INLINE float log_limits(float y, float x) {
    y = x < infinity() ? y : x;  // infinity and NaN
    y = x < 0.0f ? not_a_number() : y;
    return x == 0.0f ? -infinity() : y;
}

// |x| = (quadrant + 4k) * pi/2 + remainder, |remainder| < 0.82; quadrant modulo 4. For finite |x| >= 0.5.
struct QuarterTurns {
    uint32_t quadrant;
    float remainder;
};

// Payne and Hanek's reduction. The product |x| * 2/pi leaves out the bits of 2/pi that contribute whole turns, and
// those that contribute less than the result's precision. So all floats up to the largest come out right.
FXFUSE_INLINE QuarterTurns reduce_angle(float x) {
    // 2/pi in words of 32 bits, with 32 zero bits in front
    constexpr uint32_t kTwoOverPi[] = {0,          0xa2f9836e, 0x4e441529, 0xfc2757d1,
                                       0xf534ddc0, 0xdb629599, 0x3c439041, 0xfe5163ab};
    const uint32_t u = bits(x) & ~kSignBit;
    const uint32_t mantissa = (u & 0x7fffffu) | 0x800000u;
    // |x| = mantissa * 2^(biased - 150); bit p of the words, counted from 0, then has the weight mantissa * 2.
    const uint32_t p = (u >> kMantissaBits) - 120;
    const uint32_t word = p >> 5, shift = p & 31;
    uint32_t w[4];  // four words from `word` on, by selection: a gather would be slower
    for (int i = 0; i < 4; ++i) {
        const uint32_t low = word == 1 ? kTwoOverPi[i + 1] : kTwoOverPi[i];
        const uint32_t middle = word == 2 ? kTwoOverPi[i + 2] : low;
        const uint32_t high = word == 3 ? kTwoOverPi[i + 3] : middle;
        w[i] = word == 4 ? kTwoOverPi[i + 4] : high;
    }
    const auto window = [shift](uint32_t first, uint32_t second) {
        return first << shift | (second >> 1) >> (31 - shift);
    };
    // In units of 2^-30 quarter turns; the multiplication overflows by whole turns.
    const uint32_t top = mantissa * window(w[0], w[1]);
    const double fraction = static_cast<double>(window(w[1], w[2])) * 0x1p-32 +
                            static_cast<double>(window(w[2], w[3])) * 0x1p-64;
    const double low = static_cast<double>(mantissa) * fraction;
    const uint32_t quadrant = (top + 0x20000000u) >> 30;
    const double turns = static_cast<double>(static_cast<int32_t>(top - (quadrant << 30))) + low;
    return {quadrant, static_cast<float>(turns * 0x1.921fb54442d18p-30)};  // pi/2 * 2^-30
}

// sin(|x| + quarters * pi/2)
FXFUSE_INLINE float sin_of_magnitude(float x, uint32_t quarters) {
    const QuarterTurns far = reduce_angle(x);
    const float a = magnitude(x);
    const bool near = a < 0.5f;
    const float r = near ? a : far.remainder;
    const uint32_t quadrant = (near ? 0 : far.quadrant) + quarters;
    const float r2 = r * r;
    // (sin(r) / r - 1) / r^2: 2^-27.  (cos(r) - 1 + r^2 / 2) / r^4: 2^-32
    const float sine = multiply_add(r * r2, polynomial(r2, -0x1.98d74p-13f, 0x1.1105fap-7f, -0x1.555542p-3f), r);
    const float cosine = multiply_add(r2 * r2, polynomial(r2, 0x1.998d64p-16f, -0x1.6c0aecp-10f, 0x1.555548p-5f),
                                      multiply_add(r2, -0.5f, 1.0f));
    const float value = from_bits(bits(quadrant & 1 ? cosine : sine) ^ (quadrant & 2) << 30);
    return a < infinity() ? value : not_a_number();
}

}  // namespace detail

// ------------------------------------------------------------------------------- choice and square roots

FXFUSE_INLINE float abs(float x) { return detail::magnitude(x); }
FXFUSE_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
FXFUSE_INLINE float floor(float x) { return __builtin_floorf(x); }
FXFUSE_INLINE float ceil(float x) { return __builtin_ceilf(x); }
FXFUSE_INLINE float trunc(float x) { return __builtin_truncf(x); }
FXFUSE_INLINE float round_half_to_even(float x) { return __builtin_rintf(x); }
FXFUSE_INLINE float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }

// A condition that comes from outside of a loop, as a mask of bits. g++ does not vectorise selections that share a
// truth value; it always vectorises selections by bits.
struct Mask {
    uint32_t bits;
    FXFUSE_INLINE explicit Mask(bool is_true) : bits(is_true ? ~0u : 0u) {}
};
FXFUSE_INLINE float chosen(Mask mask, float a, float b) {
    return detail::from_bits((detail::bits(a) & mask.bits) | (detail::bits(b) & ~mask.bits));
}
FXFUSE_INLINE int32_t chosen(Mask mask, int32_t a, int32_t b) {
    return static_cast<int32_t>((static_cast<uint32_t>(a) & mask.bits) | (static_cast<uint32_t>(b) & ~mask.bits));
}

// NaN if either argument is NaN. The first selection returns a if either is NaN; the second returns b if b is, and
// folds away if b is a literal. (Conditions are not combined here and below: a combined one gives the compiler boolean
// values to share between branches, and its vectoriser gives up on those.)
FXFUSE_INLINE float minimum(float a, float b) {
    const float smaller = b < a ? b : a;
    return b != b ? b : smaller;
}
FXFUSE_INLINE float maximum(float a, float b) {
    const float larger = b > a ? b : a;
    return b != b ? b : larger;
}

// ---------------------------------------------------------------------------------------- exponentials

FXFUSE_INLINE float exp(float x) {
    using namespace detail;
    // beyond these the result is 0 or infinity, and the exponent would not fit
    const auto [n, excess] = split_exp(at_least(at_most(x, 89.0f), -104.0f));
    // in two steps, because 2^n alone may be denormal or overflow when the product does not
    const float half = power_of_two(n >> 1);
    return multiply_add(half, excess, half) * power_of_two(n - (n >> 1));
}

FXFUSE_INLINE float expm1(float x) {
    using namespace detail;
    const auto [n, excess] = split_exp(at_least(at_most(x, 89.0f), -20.0f));
    const float half = power_of_two(n - 1);  // half of 2^n, which may overflow
    const float y = 2.0f * multiply_add(half, excess, half - 0.5f);
    return magnitude(x) < 0x1p-25f ? x : y;  // keeps denormals and -0
}

// 1 / (1 + exp(-x)), numerator and denominator scaled by 2^-24 so that exp(-x) may exceed float's range: at 104 the
// quotient is 0. Adding 1 to the power of two before the excess saves a rounding (here and below).
FXFUSE_INLINE float sigmoid(float x) {
    using namespace detail;
    const auto [n, excess] = split_exp(at_least(at_most(-x, 104.0f), -20.0f));
    const float scale = power_of_two(n - 24);
    return 0x1p-24f / multiply_add(scale, excess, 0x1p-24f + scale);
}

FXFUSE_INLINE float tanh(float x) {
    using namespace detail;
    const float a = magnitude(x);
    const float a2 = a * a;
    // (tanh(a) / a - 1) / a^2 on [0, 0.55]: 2^-29
    const float small_tail = polynomial(a2, -0x1.99565ep-8f, 0x1.58ec78p-6f, -0x1.b91f20p-5f, 0x1.110cf0p-3f,
                                        -0x1.55554ap-2f);
    const float small = multiply_add(a * a2, small_tail, a);
    // 1 - 2 / (exp(2a) + 1); from 10 on this is 1
    const auto [n, excess] = split_exp(2.0f * at_most(a, 10.0f));
    const float scale = power_of_two(n);
    const float large = 1.0f - 2.0f / multiply_add(scale, excess, scale + 1.0f);
    return with_sign_of(a < 0.55f ? small : large, x);
}

FXFUSE_INLINE float erf(float x) {
    using namespace detail;
    const float a = magnitude(x);
    const float a2 = a * a;
    // erf(a) / a - 1 on [0, 0.9]: 2^-30
    const float small_tail = polynomial(a2, 0x1.4d2864p-14f, -0x1.a583bcp-11f, 0x1.543f2ap-8f, -0x1.b80062p-6f,
                                        0x1.ce2d60p-4f, -0x1.812740p-2f, 0x1.06eba8p-3f);
    const float small = multiply_add(a, small_tail, a);
    // 1 - 2^y, y / a = log2(1 - erf(a)) / a on [0.9, 4]: 2^-30 of erf; at 4 erf is 1
    const float t = at_most(a, 4.0f);
    const float y = t * polynomial(t, -0x1.f8eab2p-17f, 0x1.dc462cp-12f, -0x1.555848p-8f, 0x1.1808b2p-5f,
                                   -0x1.39a94cp-3f, -0x1.d53202p-1f, -0x1.a0d6e6p+0f);
    const float shifted = y + kToInteger;
    const float fraction = y - (shifted - kToInteger);
    // (2^f - 1) / f on |f| <= 1/2: 2^-23, of which at most a quarter is left in erf
    const float excess = fraction * polynomial(fraction, 0x1.5bd898p-10f, 0x1.3ce8c0p-7f, 0x1.c6b6dcp-5f,
                                               0x1.ebf9c2p-3f, 0x1.62e42ap-1f);
    const float scale = power_of_two(rounded_integer(shifted));
    const float large = multiply_add(-scale, excess, 1.0f - scale);
    return with_sign_of(a < 0.9f ? small : large, x);
}

FXFUSE_INLINE float tanhshrink(float x) { return x - tanh(x); }

// x * tanh(log(1 + e)) with e = exp(x) is x * n / (n + 2), n = e * (e + 2); at 20 the quotient is 1 in float32.
FXFUSE_INLINE float mish(float x) {
    const float e = exp(minimum(x, 20.0f)), n = e * (e + 2.0f);
    return x * divide(n, n + 2.0f);
}

// For negative x, 1 + erf and 1 + tanh lose the same digits here as in torch.
FXFUSE_INLINE float gelu(float x) { return 0.5f * x * (1.0f + erf(x * 0.70710678f)); }
FXFUSE_INLINE float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tanh(0.79788456f * (x + 0.044715f * (x * x * x))));
}

// ------------------------------------------------------------------------------------------ logarithms

FXFUSE_INLINE float log(float x) {
    using namespace detail;
    const auto [n, mantissa] = split_log(x);
    return log_limits(join_log(n, mantissa - 1.0f), x);
}

FXFUSE_INLINE float log1p(float x) {
    using namespace detail;
    const float sum = 1.0f + x;
    const float lost = x - (sum - 1.0f);  // what rounding took from the sum; 0 where it does not matter
    const auto [n, mantissa] = split_log(sum);
    const float scale = power_of_two(-(n > 126 ? 126 : n));
    const float y = log_limits(join_log(n, multiply_add(lost, scale, mantissa - 1.0f)), sum);
    return magnitude(x) < 0x1p-25f ? x : y;  // keeps denormals and -0
}

// ----------------------------------------------------------------------------------------- trigonometry

FXFUSE_INLINE float sin(float x) {
    const float y = detail::sin_of_magnitude(x, 0);
    return detail::from_bits(detail::bits(y) ^ (detail::bits(x) & detail::kSignBit));
}

FXFUSE_INLINE float cos(float x) { return detail::sin_of_magnitude(x, 1); }

// ------------------------------------------------------------------------------------------------ power

// 2^(y log2 |x|) in double, so that the error of the logarithm, which y multiplies, stays below float's precision.
FXFUSE_INLINE float pow(float x, float y) {
    using namespace detail;
    constexpr double kDoubleToInteger = 0x1.8p52;  // as kToInteger, for double
    constexpr float kLargest = 0x1.fffffep127f;
    const float a = magnitude(x);

    const auto [n, mantissa] = split_log(a);
    const double m = static_cast<double>(mantissa);
    const double s = (m - 1.0) / (m + 1.0);
    // log2((1 + s) / (1 - s)) / s in powers of s^2: 2^-37
    double log2 = multiply_add(s, polynomial(s * s, 0.34073218288178525, 0.4116726120128823, 0.577083586652587,
                                             0.9617966733335234, 2.885390081790092), static_cast<double>(n));
    log2 = a < infinity() ? log2 : static_cast<double>(a);
    log2 = a == 0.0f ? -__builtin_inf() : log2;

    // An infinite exponent is replaced by the largest finite one, which acts the same: inf * log2(1) would be NaN.
    double t = static_cast<double>(at_least(at_most(y, kLargest), -kLargest)) * log2;
    t = t > 129.0 ? 129.0 : t;  // overflows float
    t = t < -151.0 ? -151.0 : t;  // rounds to zero in float
    const double shifted = t + kDoubleToInteger;
    const double fraction = t - (shifted - kDoubleToInteger);
    const uint64_t exponent = bit_cast<uint64_t>(shifted) - bit_cast<uint64_t>(kDoubleToInteger);
    // 2^x on |x| <= 1/2: 2^-29
    const double power = polynomial(fraction, 0.00015345788193843718, 0.0013399957621541968, 0.009618489247217619,
                                    0.05550328711822036, 0.2402264688605499, 0.6931472057671306, 1.0000000005550527);
    float value = static_cast<float>(power * bit_cast<double>((exponent + 1023) << 52));

    // From 2^23 on every float is an integer, from 2^24 on an even one.
    const float b = magnitude(y);
    const float shifted_y = b < 0x1p23f ? b + 0x1p23f : b;  // its lowest bit is that of y's integer part
    const float rounded_y = b < 0x1p23f ? shifted_y - 0x1p23f : b;
    const uint32_t sign_if_odd = b < 0x1p24f ? bits(x) & bits(shifted_y) << 31 : 0;
    const float power_if_negative = a < infinity() ? not_a_number() : value;
    const float power_if_fraction = x < 0.0f ? power_if_negative : value;
    value = rounded_y == b ? from_bits(bits(value) ^ sign_if_odd) : power_if_fraction;
    value = x == 1.0f ? 1.0f : value;
    return y == 0.0f ? 1.0f : value;
}

// ------------------------------------------------------------------------------- 16-bit floating point

namespace detail {

constexpr uint32_t kInfinityBits = 0x7f800000u;

// The upper half of the nearest bfloat16 (ties to even).
FXFUSE_INLINE uint32_t to_bfloat16_bits(float x) {
    const uint32_t u = bits(x);
    const uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1)) >> 16;
    return x == x ? rounded : 0x7fc0u;
}

FXFUSE_INLINE float from_bfloat16_bits(uint32_t h) { return from_bits(h << 16); }

constexpr uint32_t kHalfRebias = (127u - 15u) << kMantissaBits;
constexpr float kHalfSmallestNormal = 0x1p-14f;

// The nearest float16 (ties to even).
FXFUSE_INLINE uint32_t to_half_bits(float x) {
    const uint32_t sign = bits(x) >> 16 & 0x8000u;
    const float a = magnitude(x);
    const uint32_t u = bits(a);
    const uint32_t rounded = (u + 0xfffu + (u >> 13 & 1) - kHalfRebias) >> 13;
    const uint32_t denormal = bits(a + 0.5f) - bits(0.5f);  // 0.5f has denormal half's spacing, 2^-24
    uint32_t h = a < kHalfSmallestNormal ? denormal : rounded;
    h = a >= 65520.0f ? 0x7c00u : h;  // half way between the largest half and the next power of two
    h = a == a ? h : 0x7e00u;
    return sign | h;
}

FXFUSE_INLINE float from_half_bits(uint32_t h) {
    const uint32_t u = (h & 0x7fffu) << 13;
    const uint32_t exponent = u & kInfinityBits;
    const float denormal = static_cast<float>(static_cast<int32_t>(h & 0x3ffu)) * 0x1p-24f;
    uint32_t value = exponent == 0 ? bits(denormal) : u + kHalfRebias;
    value = exponent == 31u << kMantissaBits ? u | kInfinityBits : value;
    return from_bits(value | (h & 0x8000u) << 16);
}

}  // namespace detail

FXFUSE_INLINE float round_to_half(float x) { return detail::from_half_bits(detail::to_half_bits(x)); }
FXFUSE_INLINE float round_to_bfloat16(float x) { return detail::from_bfloat16_bits(detail::to_bfloat16_bits(x)); }

}  // namespace fxfuse
