"""A region's C++ source: the epilogue as a functor, and the pass that applies it (kernels/pointwise.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from fxfuse.codegen import INTEGER_TYPES, OperandKind, function, operand_type
from fxfuse.expression import Expr, depends_on_acc

CPP_TYPES: Final = {
    torch.float32: "float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    **INTEGER_TYPES,
    torch.bool: "Truth",
}

SLOW: Final = frozenset({"sin", "cos", "pow"})
"""Functions of kernels/math.h that take longer than to read a number from memory."""
MANY_TIMES: Final = 8
"""How often a slow value is not computed: where so many elements need one of it, it is computed before."""

_TEMPLATE: Final = """\
#include "pointwise.h"

namespace fxfuse::fxfuse_kernel {{

struct Epilogue {{
    static constexpr bool kReadsResult = {reads_result};
{function}
}};

}}  // namespace fxfuse::fxfuse_kernel

extern "C" int fxfuse_launch(const void* params, const uint64_t* pointers, uint64_t threads) {{
    using namespace fxfuse;
    using namespace fxfuse_kernel;
    launch<{arguments}>(params, pointers, threads);
    return 0;
}}

extern "C" const char* fxfuse_error(int) {{ return "no error"; }}
"""


def generate(expression: Expr, output: torch.dtype, operands: Sequence[OperandKind]) -> str:
    """The complete source of the pass that replaces each element acc of a result of dtype `output` by `expression`.

    Operand i of the expression is read as `operands[i]` says. fxfuse_launch cannot fail. It takes:

    - as params: five int64 (sizes of batch, row and col, the result's strides along batch and row), and three int64
      strides per operand;
    - as pointers: the addresses of the result and the operands; for a host scalar, the bits of a float;
    - as context: the number of threads.
    """
    arguments = [CPP_TYPES[output], "Epilogue", *(operand_type(kind, CPP_TYPES) for kind in operands)]
    return _TEMPLATE.format(
        reads_result="true" if depends_on_acc(expression) else "false",
        function=function(expression, len(operands), "FXFUSE_INLINE static"),
        arguments=", ".join(arguments),
    )
