// What only nvcc's passes for the device compile. The pass for the host needs kernels' signatures, and would spend as long
// on what they instantiate as it does on all the rest.
#pragma once

#if defined(__CUDA_ARCH__) || !defined(__CUDACC__)
#define FXFUSE_DEVICE_PASS(...) __VA_ARGS__
#else
#define FXFUSE_DEVICE_PASS(...)
#endif
