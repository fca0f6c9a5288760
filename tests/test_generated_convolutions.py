"""Several hundred generated Conv2d configurations, by kernels of every family, against torch in float64.

A `Kind` is what decides which kernels are compiled, a `Configuration` what they take at run time: sizes, strides,
padding, dilation, groups, and how x lies in memory. hypothesis draws the same configurations every time.

A result is right if its error is what fxfuse.verify allows beside eager's own. Each element of a fused result also
keeps the bound that follows from the precision of its products, its sums and its dtype (`Configuration.bound`), and NaN
and infinities are where float64 has them.

Tests marked `sanitizer` are for compute-sanitizer: see CONTRIBUTING.md.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import ON_GPU, assert_as_close_as, assert_same_kind, relative_error
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn

import fxfuse
from fxfuse import plans
from fxfuse.cuda import exactness, plan, tune
from fxfuse.problem import Plan, anchor_meta
from fxfuse.verify import ALLOWANCE

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@pytest.fixture(autouse=True)
def tf32_where_it_is_allowed(monkeypatch):
    """Candidates in TF32 are tested for every problem: where eager uses it is test_exactness.py's question."""
    monkeypatch.setattr(exactness, "eager_uses_tf32", lambda problem: True)


COMPILERS = min(8, os.cpu_count() or 1)
"""At a time: other test processes compile, too."""
TF32_ERROR = 2.0**-10
"""Relative error of products whose factors are rounded to TF32's 11 significant bits, which a candidate may do that the
tuner offers where torch's switches allow it; whether it is chosen is not decided here."""
KERNELS_OF_A_KIND = 10
"""That are compiled for a kind, which takes two to three seconds each."""

# ------------------------------------------------------------------------------------------------- kinds

Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of acc, scale (K, 1, 1) and a second input."""


@dataclass(frozen=True)
class Epilogue:
    """What follows the convolution, and a bound of its derivative by acc."""

    function: Function
    slope: Function
    second: Literal["unused", "full", "gate"] = "unused"
    """The second input: of the result's shape and layout, or (B, K, 1, 1)."""


EPILOGUES = {
    "relu": Epilogue(lambda acc, scale, second: acc.relu(), lambda acc, scale, second: torch.ones_like(acc)),
    "mish": Epilogue(lambda acc, scale, second: F.mish(acc), lambda acc, scale, second: torch.full_like(acc, 1.1)),
    "clamp": Epilogue(lambda acc, scale, second: (acc * scale).clamp(-1, 2), lambda acc, scale, second: scale.abs()),
    "gate": Epilogue(lambda acc, scale, second: acc * second, lambda acc, scale, second: second.abs(), "gate"),
    "residual": Epilogue(
        lambda acc, scale, second: (acc * scale + second).relu(), lambda acc, scale, second: scale.abs(), "full"
    ),
}


@dataclass(frozen=True)
class Kind:
    """What decides which kernels are compiled."""

    dtype: torch.dtype
    layout: Literal["nchw", "nhwc"]
    aligned: bool
    """Whether channels (in NCHW columns) come in multiples of 16 bytes, so that copies are that wide, or are odd."""
    epilogue: str
    bias: bool
    weight: Literal["contiguous", "channels_last", "slice"] = "contiguous"
    tf32: bool = True
    """Whether convolutions in float32 may use TF32."""
    reductions: tuple[int, int] = (1, 4096)
    """Least and largest length of the sums: without TF32 short ones are added up by another kernel."""
    channels: tuple[int, ...] = ()
    """Of a group; if empty, what `aligned` says."""
    ones: bool = False
    """Whether filters and sides may be 1: dimensions that vanish make other kernels."""

    @property
    def rounds_to_tf32(self) -> bool:
        return self.tf32 and self.dtype == torch.float32


