"""What the tests share: small models from functions, and the comparison of an optimised model with eager."""

import copy
import io
import itertools
import pickle
import re
import threading
import time
from html.parser import HTMLParser

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

import fxfuse
from fxfuse.module import DYNAMO_KEEPS_OBJECTS, state_of, stops

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(CAPABILITY < (8, 0), reason="needs an sm_80 GPU")]
KNOWS_THE_LAST_BACKWARD = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph"),
    reason=f"torch {torch.__version__} does not tell whether a backward is the last: all that it reads is kept",
)
OPCHECK = pytest.mark.skipif(
    not hasattr(torch.library, "opcheck"), reason=f"torch {torch.__version__} has no torch.library.opcheck"
)
NEEDS_HOPPER = pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs Hopper's own instructions")


class Net(nn.Module):
    """A model from a function of (self, *inputs) and the modules, parameters and attributes it uses."""

    def __init__(self, forward, **members):
        super().__init__()
        for name, member in members.items():
            setattr(self, name, nn.Parameter(member) if isinstance(member, torch.Tensor) else member)
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


class Net2(Net):
    """The same with two inputs."""

    def forward(self, x, y):
        return self._forward(self, x, y)


def linear(features=8, **options):
    return nn.Linear(8, features, **options)


def conv(**options):
    return nn.Conv2d(4, 8, 3, **options)


def batch_norm(channels=8):
    """A BatchNorm2d in evaluation mode whose statistics and parameters all matter."""
    module = nn.BatchNorm2d(channels)
    with torch.no_grad():
        for tensor in (module.running_mean, module.bias):
            tensor.normal_()
        for tensor in (module.running_var, module.weight):
            tensor.uniform_(0.5, 2.0)
    return module.eval()


def gpu_tensor(*shape, dtype=torch.float32):
    """Normally distributed numbers, the same for the same shape."""
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def randn(*shape, seed=0, **options):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **options)


def gelu_keeps_infinity():
    """Whether torch's gelu of infinity is infinity; its vector code for AVX-512 made NaN of it in torch 2.11."""
    return bool(torch.nn.functional.gelu(torch.full((64,), torch.inf)).isposinf().all())


def softshrink_keeps_nan():
    """Whether torch's softshrink of NaN is NaN; torch 2.3 makes 0 of it."""
    return bool(torch.nn.functional.softshrink(torch.full((64,), torch.nan)).isnan().all())


def fx_traces(function):
    """Whether torch.fx traces it: torch 2.6 takes no proxy for a device, a number or a list of tensors."""
    try:
        fx.symbolic_trace(function)
    except TypeError:
        return False
    return True


def regions(fast):
    return fxfuse.explain(fast).regions


def epilogues(fast):
    return [region.epilogue for region in regions(fast)]


def outcome(call, *inputs, **keywords):
    """What the call returns, on copies of the inputs, or the exception that it raises."""
    inputs, keywords = pytree.tree_map_only(torch.Tensor, clone, (inputs, keywords))
    try:
        return call(*inputs, **keywords)
    except Exception as error:
        return error


def clone(tensor):
    """A copy with the same strides."""
    return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_(tensor.requires_grad)


def assert_same_kind(actual, expected):
    """Type, dtype, shape, strides, and the places of NaN and infinities are equal."""
    assert type(actual) is type(expected), (actual, expected)
    if isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.stride() == expected.stride(), f"strides {actual.stride()} instead of {expected.stride()}"
        if expected.is_floating_point():
            assert torch.equal(actual.isnan(), expected.isnan()), "NaN in other places"
            finite = expected.isfinite()
            assert torch.equal(actual.isfinite(), finite), "infinities in other places"
            infinite = expected.isinf()
            assert torch.equal(actual[infinite], expected[infinite])


def assert_same_specials(actual, expected):
    """NaN and infinities stand in the same places."""
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.isposinf(), expected.isposinf())
    assert torch.equal(actual.isneginf(), expected.isneginf())


def relative_error(value, exact):
    value, exact = value.detach(), exact.detach()
    finite = value.isfinite() & exact.isfinite()
    difference = (value.double() - exact.double())[finite].norm()
    norm = exact.double()[finite].norm()
    return float(difference / norm if norm > 0 else difference)


