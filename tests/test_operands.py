"""What a kernel's code may know of its operands: it must hold for every call, and not change with the batch."""

import pytest
import torch

from fxfuse import layout
from fxfuse.codegen import OperandKind
from fxfuse.cuda import codegen, pointwise
from fxfuse.expression import parse
from fxfuse.layout import Layout, contiguous_strides
from fxfuse.operands import plan_operands
from fxfuse.problem import TensorMeta

CPU = torch.device("cpu")


def meta(shape, strides=None, dtype=torch.bfloat16, alignment=16, is_parameter=False):
    return TensorMeta(shape, strides or contiguous_strides(shape), dtype, CPU, alignment, is_parameter)


def rows_and_columns(sizes, tensors):
    return layout.group(sizes, tensors, [(), (0,), (1,)])


def plan(shape, *operands, grouping=rows_and_columns):
    found = plan_operands(shape, contiguous_strides(shape), operands, frozenset(), grouping)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("operand", "access"),
    [
        (meta((64, 48)), 16),
        (meta((64, 48), dtype=torch.float32), 16),
        (meta((64, 48), alignment=8), 8),
        (meta((64, 48), (52, 1)), 8),
        (meta((64, 48), (50, 1)), 4),
        (meta((64, 48), (49, 1)), 2),
        (meta((64, 48), (49, 1), dtype=torch.float32), 4),
        (meta((64, 48), (49, 1), dtype=torch.bool), 1),
        (meta((48,), alignment=4), 4),
        (meta((1, 48), (49, 1)), 16),
        (meta((64, 48), (96, 2)), 0),
        (meta((64, 48), (1, 64)), 0),
        (meta((64, 1)), 0),
        (meta(()), 0),
    ],
)
def test_access_divides_the_address_of_every_row(operand, access):
    assert plan((64, 48), operand).kinds[0].access == access


@pytest.mark.parametrize(("columns", "known"), [(48, 8), (44, 4), (42, 2), (41, 1)])
def test_columns_are_the_results(columns, known):
    assert plan((64, columns)).columns == known


def test_a_copy_is_aligned():
    def contiguous_only(sizes, tensors):
        return rows_and_columns(sizes, tensors) if all(t[-1] in (0, 1) for t in tensors) else None

    found = plan((64, 48), meta((64, 48), (1, 64), alignment=2), grouping=contiguous_only)
    assert found.conversions[0] is not None
    assert found.kinds[0].access == 16


@pytest.mark.parametrize("width", [48, 49])
def test_kinds_do_not_change_with_the_batch(width):
    plans = [plan((rows, width), meta((rows, width)), meta((width,), is_parameter=True)) for rows in (1, 2, 7, 64)]
    assert len({(found.kinds, found.columns) for found in plans}) == 1


FULL = OperandKind(torch.bfloat16, (False, True, True), 16)


def source(text, output, columns=8):
    kernel = pointwise.kernel(Layout((1, 64, 48), ((0, 48, 1), (0, 48, 1))), output, output)
    return codegen.generate(parse(text), output, [FULL], kernel, columns=columns)


@pytest.mark.parametrize(
    ("text", "output", "functions"),
    [
        ("tanh(acc) + o0", torch.float32, "math_float"),
        ("tanh(acc) + o0", torch.float16, "math_half"),
        ("tanh(acc) + o0", torch.bfloat16, "math_bfloat16"),
        ("bfloat16(tanh(float32(acc))) + o0", torch.bfloat16, "math_float"),
    ],
)
def test_functions_are_as_exact_as_torchs_roundings(text, output, functions):
    assert f"using namespace {functions};" in source(text, output)


def test_functions_after_tf32_products_are_faster():
    kernel = pointwise.kernel(Layout((1, 1, 48), ((0, 0, 1),)), torch.float32, torch.float32)
    assert "using namespace math_tf32;" in codegen.generate(parse("mish(acc)"), torch.float32, [], kernel, tf32=True)


def test_what_the_code_knows_of_operands_is_in_its_text():
    text = source("acc + o0", torch.bfloat16)
    assert "Operand<BFloat16, kRow | kCol, 16> operand0;" in text
    assert "kColumns = 8;" in text and "kElementBytes = 2;" in text
