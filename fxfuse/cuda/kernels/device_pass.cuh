// FXFUSE_DEVICE_PASS, which surrounds the body of every kernel.
#pragma once

namespace fxfuse {

// Waits until all that was queued before this kernel has ended (launch.cuh). Every block calls it first, because the
// next kernel waits for this one only. The next kernel's blocks start when this kernel's blocks have ended. If they
// were allowed to start earlier (griddepcontrol.launch_dependents), they would hold what this kernel's own later blocks
// need.
__device__ __forceinline__ void wait_for_predecessors() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
    // ptxas moves read-only loads (ld.global.nc) before the wait, but not before a branch.
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0;\n@p exit;\n}\n" ::"r"(gridDim.x) : "memory");
#endif
}

}  // namespace fxfuse

// Only nvcc's passes for the device compile bodies. The pass for the host needs just the kernels' signatures. The
// templates that bodies instantiate would take it as long as all the rest.
#if defined(__CUDA_ARCH__) || !defined(__CUDACC__)
#define FXFUSE_DEVICE_PASS(...)      \
    fxfuse::wait_for_predecessors(); \
    __VA_ARGS__
#else
#define FXFUSE_DEVICE_PASS(...)
#endif
