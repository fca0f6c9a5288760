"""CUDA plans end to end on the emulated GPU: every candidate of a problem runs as a call would run it.

What the kernels compute is tested elsewhere; here it is which tensors they get, in which order, what is allocated, and
with which strides. The tensors are on the CPU, the plans believe that they are on a GPU. Inputs are small integers, so
that results are exact in every precision.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from emulator import available, compiled

from fxfuse import build, events
from fxfuse.cuda import conv2d_wgmma, exactness, plan, pooling, prepare, tune
from fxfuse.problem import ByAddress, Problem, TensorMeta, anchor_meta, in_order

pytestmark = pytest.mark.skipif(not available(), reason="the emulation needs Linux and g++ 12 or newer")

CUDA = torch.device("cuda:0")
CONV = (("stride", (1, 1)), ("padding", (1, 1)), ("dilation", (1, 1)), ("groups", 1))
POOL = (2, 2, 2, 2, 0, 0, 0)


WEIGHT_GRADIENTS = {
    # images, filters, channels, height and width; kernel; options
    "pixels": ((3, 24, 40, 5, 5), (1, 1), {}),
    "few pixels": ((1, 5, 3, 3, 11), (1, 1), {}),
    "one pixel": ((1, 32, 16, 1, 1), (1, 1), {}),
    "one filter": ((2, 1, 8, 5, 2), (1, 1), {}),
    "one channel": ((2, 8, 1, 9, 5), (1, 1), {}),
    "3x3": ((2, 24, 8, 9, 7), (3, 3), {"padding": (1, 1)}),
    "with a stride": ((2, 12, 8, 9, 8), (3, 5), {"padding": (1, 2), "stride": (2, 2)}),
    "1x1 with a stride": ((2, 12, 16, 9, 8), (1, 1), {"stride": (2, 2)}),
    "dilated": ((1, 16, 4, 12, 11), (3, 2), {"dilation": (2, 3), "padding": (1, 0)}),
    "depthwise": ((2, 16, 16, 9, 7), (3, 3), {"padding": (1, 1), "groups": 16}),
    "groups": ((3, 24, 12, 9, 7), (3, 3), {"padding": (1, 1), "groups": 3}),
    "groups of pixels": ((2, 12, 24, 5, 5), (1, 1), {"groups": 3}),
}


class Gpu:
    """Which GPU is the current one."""

    def __init__(self):
        self.current = CUDA.index

    @contextlib.contextmanager
    def made_current(self, index):
        before, self.current = self.current, index
        yield
        self.current = before


@pytest.fixture
def gpu():
    return Gpu()


@pytest.fixture
def drafted(gpu, monkeypatch):
    """A function from a problem to its candidates; a chain's is one that stands for its plan."""

    def load(source):
        library = compiled(source.text)

        def launch(params, stream, *pointers):
            assert gpu.current == CUDA.index
            code = library.fxfuse_launch(params, (ctypes.c_uint64 * len(pointers))(*pointers), ctypes.c_uint64(stream))
            assert code == 0, library.fxfuse_error(code)

        return launch

    properties = SimpleNamespace(major=8, minor=0, multi_processor_count=2, shared_memory_per_multiprocessor=163 << 10)

    def empty_strided(shape, strides, dtype):
        assert gpu.current == CUDA.index
        made = torch.empty_strided(shape, strides, dtype=dtype).fill_(99)
        if candidates.instead is not None and len(candidates.allocated) == candidates.instead[0]:
            made = candidates.instead[1]
        candidates.allocated.append(made)
        return made

    for module in (plan, pooling):
        monkeypatch.setattr(module, "empty_strided", empty_strided)
    monkeypatch.setattr(build, "load", load)
    monkeypatch.setattr(tune, "draft", lambda problem, candidates, apart=None: candidates)
    monkeypatch.setattr(exactness, "eager_uses_tf32", lambda problem: True)
    monkeypatch.setattr(prepare, "eager_error", lambda problem: None)
    monkeypatch.setattr(plan, "CHANNELS_LAST_PRODUCTS", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (properties.major, properties.minor))
    monkeypatch.setattr(torch.cuda, "device", gpu.made_current)
    # absent where torch is built without CUDA
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: gpu.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)

    def candidates(problem):
        acc = anchor_meta(problem)
        if problem.kind == "gated_linear":
            return plan.draft_gated(problem, acc, list)[:1]
        found = plan.draft(problem, acc)
        if callable(found):
            made = found()
            return [tune.Candidate(made.kernel, made.kernel, lambda: made.run, always=True)]
        fused = [candidate for candidate in found if not candidate.always]
        return [*fused[:1], *(candidate for candidate in found if candidate.always)]

    candidates.gpu, candidates.properties = gpu, properties
    candidates.allocated, candidates.instead = [], None
    return candidates


