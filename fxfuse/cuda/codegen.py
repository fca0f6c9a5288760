"""A region's CUDA source: the epilogue as a functor, and the kernel template it is compiled into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from fxfuse.codegen import INTEGER_TYPES, OperandKind, function, operand_type
from fxfuse.cuda.kernel import Kernel
from fxfuse.expression import Expr

CPP_TYPES: Final = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    **INTEGER_TYPES,
}

_TEMPLATE: Final = """\
#include "{header}"
#include "math.cuh"

namespace fxfuse {{

struct Epilogue {{
{members}
    static constexpr bool kUsesBatch = {uses_batch};

{make}

{function}

    // Accumulators in, results out: kVector consecutive columns from `at`, `count` of which exist.
    template <int kVector, class At>
    __device__ __forceinline__ void apply(float (&value)[kVector], const At& at, int count) const {{
{loads}
#pragma unroll
        for (int i = 0; i < kVector; ++i) value[i] = expression({arguments});
    }}
}};

using Kernel = {kernel};

}}  // namespace fxfuse
"""

_LAUNCH: Final = """
#ifndef __CUDACC_RTC__
extern "C" int fxfuse_launch(const void* params, const uint64_t* pointers, uint64_t stream) {
    using fxfuse::Kernel;
    const auto* problem = static_cast<const Kernel::Problem*>(params);
    const auto* strides = reinterpret_cast<const fxfuse::OperandStrides*>(problem + 1);
    const auto epilogue = fxfuse::Epilogue::make(pointers + Kernel::kTensors, strides);
    return Kernel::launch(*problem, pointers, epilogue, reinterpret_cast<cudaStream_t>(stream));
}

extern "C" const char* fxfuse_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
#endif
"""


def generate(
    expression: Expr, output: torch.dtype, operands: Sequence[OperandKind], kernel: Kernel, uses_batch: bool = True
) -> str:
    """The complete source for `expression` in `kernel`, writing `output`.

    Operand i of the expression is read as `operands[i]` says. The kernel's arguments are its Problem struct followed
    by three int64 strides per operand, its tensors' pointers followed by the operands'. `uses_batch`: whether operands
    tell rows of one batch from the same rows of another; if not, a GEMM numbers rows through all batches.
    """
    members = "\n".join(f"    {operand_type(kind, CPP_TYPES)} operand{i};" for i, kind in enumerate(operands))
    values = ", ".join(f"decltype(operand{i})::make(pointers[{i}], strides[{i}])" for i in range(len(operands)))
    pointers, strides = ("pointers", "strides") if operands else ("", "")
    make = (
        f"    static Epilogue make(const uint64_t* {pointers}, const OperandStrides* {strides}) {{\n"
        f"        return {{{values}}};\n    }}"
    )
    loads = "\n".join(
        f"        float o{i}[kVector];\n        operand{i}.load(o{i}, at, count);" for i in range(len(operands))
    )
    source = _TEMPLATE.format(
        header=kernel.header,
        members=members,
        uses_batch="true" if uses_batch else "false",
        make=make,
        function=function(expression, len(operands), "static __device__ __forceinline__"),
        loads=loads,
        arguments=", ".join(["value[i]", *(f"o{i}[i]" for i in range(len(operands)))]),
        kernel=kernel.type.format(output=CPP_TYPES[output], epilogue="Epilogue"),
    )
    return source + _LAUNCH
