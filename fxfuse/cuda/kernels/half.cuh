// The 16-bit types, those that the source uses: CUDA's two headers take a kernel half a second more to compile.
// cuda/codegen.py defines FXFUSE_FP16 and FXFUSE_BF16.
#pragma once

#ifdef FXFUSE_FP16
#include <cuda_fp16.h>
#else
struct __half;
struct __half2;
#endif

#ifdef FXFUSE_BF16
#include <cuda_bf16.h>
#else
struct __nv_bfloat16;
struct __nv_bfloat162;
#endif
