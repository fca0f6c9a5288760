"""What stands between regions in programs, merged into kernels of ours; the emulated GPU runs them here."""

import copy
import ctypes
import itertools
import math
import random
import re
import types
from collections import Counter

import emulator
import pytest
import torch
import torch.nn.functional as F
from helpers import ON_GPU, Net, assert_as_eager, linear, outcome, skip_if_absent, skip_if_python
from torch import nn

import fxfuse
from fxfuse import attention_modules, build, joint
from fxfuse.cuda import loops as kernels
from fxfuse.module import state_of
from fxfuse.program import attention, merge, operators, record
from fxfuse.program.indices import Index, Quotient, Remainder, Variable, variable
from fxfuse.program.loops import Inside, simplified_index
from fxfuse.verify import leaves_of

EMULATED = pytest.mark.skipif(not emulator.available(), reason="the emulation needs Linux and g++ 12 or newer")


GPUS = [pytest.param("emulated", marks=EMULATED), pytest.param("cuda", marks=ON_GPU)]


@pytest.fixture(params=GPUS)
def device(request, monkeypatch):
    """A GPU, or a CPU of which programs' loops are CUDA kernels on the emulated GPU."""
    return where(request.param, monkeypatch)


@pytest.fixture(params=["cpu", *GPUS])
def any_device(request, monkeypatch):
    """The same, or a CPU whose loops are kernels for it."""
    return where(request.param, monkeypatch)


@pytest.fixture
def texts(monkeypatch):
    """The sources of the kernels that are made for a GPU."""
    found, source_of = [], kernels.source_of
    monkeypatch.setattr(kernels, "source_of", lambda made: found.append(source_of(made)) or found[-1])
    return found