def assert_as_close_as(actual, expected, exact):
    """`actual` is as near to `exact` (float64) as `expected` (eager) is, give or take rounding noise."""
    error, eager_error = relative_error(actual, exact), relative_error(expected, exact)
    allowed = 1.5 * eager_error + torch.finfo(expected.dtype).eps
    assert error <= allowed, f"error {error:.2e} against float64, eager's own {eager_error:.2e}"


def skip_if_absent(expected):
    """Skips if what eager gave is the exception that an older torch raises for a function that it does not have."""
    lacks = re.compile(r"module 'torch[\w.]*' has no attribute '\w+'")
    if isinstance(expected, AttributeError) and lacks.fullmatch(str(expected)):
        pytest.skip(f"torch {torch.__version__}: {expected}")


def skip_if_python(fast):
    """Skips if tracing stopped in a model, which then stays Python, where Dynamo is not asked for the whole of it."""
    if not DYNAMO_KEEPS_OBJECTS and any(stops(state_of(fast).captured)):
        pytest.skip(f"torch {torch.__version__}: Dynamo is not asked for models that fx cannot trace")


def skip_if_dynamo_refuses(model, *inputs):
    """Skips if Dynamo itself captures no whole graph of a model."""
    try:
        torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)(*inputs)
    except torch._dynamo.exc.Unsupported as error:
        pytest.skip(f"Dynamo of torch {torch.__version__}: {str(error).splitlines()[0]}")


def assert_as_eager(model, fast, *inputs, exact=True, raises=None, **keywords):
    """`fast` returns what `model` does: same kinds, and values as close to float64 as eager's own.

    With exact=False, for models that cannot run in float64, values are compared with eager's. A test in which eager
    raises says which exception; fast is then to raise the same one. Returns fast's result.
    """
    expected, actual = outcome(model, *inputs, **keywords), outcome(fast, *inputs, **keywords)
    if raises is not None:
        assert isinstance(expected, raises), f"eager gives {expected!r}, no {raises.__name__}"
        assert type(actual) is type(expected), f"{actual!r} instead of {expected!r}"
        return actual
    skip_if_absent(expected)
    assert not isinstance(expected, Exception), f"eager itself raises {expected!r}: nothing would be compared"
    if isinstance(actual, Exception):
        raise actual
    reference = expected
    if exact:
        doubled = pytree.tree_map_only(torch.Tensor, as_double, (inputs, keywords))
        reference = outcome(copy.deepcopy(model).double(), *doubled[0], **doubled[1])
    leaves = [pytree.tree_leaves(value) for value in (actual, expected, reference)]
    for have, want, right in itertools.zip_longest(*leaves):
        assert_same_kind(have, want)
        if not isinstance(want, torch.Tensor):
            assert have == want
        elif not want.is_floating_point():
            assert torch.equal(have, want)
        elif exact:
            assert_as_close_as(have, want, right)
        else:
            torch.testing.assert_close(have, want, equal_nan=True)
    return actual


def as_double(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def _saved_and_loaded(fast):
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda fast: pickle.loads(pickle.dumps(fast)),
    "torch.save": _saved_and_loaded,
}
"""Ways to a model of the same kind."""


def kernels_launched(call):
    """Names of the CUDA kernels that one call launches, memory operations included."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def stochastic_depth(input, p, mode, training=True):
    """As torchvision has it."""
    return input * p if training else input


stochastic_depth.__module__ = "torchvision.ops.stochastic_depth"
fx.wrap("stochastic_depth")


def with_stochastic_depth(x, training):
    return stochastic_depth(x, 0.5, "row", training)


class _Html(HTMLParser):
    """Notes the elements of a page, and that each that must be closed is, in the right order."""

    VOID = frozenset({"meta", "link", "input", "br", "hr", "img"})

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]} at {self.getpos()}"
        self.open.pop()


def parsed_html(text):
    """The elements and attributes of a piece of HTML, every one of which is closed."""
    parser = _Html()
    parser.feed(text)
    parser.close()
    assert not parser.open, f"never closed: {parser.open}"
    return parser


def check_html(text):
    """The names of the elements of a piece of HTML, every one of which is closed."""
    return parsed_html(text).tags


def wait_until(condition, seconds=60):
    """Waits for what another thread or process does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.001)


def end_of_builds():
    """Waits for builds that no call waits for, and for threads whose kernels other threads have compiled meanwhile."""
    for thread in threading.enumerate():
        if thread.name.startswith("fxfuse: "):
            thread.join(60)
            assert not thread.is_alive()
