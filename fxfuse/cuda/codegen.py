"""The CUDA source of a region: the epilogue as a functor, and the kernel template that is instantiated with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from fxfuse.codegen import INTEGER_TYPES, OperandKind, function, operand_type
from fxfuse.cuda.kernel import Kernel
from fxfuse.expression import Call, Expr, operand_count, postorder

CPP_TYPES: Final = {
    torch.float32: "float",
    torch.float16: "Float16",
    torch.bfloat16: "BFloat16",
    **INTEGER_TYPES,
}

MOVED_TYPES: Final = {**CPP_TYPES, torch.float64: "double"}
"""Those that kernels of loops read and write: they only move float64."""

_TEMPLATE: Final = """\
#include "{header}"
#include "math.cuh"

namespace fxfuse::fxfuse_kernel {{

using namespace {functions};

struct Epilogue {{
{members}
    static constexpr bool kUsesBatch = {uses_batch};
    static constexpr int kOperands = {operands};
    static constexpr int kColumns = {columns};
    static constexpr int kElementBytes = {element_bytes};  // that an element reads of operands which vary like it
    static constexpr bool kVariesAlongCols = {varies_along_cols};  // whether any operand does

{make}

{function}

    // What the operands hold at a run of kVector columns: those that are the same in all rows, and the others.
    template <int kVector, class At>
    struct ColumnValues {{
{column_values}
    }};
    template <int kVector, class At>
    struct RowValues {{
{row_values}
    }};
    template <int kVector, class At>
    struct Values {{
        ColumnValues<kVector, At> columns;
        RowValues<kVector, At> rows;
    }};

    template <Runs kRuns, int kVector, class At>
    __device__ __forceinline__ ColumnValues<kVector, At> load_columns({column_at}, {column_count}) const {{
        return {{{column_loads}}};
    }}
    template <Runs kRuns, int kVector, class At>
    __device__ __forceinline__ RowValues<kVector, At> load_rows({row_at}, {row_count}) const {{
        return {{{row_loads}}};
    }}
    template <Runs kRuns, int kVector, class At>
    __device__ __forceinline__ Values<kVector, At> load(const At& at, int count) const {{
        return {{load_columns<kRuns, kVector>(at, count), load_rows<kRuns, kVector>(at, count)}};
    }}

    // Accumulators in, results out.
    template <int kVector, class At>
    __device__ __forceinline__ void apply({sums}, const ColumnValues<kVector, At>& {columns_name},
                                          const RowValues<kVector, At>& {rows_name}) const {{
#pragma unroll
        for (int i = 0; i < kVector; ++i) value[i] = expression({arguments});
    }}
    template <int kVector, class At>
    __device__ __forceinline__ void apply(float (&value)[kVector], const Values<kVector, At>& operands) const {{
        apply(value, operands.columns, operands.rows);
    }}

    // The same for the run at `at`, `count` columns of which exist.
    template <int kVector>
    __device__ __forceinline__ void apply(float (&value)[kVector], const Position& at, int count) const {{
        apply(value, load<Runs::kAnywhere, kVector>(at, count));
    }}
}};

using Kernel = {kernel};

}}  // namespace fxfuse::fxfuse_kernel
"""

_LAUNCH: Final = """
#ifndef __CUDACC_RTC__
extern "C" int fxfuse_launch(const void* params, const uint64_t* pointers, uint64_t stream) {
    using fxfuse::fxfuse_kernel::Kernel;
    const auto* problem = static_cast<const Kernel::Problem*>(params);
    const auto* strides = reinterpret_cast<const fxfuse::OperandStrides*>(problem + 1);
    const auto epilogue = fxfuse::fxfuse_kernel::Epilogue::make(pointers + Kernel::kTensors, strides);
    return Kernel::launch(*problem, pointers, epilogue, reinterpret_cast<cudaStream_t>(stream));
}

extern "C" const char* fxfuse_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
#endif
"""

_LAUNCH_TOGETHER: Final = """
#ifndef __CUDACC_RTC__
extern "C" int fxfuse_launch(const void* params, const uint64_t* pointers, uint64_t stream) {
    return fxfuse::fxfuse_kernel::Kernel::launch(params, pointers, reinterpret_cast<cudaStream_t>(stream));
}