def where(kind, monkeypatch):
    """The device of models, after what makes it one of this kind."""
    if kind != "emulated":
        return kind

    def load(source):
        library = emulator.compiled(source.text)
        functions = (library.fxfuse_launch, library.fxfuse_error)
        addresses = tuple(ctypes.cast(function, ctypes.c_void_p).value for function in functions)
        return types.MethodType(lambda *_: None, types.SimpleNamespace(functions=addresses))

    def load_each(sources):
        return list(map(load, sources))

    monkeypatch.setattr(merge, "build", types.SimpleNamespace(load_each=load_each, Source=build.Source))
    monkeypatch.setattr(merge, "runs_on_gpu", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    return "cpu"


def where_steps_are(kind, monkeypatch):
    """The same for training steps: a CPU takes operators apart as for a GPU, too."""
    apart = joint.decompositions
    monkeypatch.setattr(joint, "decompositions", lambda device: apart("cuda"))
    return where(kind, monkeypatch)


def checked(model, device, *shape, dtype=torch.float32, **compared):
    """The optimised model's program for such inputs, after it gave what eager gives."""
    model = model.eval().to(device, dtype)
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for seed in range(4):
            torch.manual_seed(seed)
            assert_as_eager(model, fast, torch.randn(*shape).to(device, dtype), **compared)
    skip_if_python(fast)
    (made,) = state_of(fast).programs.programs or [pytest.fail(state_of(fast).programs.reason)]
    return made


class OfThree(nn.Linear):
    def forward(self, x, y, z):
        return F.softmax((super().forward(x).tanh() * y - z).exp() + z, -1) * y


def test_arguments_that_share_memory_in_any_order(any_device):
    """A kernel counts the elements of memory without a sign, from the lowest of the tensors that it gets there."""
    model = OfThree(8, 8).to(any_device)
    fast = fxfuse.optimize(copy.deepcopy(model))
    parts = torch.randn(3, 8, 8).to(any_device)
    with torch.no_grad():
        for number, order in enumerate([*itertools.permutations(range(3)), (2, 0, 2), (1, 1, 0)]):
            x, y, z = (parts[place] for place in order)
            for _ in range(8):
                torch.testing.assert_close(fast(x, y, z), model(x, y, z))
            skip_if_python(fast)
            assert len(state_of(fast).programs.programs) == number + 1, state_of(fast).programs.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_whole_numbers_of_floats(dtype, any_device):
    """Cut off towards zero, as the positions that models look up in a table are."""

    def forward(m, x):
        positions = (x.cumsum(0) * 1.5).long()
        apart = (torch.arange(8, device=x.device)[:, None] * 1.5 - torch.arange(4, device=x.device) * 0.75 + 2.5).long()
        return positions * 2 + 1, m.table[apart], positions.flip(1) - (x > 0).int()

    model = Net(forward, table=torch.randn(16, 5))
    made = checked(model, any_device, 6, 8, dtype=dtype, exact=False)
    assert "_to_copy" not in made.calls, made.code


def test_quotients_of_integers_and_of_truth_values(any_device):
    """In C++ these are integers. A quotient by zero would end the process."""

    def forward(m, x):
        many, few = (x * 9).to(torch.int64), (x * 2).to(torch.int32)
        positive, large = x > 0, x > 0.5
        of_integers = many / few + (many * 2 + 1) / (few - 3) * 0.5
        of_truths = positive / large.float() + large / positive * 0.5 + positive / few + many / large
        return m.fc(x).relu() * 2 + 1, of_integers * 3, of_truths * 3

    made = checked(Net(forward, fc=linear()), any_device, 6, 8, exact=False)
    assert not {"div.Tensor", "truediv", "div"} & made.calls.keys(), made.calls


def test_numbers_of_dtypes_that_kernels_do_not_have(any_device):
    """Filling takes one number, whatever the dtype of what is filled."""

    def forward(m, x):
        turned = torch.complex(x, x * 2)
        filled = torch.full_like(turned, 2) + torch.zeros_like(turned)
        return m.fc(x).relu() * 2 + 1, filled * turned

    assert checked(Net(forward, fc=linear()), any_device, 4, 8, exact=False).launches


def test_a_view_that_begins_before_its_tensor(any_device):
    model = Net(lambda m, x: (m.fc(x) * 2).tanh() + x.as_strided((8, 8), (8, 1), 0) * x, fc=linear()).to(any_device)
    fast = fxfuse.optimize(copy.deepcopy(model))
    x = torch.randn(16, 8).to(any_device)[8:]
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(fast(x), model(x))
        skip_if_python(fast)
    assert state_of(fast).programs.reason == "a view begins before the tensor that it is a view of"


class Refilled(nn.Module):
    def forward(self, x):
        total = torch.ones(1, device=x.device)
        total[0] = x.sum()
        return torch.ops.aten.relu.default(x), x.cumsum(0).nextafter_(total)


def test_memory_that_is_filled_again_as_a_whole(any_device):
    """Nothing needs what it held before. But where torch fills it, in place, it has to be there."""
    fast = fxfuse.optimize(Refilled())
    with torch.no_grad():
        for x in (torch.randn(3, 5, 2), torch.randn(1, 5, 3).permute(2, 1, 0)):
            for _ in range(6):
                torch.testing.assert_close(fast(x.to(any_device)), Refilled()(x.to(any_device)))
    skip_if_python(fast)
    assert len(state_of(fast).programs.programs) == 2, state_of(fast).programs.reason


def test_tensors_at_odd_addresses_have_programs_of_their_own(any_device):
    def at(place, *shape):
        size = math.prod(shape)
        return torch.randn(size + 8).to(any_device)[place : place + size].view(shape)

    model = Net(lambda m, x: F.softmax((m.fc((x * 2).tanh() + 1) * 3).exp() + 1, -1) * m.fc.weight + x, fc=linear())
    model.to(any_device).fc.weight.data = at(1, 8, 8)
    fast = fxfuse.optimize(model)  # of the same parameters
    with torch.no_grad():
        for place in (0, 1, 2, 3) * 3:
            x = at(place, 8, 8)  # no copy of it, which would lie elsewhere
            torch.testing.assert_close(fast(x), model(x))
        skip_if_python(fast)
        made = state_of(fast).programs
        assert len(made.programs) == 3, made.reason  # whose x lies at multiples of 16, 4 and 8 bytes
        fitting = []
        for place in (0, 1, 2, 3):
            bound = made._binding.of((at(place, 8, 8),), {})
            fitting += [one for one in made.programs if one.table(bound.tensors, bound.constants) is not None]
    assert len(fitting) == 4 and fitting[1] is fitting[3] and len(set(fitting)) == 3


TURNED = {  # shape, what is read across the memory of the result, whether threads go across it, too
    "to channels_last": ((2, 40, 9, 5), lambda x: x.contiguous(memory_format=torch.channels_last), True),
    "filters": ((8, 64, 3, 3), lambda x: x.contiguous(memory_format=torch.channels_last), True),
    "from channels_last": ((2, 9, 12, 40), lambda x: x.permute(0, 3, 1, 2).contiguous() * 2, True),
    "an odd size": ((2, 45, 9, 11), lambda x: x.contiguous(memory_format=torch.channels_last), True),
    "a prime size": ((2, 67, 9, 11), lambda x: x.contiguous(memory_format=torch.channels_last), False),
    "two transpositions": ((48, 48, 48), lambda x: x.transpose(0, 2) + x.transpose(1, 2), True),
    "beside what lies alike": ((3, 40, 48), lambda x: x.transpose(1, 2) * x.view(3, 48, 40), True),
    "two results": ((3, 40, 24), lambda x: (lambda y: (y, y.exp()))(x.transpose(1, 2).contiguous() * 2), True),
    "between others": ((3, 16, 4, 24), lambda x: x.permute(0, 3, 2, 1).contiguous() * 2, True),
    "few beside": ((3, 4, 100), lambda x: x.transpose(1, 2).contiguous() * 2, False),
    "padded": ((2, 40, 9, 5), lambda x: F.pad(x, (1, 2, 0, 1)).contiguous(memory_format=torch.channels_last), True),
    "rolled": ((2, 40, 9, 12), lambda x: x.roll(5, 3).contiguous(memory_format=torch.channels_last), False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TURNED)
def test_threads_go_across_the_memory_of_a_result_that_is_read_so(name, dtype, device, monkeypatch):
    asked, across = [], kernels._across
    monkeypatch.setattr(kernels, "_across", lambda *args: asked.append(across(*args)) or asked[-1])
    shape, move, expected = TURNED[name]
    checked(moved(move), device, *shape, dtype=dtype, exact=False)
    assert any(found is not None for found in asked) == expected or dtype != torch.float32, asked


@pytest.fixture
def widening(monkeypatch):
    """Products that take the dtype of their result, on a CPU, too, which torch has none for."""

    def product(a, b, dtype, *, out=None):
        return torch.mm(a.to(dtype), b.to(dtype), out=out)

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", product, "CPU")
    library.impl("mm.dtype_out", product, "CPU")
    known = merge.products_that_widen(torch.device("cuda"))
    monkeypatch.setattr(merge, "products_that_widen", lambda device: known)
    yield
    library._destroy()


WIDENED = {
    "a result": (lambda p, x: p.float(), 1),
    "read by kernels": (lambda p, x: p.float().cumsum(0) * 2, 1),
    "needed in 16 bits, too": (lambda p, x: (p.float(), p.sort(0).values), 0),
    "read by a region, too": (lambda p, x: (p.float(), (p * 2 + 1).tanh() * p.sigmoid()), 0),
    "the caller's": (lambda p, x: (p.float(), p), 0),
    "turned over": (lambda p, x: p.t().float().contiguous(), 0),
    "computed with": (lambda p, x: p.float() * 2, 0),
    "a part of it": (lambda p, x: p[1:].float(), 0),
    "as float64": (lambda p, x: p.double(), 0),
}


@pytest.mark.skipif(
    not hasattr(torch.ops.aten.mm, "dtype"), reason="torch's products have the dtype of their arguments"
)
@pytest.mark.parametrize("name", WIDENED)
def test_products_that_are_converted_are_written_as_float32(name, device, widening):
    then, expected = WIDENED[name]
    torch.manual_seed(0)
    model = Net(lambda m, x: then(torch.mm(x.bfloat16(), x.bfloat16().t()), x)).to(device)
    fast = fxfuse.optimize(model)
    x = torch.randn(24, 40, device=device)
    rounded = x.bfloat16().double()
    exact = leaves_of(then(rounded @ rounded.t(), x))
    with torch.no_grad():
        for _ in range(4):
            made = leaves_of(fast(x))
    (program,) = state_of(fast).programs.programs
    assert program.code.count("out_dtype=") == expected, program.code
    tolerance = 1e-6 if expected else 2**-8
    for one, other in zip(made, exact, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("is_chain", [False, True])
def test_what_kernels_read_as_float32_is_stored_in_16_bits(is_chain, device, monkeypatch):
    stored, kernel = [], kernels.kernel

    def noted(loops):
        stored.extend(store.output for store in loops.stores)
        return kernel(loops)

    monkeypatch.setattr(kernels, "kernel", noted)

    def forward(m, x):
        y = (x.bfloat16().cumsum(0) * 2).tanh() if is_chain else x.bfloat16().cumsum(0).tanh()
        wide = y.float()
        parts = [wide * factor for factor in (2, 3, 4, 5)]  # torch's sums between them keep them apart
        return [part.cumsum(0) for part in parts], wide.sum(0)

    torch.compiler.reset()
    model, x = Net(forward), torch.randn(48, 64, device=device)
    fast = torch.compile(model, backend="fxfuse")
    for _ in range(4):
        for one, other in zip(leaves_of(fast(x)), leaves_of(model(x)), strict=True):
            assert (one - other).norm() <= 2**-8 * other.norm()  # eager rounds before and after tanh
    values = [value.dtype for value in stored if value.shape == (48, 64)]
    assert values.count(torch.bfloat16) == 2 and values.count(torch.float32) == 4, stored  # the first is cumsum's input


def compiled(model, device, *shape):
    """The program of torch.compile's one graph, as `checked`."""
    torch.compiler.reset()
    before = set(fxfuse.compiled_graphs())
    fast = torch.compile(model, backend="fxfuse")
    with torch.no_grad():
        for _ in range(4):
            assert_as_eager(model, fast, torch.randn(*shape, device=device))
    (graph,) = set(fxfuse.compiled_graphs()) - before
    (made,) = state_of(graph).programs.programs or [pytest.fail(state_of(graph).programs.reason)]
    return made


def moved(forward):
    """A model that moves what a region computes and a library turns over; cumulative sums are no loops of ours."""
    return Net(lambda m, x: forward((x.relu() * 2).neg().cumsum(-1)))


def windows(x):
    x = F.pad(torch.roll(x, (-2, -2), (1, 2)), (0, 0, 0, 4, 0, 4))
    return x.view(2, 3, 4, 3, 4, 8).permute(0, 1, 3, 2, 4, 5).contiguous()


def back_from_windows(x):
    x = x.view(2, 2, 2, 4, 4, 8).permute(0, 1, 3, 2, 4, 5).reshape(2, 8, 8, 8)
    return torch.roll(x, (2, 2), (1, 2))[:, :7, :7].contiguous()


def table(x):
    rows = torch.arange(64, device=x.device).view(8, 8).t().reshape(-1)
    return x.reshape(-1, 8)[rows].view(8, 8, 8).permute(2, 0, 1).contiguous()


def rows_are_set(x):
    y = x.roll(1, 0)
    y[x[..., 0] > 0] = x[0, 0, 0]
    y[x[..., 0, 0] < 0] = x[:1, 0, :, :1]
    y[x > 2] = x[0, 0, 0, 0]
    return y * 2


def turned(x):
    """Rotary positions."""
    at = torch.arange(x.shape[-1], device=x.device).to(x.dtype)
    half = x.shape[-1] // 2
    return x * at.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * at.sin()


def turned_by_pairs(x):
    """The same of neighbours."""
    at = torch.arange(x.shape[-1] // 2, device=x.device).to(x.dtype).repeat_interleave(2, -1)
    return x * at.cos() + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * at.sin()


def greater(n):
    return torch.minimum(n.abs(), -n.clamp(-3, 2)).clamp(min=-2) + torch.maximum(n.clamp(max=1), n.new_full((), -5))


def unpooled(x, sides, steps, around, ceil_mode):
    """The gradient of pooling by the greatest."""
    own = torch.ops.fxfuse
    y = x.round()  # with equal elements
    places = own.max_pool_places(y, sides, steps, around, ceil_mode)
    gradient = 1 + places.sin()
    return own.max_pool_gradient(gradient, places, y.shape, y.stride(), sides, steps, around, ceil_mode) * x


def spread(x, *how):
    """The gradient of pooling by the mean: side, stride, padding, ceil_mode, count_include_pad, divisor_override."""
    made = F.avg_pool2d(x, *how)
    return torch.ops.aten.avg_pool2d_backward(made.sin(), x, *how).flip(1)


MOVES = {
    "gradient of the greatest": lambda x: unpooled(x, [2, 2], [2, 2], [0, 0], False),
    "gradient of the greatest, odd sizes": lambda x: unpooled(x[..., :7], [2, 3], [2, 3], [0, 1], True),
    "gradient of the greatest, overlapping": lambda x: unpooled(x, [3, 3], [2, 2], [1, 1], False),
    "gradient of the greatest, channels_last": lambda x: unpooled(
        x.to(memory_format=torch.channels_last), [3, 2], [1, 2], [1, 0], False
    ),
    "gradient of the greatest, with gaps": lambda x: unpooled(x, [1, 2], [3, 3], [0, 0], False),
    "gradient of the greatest of volumes": lambda x: unpooled(x, [2, 1, 2], [1, 2, 2], [0] * 3, False),
    "places of NaN": lambda x: torch.ops.fxfuse.max_pool_places(x / x.sign(), [2, 2], [1, 2], [0, 1], False).sin(),
    "places of infinities": lambda x: torch.ops.fxfuse.max_pool_places(
        x.masked_fill(x < 9, float("-inf")), [3, 3], [2, 2], [1, 1], True
    ).cos(),
    "gradient of a mean": lambda x: spread(x, [2, 2], [2, 2], [0, 0], False, True, None),
    "gradient of a mean, overlapping": lambda x: spread(x, [3, 2], [2, 1], [1, 0], False, True, None),
    "gradient of a mean, with gaps": lambda x: spread(x, [2, 2], [3, 4], [0, 1], False, True, 3),
    "gradient of a mean of some": lambda x: spread(x, [3, 3], [2, 2], [1, 1], True, False, None),
    "gradient of a mean of pixels": lambda x: spread(x, [3, 3], [1, 1], [1, 1], False, False, None),
    "gradient of a mean of pixels, with steps": lambda x: spread(x, [3, 2], [2, 3], [1, 1], False, False, None),
    "gradient of means of parts": lambda x: torch.ops.aten._adaptive_avg_pool2d_backward(
        F.adaptive_avg_pool2d(x, (4, 1)).sin(), x
    ).flip(1),
    "a copy": lambda x: x.permute(3, 1, 0, 2).contiguous(),
    "windows": windows,
    "back from windows": back_from_windows,
    "rolled and flipped": lambda x: x.roll((3, -1), (0, 2)).flip(1, 3).roll(5, 1),
    "padded on all sides": lambda x: F.pad(x, (1, 2, 3, 0, 0, 1), value=0.5).transpose(1, 3).contiguous(),
    "cut by padding": lambda x: F.pad(x, (-1, 3, 2, -3)).contiguous(),
    "concatenated": lambda x: torch.cat([x[..., :3], x.flip(-1), x[..., 5:]], -1),
    "concatenated along the first": lambda x: torch.cat([x[:1].transpose(1, 2), F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))]),
    "stacked": lambda x: torch.stack([x, x.roll(1, 0), x.flip(2)], -2),
    "repeated": lambda x: x.repeat(2, 1, 2, 3, 1)[1:].contiguous(),
    "turned by pairs": turned_by_pairs,
    "pairs change places": lambda x: x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2).contiguous(),
    "fours change places": lambda x: x.unflatten(-1, (-1, 4)).flip(-1).flatten(-2)[:, 1:].contiguous(),
    "every other": lambda x: torch.cat([x[..., ::2], x[..., 1::2].flip(1)], -1),
    "every third": lambda x: x.flatten(2)[..., 2::3].contiguous() + x.flatten(2)[..., :63:3],
    "interleaved": lambda x: torch.stack([x, x.exp(), x.flip(1)], -1).flatten(-2),
    "interleaved in parts": lambda x: torch.stack([x[..., 1:5], x[..., 4:]], -1).flatten(-2),
    "expanded": lambda x: x[:, :, :1].expand(2, 8, 5, 8).contiguous(),
    "chosen by an index": table,
    "chosen by two": lambda x: x[
        :, torch.tensor([[1, -2]], device=x.device), torch.tensor([[3], [0], [-1]], device=x.device)
    ],
    "selected": lambda x: x.index_select(2, torch.tensor([5, 0, 0], device=x.device)).permute(2, 0, 1, 3).contiguous(),
    "gathered": lambda x: x.gather(1, torch.arange(8, device=x.device).view(1, 4, 1, 2).expand(2, 4, 8, 2)),
    "embedded": lambda x: F.embedding(torch.tensor([[3, 1, 4]], device=x.device), x.reshape(16, -1)).flip(0),
    "scattered": lambda x: torch.slice_scatter(x, x[:, :, :3] * 2, 2, 4, 7),
    "scattered over every third": lambda x: torch.slice_scatter(x, x[:, :, :2] * 2, -2, 1, 7, 3),
    "scattered from behind": lambda x: torch.slice_scatter(x.exp(), x[:, :, ::2].sin(), 2, -8, None, 2) * 2,
    "scattered at a place": lambda x: torch.select_scatter(x, x[:, 1] * 2, 1, -1) + x.select_scatter(x[0], 0, 1),
    "pixels shuffled": lambda x: F.pixel_shuffle(x, 2).flip(-1),
    "pixels unshuffled": lambda x: F.pixel_unshuffle(x, 4).contiguous(),
    "pooled": lambda x: F.avg_pool2d(x.permute(0, 3, 1, 2), 2).sin(),
    "pooled, overlapping": lambda x: F.avg_pool2d(x, (3, 2), (2, 1), (1, 0)) * 2,
    "pooled without what is around": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False).neg(),
    "pooled, and divided by a number": lambda x: F.avg_pool2d(x, 2, 1, divisor_override=3).flip(-1),
    "pooled by the greatest": lambda x: F.max_pool2d(x.permute(0, 3, 1, 2), 3, 2, 1) * 2,
    "pooled by the greatest, on to the end": lambda x: F.max_pool2d(x, (2, 3), 3, (0, 1), ceil_mode=True).neg(),
    "pooled by the greatest, apart": lambda x: F.max_pool2d(x / x.sign(), 2, 1, 1, 2) + 1,  # NaN where x is 0
    "pooled by the greatest of infinities": lambda x: F.max_pool2d(x.masked_fill(x < 9, float("-inf")), 2).flip(0),
    "pooled by the greatest of two columns": lambda x: F.max_pool2d(x[..., :2], 3, 2, 1) * 2,
    "pooled volumes": lambda x: F.avg_pool3d(x, (1, 2, 3), 1, (0, 1, 0)).sin(),
    "pooled volumes by the greatest": lambda x: F.max_pool3d(x, (2, 3, 2), (2, 2, 1), (1, 1, 0)).flip(1),
    "unfolded": lambda x: F.unfold(x.permute(0, 3, 1, 2), (3, 2), padding=(1, 0), stride=(2, 1)).transpose(1, 2) * 2,
    "unfolded, apart": lambda x: F.unfold(x, (2, 3), dilation=(3, 2), padding=(0, 3), stride=(1, 3)).sin(),
    "unfolded from one image": lambda x: F.unfold(x[0], 2, stride=2).flip(0),
    "unfolded integers": lambda x: F.unfold((x * 9).long().double(), 3, padding=1).flip(0),
    "folded": lambda x: F.fold(x.reshape(2, 32, 16), (8, 8), 2, stride=2) + 1,
    "folded, overlapping": lambda x: F.fold(x.reshape(2, 32, 16).repeat(1, 9, 1), (8, 8), 3, padding=1, stride=2) * 2,
    "folded, overlapping unevenly": lambda x: F.fold(
        x.reshape(2, 32, 16)[:, :, :12], (4, 7), (4, 1), stride=(1, 2), padding=(1, 0)
    ).sin(),
    "folded with gaps": lambda x: F.fold(x.reshape(2, 64, 8)[:, :, :6], (7, 5), (2, 2), stride=(3, 3), padding=(1, 1)),
    "pooled to 4 x 8": lambda x: F.adaptive_avg_pool2d(x, (4, 8)) * 2,
    "rounded": lambda x: (x.ceil() + x.floor().flip(0)) * 2 - x.trunc() + (x * 2).round() * x.sign() + torch.frac(x),
    "questions for nan": lambda x: torch.where(torch.isnan(x / x.sign()) | ~torch.isfinite(x), 1.0, x).flip(0),
    "questions for infinities": lambda x: torch.where(torch.isinf(1 / x.floor()), 1.0, x).flip(0),
    "numbers for nan": lambda x: torch.nan_to_num(x / x.floor(), 3.0, None, -1.0).flip(0),
    "truth values multiplied": lambda x: ((x > 0) * (x < 1) + (x > 2)).flip(0),
    "prelu": lambda x: F.prelu(x / x.sign(), x[0, 0, 0, :1]).flip(0),  # NaN where x is 0
    "prelu along channels": lambda x: F.prelu(x, x[0, :, 0, 1]).sin(),
    "normalised by known numbers": lambda x: F.batch_norm(x, x[0, :, 0, 0], x[0, :, 0, 1].exp(), eps=0.1).sin(),
    "scaled and shifted channels": lambda x: F.batch_norm(
        x.to(memory_format=torch.channels_last), x[0, :, 0, 0], x[0, :, 0, 1].exp(), x[0, 0, 0], x[1, 0, 0]
    ).flip(1),
    "pooled in one dimension": lambda x: F.avg_pool1d(x[0], 2, 2, 1).flip(1),
    "multiplied, a few terms": lambda x: (x[0, :, :, :3] @ x[1, :, 5:]).flip(0),
    "multiplied by a table": lambda x: x.reshape(-1, 8)[:, :7] @ torch.ones(7, 5).to(x.device, x.dtype).tril(),
    "an outer product": lambda x: (x[0, :, :, :1] @ x[1, :, :1]).sin(),
    "enlarged": lambda x: F.interpolate(x, scale_factor=2, mode="nearest") + 1,
    "enlarged, exactly": lambda x: F.interpolate(x, size=(16, 24), mode="nearest-exact").sin(),
    "enlarged rows": lambda x: F.interpolate(x[0], scale_factor=3) * 2,
    "enlarged rows between": lambda x: F.interpolate(x[0], 11, mode="linear").flip(0),
    "enlarged volumes": lambda x: F.interpolate(x[None], scale_factor=(2, 1, 2)).sin(),
    "enlarged volumes between": lambda x: F.interpolate(x[None], scale_factor=2, mode="trilinear") + 1,
    "volumes' corners": lambda x: F.interpolate(x[None], (3, 5, 13), mode="trilinear", align_corners=True).sin(),
    "enlarged between": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear") + 1,
    "enlarged to odd sizes": lambda x: F.interpolate(x, (11, 21), mode="bilinear").sin(),
    "made smaller between": lambda x: F.interpolate(x.to(memory_format=torch.channels_last), (3, 5), mode="bilinear"),
    "corners on corners": lambda x: F.interpolate(x, (13, 5), mode="bilinear", align_corners=True).flip(1),
    "corners on one corner": lambda x: F.interpolate(x, (1, 1), mode="bilinear", align_corners=True).flip(1),
    "from one pixel": lambda x: F.interpolate(x[:, :, :1, :1], (5, 3), mode="bilinear"),
    "a lower triangle": lambda x: x.tril(-1).flip(1),
    "an upper triangle of truths": lambda x: (x > 0).triu(2),
    "channels_last": lambda x: F.pad(x.to(memory_format=torch.channels_last), (1, 1, 1, 1)),
    "in place": lambda x: x.clone().add_(x.transpose(1, 2)).mul_(2),
    "in place, twice over": lambda x: (lambda y: (y.flip(1), y.add_(1).mul_(x)))(x.roll(1, 0))[1].roll(1, 2),
    "in place and what was there before": lambda x: (lambda y: (y.flip(1) + 1, y.add_(x), y.roll(1, 1), y.mul_(2)))(
        x.roll(1, 0)
    )[::2],
    "in place on what is read on": lambda x: (lambda y: y.mul_(y.flip(0).add_(1)).add_(y.roll(1, 0)))(x.flip(2) + 1),
    "in place on a part": lambda x: (lambda y: (y[:, :4].copy_(x[:, 4:]), y)[1])(x.clone()),
    "in place from an odd element on": lambda x: (lambda y: (y[1:].add_(x[0, 0, 0, 0]), y)[1])(x.cumsum(0).flatten()),
    "before and after in place": lambda x: (lambda y: (y.flip(1), y.mul_(2), y.flip(2)))(x.clone()),
    "used twice": lambda x: (lambda y: (y.exp(), y.roll(1, 1)))(x.permute(0, 2, 1, 3).contiguous()),
    "another dtype": lambda x: F.pad(x.bfloat16().float() * 3, (1, 0)).half(),
    "float64": lambda x: torch.cat([x.double().flip(1), x.double()], 2),
    "integers": lambda x: F.pad((x * 9).long(), (1, 1), value=7).transpose(0, 1).contiguous(),
    "truth values": lambda x: torch.where(F.pad(x > 1, (1, 0), value=True), F.pad(x, (0, 1)), -1.0),
    "a causal mask": lambda x: torch.where(
        torch.arange(8, device=x.device)[:, None] >= torch.arange(8, device=x.device), x, -torch.inf
    ),
    "sums of integers": lambda x: x + ((x * 9).long() * 3 - 1 + torch.arange(2, 10, device=x.device)),
    "other integers": lambda x: ((x * 9).int() == 3) | ~((x * 9).to(torch.int16) < 2) & (x.bool()).roll(1, 0),
    "integers that wrap": lambda x: ((x * 9).to(torch.int8) * 40 + 100).roll(1, 0).int(),
    "numbers of one dtype and another": lambda x: torch.where(x > 1, torch.ones_like(x), x.new_zeros(1)).roll(1, 0) / 3,
    "the greater of integers": lambda x: greater((x * 9).long()),
    "truth values of numbers": lambda x: (x.round().bool() & (x * float("inf")).to(torch.bool)).roll(1, 0),
    "integers of truth values": lambda x: F.pad((x > 1).long(), (1, 0)) * 5 + 2,
    "large integers": lambda x: (x.long() * (2**40 + 1) + 3).roll(1, 0),
    "rows set where a mask is true": rows_are_set,
    "masks": lambda x: x.masked_fill((x > 2).flip(1), -torch.inf).roll(1, 0),
    "numbers": lambda x: torch.cat([x.new_zeros(2, 8, 8, 1), x, x.new_full((2, 8, 8, 2), 0.25)], -1),
    "in place on what torch made": lambda x: x.cumsum(1).mul_(x.flip(1)).cumsum(2).add_(1),
    "nobody reads it": lambda x: (x.flip(0), x + 1)[1] * x.roll(1, 1),
    "a vector": lambda x: x[0, 0, 0].flip(0) * x,
    "nothing": lambda x: x[:, :0].permute(3, 0, 1, 2).contiguous(),
    "a number": lambda x: x[0, 0, 0, 0] + x.roll(1, 3),
}


