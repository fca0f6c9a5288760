// The 16-bit types as they lie in memory. CUDA's headers for them would take as long to compile as a whole kernel.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace fxfuse {

struct Float16 {
    uint16_t bits;
};

struct BFloat16 {
    uint16_t bits;
};

// __ldg for these types, as CUDA has it for its own types.
using ::__ldg;
__device__ __forceinline__ Float16 __ldg(const Float16* source) { return {ptx::load_read_only_2(source)}; }
__device__ __forceinline__ BFloat16 __ldg(const BFloat16* source) { return {ptx::load_read_only_2(source)}; }

}  // namespace fxfuse