extern "C" const char* fxfuse_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
#endif
"""
"""The entry point of a kernel that may run several problems (Kernel.together): it unpacks them itself."""

_FUNCTIONS: Final = {
    torch.float16: "math_half",
    torch.bfloat16: "math_bfloat16",
}


def functions(expression: Expr, output: torch.dtype, tf32: bool) -> str:
    """The namespace of math.cuh whose functions are exact enough for a result of dtype `output`.

    For a 16-bit result, the errors of math_half and math_bfloat16 are negligible beside torch's: torch rounds every
    function's value to 16 bits. If the expression casts, torch computes a part of it in another dtype, so float32's
    functions are used.
    """
    calls = (node.op for node in postorder(expression) if isinstance(node, Call))
    if output == torch.float32 or any(op in ("float32", "float16", "bfloat16") for op in calls):
        return "math_tf32" if tf32 else "math_float"
    return _FUNCTIONS[output]


def generate(
    expression: Expr,
    output: torch.dtype,
    operands: Sequence[OperandKind],
    kernel: Kernel,
    uses_batch: bool = True,
    columns: int = 1,
    tf32: bool = False,
) -> str:
    """The complete source of `kernel` with the epilogue `expression`.

    A launch takes, as params, the kernel's Problem struct and then three int64 strides for each operand; as pointers,
    the addresses of the kernel's tensors and then those of the operands.

    Args:
        output: the dtype of the result.
        operands: how operand i of the expression is read. If the expression has one operand more, that is the second
            product of a kernel with two weights (kWeights in tile_after_tile.cuh).
        uses_batch: whether operands differ between the batches. If not, a GEMM numbers rows through all batches.
        columns: a power of two that divides the result's number of columns and its batch and row strides
            (OperandPlan.columns). An aligned run of that many columns lies within a row.
        tf32: whether the anchor rounds to TF32, so that faster functions are exact enough.
    """
    members = "\n".join(f"    {operand_type(kind, CPP_TYPES, True)} operand{i};" for i, kind in enumerate(operands))
    made = ", ".join(f"decltype(operand{i})::make(pointers[{i}], strides[{i}])" for i in range(len(operands)))
    pointers, strides = ("pointers", "strides") if operands else ("", "")
    make = (
        f"    static Epilogue make(const uint64_t* {pointers}, const OperandStrides* {strides}) {{\n"
        f"        return {{{made}}};\n    }}"
    )
    in_rows = [i for i, kind in enumerate(operands) if any(kind.varies[:2])]
    in_columns = [i for i in range(len(operands)) if i not in in_rows]

    def values(which: Sequence[int]) -> str:
        return "\n".join(
            f"        typename {operand_type(operands[i], CPP_TYPES, True)}::template Values<kVector, At> o{i};"
            for i in which
        )

    def loads(which: Sequence[int]) -> str:
        return ", ".join(f"operand{i}.template load<kRuns, kVector>(at, count)" for i in which)

    sums = "float (&value)[kVector]"
    arguments = ["value[i]", *(f"{'rows' if i in in_rows else 'columns'}.o{i}[i]" for i in range(len(operands)))]
    if operand_count(expression) > len(operands):
        sums += ", const float (&other)[kVector]"
        arguments.append("other[i]")
    source = _TEMPLATE.format(
        header=kernel.header,
        functions=functions(expression, output, tf32),
        members=members,
        operands=len(operands),
        uses_batch="true" if uses_batch else "false",
        columns=columns,
        element_bytes=sum(
            kind.dtype.itemsize for kind in operands if kind.dtype and kind.varies[2] and any(kind.varies[:2])
        ),
        varies_along_cols="true" if any(kind.dtype and kind.varies[2] for kind in operands) else "false",
        make=make,
        function=function(expression, len(arguments) - 1, "static __device__ __forceinline__"),
        column_values=values(in_columns),
        row_values=values(in_rows),
        column_at="const At& at" if in_columns else "const At&",
        column_count="int count" if in_columns else "int",
        column_loads=loads(in_columns),
        row_at="const At& at" if in_rows else "const At&",
        row_count="int count" if in_rows else "int",
        row_loads=loads(in_rows),
        columns_name="columns" if in_columns else "",
        rows_name="rows" if in_rows else "",
        sums=sums,
        arguments=", ".join(arguments),
        kernel=kernel.type.format(output=CPP_TYPES[output], epilogue="Epilogue"),
    )
    return source + (_LAUNCH if kernel.together == 1 else _LAUNCH_TOGETHER)