@pytest.mark.parametrize("name", MOVES)
def test_results_are_eagers(name, any_device):
    made = checked(moved(MOVES[name]), any_device, 2, 8, 8, 8, exact=False)
    if name != "nothing" and merge.runs_on_gpu(torch.device(any_device)):  # a CPU's kernels are of vectors, or torch's
        assert made.launches > 1, made.code


def test_integers_are_no_calls(device):
    made = checked(Net(lambda m, x: greater(x.argsort(-1)).cumsum(0).float()), device, 3, 8, exact=False)
    assert made.calls == Counter(sort=1, cumsum=1), made.code


def test_what_stands_between_library_calls_is_one_kernel(device):
    model = Net(
        lambda m, x: (
            back_from_windows(F.softmax(windows(m.fc((x * 2 + 1).sigmoid()))[:, :2, :2] * 2, -1)) + x[:, :7, :7]
        ),
        fc=linear(),
    )
    made = checked(model, device, 2, 8, 8, 8, exact=False)
    # the linear is a kernel of ours on a GPU; what stands before and behind it is one each
    assert made.launches + made.calls["addmm"] == 3 and not made.calls - Counter(addmm=1), made.code


def rotary_of_heads_side_by_side(m, x):
    heads = x.cumsum(0).unflatten(-1, (3, 8))
    turned = torch.cat((-heads[..., 4:], heads[..., :4]), -1)
    return (heads * m.cos + turned * m.sin).tanh().transpose(1, 2).cumsum(0)


@pytest.mark.parametrize("forward", [
    rotary_of_heads_side_by_side,
    lambda m, x: (x.cumsum(0).unflatten(-1, (3, 8)).exp() * m.cos + m.sin).tanh().cumsum(0),
], ids=["merged with others", "alone"])  # fmt: skip
def test_a_pass_whose_operands_a_chain_would_copy_is_a_kernel_without_copies(forward, device):
    """The operands are the same for all heads, which lie within a row of the result."""
    model = Net(forward, cos=torch.randn(1, 5, 1, 8), sin=torch.randn(1, 5, 1, 8))
    made = checked(model, device, 2, 5, 24)
    assert (made.launches, made.calls) == (1, {"cumsum": 2}), made.code


def test_what_a_pass_overwrites_is_read_before(device):
    """A region's pass may take the memory of what a library computed, if nobody reads that any more."""

    def forward(m, x):
        product = torch.matmul(x, x.transpose(1, 2))
        before = product.flip(1)
        after = (product * 2 + 1).sigmoid().cumsum(0)
        return torch.cat([after, before.roll(1, 0)])

    checked(Net(forward), device, 3, 4, 5)


BIASED = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 20)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3, padding=1), (2, 4, 5, 6, 7)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 7, 5)),
    "channels_last": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 2)).to(memory_format=torch.channels_last), (2, 4, 7, 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BIASED)
def test_the_bias_of_a_library_convolution_is_added_by_the_kernel_behind_it(name, device, monkeypatch):
    """cuDNN's convolutions have none: torch adds it in a pass of its own."""
    make, shape = BIASED[name]
    if device != "cuda":
        monkeypatch.setattr(record, "_runs_in_cudnn", lambda *_: True)
    model = Net(lambda m, x: F.glu(m.conv(x).flip(-1), 1), conv=make())
    made = checked(model, device, *shape, exact=False)
    assert made.launches == 1 and made.calls == Counter(convolution=1), made.code


OVERFLOWING = {
    "infinities": torch.isinf,
    "what is finite": lambda y: ~torch.isfinite(y),
    "an infinity": lambda y: y == math.inf,
    "any": lambda y: torch.where(torch.isinf(y).any(), y.clamp(-1000, 1000), y),
    "numbers": lambda y: torch.nan_to_num(y, posinf=5.0),
}


@pytest.mark.parametrize("name", OVERFLOWING)
def test_what_overflows_in_float16_is_seen(name, device):
    """Between operations that run as one kernel, values are in float32, which most of them fit."""
    model = Net(lambda m, x: OVERFLOWING[name](x.flip(0) * 60000.0))
    checked(model, device, 16, 8, dtype=torch.float16)


def test_integers_in_memory_of_odd_size(device):
    """All dtypes are views of one piece of memory."""
    embedding = torch.nn.Embedding(5, 5)
    model = Net(lambda m, x: x + m.rows(torch.arange(5, device=x.device) % 5).sum(0), rows=embedding)
    checked(model, device, 2, 4, 5, exact=False)