def integers(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def meta(tensor, parameter=False):
    return dataclasses.replace(TensorMeta.of(tensor, CUDA), is_parameter=parameter)


def copied(x):
    """A copy with the same strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


def check(drafted, kind, options, epilogue, x, weight, bias, operands, pool=()):
    """Runs each candidate by tensors and by addresses, on the current GPU and another. Returns their names."""
    problem = Problem(
        kind, options, epilogue, meta(x), None if weight is None else meta(weight, True),
        None if bias is None else meta(bias, True), tuple(map(meta, operands)), pool=pool,
    )  # fmt: skip
    expected = problem.reference(*(None if t is None else t.double() for t in (x, weight, bias)),
                                 [operand.double() for operand in operands])  # fmt: skip
    expected = expected if kind == "layer_norm" else expected.to(x.dtype)
    if kind == "conv3d":  # on a CPU torch's result in float64 is contiguous
        expected = expected.to(memory_format=torch._prims_common.suggest_memory_format(x))
    names = []
    for candidate in drafted(problem):
        run = candidate.build()
        others, results = (weight, bias, tuple(operands)), []
        for drafted.gpu.current in (CUDA.index, CUDA.index + 1):
            results.append(run(copied(x), *others))
            if isinstance(run, ByAddress):
                ordered = in_order(copied(x), *others)
                results.append(run.launch(ordered, [tensor.data_ptr() for tensor in ordered]))
        drafted.gpu.current = CUDA.index
        if candidate.name != plan.LIBRARY:  # whose pass overwrites the library's result
            results += in_place(drafted, run, x, weight, bias, operands)
        for result in results:
            if kind == "layer_norm":  # whose results are no integers
                assert_rounded(result, expected, candidate.name)
            else:
                assert torch.equal(result, expected), candidate.name
            moves = [size > 1 for size in result.shape]
            strides = (
                [step for step, moved in zip(of.stride(), moves, strict=True) if moved] for of in (result, expected)
            )
            assert len(set(map(tuple, strides))) == 1, candidate.name
        names.append(candidate.name)
    return names


def in_place(drafted, run, x, weight, bias, operands):
    """The results of `run` in the memory of each operand that lies as the result does, as a program may have it."""
    drafted.allocated.clear()
    with events.recorded() as seen:
        result = run(copied(x), weight, bias, operands)
    place = next((place for place, made in enumerate(drafted.allocated) if made.data_ptr() == result.data_ptr()), None)
    if place is None or not seen.launches or not seen.launches[-1].in_place:
        return
    for number, operand in enumerate(operands):
        if (operand.shape, operand.stride(), operand.dtype) == (result.shape, result.stride(), result.dtype):
            shared = copied(operand)
            drafted.allocated.clear()
            drafted.instead = place, shared
            again = run(copied(x), weight, bias, (*operands[:number], shared, *operands[number + 1 :]))
            drafted.instead = None
            assert again.data_ptr() == shared.data_ptr()
            yield again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(dtype, drafted):
    x, weight, bias = integers(5, 40, dtype=dtype), integers(24, 40, dtype=dtype), integers(24, dtype=dtype)
    full, column = integers(5, 24, dtype=dtype, seed=1), integers(5, 1, dtype=dtype)
    names = check(drafted, "linear", (), "relu(acc * o1 + o0)", x, weight, bias, (full, column))
    assert len(names) == 2 and names[-1] == plan.LIBRARY


@pytest.mark.parametrize("biases", ["", "gate", "other", "both"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gated_linear(dtype, biases, drafted):
    drafted.properties.major = 9
    x, weight, gate = (integers(*shape, dtype=dtype) for shape in ((4, 5, 40), (24, 40), (24, 40)))
    bias, gate_bias = (integers(24, dtype=dtype, seed=seed) if biases in (name, "both") else None
                       for seed, name in enumerate(("other", "gate")))  # fmt: skip
    full, column = integers(4, 5, 24, dtype=dtype, seed=1), integers(5, 1, dtype=dtype)
    for others in ((full, column), (full, torch.ones(()))):  # what is read by its address, and a number
        operands = (gate, *others, *([] if gate_bias is None else [gate_bias]))
        epilogue = "relu(o0 + o2) * acc + o1"
        names = check(drafted, "gated_linear", (), epilogue, x, weight, bias, operands)
        assert len(names) == 1 and "gated" in names[0]
    spread = integers(4, 5, 80, dtype=dtype)[..., ::2]  # which is copied
    check(drafted, "gated_linear", (), "relu(o0) * acc", spread, weight, None, (gate,))


def test_problems_that_need_one_kernel_have_candidates_of_one_form(drafted):
    def forms(rows, epilogue):
        tensors = integers(rows, 40), integers(24, 40), integers(24)
        problem = Problem(
            "linear", (), epilogue, *map(meta, tensors[:1]), *(meta(one, True) for one in tensors[1:]), ()
        )
        return {candidate.form for candidate in drafted(problem) if not candidate.always}

    assert forms(5, "relu(acc)") == forms(6, "relu(acc)")
    assert forms(5, "relu(acc)").isdisjoint(forms(5, "tanh(acc)")) and None not in forms(5, "tanh(acc)")


def test_addmm_does_not_read_a_bias_that_counts_nothing(drafted):
    x, weight, bias = integers(5, 40), integers(40, 24), torch.full((24,), torch.nan)
    options = (("beta", 0.0), ("alpha", 2.0))
    assert len(check(drafted, "addmm", options, "relu(acc + o0)", x, weight, bias, (integers(24),))) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WEIGHT_GRADIENTS)
def test_gradients_of_filters(name, dtype, drafted):
    (images, filters, channels, *size), kernel, options = WEIGHT_GRADIENTS[name]
    options = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, **options}
    sides = zip(size, kernel, options["stride"], options["padding"], options["dilation"], strict=True)
    out_size = [(side + 2 * pad - step * (taps - 1) - 1) // stride + 1 for side, taps, stride, pad, step in sides]
    x, dy = (
        integers(images, count, *sizes, dtype=dtype).to(memory_format=torch.channels_last)
        for count, sizes in ((channels, size), (filters, out_size))
    )
    given = (("kernel", kernel), *options.items())
    names = check(drafted, "conv2d_weight", given, "acc", dy, x, None, ())
    gathers = max(*kernel, *options["stride"]) > 1
    is_depthwise = options["groups"] == channels > 1
    kind = "depthwise" if is_depthwise else "filters' gradient as gemm" if gathers else "gemm"
    kind = f"batched {kind}" if 1 < options["groups"] < channels else kind
    assert names[0].startswith(kind) and names[-1] == plan.LIBRARY_ALONE


def test_gradients_of_filters_without_a_kernel(drafted):
    x = integers(2, 8, 9, 7)
    for groups in (1, 2):
        given = (("kernel", (3, 3)), *dict(CONV, groups=groups).items())
        assert check(drafted, "conv2d_weight", given, "acc", x, x, None, ()) == [plan.LIBRARY_ALONE]


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize(
    ("of_x", "of_weight"),
    [(lambda x: x, lambda w: w), (lambda x: x.mT.contiguous().mT, lambda w: w),
     (lambda x: x, lambda w: w.mT.contiguous().mT), (lambda x: x.mT.contiguous().mT, lambda w: w.mT.contiguous().mT),
     (lambda x: x.repeat(1, 1, 2)[..., ::2], lambda w: w)],
    ids=["rows", "columns of x", "columns of the weight", "columns of both", "strided"],
)  # fmt: skip
def test_products_of_batches(of_x, of_weight, batches, drafted):
    """Attention's gradients read either side by rows and by columns."""
    x, weight = of_x(integers(batches, 37, 40)), of_weight(integers(batches, 40, 24))
    operands = integers(batches, 37, 24, seed=1), integers(24)
    names = check(drafted, "bmm", (), "relu(acc * 0.5 + o0) + o1", x, weight, None, operands)
    assert names[0].startswith("batched gemm" if batches > 1 else "gemm") and names[-1] == plan.LIBRARY


@pytest.mark.parametrize("pool", [(), POOL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_convolution(channels_last, dtype, pool, drafted):
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = integers(2, 8, 6, 10, dtype=dtype).contiguous(memory_format=memory_format)
    weight = integers(16, 8, 3, 3, dtype=dtype).contiguous(memory_format=memory_format)
    residual = integers(2, 16, 6, 10, dtype=dtype, seed=1).contiguous(memory_format=memory_format)
    bias, scale = integers(16, dtype=dtype), integers(16, 1, 1, dtype=dtype)
    names = check(drafted, "conv2d", CONV, "relu(acc * o1 + o0)", x, weight, bias, (residual, scale), pool)
    library = plan.LIBRARY_POOLED if pool else plan.LIBRARY
    others = [] if channels_last else [plan.CHANNELS_LAST_LIBRARY + (" + max_pool2d" if pool else "")]
    assert names[1:] == [library, *others] and ("max_pool2d" in names[0]) == bool(pool)


def test_convolution_on_hopper(drafted, monkeypatch):
    drafted.properties.major = 9
    monkeypatch.setattr(conv2d_wgmma, "_START", 0)
    x, weight, bias = integers(2, 8, 6, 10), integers(16, 8, 3, 3), integers(16)
    names = check(drafted, "conv2d", CONV, "relu(acc) + o0", x, weight, bias, (integers(2, 16, 6, 10),), POOL)
    assert "wgmma" in names[0]


def test_convolution_without_tf32(drafted, monkeypatch):
    monkeypatch.setattr(build, "PROCESSORS", 64)
    x, weight, bias = integers(2, 8, 6, 10), integers(16, 8, 3, 3), integers(16)
    with torch.backends.cudnn.flags(allow_tf32=False):
        names = check(drafted, "conv2d", CONV, "relu(acc)", x, weight, bias, ())
    assert sum("in channels_last + passes" in name for name in names) == plan.CHANNELS_LAST_CONTESTANTS


def test_a_layout_that_no_kernel_reads(drafted):
    """Filters in NCHW's order beside an input in channels_last, and an operand in another order: both are copied."""
    x = integers(2, 8, 6, 10).contiguous(memory_format=torch.channels_last)
    operand = integers(2, 16, 6, 10).contiguous()
    check(drafted, "conv2d", CONV, "relu(acc + o0)", x, integers(16, 8, 3, 3), None, (operand,))


FLAT = {
    "planes": ((1, 3, 3), (1, 1, 1), (0, 1, 1)),
    "planes, every second one": ((1, 3, 3), (2, 2, 2), (0, 1, 1)),
    "through planes": ((3, 1, 1), (1, 1, 1), (1, 0, 0)),
    "through planes, every second one": ((3, 1, 1), (2, 1, 1), (1, 0, 0)),
    "pixels": ((1, 1, 1), (1, 1, 1), (0, 0, 0)),
    "pixels, every second one": ((1, 1, 1), (2, 2, 2), (0, 0, 0)),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FLAT)
def test_volumes_with_flat_filters_are_images(name, dtype, channels_last, drafted):
    kernel, stride, padding = FLAT[name]
    options = (("stride", stride), ("padding", padding), ("dilation", (1, 1, 1)), ("groups", 1))
    memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
    for batch in (1, 3):
        x = integers(batch, 8, 4, 6, 5, dtype=dtype).contiguous(memory_format=memory_format)
        weight, bias, scale = integers(16, 8, *kernel, dtype=dtype), integers(16, dtype=dtype), integers(16, 1, 1, 1)
        of_batch = integers(batch, 16, 1, 1, 1, dtype=dtype)
        residual = torch.nn.functional.conv3d(x, weight, bias, stride, padding).contiguous(memory_format=memory_format)
        operands = (residual, scale.to(dtype), of_batch)
        names = check(drafted, "conv3d", options, "relu(acc * o1 + o0) + o2", x, weight, bias, operands)
        ours = channels_last or name in ("through planes", "through planes, every second one", "pixels")
        assert names[-1] == plan.LIBRARY and len(names) == 1 + ours


def test_volumes_that_are_no_images_are_left_to_the_library(drafted):
    for x, kernel, stride, padding in (
        (integers(2, 8, 5, 6, 5).contiguous(memory_format=torch.channels_last_3d), (1, 3, 3), (2, 1, 1), (0, 1, 1)),
        (integers(2, 8, 4, 6, 5), (3, 3, 3), (1, 1, 1), (1, 1, 1)),
        (integers(8, 4, 6, 5), (3, 1, 1), (1, 1, 1), (1, 0, 0)),
    ):
        options = (("stride", stride), ("padding", padding), ("dilation", (1, 1, 1)), ("groups", 1))
        assert check(drafted, "conv3d", options, "relu(acc)", x, integers(16, 8, *kernel), None, ()) == [plan.LIBRARY]


def assert_rounded(have, exact, name):
    """As close as a library's result that a pass rounds once more."""
    eps = torch.finfo(have.dtype).eps
    torch.testing.assert_close(have.double(), exact, rtol=4 * eps, atol=4 * eps, msg=lambda text: f"{name}: {text}")


NORMALISED = {
    "rows": lambda dtype: (integers(5, 24, dtype=dtype), (24,)),
    "of any batch": lambda dtype: (integers(1, 5, 24, dtype=dtype), (24,)),
    "two dimensions": lambda dtype: (integers(5, 4, 6, dtype=dtype), (4, 6)),
    "everything": lambda dtype: (integers(1, 24, dtype=dtype), (1, 24)),
    "part of a longer row": lambda dtype: (integers(5, 40, dtype=dtype)[:, 3:27], (24,)),
    "another order, which is copied": lambda dtype: (integers(3, 24, 5, dtype=dtype).transpose(1, 2), (24,)),
}


@pytest.mark.parametrize("affine", [(), ("weight",), ("weight", "bias"), ("bias",)], ids="+".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMALISED)
def test_layer_norm(name, dtype, affine, drafted):
    x, normalized = NORMALISED[name](dtype)
    weight, bias = (
        integers(*normalized, dtype=dtype, seed=seed) if given in affine else None
        for seed, given in enumerate(("weight", "bias"))
    )
    options = (("normalized_shape", normalized), ("eps", 1e-5))
    assert check(drafted, "layer_norm", options, "acc", x, weight, bias, ())[1:] == [plan.LIBRARY_ALONE]
    full, vector = integers(*x.shape, dtype=dtype, seed=1), integers(*normalized, dtype=dtype, seed=2)
    names = check(drafted, "layer_norm", options, "relu(acc + o1) + o0", x, weight, bias, (full, vector))
    assert "layer_norm" in names[0] and names[1:] == [plan.LIBRARY]


def test_layer_norm_with_operands_of_a_batch_and_by_channel(drafted):
    x, scale, slope = integers(3, 5, 24), integers(3, 1, 24, seed=1), integers(5)
    options = (("normalized_shape", (24,)), ("eps", 1e-5))
    epilogue = "prelu(acc, o0) * o1 + o2"
    check(
        drafted, "layer_norm", options, epilogue, x, integers(24), integers(24, seed=2), (slope, scale, torch.ones(()))
    )


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chain(overwrite, dtype, drafted):
    x, full, vector = (
        integers(4, 6, 10, dtype=dtype),
        integers(4, 6, 10, dtype=dtype, seed=1),
        integers(10, dtype=dtype),
    )
    options = (("overwrite", overwrite),)
    (name,) = check(drafted, "pointwise", options, "relu(acc * o1 + o0)", x, None, None, (full, vector))
    assert ("in place" in name) == overwrite