SHORT, LONG = (1, 256), (257, 2047)
KINDS = {
    "tf32 nchw odd": Kind(torch.float32, "nchw", False, "relu", True),
    "tf32 nchw aligned": Kind(torch.float32, "nchw", True, "residual", False),
    "tf32 nchw, ones": Kind(torch.float32, "nchw", False, "clamp", False, ones=True),
    "tf32 nhwc odd": Kind(torch.float32, "nhwc", False, "mish", True, "channels_last"),
    "tf32 nhwc aligned": Kind(torch.float32, "nhwc", True, "residual", False, "channels_last"),
    "tf32 nhwc, one channel": Kind(torch.float32, "nhwc", False, "clamp", False, channels=(1,)),
    "tf32 nhwc, contiguous weight": Kind(torch.float32, "nhwc", True, "gate", True),
    "float32 nchw odd": Kind(torch.float32, "nchw", False, "relu", True, tf32=False, reductions=SHORT),
    "float32 nchw, sliced weight": Kind(
        torch.float32, "nchw", False, "gate", False, "slice", tf32=False, reductions=LONG
    ),
    "float32 nhwc aligned": Kind(
        torch.float32, "nhwc", True, "clamp", False, "channels_last", tf32=False, reductions=LONG
    ),
    "bf16 nchw odd": Kind(torch.bfloat16, "nchw", False, "relu", True),
    "bf16 nchw aligned": Kind(torch.bfloat16, "nchw", True, "residual", False),
    "bf16 nhwc odd": Kind(torch.bfloat16, "nhwc", False, "mish", True, "channels_last"),
    "bf16 nhwc aligned": Kind(torch.bfloat16, "nhwc", True, "residual", False, "channels_last"),
    "fp16 nchw aligned": Kind(torch.float16, "nchw", True, "gate", True),
    "fp16 nhwc odd": Kind(torch.float16, "nhwc", False, "clamp", False, "channels_last"),
}

# ---------------------------------------------------------------------------------------- configurations

Pair = tuple[int, int]