RESHAPED = {
    "transposed": lambda y: (y.t_(), y.flip(0) + 1)[1],
    "transposed, by what it returns": lambda y: (y.t_().flip(0), y * 2)[0],
    "one dimension more": lambda y: (y.unsqueeze_(1), y.flip(0) * 2)[1],
    "one dimension less": lambda y: (y.unsqueeze_(0).squeeze_(0), y.roll(1, 0))[1],
    "exchanged": lambda y: (y.transpose_(0, 1), torch.cat([y, y]))[1],
    "other strides": lambda y: (y.as_strided_((8, 4), (1, 8)), F.softmax(y, -1))[1],
}


@pytest.mark.parametrize("name", RESHAPED)
@pytest.mark.parametrize("made", [lambda x: x.cumsum(0), lambda x: x.flip(0) + 1], ids=["by torch", "by loops"])
def test_shapes_that_change_in_place(name, made, device):
    """Nothing is recorded: each view of the tensor would have to know."""
    model = Net(lambda m, x: RESHAPED[name](made((x.relu() * 2).neg()))).eval()
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for _ in range(4):
            assert_as_eager(model, fast, torch.randn(4, 8).to(device))
    assert "in place" in state_of(fast).programs.reason


def test_copies_into_what_an_operator_allocates(device):
    """Circular padding copies an image, and then from one part of it to another."""
    made = checked(moved(lambda x: F.pad(x, (2, 3), mode="circular")), device, 1, 1, 8)
    assert (made.launches, made.calls) == (2, {"cumsum": 1, "copy_": 2})


def test_softmax_lies_where_its_scores_lay(device):
    def forward(m, x):
        x = (x.relu() * 2).neg().cumsum(0)
        return F.softmax((x @ x.mT) * 2, -1) @ x

    made = checked(Net(forward), device, 64, 8, exact=False)
    assert made.arena_size == 64 * 64 * 4, made.code


def test_groups_lie_where_they_are_computed_from(device):
    """Each channel of a group has a weight of its own, and all are reduced together."""

    def forward(m, x):
        x = (x.relu() * 2).neg().cumsum(0)
        return F.group_norm(((x @ x.mT) * 2).view(1, 8, 8, 64), 2, m.scale, m.shift).view(64, 64) @ x

    model = Net(forward, scale=nn.Parameter(torch.rand(8)), shift=nn.Parameter(torch.rand(8)))
    made = checked(model, device, 64, 8)
    assert made.arena_size == 64 * 64 * 4, made.code


@pytest.mark.parametrize("computed", [False, True], ids=["a parameter", "computed"])
def test_weights_are_brought_into_channels_last_by_kernels_of_ours(computed, device, monkeypatch):
    monkeypatch.setattr(record, "_runs_in_cudnn", lambda *_: True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 8, 3, 3))

        def forward(self, x):
            image = x.cumsum(1).to(memory_format=torch.channels_last)
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True) if computed else self.weight
            return torch.cumsum(torch.convolution(image, weight, None, [1], [1], [1], False, [0], 1), 1)

    made = checked(Model(), device, 2, 8, 7, 7)
    assert made.calls == {"cumsum": 2, "convolution": 1} and made.launches >= 2


@pytest.mark.parametrize("wanted", [(True, True, False), (True, False, False), (False, True, False)])
def test_weights_for_gradients_are_brought_into_channels_last_by_kernels_of_ours(wanted, device, monkeypatch):
    monkeypatch.setattr(record, "_runs_in_cudnn", lambda *_: True)

    def gradients(m, x):
        image = x.cumsum(1).to(memory_format=torch.channels_last)
        options = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        found = torch.ops.aten.convolution_backward(image[:, :6].exp(), image, m.weight, None, *options, wanted)
        return [found[at].cumsum(1) for at in range(2) if wanted[at]]

    model = Net(gradients, weight=nn.Parameter(torch.randn(6, 8, 3, 3)))
    made = checked(model, device, 2, 8, 7, 7)
    assert made.calls["convolution_backward"] == 1, made.code
    nodes = [step.what for step in made.steps if step.is_launch]
    assert any("its weight" in what for what in nodes) == wanted[0], made.code


@pytest.mark.parametrize("terms, calls", [(1, 0), (16, 0), (17, 1)])
def test_products_of_few_terms_are_kernels_of_ours(terms, calls, device):
    made = checked(moved(lambda x: (x[..., :terms] @ x[:, :terms].flip(1)).sin()), device, 4, 20, 20)
    assert made.calls["bmm"] == calls and not made.calls["matmul"]


@pytest.mark.parametrize("columns, calls", [(8, 0), (9, 1)])
def test_thin_products_of_any_length_are_kernels_of_ours(columns, calls, device, monkeypatch):
    monkeypatch.setattr(operators, "SMALL_PRODUCT", 1)
    model = moved(lambda x: torch.addmm(x[0, 0, :columns], x[0, :, :8], x[1, :8, :columns]).sin())
    made = checked(model, device, 2, 40, 20)
    assert made.calls["addmm"] == calls, made.code


class TalkingHeads(nn.Module):
    """Heads are mixed before and after the softmax of their scores, as in CaiT."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        scores = torch.cumsum(x, 0)  # torch's
        mixed = self.before(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1)
        return torch.cumsum(self.after(mixed.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous(), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_softmax_of_rows_that_are_apart_is_a_kernel_with_what_it_reads(dtype, device):
    """Alone it would be torch's: rows whose elements are apart in memory are slow to read."""
    made = checked(TalkingHeads(), device, 2, 4, 40, 300, dtype=dtype)
    assert (made.launches, made.calls) == (2, {"cumsum": 2}), made.code


def test_a_softmax_of_rows_that_are_apart_stays_torchs(device):
    model = moved(lambda x: torch.cumsum(torch.cumsum(x, 0).permute(0, 3, 1, 2).softmax(-1), 0))
    made = checked(model, device, 2, 600, 600, 4)
    assert made.calls["_softmax"] == 1, made.code


class Products(nn.Module):
    """Of x with what `compute` makes of weights, each behind a call of torch's."""

    def __init__(self, sizes, compute):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(size, 24) for size in sizes)
        self.compute = compute

    def forward(self, x):
        return [torch.cumsum(torch.cumsum(x, 0) @ self.compute(weight).T, 0) for weight in self.weights]


def test_what_needs_nothing_is_computed_together(device):
    """Weights of several sizes, of which means are taken at every call: one launch, before the first is needed."""
    made = checked(Products((5, 7, 300, 11, 8), lambda weight: weight - weight.mean(1, keepdim=True)), device, 2000, 24)
    assert (made.launches, made.calls) == (1, {"cumsum": 10, "mm": 5})


@pytest.mark.parametrize("room, launches", [(8 << 20, 1), (6 * 24 * 4 * 2, 2), (1, 4)])
def test_no_more_is_together_than_there_is_room_for(room, launches, device, monkeypatch):
    monkeypatch.setattr(merge, "MOST_BYTES_TOGETHER", room)
    made = checked(Products([6] * 4, lambda weight: weight.flip(0).roll(1, 1)), device, 2000, 24)
    assert made.launches == launches


def test_what_is_overwritten_is_computed_where_it_is_read(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(6, 8))

        def forward(self, x):
            first = torch.cumsum(x @ self.table.flip(1).T, 0)
            self.table.copy_(first[:6, :1])
            return first, torch.cumsum(x @ self.table.flip(1).T, 0)

    checked(Model(), device, 2000, 8)


@pytest.mark.parametrize("name, dtype", [
    ("turned by pairs", torch.float32), ("pairs change places", torch.bfloat16), ("fours change places", torch.float32),
    ("fours change places", torch.bfloat16), ("every other", torch.float32), ("every other", torch.bfloat16),
], ids=str)  # fmt: skip
def test_elements_that_lie_close_together_are_read_at_once(name, dtype, device, monkeypatch):
    made, kernel = [], merge.kernels.kernel
    monkeypatch.setattr(merge.kernels, "kernel", lambda loops: made.append(kernel(loops)) or made[-1])
    checked(moved(MOVES[name]), device, 2, 8, 8, 32, dtype=dtype, exact=False)
    reads = "\n".join(one.form for one in made)
    assert ".load(" in reads and not re.search(r"p\.memory\[\d+\]\)\[", reads), reads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(dtype, device):
    assert checked(moved(lambda x: windows(x) * 2), device, 2, 8, 8, 8, dtype=dtype).calls == {"cumsum": 1}


ATTENTION = {
    "attention": lambda first: nn.MultiheadAttention(16, 2, batch_first=first),
    "attention without biases": lambda first: nn.MultiheadAttention(16, 4, bias=False, batch_first=first),
    "an encoder": lambda first: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 24, batch_first=first), 2, enable_nested_tensor=False
    ),
    "norms first": lambda first: nn.TransformerEncoderLayer(16, 2, 24, norm_first=True, batch_first=first),
    "a decoder": lambda first: nn.TransformerDecoderLayer(16, 2, 24, batch_first=first),
}


class Attending(nn.Module):
    def __init__(self, made):
        super().__init__()
        self.part = made

    def forward(self, x):
        x = (x * 2 + 1).sigmoid()
        if isinstance(self.part, nn.MultiheadAttention):
            return self.part(x, x, x, need_weights=False)[0]
        return self.part(x, x) if isinstance(self.part, nn.TransformerDecoderLayer) else self.part(x)


@pytest.fixture
def attention_modules_are_nodes(monkeypatch):
    """As those with masks are."""
    monkeypatch.setattr(attention_modules, "_FORWARDS", {})


@pytest.mark.usefixtures("attention_modules_are_nodes")
@pytest.mark.parametrize("first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("name", ATTENTION)
def test_modules_with_attention_are_taken_apart(name, first, device):
    torch.manual_seed(0)
    made = checked(Attending(ATTENTION[name](first)), device, 3, 5, 16)
    left = {call for call in made.calls if "scaled_dot_product" not in call}
    assert left <= {"addmm", "mm", "bmm"} and made.launches > 1, made.code


@pytest.mark.parametrize("first", [True, False], ids=["batch first", "batch second"])
def test_an_encoder_is_left_whole_where_torchs_operator_computes_another_gelu(first, device):
    """It does if the batch is first; on a GPU the difference is a hundred times what rounding makes."""
    layer = nn.TransformerEncoderLayer(16, 2, 24, activation="gelu", batch_first=first)
    made = checked(Attending(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)), device, 3, 5, 16)
    assert ("_transformer_encoder_layer_fwd" in made.calls) == first


@pytest.mark.usefixtures("attention_modules_are_nodes")
def test_changes_of_what_is_in_a_module_with_attention(device):
    model = Attending(nn.MultiheadAttention(16, 2, batch_first=True)).eval().to(device)
    fast = fxfuse.optimize(copy.deepcopy(model))
    changes = [
        lambda part: setattr(part, "num_heads", 4),
        lambda part: part.out_proj.weight.data.mul_(2),
        lambda part: setattr(part.out_proj, "bias", nn.Parameter(torch.ones(16, device=device))),
        lambda part: setattr(
            part, "out_proj", nn.modules.linear.NonDynamicallyQuantizableLinear(16, 16, device=device)
        ),
    ]
    with torch.no_grad():
        for number, change in enumerate([lambda part: None, *changes]):
            for each in (model, fast):
                torch.manual_seed(number)
                change(each.part)
            for _ in range(4):
                assert_as_eager(model, fast, torch.randn(3, 5, 16, device=device), exact=False)
            if number == 0:
                assert state_of(fast).programs.programs
        for each in (model, fast):
            each.part.register_forward_hook(lambda module, args, result: (result[0] * 3, None))
        x = torch.randn(3, 5, 16, device=device)
        for _ in range(4):
            torch.testing.assert_close(fast(x), model(x))


