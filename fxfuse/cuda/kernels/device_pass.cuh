// What every kernel's body stands in.
#pragma once

namespace fxfuse {

// Until all that was queued before this kernel has ended (launch.cuh): first of all, and in every block, since the next
// kernel waits for this one only. The next one's blocks come when this one's have gone: told earlier that they may
// (griddepcontrol.launch_dependents), they hold what this kernel's own later blocks need.
__device__ __forceinline__ void wait_for_predecessors() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
    // ptxas moves loads of what nothing writes (ld.global.nc) before the wait, but not before a branch.
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0;\n@p exit;\n}\n" ::"r"(gridDim.x) : "memory");
#endif
}

}  // namespace fxfuse

// Only nvcc's passes for the device compile bodies. The pass for the host needs kernels' signatures, and would spend as
// long on what they instantiate as it does on all the rest.
#if defined(__CUDA_ARCH__) || !defined(__CUDACC__)
#define FXFUSE_DEVICE_PASS(...)      \
    fxfuse::wait_for_predecessors(); \
    __VA_ARGS__
#else
#define FXFUSE_DEVICE_PASS(...)
#endif
