// Division by a number that only the host knows beforehand.
#pragma once

#include <cstdint>

namespace fxfuse {

// Divides numbers below 2^31 by a multiplication and a shift: Granlund & Montgomery 1994, "Division by invariant
// integers using multiplication", figure 4.1.
struct FastDivisor {
    unsigned divisor, multiplier, shift;

    FastDivisor() = default;
    explicit FastDivisor(unsigned by) : divisor(by), shift(0) {
        while ((uint64_t{1} << shift) < by) ++shift;
        multiplier = static_cast<unsigned>((uint64_t{1} << 32) * ((uint64_t{1} << shift) - by) / by + 1);
    }

    __device__ __forceinline__ unsigned divide(unsigned n) const { return (__umulhi(n, multiplier) + n) >> shift; }

    // Takes the last digit of `number` in this radix; `number` keeps the other digits.
    __device__ __forceinline__ unsigned take(unsigned& number) const {
        const unsigned rest = divide(number), digit = number - rest * divisor;
        number = rest;
        return digit;
    }
};

}  // namespace fxfuse