def test_the_kind_of_attention_is_the_one_that_is_allowed_now(device):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fast = fxfuse.optimize(Attending(nn.MultiheadAttention(16, 2, batch_first=True)).eval().to(device))
    x = torch.randn(3, 5, 16, device=device)
    with torch.no_grad():
        for _ in range(4):
            fast(x)
        with sdpa_kernel(SDPBackend.MATH):
            for _ in range(4):
                fast(x)
        (by_products, fused) = state_of(fast).programs.programs
    kinds = [any("scaled_dot_product" in call for call in made.calls) for made in (by_products, fused)]
    assert kinds == [False, True], (by_products.calls, fused.calls)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_numbers_and_indices_on_a_cpu(device):
    """What torch takes from a CPU at every call is no kernel's to read."""

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.order = torch.tensor(2.0), torch.tensor([3, 1, 1, 0])

        def forward(self, x):
            y = (x.relu() * self.scale).neg().cumsum(0)
            return y.index_select(0, self.order.to(x.device)).flip(1) * self.scale + torch.tensor([0.5]).to(x.device)

    model = Scaled()
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for number in range(6):
            for each in (model, fast):
                each.scale.fill_(number)
            assert_as_eager(model, fast, torch.randn(4, 8, device=device))
    assert state_of(fast).programs.programs, state_of(fast).programs.reason


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_indices_made_of_numbers_on_a_cpu(device):
    """torch copies them to the GPU at every call; a program keeps the copies."""
    model = moved(lambda x: x[:, (torch.arange(4)[:, None] - torch.arange(4) + 3).long()].flip(-1))
    assert checked(model, device, 2, 8, 3).calls == {"cumsum": 1}


def test_modules_with_lists_are_taken_apart(device):
    """torchvision's MViT makes its layers of lists; they may be changed in place."""
    model = Net(lambda m, x: m.pool(x.exp()).flip(1).cumsum(1), pool=nn.MaxPool3d([1, 2, 2], [1, 2, 2]))
    model = model.eval().to(device)
    fast, x = fxfuse.optimize(model), torch.randn(2, 3, 4, 8, 8, device=device)
    with torch.no_grad():
        for _ in range(3):
            assert_as_eager(model, fast, x)
        assert state_of(fast).programs.programs[0].calls == {"cumsum": 1}
        for pool in {model.pool, fast.get_submodule("pool")}:
            pool.stride[2] = 1
        assert_as_eager(model, fast, x)


def test_numbers_of_a_captured_graph_are_not_brought_from_a_cpu(device):
    def forward(m, x):
        counted = torch.tensor(7, dtype=torch.int32, device=x.device), torch.tensor(2.7, dtype=int, device=x.device)
        return (
            F.relu(x @ m.weight).cumsum(0),
            torch.tensor(0.5, device=x.device),
            torch.tensor(True, device=x.device),
            *counted,
        )

    model = Net(forward, weight=nn.Parameter(torch.randn(8, 8))).to(device)
    made = compiled(model, device, 4, 8)
    assert made.calls == {"tensor": 1, "cumsum": 1}, "the one that is rounded alone"


def test_numbers_on_a_cpu_are_filled_in_where_they_are_brought_to(device):
    """As the windows of transformers' caches; a CUDA graph may bring nothing from a CPU."""

    def forward(m, x):
        brought = torch.tensor(7).to(x.device), torch.tensor(0.5).to(x.device, torch.bfloat16)
        return F.relu(x @ m.weight).cumsum(0), *brought

    model = Net(forward, weight=nn.Parameter(torch.randn(8, 8))).to(device)
    made = compiled(model, device, 4, 8)
    assert "_to_copy" not in made.calls or device == "cpu", made.code


def drawn(seed, shape):
    """A model of random moves and sums."""
    generator = random.Random(seed)
    moves, kept = [], [torch.zeros(shape)]

    def add(source, move):
        moves.append((source, move))
        kept.append(move(kept[source]))

    for _ in range(generator.randrange(3, 8)):
        source = generator.randrange(max(0, len(kept) - 3), len(kept))
        sizes = kept[source].shape
        dim, n = generator.randrange(len(sizes)), generator.randrange(1, 4)
        dims, kept_size = list(range(len(sizes))), max(1, sizes[dim] - n)
        generator.shuffle(dims)
        pad = (n, 0, -1, n) if len(sizes) > 1 and sizes[-2] > 1 else (n, 1)
        parts = next((size for size in (2, 3) if sizes[dim] % size == 0 and len(sizes) < 6), 1)
        size, rank = sizes[dim], len(sizes)
        choices = [
            lambda y, n=n, dim=dim: y.roll(n, dim), lambda y, dim=dim: y.flip(dim), lambda y: y.exp() * 0.5,
            lambda y, dims=dims: y.permute(dims).contiguous(), lambda y, dims=dims: y.permute(dims),
            lambda y, pad=pad: F.pad(y, pad), lambda y, dim=dim: y + y.flip(dim), lambda y, dim=dim: y.cumsum(dim),
            lambda y, n=n, dim=dim: torch.cat([y, y.roll(n, dim)], dim),
            lambda y, rank=rank: y.flatten(0, max(0, rank - 2)),
            lambda y: y.clone().mul_(0.5), lambda y: y.mul_(0.5), lambda y: y.add_(y.flip(0)),
            lambda y, dim=dim: F.softmax(y, dim), lambda y, dim=dim: y - y.mean(dim, keepdim=True),
            lambda y, dim=dim, rank=rank: F.avg_pool2d(y, 2, 1, 1) if rank == 4 else y.amax(dim, rank == 1),
            lambda y, dim=dim, kept_size=kept_size: y.narrow(dim, 0, kept_size),
            lambda y, dim=dim, parts=parts: y.unflatten(dim, (parts, -1)),
            lambda y, dim=dim, size=size: y.index_select(dim, torch.arange(size, device=y.device).flip(0)),
        ]  # fmt: skip
        add(source, generator.choice(choices))
        if kept[-1].numel() > 20000:
            add(len(kept) - 1, lambda y: y.flatten()[:500].contiguous())

    def forward(x):
        values = [(x.relu() * 2).neg()]
        for source, move in moves:
            values.append(move(values[source]))
        return tuple(values[-2:])

    return Net(lambda m, x: forward(x))


@pytest.mark.parametrize("seed", [*range(6), 133])  # in 133 a region's kernel reads a copy of an operand
def test_drawn_models(seed, any_device):
    checked(drawn(seed, (2, 6, 4, 8)), any_device, 2, 6, 4, 8, exact=False)


def parts(seed):
    """A model that puts together a tensor of parts, of which others are overwritten, or read on the way; its shape."""
    generator = random.Random(seed)
    shape = generator.choice([(4, 6, 8), (3, 2, 5, 9), (12, 7)])
    views = {"whole": lambda y: y, "flat": lambda y: y.flatten(1), "transposed": lambda y: y.transpose(0, -1)}
    writes = []
    for _ in range(generator.randrange(2, 7)):
        view = views[generator.choice(["whole", "whole", "transposed", "flat"])]
        index = []
        for size in view(torch.zeros(shape)).shape:
            begin, step = generator.randrange(size), generator.choice([1, 1, 1, 2])
            index.append(generator.choice([slice(None), slice(begin, None, step), slice(0, begin + 1), begin, -1]))
        kind = generator.choice(["other", "other", "other", "number", "own", "scaled", "row"])
        writes.append((view, tuple(index), kind, generator.random(), view(torch.zeros(shape))[tuple(index)].shape))
    begin, is_read = generator.choice(["zeros", "copy", "sum"]), generator.randrange(8)

    def forward(m, x):
        base = x.exp()
        whole = torch.zeros_like(base) if begin == "zeros" else base.clone() if begin == "copy" else base.cumsum(0)
        kept = []
        for number, (view, index, kind, scale, sizes) in enumerate(writes):
            seen = view(whole)
            if kind == "scaled":
                seen[index].mul_(scale)
            elif kind == "own":
                seen[index] = seen[index] + 1
            elif kind == "number":
                seen[index] = scale
            else:
                count = math.prod(sizes) if kind == "other" else sizes[-1] if sizes else 1
                value = (x * scale).flatten()[:count].sin()
                seen[index] = value.view(sizes if kind == "other" else sizes[-1:])
            if number == is_read:
                kept.append((whole * 2).cumsum(0))
        return (whole.flip(0) * 0.5).cumsum(0), *kept

    return Net(forward), shape


@pytest.mark.parametrize("seed", range(12))
def test_drawn_parts(seed, any_device):
    model, shape = parts(seed)
    checked(model, any_device, *shape, exact=False)


def bands(scores):
    """As Longformer puts its scores together."""
    whole = scores.new_zeros(4, 3, 6, 9)
    whole[:, :-1, :, 4:] = scores[:, :, :6, :5]
    whole[:, -1, :, 4:] = scores[:, -1, 6:, :5]
    whole[:, 1:, :, :4] = scores[:, :, -7:-1, 6:]
    return whole


def test_parts_that_make_a_tensor_up_are_one_kernel(device):
    """Zeros, of which each part is written."""

    def forward(m, x):
        scores = x.cumsum(0)
        whole = bands(scores)
        whole[:, 0, 1:4, 1:4] = scores[:, 0, :3, -3:]
        rows = whole.view(2, 2, 18, 9).transpose(2, 1)
        rows[:, :4, :, :5] = -1.0
        return whole.cumsum(0)

    made = checked(Net(forward), device, 4, 2, 12, 10)
    assert (made.launches, set(made.calls)) == (1, {"cumsum"}), made.code


def test_parts_of_parts_that_are_masked_are_one_kernel(device):
    """As Longformer's scores: parts of what was put together are masked, and a softmax of all follows, padded."""

    def forward(m, x):
        whole = bands(x.cumsum(0))
        rows = whole.view(2, 2, 18, 9).transpose(2, 1)
        for mask, part in ((torch.ones(6, 5).tril(), rows[:, :6, :, :5]), (torch.ones(6, 5), rows[:, -6:, :, -5:])):
            mask = mask.to(x.device)[None, :, None, :].expand(part.shape)
            part.copy_(torch.full_like(part, -9.0).where(mask.bool(), part))
        rows += x[:1, :1, :1, :9]
        return F.pad(F.softmax(rows, -1, dtype=torch.float32).type_as(x), (0, 2)).cumsum(0)

    for dtype in (torch.float32, torch.bfloat16):
        made = checked(Net(forward), device, 4, 2, 12, 10, dtype=dtype, exact=False)
        assert set(made.calls) == {"cumsum"} and made.launches <= 4, made.code


@pytest.mark.parametrize("length, more", [(513, 257), (40, 30), (33, 1), (300, 299), (1030, 3)])
def test_rows_are_read_once_although_the_result_is_longer(length, more, device, monkeypatch):
    made, kernel = [], merge.kernels.kernel
    monkeypatch.setattr(merge.kernels, "kernel", lambda loops: made.append(kernel(loops)) or made[-1])
    model = Net(lambda m, x: F.pad(F.softmax(x.cumsum(0), -1), (0, more)).cumsum(0))
    checked(model, device, 5, length, exact=False)
    (rows,) = [one.form for one in made if "run_rows" in one.form]
    assert "held0" in rows and rows.count("static_cast<const float*>") == 1, rows


@pytest.mark.parametrize("compute", [
    lambda x: F.layer_norm(x.cumsum(0) + x.cumsum(1) * x.cumsum(2), (16,)),
    lambda x: F.pad(F.softmax(x.cumsum(0) + x.cumsum(1) * x.cumsum(2), -1), (0, 5)),
], ids=["norm", "padded"])  # fmt: skip
def test_the_text_of_a_kernel_is_the_same_each_time(compute, device, monkeypatch):
    """Otherwise a new process does not find it in the cache, and compiles it again."""
    made, kernel = [], merge.kernels.kernel
    monkeypatch.setattr(merge.kernels, "kernel", lambda loops: made.append(kernel(loops)) or made[-1])
    for _ in range(8):
        checked(Net(lambda m, x: compute(x)), device, 3, 5, 16, exact=False)
    assert len(made) == 8 and len({one.form for one in made}) == 1


def test_what_becomes_float32_is_read_as_it_lies(device):
    """Rotary positions by pairs, in float32: three places read what a cast makes."""

    def forward(m, x):
        x = x.cumsum(0)
        wide, at = x.float(), torch.arange(x.shape[-1], device=x.device)
        turned = torch.stack([-wide[..., 1::2], wide[..., ::2]], -1).flatten(-2)
        return (wide * at.cos() + turned * at.sin()).to(x.dtype).cumsum(0)

    made = checked(Net(forward), device, 3, 5, 16, dtype=torch.bfloat16, exact=False)
    assert made.launches == 1, made.code