class Layer(nn.Module):
    """A convolution and an epilogue, whose second input comes as a second argument."""

    def __init__(self, conv: nn.Conv2d, epilogue: Epilogue) -> None:
        super().__init__()
        self.conv, self.epilogue = conv, epilogue
        self.scale = nn.Parameter(torch.randn(conv.out_channels, 1, 1))

    def forward(self, x: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self.epilogue.function(self.conv(x), self.scale, second)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers from one element behind an aligned address on."""
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


def in_whole_pieces(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in a storage of a multiple of 16 bytes.

    A copy of 16 bytes of which fewer exist reads no more than these; memcheck counts all 16.
    """
    return F.pad(tensor.flatten(), (0, -tensor.numel() % 8))[: tensor.numel()].view(tensor.shape)


@dataclass(frozen=True)
class Configuration:
    """One convolution: what the kernels of its kind take at run time."""

    kind: Kind
    images: int
    """0: x has three dimensions."""
    channels: int
    filters: int
    groups: int
    size: Pair
    kernel: Pair
    stride: Pair
    padding: Pair | Literal["same", "valid"]
    dilation: Pair
    x_layout: str
    specials: bool
    """Whether x contains NaN and infinities."""

    def __str__(self) -> str:
        x = "x".join(map(str, (self.images, self.channels, *self.size)))
        return (
            f"{x}{' with NaN' * self.specials}, {self.x_layout} -> {self.filters}, groups {self.groups}, kernel "
            f"{self.kernel}, stride {self.stride}, padding {self.padding}, dilation {self.dilation}"
        )

    @property
    def reduction(self) -> int:
        return self.channels // self.groups * self.kernel[0] * self.kernel[1]

    @property
    def epilogue(self) -> Epilogue:
        return EPILOGUES[self.kind.epilogue]

    def layer(self, device: str) -> Layer:
        torch.manual_seed(self.reduction)
        conv = nn.Conv2d(
            self.channels, self.filters, self.kernel, self.stride, self.padding, self.dilation, self.groups,
            bias=self.kind.bias,
        )  # fmt: skip
        layer = Layer(conv, self.epilogue).to(device, self.kind.dtype).eval().requires_grad_(False)
        if self.kind.weight == "channels_last":
            conv.to(memory_format=torch.channels_last)
        elif self.kind.weight == "slice":
            conv.weight.data = F.pad(conv.weight, (1, 1))[..., 1:-1]
        elif not self.kind.aligned:  # however long a filter is, it starts at an odd address
            conv.weight.data = unaligned(conv.weight)
        return layer

    def inputs(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """x and the epilogue's second input."""
        generator = torch.Generator(device).manual_seed(self.reduction)

        def randn(*shape: int) -> torch.Tensor:
            return in_whole_pieces(torch.randn(shape, generator=generator, device=device).to(self.kind.dtype))

        x = X_LAYOUTS[self.kind.layout][self.x_layout](randn, self.kind, max(1, self.images), self.channels, *self.size)
        if self.specials:
            for value, place in ((torch.nan, 0.0), (torch.inf, 0.5), (-torch.inf, 1.0)):
                x[tuple(int(place * (size - 1)) for size in x.shape)] = value
        x = x if self.images else x[0]
        result = self.layer("meta").conv(x.to("meta")).shape
        if self.epilogue.second == "unused":
            return x, x.new_ones(())
        if self.epilogue.second == "gate":
            return x, randn(*result[:-2], 1, 1)
        memory_format = torch.channels_last if self.kind.layout == "nhwc" else torch.contiguous_format
        return x, randn(*result).to(memory_format=memory_format)

    def bound(self, layer: Layer, x: torch.Tensor, second: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        """How far each element of a fused result may be from `exact`; everything in float64.

        Factors are rounded to the nearest TF32 number or not at all. Sums are in float32, and tensor cores truncate
        them: n products are off by at most n * 2^-23 of the sum of their magnitudes, parts that float32 is split into
        and the epilogue by another 16 of these. The result is rounded to its dtype; special functions for 16 bits
        may add a tenth of that error.
        """
        conv, dtype = layer.conv, self.kind.dtype
        bias = None if conv.bias is None else conv.bias.abs()
        magnitudes = conv._conv_forward(x.abs(), conv.weight.abs(), bias)
        tf32 = TF32_ERROR if self.kind.rounds_to_tf32 else 0.0
        of_products = (tf32 + (self.reduction + 16) * 2.0**-23) * magnitudes
        added = second.abs() if self.epilogue.second == "full" else 0.0
        of_sums = self.epilogue.slope(magnitudes, layer.scale, second) * of_products + 2.0**-20 * (exact.abs() + added)
        rounding = 1.1 * torch.finfo(dtype).eps / 2
        return (1 + rounding) * of_sums + rounding * exact.abs() + torch.finfo(dtype).tiny


Make = Callable[..., torch.Tensor]
"""Takes randn, the kind, and x's images, channels, height and width."""


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.channels_last).copy_(tensor)  # strides, whatever the sizes


def _gap(kind: Kind) -> int:
    """Elements left out at the start of rows: as many as keep alignment, or one."""
    return 8 if kind.aligned else 1


X_LAYOUTS: dict[str, dict[str, Make]] = {
    "nchw": {
        "contiguous": lambda randn, kind, n, c, h, w: randn(n, c, h, w),
        "cropped": lambda randn, kind, n, c, h, w: randn(n, c, h + 2, w + _gap(kind))[:, :, 1:-1, _gap(kind) :],
        "every other channel": lambda randn, kind, n, c, h, w: randn(n, 2 * c, h, w)[:, ::2],
        "transposed": lambda randn, kind, n, c, h, w: randn(n, c, w, h).transpose(2, 3),
        "one image expanded": lambda randn, kind, n, c, h, w: randn(1, c, h, w).expand(n, -1, -1, -1),
    },
    "nhwc": {
        "contiguous": lambda randn, kind, n, c, h, w: _channels_last(randn(n, c, h, w)),
        "cropped": lambda randn, kind, n, c, h, w: _channels_last(randn(n, c, h + 2, w + 1))[:, :, 1:-1, 1:],
        "some channels": lambda randn, kind, n, c, h, w: _channels_last(randn(n, c + 8, h, w))[:, 8:],
    },
}
THREE_BY_THREE = (3, 3)
KERNELS = ((1, 1), (1, 1), (5, 5), (7, 7), (1, 7), (7, 1), (3, 1), (2, 2), (4, 3))
LARGEST = 7 * 7
STRIDES = ((1, 1), (2, 2), (3, 3), (1, 2), (2, 1))
DILATIONS = ((1, 1), (1, 1), (2, 2), (2, 3), (3, 1))
ODD, EIGHTS = (3, 5, 7, 9, 17, 33), (8, 16, 24, 32, 64, 136)
MOST_PRODUCTS = 2**26
"""Of a configuration: float64 computes them, too."""


@st.composite
def configurations(draw: st.DrawFn, kind: Kind) -> Configuration:
    """Draws the output's size and gives x the size that it takes."""

    def choose(*values):
        return draw(st.sampled_from(values))

    channels, filters, groups = draw(channel_counts(kind))
    least, most = kind.reductions
    fitting = [k for k in (THREE_BY_THREE, *KERNELS) if least <= channels // groups * k[0] * k[1] <= most]
    kernel = THREE_BY_THREE if THREE_BY_THREE in fitting and choose(True, False) else choose(*fitting)
    stride = choose((1, 1), choose(*STRIDES))
    dilation = choose((1, 1), choose(*DILATIONS))
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    unbatched = kind.layout == "nchw" and kind.epilogue == "relu"
    images = choose(*(range(6) if unbatched else range(1, 6)))
    pixels = MOST_PRODUCTS // (max(1, images) * filters * channels // groups * kernel[0] * kernel[1])
    height = draw(st.integers(2, max(2, min(30, pixels // 16))))
    width = draw(st.integers(2, max(2, min(choose(12, 70, 300), pixels // height))))
    out = (height, -(-width // 8) * 8) if kind.aligned else (height | 1, width | 1)
    if kind.ones:
        out = choose((1, 1), (1, out[1]), (out[0], 1), out)
    padding = choose("same", "valid", "any", "any") if stride == (1, 1) else choose("valid", "any")
    # In NCHW rows of x are then as aligned as those of the output; 1x1 kernels read pixels side by side.
    within = kind.aligned and kind.layout == "nchw" and stride[1] == 1 and padding != "same"
    sides, pads = [0, 0], [0, 0]
    for dim, (o, s, extent) in enumerate(zip(out, stride, extents, strict=True)):
        if within and (dim == 1 or kernel == (1, 1)):
            pads[dim] = extent // 2
        elif padding == "any":
            pads[dim] = draw(st.integers(0, max(0, min(9, ((o - 1) * s + extent - (1 if kind.ones else 2)) // 2))))
        sides[dim] = (o - 1) * s + extent - 2 * pads[dim] + draw(st.integers(0, s - 1))
    plain = kind.aligned and kind.layout == "nchw" and kernel == stride == (1, 1)  # here copies would be narrower
    return Configuration(
        kind, images, channels, filters, groups,
        size=out if padding == "same" else (sides[0], sides[1]),
        kernel=kernel,
        stride=stride,
        padding="same" if padding == "same" else "valid" if pads == [0, 0] else (pads[0], pads[1]),
        dilation=dilation,
        x_layout="contiguous" if plain else choose("contiguous", *X_LAYOUTS[kind.layout]),
        specials=choose(False, False, False, False, True),
    )  # fmt: skip


@st.composite
def channel_counts(draw: st.DrawFn, kind: Kind) -> tuple[int, int, int]:
    """Channels, filters and groups."""

    def choose(*values):
        return draw(st.sampled_from(values))

    of_channels, of_filters = (EIGHTS, EIGHTS) if kind.aligned else (ODD, ODD)
    if kind.layout == "nchw":  # where the output's rows decide how it is written
        of_filters = ODD + EIGHTS
    if kind.reductions != LONG and choose(0, 0, 0, 1) and not kind.channels:
        channels = choose(*of_channels)
        return channels, channels * choose(1, 1, 2 if kind.layout == "nchw" or kind.aligned else 3), channels
    if kind.channels:
        return choose(*kind.channels), choose(*of_filters), 1
    if kind.aligned and kind.dtype == torch.float32 and kind.reductions != LONG:
        of_channels = (4, *of_channels)  # 16 bytes
    if kind.layout == "nchw" and not kind.aligned and kind.reductions != LONG:
        of_channels = (1, *of_channels)
    if kind.ones:
        of_filters = (1, 1, *of_filters)
    of_channels = tuple(c for c in of_channels if c * LARGEST >= kind.reductions[0])
    groups = choose(1, 1, 1, 3, 5)
    return groups * choose(*of_channels), groups * choose(*of_filters), groups


def table(name: str, count: int = 40) -> list[Configuration]:
    """What hypothesis draws for a kind in `count` attempts."""
    found: dict[Configuration, None] = {}

    @seed(list(KINDS).index(name))
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(configurations(KINDS[name]))
    def collect(configuration: Configuration) -> None:
        found.setdefault(configuration)

    collect()
    return list(found)


def test_the_table_has_what_public_networks_have():
    drawn = [configuration for name in KINDS for configuration in table(name)]
    assert len(drawn) > 400
    assert {c.kernel for c in drawn} == {THREE_BY_THREE, *KERNELS}
    assert {c.stride for c in drawn} == set(STRIDES) and {c.dilation for c in drawn} == set(DILATIONS)
    assert {c.images for c in drawn} == set(range(6)) and {c.specials for c in drawn} == {False, True}
    assert {c.x_layout for c in drawn} == {layout for layouts in X_LAYOUTS.values() for layout in layouts}
    assert {"same", "valid"} < {c.padding for c in drawn}
    padded = [c for c in drawn if not isinstance(c.padding, str)]
    assert any(c.padding[0] > c.size[0] for c in padded) and any(c.padding[0] != c.padding[1] for c in padded)
    assert {c.filters // c.groups for c in drawn if c.groups == c.channels > 1} >= {1, 2, 3}
    assert any(1 < c.groups < c.channels for c in drawn)
    assert {1, 3, 4, 8, 16} < {c.channels for c in drawn}


# ------------------------------------------------------------------------------------------------ on a CPU


@pytest.mark.parametrize("name", ("tf32 nchw odd", "tf32 nhwc aligned", "bf16 nchw aligned", "bf16 nhwc odd"))
@torch.no_grad()
def test_on_the_cpu(name):
    for configuration in table(name, count=8):
        layer, inputs = configuration.layer("cpu"), configuration.inputs("cpu")
        have, want = fxfuse.optimize(layer, strict=True)(*inputs), layer(*inputs)
        assert_same_kind(have, want)
        assert_as_close_as(have, want, copy.deepcopy(layer).double()(*(tensor.double() for tensor in inputs)))


# ------------------------------------------------------------------------------------------------ on a GPU


@contextlib.contextmanager
def switches_of(kind: Kind) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = kind.tf32
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@dataclass(frozen=True)
class Case:
    """A configuration on the GPU, and what may run it."""

    configuration: Configuration
    layer: Layer
    fast: fxfuse.FusedModule
    inputs: tuple[torch.Tensor, torch.Tensor]
    call: plans._FirstCall
    candidates: tuple[tune.Candidate, ...]

    @staticmethod
    def of(configuration: Configuration) -> Case:
        layer, inputs = configuration.layer("cuda"), configuration.inputs("cuda")
        fast = fxfuse.optimize(layer, strict=True)
        undecided = mock.patch.object(plans, "_at_hand", lambda problem, strict: None)
        calls: list[plans._FirstCall] = []
        with undecided, plans.collect(calls.append), torch.no_grad():
            fast(*inputs)
        (call,) = calls
        all_of_them = mock.patch.object(plan, "_is_tiny", lambda region: False)  # those are offered one
        with all_of_them, mock.patch.object(tune, "draft", lambda problem, candidates: candidates):
            candidates = plan.draft(call.problem, anchor_meta(call.problem))
        assert any(is_fused(candidate) for candidate in candidates), configuration
        return Case(configuration, layer, fast, inputs, call, tuple(candidates))

    def first_of_each_family(self) -> Case:
        """With one candidate of each kernel template, and without the library."""
        families = {family(c): c for c in reversed(self.candidates) if is_fused(c)}
        return dataclasses.replace(self, candidates=tuple(families.values()))

    @torch.no_grad()
    def run(self, candidate: tune.Candidate) -> torch.Tensor:
        """The optimised layer's result, if it runs by `candidate`."""
        plans.assign(self.call.region, self.call.key, Plan(candidate.build(), candidate.name))
        result = self.fast(*self.inputs)
        torch.cuda.synchronize()
        return result


def is_fused(candidate: tune.Candidate) -> bool:
    return not candidate.always


def family(candidate: tune.Candidate) -> str:
    return candidate.identity.partition("<")[0]


def thinned(cases: Sequence[Case], start: int) -> list[Case]:
    """The cases with KERNELS_OF_A_KIND of the fused candidates that they have together, and with one at least.

    Families have equal shares. `start` says which of a family are first: kinds take turns.
    """
    offers = Counter(c.identity for case in cases for c in case.candidates if is_fused(c))
    of_family: dict[str, deque[str]] = {}
    for identity in sorted(offers):
        if offers[identity] > 1:  # else it would be compiled for one configuration
            of_family.setdefault(identity.partition("<")[0], deque()).append(identity)
    for identities in of_family.values():
        identities.rotate(-start)
    in_turns = itertools.chain.from_iterable(itertools.zip_longest(*of_family.values()))
    chosen = set(itertools.islice(filter(None, in_turns), KERNELS_OF_A_KIND))
    kept = []
    for case in cases:
        if not any(c.identity in chosen for c in case.candidates):
            chosen.add(next(c.identity for c in case.candidates if is_fused(c)))
        few = tuple(c for c in case.candidates if not is_fused(c) or c.identity in chosen)
        kept.append(dataclasses.replace(case, candidates=few))
    return kept


def compile_all(cases: Sequence[Case]) -> None:
    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(lambda candidate: candidate.build(), (c for case in cases for c in case.candidates)))


class Judge:
    """What results of a configuration are compared with."""

    @torch.no_grad()
    def __init__(self, configuration: Configuration, layer: Layer, *inputs: torch.Tensor, device: str = "cuda") -> None:
        """`device`: where float64 is computed. On the CPU, eager is left out."""
        self.kind = configuration.kind
        double = copy.deepcopy(layer).to(device).double()
        x, second = (tensor.to(device).double() for tensor in inputs)
        self.exact = double(x, second)
        self.bound = configuration.bound(double, x, second, self.exact)
        self.eager = layer(*inputs) if device == "cuda" and not configuration.specials else None

    def objection(self, candidate: tune.Candidate, result: torch.Tensor) -> str | None:
        """What is wrong with the candidate's result."""
        if result.shape != self.exact.shape:
            return f"its shape is {tuple(result.shape)}"
        have = result.to(self.exact)
        if self.eager is not None:
            if result.stride() != self.eager.stride() and 1 not in result.shape:
                return f"its strides are {result.stride()} instead of {self.eager.stride()}"
            error, eager_error = relative_error(have, self.exact), relative_error(self.eager, self.exact)
            least = TF32_ERROR if self.kind.rounds_to_tf32 else 0.0
            if not error <= max(ALLOWANCE * eager_error + torch.finfo(self.kind.dtype).eps, least):
                return f"its error is {error:.1e}, eager's {eager_error:.1e}"
        if not is_fused(candidate):  # libraries may choose other algorithms, which also spread NaN
            return None
        near = (have - self.exact).abs() <= self.bound
        rounded = self.exact.to(self.kind.dtype).double()
        same = (have == rounded) | (have.isnan() & rounded.isnan())
        wrong = ~torch.where(self.bound.isfinite(), near, same)
        if not wrong.any():
            return None
        place = tuple(wrong.nonzero()[0].tolist())
        return f"{int(wrong.sum())} elements are wrong, at {place} {have[place]:.7g} instead of {self.exact[place]:.7g}"


def objections(cases: Sequence[Case], device: str = "cuda") -> list[str]:
    """To all results of all candidates, each as a line."""
    compile_all(cases)
    found = []
    for case in cases:
        with switches_of(case.configuration.kind):
            judge = Judge(case.configuration, case.layer, *case.inputs, device=device)
        for candidate in case.candidates:
            with switches_of(case.configuration.kind):
                result = case.run(candidate)
            objection = judge.objection(candidate, result)
            if objection is not None:
                found.append(f"{candidate.name}: {objection}: {case.configuration}")
    return found


def for_the_sanitizer(name: str) -> list[Configuration]:
    """A 3x3 convolution and a depthwise one of the kind, as far as it has them."""

    def is_depthwise(c: Configuration) -> bool:
        return c.groups == c.channels > 1

    def is_common(c: Configuration) -> bool:
        return c.kernel == THREE_BY_THREE and c.stride == c.dilation == (1, 1) and not is_depthwise(c)

    drawn = table(name)[::-1]  # the first are the simplest
    return [next(filter(is_common, drawn)), *itertools.islice(filter(is_depthwise, drawn), 1)]


def summary(found: Sequence[str]) -> str:
    return "\n".join((f"{len(found)} results are wrong, such as", *found[:: -(-len(found) // 12)]))


@torch.no_grad()
def assert_replays(case: Case, candidate: tune.Candidate) -> None:
    """A captured call computes from what x holds when it is replayed."""
    case.run(candidate)
    graph, (x, _) = torch.cuda.CUDAGraph(), case.inputs
    with torch.cuda.graph(graph):
        captured = case.fast(*case.inputs)
    x.mul_(-0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, case.run(candidate)), f"{candidate.name}: {case.configuration}"


class TestOnGpu:
    pytestmark = ON_GPU  # beside the module's

    @pytest.mark.parametrize("name", KINDS)
    def test_candidates_are_right(self, name):
        with switches_of(KINDS[name]):
            cases = thinned([Case.of(configuration) for configuration in table(name)], list(KINDS).index(name))
            found = objections(cases)
            assert not found, summary(found)

            def plain(configuration):
                return configuration.x_layout == "contiguous" and not configuration.specials

            captured = next(case for case in cases if plain(case.configuration))
            for candidate in captured.candidates:
                assert_replays(captured, candidate)

    @pytest.mark.sanitizer
    def test_a_few_of_each_family_for_the_sanitizer(self):
        cases = []
        for name, kind in KINDS.items():
            with switches_of(kind):
                cases += [Case.of(configuration).first_of_each_family() for configuration in for_the_sanitizer(name)]
        found = objections(cases, device="cpu")  # cuDNN in a sanitizer takes long
        assert not found, summary(found)

    @pytest.mark.parametrize("name", ("bf16 nchw aligned", "bf16 nhwc aligned"))
    def test_outputs_of_more_than_two_to_the_31_elements(self, name):
        if torch.cuda.mem_get_info()[0] < 40 * 2**30:
            pytest.skip("takes 40 GB of the GPU's memory")
        configuration = Configuration(
            KINDS[name], 130, 8, 64, 1, (512, 512), THREE_BY_THREE, (1, 1), (1, 1), (1, 1), "contiguous", False
        )
        case = Case.of(configuration)
        image = 64 * 512 * 512
        assert 130 * image > 2**31
        judges = {
            i: Judge(configuration, case.layer, *(tensor[i : i + 1] for tensor in case.inputs))
            for i in (0, 2**31 // 2 // image, 2**31 // image - 1, 2**31 // image, 129)
        }
        for candidate in (*case.first_of_each_family().candidates, *itertools.filterfalse(is_fused, case.candidates)):
            result = case.run(candidate)
            for i, judge in judges.items():
                assert judge.objection(candidate, result[i : i + 1]) is None, (candidate.name, i)