def test_of_what_torch_makes_only_the_part_is_written(device):
    """All of it would be read and written for some of it."""

    def forward(m, x):
        whole = x.cumsum(0)
        whole[1:, :3] = x[1:, :3].exp()
        return whole.cumsum(0)

    made = checked(Net(forward), device, 8, 16)
    assert made.calls == {"cumsum": 2} and made.launches == 1, made.code


def branches(seed):
    """A model in which results are read several times, and overwritten here and there."""
    generator = random.Random(seed)
    steps = [(generator.randrange(9), generator.randrange(3), generator.randrange(100)) for _ in range(6)]
    returned = generator.sample(range(8), 3)
    makes = [
        lambda x, y: x + y, lambda x, y: x.clone().add_(y), lambda x, y: x.mul_(0.5).sub_(y), lambda x, y: x * y.tanh(),
        lambda x, y: F.layer_norm(x, (x.shape[-1],)) + y, lambda x, y: x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-3),
        lambda x, y: F.softmax(x + y, -1), lambda x, y: y - x.mean(1, keepdim=True), lambda x, y: x.cumsum(1) * 0.1,
    ]  # fmt: skip

    def forward(m, x):
        values = [m.fc(x).relu() * 2, x.cumsum(1) * 0.1]
        for make, back, other in steps:
            values.append(makes[make](values[-1 - back % len(values)], values[other % len(values)]))
        return tuple(values[number] for number in returned)

    return Net(forward, fc=nn.Linear(16, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_drawn_branches(seed, dtype, any_device):
    checked(branches(seed), any_device, 3, 5, 16, dtype=dtype)


BRANCHES = {
    # how many kernels there are beside cumulative sums
    "a residual and its norm": (lambda r: (F.rms_norm(r, (16,)).cumsum(0), r.cumsum(0)), 1),
    "that leaves": (lambda r: (r, F.layer_norm(r, (16,)).cumsum(0)), 1),
    "of another shape": (lambda r: (F.softmax(r, -1).cumsum(0), r.view(-1).cumsum(0)), 1),
    "three results": (lambda r: (lambda s: (F.softmax(s, -1).cumsum(0), s.cumsum(0), r.cumsum(0)))(r.exp()), 1),
    "torch reads it first": (lambda r: (r.cumsum(0), F.softmax(r, -1).cumsum(0)), 2),
    "read elsewhere": (lambda r: ((r.flip(0) * 2).cumsum(0), r.cumsum(0)), 2),
    "overwritten": (lambda r: (lambda s: (s.cumsum(0), r.mul_(2).cumsum(0)))(F.softmax(r, -1)), 2),
    "alike": (lambda r: (lambda x, y: (x.cumsum(0), y.cumsum(0)))(r.sin() * 2, r.sin().flip(0) * 2), 1),
    "alike, of other sizes": (
        lambda r: (lambda x, y: (x.cumsum(0), y.cumsum(0)))(r.flip(1).clone(), r[1:, :3, :8].flip(1).clone()), 1,
    ),
    "alike, one of the other": (lambda r: (r.flip(1).contiguous() + 2).flip(1).contiguous().cumsum(0), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", BRANCHES)
def test_results_that_are_read_several_times(name, device):
    compute, kernels = BRANCHES[name]
    model = Net(lambda m, x: compute(x.cumsum(0) + x.cumsum(1)))
    made = checked(model, device, 3, 5, 16, exact=False)
    assert (made.launches, set(made.calls)) == (kernels, {"cumsum"}), made.code


def turned_over(x):
    return (x.transpose(0, 1) * 2).contiguous()


REPEATED = {
    # how many kernels there are beside cumulative sums
    "twice": (lambda r: (turned_over(r).cumsum(0), turned_over(r).cumsum(1)), 1),
    "three times": (lambda r: (turned_over(r).cumsum(0), turned_over(r).cumsum(1), turned_over(r).cumsum(2)), 1),
    "and read by a kernel": (lambda r: (turned_over(r).cumsum(0), turned_over(r).cumsum(1) + turned_over(r)), 2),
    "of what is repeated": (
        lambda r: (turned_over(turned_over(r).cumsum(0)).cumsum(0), turned_over(r).cumsum(1)), 2,
    ),
    "overwritten in between": (lambda r: (turned_over(r).cumsum(0), turned_over(r.mul_(3)).cumsum(1)), 2),
    "the second is overwritten": (lambda r: (turned_over(r).cumsum(0), turned_over(r).cumsum_(1)), 2),
    "the first is overwritten": (lambda r: (turned_over(r).cumsum_(0), turned_over(r).cumsum(1)), 2),
    "the second leaves": (lambda r: (turned_over(r).cumsum(0), turned_over(r)), 2),
    "the first leaves": (lambda r: (lambda y: (y, y.cumsum(1), turned_over(r).cumsum(0)))(turned_over(r)), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_what_is_computed_twice(name, device):
    compute, kernels = REPEATED[name]
    model = Net(lambda m, x: (compute((x.cumsum(0) + x.cumsum(1)).cumsum(2)), torch.cat([x] * 9).cumsum(0)))
    made = checked(model, device, 3, 5, 16)
    assert made.launches == kernels + 2, made.code  # the sum, and what is much larger


def test_layers_of_kernels_that_are_alike(device):
    """Each layer's kernel, in the place of two passes after a library's products, needs what the one before made."""

    def forward(m, x):
        for _ in range(4):
            x = F.silu(m.fc(x)) * m.other(x)
        return x.cumsum(0)

    made = checked(Net(forward, fc=nn.Linear(16, 16), other=nn.Linear(16, 16)), device, 3, 5, 16)
    assert made.launches == 4 or device == "cuda"


def test_what_overwrites_a_librarys_result_is_computed_where_it_is_moved(device):
    def forward(m, x):
        y = x.cumsum(-1)
        y.mul_(2).sigmoid_()
        return y.t().contiguous().cumsum(-1)

    made = checked(Net(forward), device, 6, 8)
    assert made.launches == 1, made.code


def scores_with_positions(x):
    """As in torchvision's MViT: Python copies the part onto itself after it is added to."""
    scores = x @ x.transpose(1, 2)
    scores[:, 1:, 1:] += x[:, 1:, :1] * x[:, None, 1:, 0] * 2
    return scores.softmax(-1)


def parts_one_after_another(x):
    y = x.cumsum(0)
    y[..., 0:2] *= 2
    y[:, 1:].transpose(1, 2)[:, 2:4].exp_()
    y[..., ::2].clamp_(-1, 1)
    return y.cumsum(1)


def part_and_its_neighbour(x):
    y = x.cumsum(0)
    y[:, :2] += y[:, 2:4]
    y[:, 1:3] *= y[:, 2:4]  # what is read is overwritten by others
    return y.flip(1) * 2


def arguments_part(x):
    x[:, 1:] -= 1.5
    return x.mul_(2).cumsum(0)


@pytest.mark.parametrize("compute, calls", [
    (scores_with_positions, {"bmm": 1}), (parts_one_after_another, {"cumsum": 2}),
    (part_and_its_neighbour, {"cumsum": 1, "add_": 1, "mul_": 1}), (arguments_part, {"cumsum": 1}),
])  # fmt: skip
def test_parts_that_are_changed_in_place(compute, calls, device):
    made = checked(Net(lambda m, x: compute(x)), device, 3, 20, 20)
    assert made.calls == calls, made.code


def moved_after_a_part_was_changed(x):
    y = x.cumsum(0)
    y[:, 1:] += x[:, :1]
    return y.transpose(1, 2).reshape(x.shape[0], -1) * 2


def read_twice_after_a_part_was_changed(x):
    y = x.cumsum(0)
    y[:, 1:] += x[:, :1]
    return y * 2, y.sum(-1)


def tables(m, x):
    """As relative positions: each made of numbers, before a parameter is indexed with it."""

    def chosen(step):
        return m.p[(torch.arange(20)[:, None] * step - torch.arange(20)[None, :]) % 20]

    one, two, three = map(chosen, (1, 2, 3))
    return x @ one, x @ two, x @ three


@pytest.mark.parametrize("compute, calls, launches", [
    (scores_with_positions, 1, 1), (moved_after_a_part_was_changed, 1, 1), (read_twice_after_a_part_was_changed, 1, 2),
])  # fmt: skip
def test_a_part_is_changed_where_the_whole_is_read(compute, calls, launches, device):
    """Only then: whoever else reads it needs it in memory."""
    made = checked(Net(lambda m, x: compute(x)), device, 3, 20, 20)
    assert (sum(made.calls.values()), made.launches) == (calls, launches), made.code


def test_what_constants_choose_shares_a_launch(device):
    made = checked(Net(tables, p=torch.randn(20, 20)), device, 20, 3, 20)
    assert (made.calls, made.launches) == ({"bmm": 3}, 1), made.code
    assert len(made.constants) == 3


def test_an_argument_is_overwritten_as_eager_overwrites_it(any_device):
    model = Net(lambda m, x: (arguments_part(x), F.linear(x, x[0]).relu() + 1))
    fast = fxfuse.optimize(model)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(3, 5, 5).to(any_device)
        y = x.clone()
        for have, want in zip(fast(x), model(y), strict=True):
            torch.testing.assert_close(have, want)
        assert torch.equal(x, y)


def test_what_is_overwritten_and_read_by_two(device):
    """Both readers need what was computed in place: it is, before the first of them."""

    def forward(m, x):
        y = torch.sort(x, -1)[0]
        y.mul_(2).add_(1)
        return y.flip(-1).cumsum(-1), y.t().contiguous().cumsum(-1)

    checked(Net(forward), device, 6, 8)


@pytest.mark.parametrize("like", [torch.empty_like, torch.zeros_like, lambda y: y.new_full(y.shape, 2)])
def test_memory_like_that_of_what_lies_nowhere(like, device):
    """Whatever is to be of the same shape needs no tensor, which the loops that move it never make."""

    def forward(m, x):
        y = torch.cat([x.cumsum(-1), x], 1)
        z = like(y)
        z[:, 1:] = y[:, :-1]
        z[:, 0] = 1
        return z.cumsum(-1)

    for dtype in (torch.float32, torch.float64):
        assert "cat" not in checked(Net(forward), device, 1, 6, dtype=dtype).calls


def test_memory_that_a_number_fills(device):
    """As torch subtracts a tensor from a number in a trace: so begins every gradient of a SiLU."""

    def forward(m, x):
        return (torch.ops.aten.fill(torch.empty_like(x), 1.5) - x.cumsum(-1)).cumsum(-1)

    assert not {"fill", "empty_like", "sub"} & checked(Net(forward), device, 5, 8).calls.keys()


@pytest.mark.parametrize("rows", [1, 5])
def test_memory_that_is_replaced(rows, device):
    """As a trace without in-place changes has them."""

    def forward(m, x):
        like = torch.ops.aten.new_empty_strided(x, (5, 8), (8, 1))
        return (torch.ops.aten.copy(like, x.cumsum(-1)[:rows]) + 1).cumsum(-1)

    assert not {"copy", "new_empty_strided"} & checked(Net(forward), device, 5, 8).calls.keys()


def test_memory_of_which_the_first_element_is_overwritten(device):
    def forward(m, x):
        v = torch.ones(4096, device=x.device)
        v[0] = x.cumsum(-1).sum()
        return (x.cumsum(-1) * v).cumsum(-1)

    made = checked(Net(forward), device, 2, 4096)
    assert made.arena_size >= 4096 * 4


def test_a_sum_that_overwrites_a_part_of_what_is_read(device):
    def forward(m, x):
        y = torch.ones(8, device=x.device)
        y[0] = x.sum()
        return (x * y).cumsum(0)

    checked(Net(forward), device, 5, 8)


def test_memory_that_is_overwritten_with_parameters_after_it_was_read(device):
    """What needs nothing but parameters could be computed early, but not before others have read what was there."""

    def forward(m, x):
        first, second = m.w * 2, m.v * 2
        y = (x * first).cumsum(-1) + first
        first.copy_(second)
        return y.cumsum(-1) * first

    w, v = (nn.Parameter(torch.randn(64)) for _ in range(2))
    checked(Net(forward, w=w, v=v), device, 2, 64)


def pictures(x):
    """Images of which the channels come last in memory."""
    return x.permute(0, 3, 1, 2)


ROWS = {
    "softmax": (lambda x: F.softmax(x * 2, -1), (2, 3, 5, 49), 1),
    "softmax with a mask": (
        lambda x: F.softmax((x * 0.3).masked_fill(x > 1, float("-inf")) + x.sin(), -1), (2, 3, 5, 40), 1,
    ),
    "softmax of nothing": (lambda x: F.softmax(x.masked_fill(x > -9, float("-inf")), -1), (3, 8), 1),
    "softmax, windows put together": (
        lambda x: back_from_windows(F.softmax(windows(x)[:, :2, :2], -1)), (2, 8, 8, 8), 1,
    ),
    "softmax, moved": (lambda x: F.softmax(x, -1).permute(1, 0, 2).contiguous(), (4, 5, 64), 1),
    "softmax of long rows": (lambda x: F.softmax(x, -1), (32, 4200), 1),
    "softmax of short rows": (lambda x: F.softmax(x, -1), (30, 3), 1),
    "log_softmax": (lambda x: F.log_softmax(x, -1) * 2, (4, 1000), 1),
    "mean": (lambda x: x.exp().mean(-1), (3, 4, 96), 1),
    "mean of all": (lambda x: x.exp().mean(), (3, 4, 96), 1),
    "mean of pixels": (lambda x: x.sin().mean((2, 3), keepdim=True) + 1, (3, 4, 8, 7), 1),
    "sum and what it is divided by": (lambda x: x / x.abs().sum(-1, True), (3, 4, 31), 1),
    "amax": (lambda x: x.amax(-1, keepdim=True) - x, (3, 4, 33), 1),
    "var": (lambda x: x.var(-1) + 1, (4, 70), 1),
    "normalize": (lambda x: F.normalize(x.cos(), dim=-1), (3, 5, 30), 1),
    "RMSNorm, written out": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), (3, 5, 64), 1),
    "LayerNorm, written out": (
        lambda x: (lambda d: d / torch.sqrt((d * d).mean(-1, True) + 1e-5))(x - x.mean(-1, True)), (3, 5, 64), 1,
    ),
    "LayerNorm, its mean taken off twice": (
        lambda x: (lambda m: (x - m) * torch.rsqrt((x - m).pow(2).mean(-1, True) + 1e-5))(x.mean(-1, True)),
        (3, 5, 64), 1,
    ),
    "the greatest and the mean of a row": (
        lambda x: (lambda m, g: (x - m).exp() * g + m)(x.mean(-1, True), x.amax(-1, True)), (3, 5, 64), None,
    ),
    "norms of a sum of norms": (
        lambda x: (lambda y: (y, F.rms_norm(y, (64,)) * 2))(x + F.rms_norm(x.sin(), (64,))), (3, 5, 64), 1,
    ),
    "a norm, turned": (lambda x: turned(F.rms_norm(x, (64,)) * 2), (3, 5, 64), 1),
    "a norm along the first, turned": (lambda x: turned(F.normalize(x, dim=0)), (5, 6, 64), None),
    "rms_norm": (lambda x: F.rms_norm(x, (6,)) * 2, (6, 5, 6), 1),
    "rms_norm of small numbers": (lambda x: F.rms_norm(x * 0.015625, (6,)), (6, 5, 6), None),
    "layer_norm": (lambda x: F.layer_norm(x, (5, 6)) * 2, (6, 5, 6), 1),
    "group_norm": (lambda x: F.group_norm(x, 2) * 3, (3, 4, 5, 6), 1),
    "group_norm, channels_last": (lambda x: F.silu(F.group_norm(pictures(x), 2)) * 3, (3, 5, 6, 16), 1),
    "group_norm of odd groups, channels_last": (lambda x: F.group_norm(pictures(x), 3) + 1, (3, 5, 6, 30), 1),
    "instance_norm": (lambda x: F.instance_norm(x), (3, 4, 5, 6), 1),
    "standardised weights": (
        lambda x: F.batch_norm(x.reshape(1, 4, -1), None, None, x[0, 0, 0, :4], training=True).reshape(x.shape) * 2,
        (4, 3, 5, 5), 1,
    ),
    "rows of rows": (lambda x: F.softmax(x.mean(-1) + 1, -1), (4, 20, 30), 2),
    "few short rows for many elements": (lambda x: x + x[..., :3].mean(-1, keepdim=True), (4, 2000), 2),
    "one long row": (lambda x: x.exp().sum(), (8, 4096), None),
    "mean of two": (lambda x: x.mean(0) + 1, (2, 64), 1),
    "few long columns": (lambda x: x.sum(0), (4100, 64), None),
    "softmax of rows that may be masked": (
        lambda x: torch._safe_softmax(x.masked_fill(x.sum(-1, True) > 0, float("-inf")), -1), (5, 8), 1,
    ),
    "pooled to one": (lambda x: F.adaptive_avg_pool2d(x, 1) * 2, (3, 4, 8, 7), 1),
    "pooled to one, channels_last": (lambda x: F.adaptive_avg_pool2d(pictures(x), 1) + 1, (3, 9, 7, 16), 1),
    "mean of pixels, channels_last": (lambda x: pictures(x).mean((2, 3)).sigmoid(), (2, 30, 30, 40), 1),
    "mean of few pixels, channels_last": (lambda x: pictures(x).mean((2, 3), True) + 1, (2, 2, 3, 200), 1),
    "mean of pixels, odd channels": (lambda x: pictures(x).exp().mean((2, 3)), (2, 5, 9, 11), 1),
    "softmax along the first": (lambda x: F.softmax(x, 0), (20, 64), 1),
    "softmax along channels": (lambda x: F.softmax(x, 1), (2, 20, 6, 8), 1),
    "log_softmax along channels, odd": (lambda x: F.log_softmax(x, 1) * 2, (2, 20, 7, 9), 1),
    "LayerNorm along channels": (
        lambda x: (lambda d: d * torch.rsqrt((d * d).mean(1, True) + 1e-6))(x - x.mean(1, True)), (2, 24, 6, 8), 1,
    ),
    "amax along the first": (lambda x: x.amax(0) - x[0], (500, 64), 1),
    "norm along channels": (lambda x: F.normalize(x, dim=1), (3, 40, 64), 1),
    "sum of every other column": (lambda x: x[:, ::2].sum(0), (40, 64), None),
    "sum along the first of few columns": (lambda x: x.sum(0), (40, 6), None),
    "of integers": (lambda x: (x * 9).long().sum(-1), (4, 20), None),
}  # fmt: skip
"""What follows a library call, of what shape, and how many kernels it is; None where torch adds up."""


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_mean_that_deviations_are_taken_from_is_stored_by_their_kernel(channels_last, device):
    def forward(_, x):
        mean = x.mean((2, 3), keepdim=True)
        return mean, (x - mean).square().mean((2, 3), keepdim=True)

    model = Net(forward)
    fast = fxfuse.optimize(model.to(device))
    with torch.no_grad():
        for seed in range(4):
            torch.manual_seed(seed)
            x = torch.randn(3, 40, 9, 7).to(device) + 3
            x = x.to(memory_format=torch.channels_last) if channels_last else x
            assert_as_eager(model, fast, x)
    (made,) = state_of(fast).programs.programs
    assert made.launches == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [2, 31, 33, 49, 64, 100, 256, 260, 1023, 2064])
def test_rows_of_all_lengths(length, dtype, device):
    """Short ones are read once and held, and long ones read again by each loop."""
    bias, gain = torch.randn(3, length).to(device, dtype), torch.randn(length).to(device, dtype)

    def forward(model, x):
        x = x.cumsum(0)
        softmax = F.softmax(x * 0.3 + bias, -1)
        norm = F.rms_norm(x, (length,), gain) * 2
        return softmax.cumsum(0), norm.cumsum(0)

    assert checked(Net(forward), device, 5, 3, length, dtype=dtype).calls == {"cumsum": 3}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name, device):
    compute, shape, kernels = ROWS[name]
    model = Net(lambda m, x: compute((x.relu() * 2).neg().cumsum(0)))
    made = checked(model, device, *shape, exact=False)
    if kernels is not None:
        assert (made.launches - 1, made.calls - Counter(cumsum=1)) == (kernels, Counter()), made.code


SUMS_OF_THE_SAME = {
    "rows": (lambda x: (x.sum(-1), (x * x.sin()).sum(-1), x.amax(-1)), (3, 4, 96)),
    "long rows": (lambda x: (x.square().sum(-1) * 2, (x * x.tanh()).sum(-1)), (40, 5000)),
    "columns": (lambda x: (x.sum(0), (x * x.cos()).sum(0)), (60, 64)),
    "pixels in channels_last": (
        lambda x: (lambda y, m: ((y * m).sum((2, 3)), (y * m * y.cos()).sum((2, 3))))(pictures(x), pictures(x) > 0),
        (2, 30, 30, 40),
    ),
    "rows, one of a sum of them": (lambda x: ((x - x.mean(-1, True)).square().sum(-1), x.sum(-1)), (3, 4, 96)),
    "what is made of a mean and of the variance": (
        lambda x: (lambda m: (lambda v: (m, (v + 0.1).rsqrt(), m * 0.1, v * 2))((x - m[:, None]).square().mean(-1)))(
            x.mean(-1)
        ),
        (40, 96),
    ),
    "a sum that is read again where another one is added up": (
        lambda x: (lambda mean: (mean, mean.sin(), (x * mean.sin()[:, None]).square().mean(-1)))(x.mean(-1)), (40, 96),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS_OF_THE_SAME)
def test_sums_of_the_same_are_one_kernel(name, device, texts):
    """As batch normalisation's gradients need them: memory is read once."""
    compute, shape = SUMS_OF_THE_SAME[name]
    checked(Net(lambda m, x: compute(x.cumsum(0))), device, *shape, exact=False)
    assert [text.count("struct Body") for text in texts if "Totals<" in text] == [1]


RESULTS_OF_THE_SAME = {  # the results, and how many kernels compute them
    "two of one tensor": (lambda x, y: (x.sin(), x * 2), 1),
    "of two, most alike": (lambda x, y: (x * y, x / y, x.exp()), 1),
    "five of one": (lambda x, y: tuple(x * factor for factor in range(2, 7)), 2),
    "windows of one": (lambda x, y: (x[1:] + x[:-1], x[1:] - x[:-1]), 1),
    "in other strides": (lambda x, y: (x * 2, (x.t() * 3).contiguous()), 2),
    "of a row that both read": (lambda x, y: (x * x[0], y * x[0]), 2),
    "one overwrites what the other reads": (lambda x, y: (x * 2, x.mul_(3)), 2),
    "the same": (lambda x, y: (x * 2, x * 2), 1),
}


@pytest.mark.parametrize("name", RESULTS_OF_THE_SAME)
def test_results_of_the_same_are_one_kernel(name, device, monkeypatch):
    """Memory is read once."""
    made, kernel = [], kernels.kernel
    monkeypatch.setattr(kernels, "kernel", lambda loops: made.append(loops) or kernel(loops))
    compute, expected = RESULTS_OF_THE_SAME[name]

    def forward(_, x):
        results = compute(x.cumsum(0), x.cumsum(1))
        return [one.cumsum(0) for one in results]

    checked(Net(forward), device, 48, 40, exact=False)
    assert len(made) == expected, made


def test_sums_of_the_same_of_which_one_is_overwritten(device):
    """Memory that torch allocated for a sum begins with what is made of it in place."""

    def forward(_, x):
        x = x.cumsum(0)
        return x.sum(-1), (x * x.tanh()).sum(-1).mul_(2).add_(1)

    checked(Net(forward), device, 6, 70, exact=False)


def test_sums_are_apart_where_another_kernel_needs_one_for_the_other(device):
    def forward(_, x):
        x = x.cumsum(0)
        mean = x.mean(-1)
        x[:, 0] = mean * 2
        return mean, (x * x).sum(-1)

    checked(Net(forward), device, 6, 70, exact=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [
    "softmax with a mask", "RMSNorm, written out", "rms_norm of small numbers", "standardised weights",
    "group_norm", "mean of pixels, channels_last", "softmax along channels",
])  # fmt: skip
def test_rows_of_sixteen_bits_are_no_less_exact(name, dtype, any_device):
    compute, shape, _ = ROWS[name]
    model = Net(lambda m, x: compute((x.relu() * 2).neg().cumsum(0)))
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for seed in range(4):
            torch.manual_seed(seed)
            x = torch.randn(shape).to(any_device, dtype)
            x = (x * 8).round() / 8  # sums before the rows are exact
            skip_if_absent(outcome(model, x))
            exact = model(x.double())
            errors = [(f(x).double() - exact).abs().max().item() for f in (fast, model)]
            assert errors[0] <= errors[1] + torch.finfo(dtype).eps * exact.abs().max().item()
    assert state_of(fast).programs.programs


def test_rows_keep_what_is_no_number(any_device):
    """NaN and infinities, and equal numbers that cancel."""
    model = Net(lambda m, x: (lambda y: (F.softmax(y, -1), y.mean(-1), y.amax(-1), y.var(-1)))((x * 1).neg().cumsum(0)))
    x = torch.randn(5, 7)
    x[1, 2], x[2, 3], x[3], x[4] = torch.nan, torch.inf, 1e4, -torch.inf
    x = torch.cat([x, torch.zeros(1, 7)]).to(any_device)
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for _ in range(4):
            assert_as_eager(model, fast, x, exact=False)
    assert state_of(fast).programs.programs


def test_indices_are_the_same_numbers_however_they_are_simplified():
    generator = random.Random(0)

    def value(index, at):
        total = index.constant
        for atom, coefficient in index.terms:
            match atom:
                case Variable(name, _):
                    number = at[name]
                case Quotient(of, by):
                    number = value(of, at) // by
                case Remainder(of, by):
                    number = value(of, at) % by
            total += coefficient * number
        return total

    operations = (
        lambda a, b, n: a + b,
        lambda a, b, n: a - b,
        lambda a, b, n: a * n + 1,
        lambda a, b, n: a // n,
        lambda a, b, n: a % n,
    )
    for _ in range(300):
        sizes = [generator.choice([1, 2, 3, 4, 6, 8]) for _ in range(3)]
        every = [dict(zip("abc", at, strict=True)) for at in itertools.product(*map(range, sizes))]
        indices = [variable(name, size) for name, size in zip("abc", sizes, strict=True)]
        right = [[at[name] for at in every] for name in "abc"]
        for _ in range(6):
            one, two = generator.randrange(len(indices)), generator.randrange(len(indices))
            operation, number = generator.choice(operations), generator.choice([2, 3, 4, 8, 12])
            indices.append(operation(indices[one], indices[two], number))
            right.append([operation(a, b, number) for a, b in zip(right[one], right[two], strict=True)])
        for index, numbers in zip(indices, right, strict=True):
            assert [value(index, at) for at in every] == numbers
            assert index.range[0] <= min(numbers) and max(numbers) <= index.range[1]


def test_indices_are_the_same_numbers_where_conditions_hold():
    generator = random.Random(1)
    simpler = 0
    for _ in range(400):
        sizes = [generator.choice([2, 3, 4, 6, 8]) for _ in range(3)]
        every = [dict(zip("abc", at, strict=True)) for at in itertools.product(*map(range, sizes))]
        a, b, c = (variable(name, size) for name, size in zip("abc", sizes, strict=True))
        sums = [a, b * 3 + c, a * sizes[1] + b, c - generator.randrange(4), b * -1 + sizes[1], (a + c) % 5, a // 2 + b]
        where = [Inside(one - generator.randrange(4), generator.randrange(1, 6)) for one in generator.sample(sums, 2)]
        index = generator.choice(sums)
        for _ in range(3):
            by = generator.choice([2, 3, 5, 8])
            index = (index + generator.choice(sums) * generator.choice([1, 2, -1, 5]) + 40) % by + index // by
        shorter = simplified_index(index, tuple(where))
        simpler += len(list(shorter.atoms())) < len(list(index.atoms()))
        for at in every:
            values = {name: Index((), number) for name, number in at.items()}
            if all(0 <= one.index.substituted(values).constant < one.size for one in where):
                assert shorter.substituted(values) == index.substituted(values), (index, where)
    assert simpler > 20


def test_views_of_views_are_simple_again():
    x = variable("x", 5376)
    assert (x // 672) * 672 + (x // 96 % 7) * 96 + x % 96 == x
    assert (variable("u", 12) * 8 + variable("l", 8)) // 32 == variable("u", 12) // 4


# ------------------------------------------------------------------------------- parts of what is given


def rows_copied(m, y, at):
    m.cache.index_copy_(1, at, y.exp() + 1)


def rows_put(m, y, at):
    m.cache[:, at] = y.exp() + 1


def a_part_copied(m, y, at):
    m.cache[:, 2:5] = y.exp() + 1


def every_other_column(m, y, at):
    m.cache.narrow(1, 2, 3)[..., ::2] = y[..., ::2].exp() + 1


def a_number(m, y, at):
    m.cache[:, 3:5].fill_(2.5)


def columns_copied(m, y, at):  # neighbours in memory come from rows that are far apart
    m.turned.index_copy_(2, at, (y.exp() + 1).transpose(1, 2))


def pairs_put(m, y, at):
    m.cache[at, at + 1] = y[0].exp() + 1


def rows_normalised(m, y, at):
    m.cache.index_copy_(1, at, y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))


def sums_of_columns(m, y, at):
    m.sums.index_copy_(1, at[:1], y.exp().sum(1, keepdim=True))


def two_of_them(m, y, at):
    m.cache.index_copy_(1, at, y.exp() + 1)
    m.other.index_copy_(1, at, (y.exp() + 1) * 2)


def a_part_in_place(m, y, at):
    m.cache[:, 2:5] = m.cache[:, 2:5] * 0.5 + y.exp()


def all_in_place(m, y, at):
    m.cache.copy_(m.cache * 0.5 + y[:, :1].exp())


WRITTEN = {
    "rows copied": (rows_copied, 1),
    "rows put": (rows_put, 1),
    "a part copied": (a_part_copied, 1),
    "every other column": (every_other_column, 1),
    "a number": (a_number, 1),
    "columns copied": (columns_copied, 1),
    "pairs put": (pairs_put, 2),
    "rows normalised": (rows_normalised, 1),
    "sums of columns": (sums_of_columns, 1),
    "two of them": (two_of_them, 1),
    "a part in place": (a_part_in_place, 1),
    "all in place": (all_in_place, 1),
}


class Cached(nn.Module):
    """Puts something into a part of its buffers, and reads all of them."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        for name, shape in (("cache", (5, 7, 8)), ("other", (5, 7, 8)), ("turned", (5, 8, 7)), ("sums", (5, 7, 8))):
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, x, at):
        y = x.cumsum(-1)
        self.write(self, y, at)
        return (self.cache + self.other * 3 + self.turned.transpose(1, 2) + self.sums).cumsum(-1)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_put_into_a_part_of_memory_is_put_there(name, dtype, device):
    write, kernels = WRITTEN[name]
    model = Cached(write).eval().to(device, dtype)
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for seed in range(5):
            torch.manual_seed(seed)
            x, at = torch.randn(5, 3, 8).to(device, dtype), torch.randperm(5)[:3].to(device)
            versions = [buffer._version for buffer in fast.buffers()]
            assert_as_eager(model, fast, x, at)
            for (which, own), before in zip(model.named_buffers(), versions, strict=True):
                torch.testing.assert_close(fast.get_buffer(which), own)
                assert (fast.get_buffer(which)._version > before) is (own._version > 0), which
    (made,) = state_of(fast).programs.programs or [pytest.fail(state_of(fast).programs.reason)]
    if dtype == torch.float32 or write is not sums_of_columns:  # rows of 16 bytes are left to torch
        assert made.launches == kernels + 1, made.code
        assert set(made.calls) == {"cumsum"}, made.code
    assert not made.repeats


class Given(nn.Module):
    def forward(self, x, cache, at):
        cache.index_copy_(0, at, x.cumsum(-1).exp())
        return (cache + 1).cumsum(-1)


def test_an_argument_that_is_written_into_must_be_no_other(device):
    model = Given().eval()
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for seed in range(5):
            torch.manual_seed(seed)
            x, at = torch.randn(3, 8, device=device), torch.randperm(6, device=device)[:3]
            caches = [torch.zeros(6, 8, device=device) for _ in range(2)]
            torch.testing.assert_close(fast(x, caches[0], at), model(x, caches[1], at))
            torch.testing.assert_close(*caches)
        assert state_of(fast).programs.programs, state_of(fast).programs.reason
        same = [torch.randn(3, 8, device=device)] * 2
        same[1] = same[0].clone()
        at = torch.tensor([2, 0, 1], device=device)
        torch.testing.assert_close(fast(same[0], same[0], at), model(same[1], same[1], at))
        torch.testing.assert_close(*same)


def sums_in_place(m, y, at):
    m.cache.index_copy_(1, at, m.cache[:, :3] + y.exp())


def rows_changed_twice(m, y, at):
    at = at.clamp(max=1)  # one of them comes twice
    m.cache.index_copy_(1, at, m.cache.index_select(1, at) * 2 + y[:, :1].exp())


def rows_moved(m, y, at):
    m.cache[:, 1:4] = m.cache[:, :3].clone() + y[:, :1].exp()


@pytest.mark.parametrize(("write", "launches"), [(sums_in_place, 3), (rows_moved, 3), (rows_changed_twice, 4)])
def test_a_part_of_memory_is_not_overwritten_while_others_read_it(write, launches, device):
    model = Cached(write).eval().to(device)
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for seed in range(4):
            torch.manual_seed(seed)
            assert_as_eager(model, fast, torch.randn(5, 3, 8, device=device), torch.randperm(5, device=device)[:3])
            torch.testing.assert_close(fast.cache, model.cache)
    (made,) = state_of(fast).programs.programs or [pytest.fail(state_of(fast).programs.reason)]
    assert set(made.calls) == {"cumsum"} and made.launches == launches, made.code


# ------------------------------------------------------------------------------------------- masks


def attentions(made):
    """How many calls of torch's attention, whichever of its operators it chooses."""
    return sum(count for name, count in made.calls.items() if "scaled_dot_product" in name)


@pytest.fixture
def attention_by_torch(monkeypatch):
    """No kernel of ours for few queries."""
    monkeypatch.setattr(attention, "planned", lambda *_: None)


@pytest.mark.usefixtures("attention_by_torch")
@pytest.mark.parametrize("named", [False, True])
def test_a_mask_of_truth_values_is_made_into_numbers_once(named, device):
    def attend(q, mask):
        options = {"attn_mask": mask} if named else {}
        return F.scaled_dot_product_attention(q, q, q, *([] if named else [mask]), **options)

    def forward(m, x):
        mask = (x[:, :1, :, :1] > -1) & torch.ones(6, 6, dtype=torch.bool, device=x.device).tril()
        q = x.cumsum(-1)
        for _ in range(3):
            q = attend(q, mask) + 1
        return q.cumsum(-1)

    made = checked(Net(forward), device, 2, 2, 6, 16)
    assert made.calls["cumsum"] == 2 and attentions(made) == 3 and made.calls.total() == 5, made.code
    assert made.launches == 5, made.code  # the question, the mask, and three additions


def test_a_row_without_any_key_attends_as_in_torch(device):
    def forward(m, x):
        mask = (x[:, :1, :, :1] > 0).expand(-1, -1, -1, 6)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).cumsum(-1) + 1

    checked(Net(forward), device, 2, 2, 6, 16)


@pytest.mark.usefixtures("attention_by_torch")
def test_a_mask_that_changes_is_made_into_numbers_again(device):
    def forward(m, x):
        mask = x[:, :1, :, :6] > -1
        y = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        mask[:, :, 2:4] = x[:, 1:, 2:4, 1:7] > -2
        return F.scaled_dot_product_attention(y, x, x, attn_mask=mask).cumsum(-1) + 1

    made = checked(Net(forward), device, 2, 2, 6, 16)
    assert made.calls["cumsum"] == 1 and attentions(made) == 2 and made.calls.total() == 3, made.code
