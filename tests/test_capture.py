"""Capture: whatever Python a model's forward is, the result is eager's and the report says what was not traced."""

import builtins
import collections.abc
import contextvars
import copy
import dataclasses
import enum
import functools
import logging
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Net, Net2, assert_as_eager, conv, epilogues, linear, randn, skip_if_python
from torch import fx, nn

import fxfuse
from fxfuse import plans, proxies
from fxfuse.module import state_of

X = randn(5, 8)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLE = 2


class DefaultNone(Base):
    def forward(self, x, mask=None):
        y = self.fc(x).relu()
        return y if mask is None else y * mask


class FirstDefaultNone(Base):
    """As the models of transformers have it: every input is optional, and the first is always given."""

    def forward(self, x=None, mask=None):
        if x is None:
            raise ValueError("x is needed")
        y = self.fc(x).relu()
        return y if mask is None else y * mask


class DefaultNumber(Base):
    def forward(self, x, scale: float = 2.0, flag: bool = True):
        return self.fc(x).tanh() * scale if flag else x


class DefaultFunction(Base):
    def forward(self, x, act=F.relu):
        return act(self.fc(x))


class DefaultEnum(Base):
    def forward(self, x, mode=Mode.PLAIN):
        return self.fc(x).tanh() if mode is Mode.PLAIN else self.fc(x) * 2


class DefaultDtype(Base):
    def forward(self, x, dtype=torch.float32):
        return self.fc(x).relu().to(dtype)


class DefaultTensor(Base):
    def forward(self, x, v=torch.ones(8)):  # noqa: B008
        return self.fc(x).relu() + v


class DefaultTuple(Base):
    def forward(self, x, scales=(1, 2)):
        return self.fc(x).relu() * scales[1]


class DefaultInfinity(Base):
    def forward(self, x, high=float("inf")):
        return self.fc(x).relu().clamp(max=high)


class KeywordOnly(Base):
    def forward(self, x, *, mask=None, scale=1.0):
        y = self.fc(x).relu() * scale
        return y if mask is None else y * mask


class StringAnnotations(Base):
    def forward(self, x: "torch.Tensor", scale: "float", mask: "torch.Tensor | None" = None) -> "torch.Tensor":
        return self.fc(x).relu() * scale


class UnannotatedNumber(Base):
    def forward(self, x, scale):
        return self.fc(x).relu() * scale


class VariableArguments(Base):
    def forward(self, x, *rest, **options):
        return self.fc(x).relu() * len(rest) + len(options)


CALLS = {
    "default None": (DefaultNone, (X,), {}),
    "default None, given": (DefaultNone, (X, X), {}),
    "default None, given by name": (DefaultNone, (X,), {"mask": X}),
    "first default None": (FirstDefaultNone, (X,), {}),
    "first default None, by name": (FirstDefaultNone, (), {"x": X, "mask": X}),
    "default number": (DefaultNumber, (X,), {}),
    "default number, given": (DefaultNumber, (X, 3.0), {}),
    "default number, equal but int": (DefaultNumber, (X, 2), {}),
    "default number, tensor given": (DefaultNumber, (X,), {"scale": X}),
    "default flag, given": (DefaultNumber, (X,), {"flag": False}),
    "default function": (DefaultFunction, (X,), {}),
    "default function, given": (DefaultFunction, (X, torch.tanh), {}),
    "default enum": (DefaultEnum, (X,), {}),
    "default enum, given": (DefaultEnum, (X, Mode.DOUBLE), {}),
    "default dtype": (DefaultDtype, (X,), {}),
    "default dtype, given": (DefaultDtype, (X, torch.float16), {}),
    "default tensor": (DefaultTensor, (X,), {}),
    "default tensor, given": (DefaultTensor, (X, X), {}),
    "default tuple": (DefaultTuple, (X,), {}),
    "default tuple, given": (DefaultTuple, (X, (3, 4)), {}),
    "default infinity": (DefaultInfinity, (X,), {}),
    "keyword only": (KeywordOnly, (X,), {}),
    "keyword only, given": (KeywordOnly, (X,), {"mask": X, "scale": 2.0}),
    "keyword": (DefaultNone, (), {"x": X}),
    "string annotations": (StringAnnotations, (X, 2.0), {}),
    "a number without annotation": (UnannotatedNumber, (X, 2.0), {}),
    "an int without annotation": (UnannotatedNumber, (X, 3), {}),
    "a 0-d tensor without annotation": (UnannotatedNumber, (X, torch.tensor(3.0)), {}),
    "variable arguments": (VariableArguments, (X, 1, 2), {"a": 1}),
}
WRONG_CALLS = {
    "first default None, not given": (FirstDefaultNone, (), {}, ValueError),
    "too few arguments": (UnannotatedNumber, (X,), {}, TypeError),
    "unknown keyword": (DefaultNone, (X,), {"nonsense": 1}, TypeError),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_mean_what_they_mean_in_eager(name):
    make, args, kwargs = CALLS[name]
    model = make().eval()
    with torch.no_grad():
        assert_as_eager(model, fxfuse.optimize(model), *args, exact=False, **kwargs)


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_arguments_raise_what_they_raise_in_eager(name):
    make, args, kwargs, error = WRONG_CALLS[name]
    model = make().eval()
    with torch.no_grad():
        assert_as_eager(model, fxfuse.optimize(model), *args, raises=error, **kwargs)


def test_an_optional_first_input_does_not_hinder_fusing():
    """What the report calls fused is what runs when the input is given."""
    model = FirstDefaultNone().eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        fast(X)
    assert epilogues(fast) == ["relu(acc)"]
    assert fxfuse.explain(fast).regions[0].kernel is not None


def test_children_are_fused_when_an_optional_input_is_given():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(linear(), nn.Softsign())

        def forward(self, x, mask=None):
            return self.inner(x) if mask is None else self.inner(x) * mask

    fast = fxfuse.optimize(Outer().eval())
    with torch.no_grad():
        fast(X, X)
    assert any(region.kernel for region in fxfuse.explain(fast).regions)


class Decorated(Base):
    """Its arguments go by name: as many of transformers' models, it sets defaults in keywords."""

    @staticmethod
    def _with_scale(forward):
        @functools.wraps(forward)
        def wrapper(self, *args, **kwargs):
            if kwargs.get("scale") is None:
                kwargs["scale"] = 3.0
            return forward(self, *args, **kwargs)

        return wrapper

    @_with_scale
    def forward(self, x, mask=None, scale=None):
        y = self.fc(x).relu() * scale
        return y if mask is None else y * mask


def test_arguments_that_are_not_given_are_not_passed():
    model = Decorated().eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        assert_as_eager(model, fast, X)
        assert_as_eager(model, fast, X, mask=X)
        assert_as_eager(model, fast, X, scale=2.0)
    assert not fxfuse.explain(fast).skipped


class KeywordTensors(Base):
    """It hands on keywords that its signature does not name."""

    def forward(self, x, **options):
        return self._scaled(self.fc(x).relu(), **options)

    def _scaled(self, y, scale=1.0, shift=None):
        return y * scale if shift is None else y * scale + shift


def test_tensors_among_further_keywords_are_inputs():
    model = KeywordTensors().eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for options in ({}, {"shift": X}, {"shift": -X, "scale": 2.0}, {"shift": X, "scale": X}):
            assert_as_eager(model, fast, X, exact=False, **options)
        assert_as_eager(model, fast, X, raises=TypeError, unknown=X)
        fast(X, shift=X)
    assert any(region.kernel and "o1" in region.epilogue for region in fxfuse.explain(fast).regions)


# ---------------------------------------------------------------------------------------------- outputs


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    logits: torch.Tensor


OUTPUTS = {
    "tuple": lambda m, x: (m.fc(x).relu(), x),
    "dict": lambda m, x: {"a": m.fc(x).relu(), "b": [x, 3]},
    "nested": lambda m, x: ({"a": (m.fc(x).relu(),)}, None, "text"),
    "the input itself": lambda m, x: x,
    "an unused result": lambda m, x: (m.fc(x).relu(), x + 1)[1],
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_keep_their_structure(name):
    model = Net(OUTPUTS[name], fc=linear()).eval()
    with torch.no_grad():
        assert_as_eager(model, fxfuse.optimize(model), X)


def test_dataclass_outputs():
    model = Net(lambda m, x: Output(m.fc(x).relu(), logits=x * 2), fc=linear()).eval()
    with torch.no_grad():
        expected, actual = model(X), fxfuse.optimize(model)(X)
    assert type(actual) is Output
    torch.testing.assert_close(actual.hidden, expected.hidden)
    torch.testing.assert_close(actual.logits, expected.logits)


# ------------------------------------------------------------------------------------------- untraceable


class Branching(Base):
    """Control flow on a value."""

    def forward(self, x):
        if x.sum() > 0:
            return self.fc(x).relu()
        return self.fc(x).tanh()


class Block(Base):
    takes_two = True

    def forward(self, x, skip=None):
        y = self.fc(x).relu()
        return y if skip is None else y + skip


class Dispatching(nn.Module):
    """An untraceable parent that looks at its children's attributes and items."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), Block()])
        self.named = nn.ModuleDict({"a": Block(), "b": Branching()})
        self.stem = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x):
        if x.numel() > 10**9 or bool(x.isnan().all()):
            return x
        for block in self.blocks:
            x = block(x, x) if getattr(block, "takes_two", False) else block(x)
        for layer in self.stem:
            x = layer(x)
        x = self.stem[0](x) + self.stem[-1](x) + len(self.stem)
        x = x @ self.blocks[0].fc.weight + self.named["a"].fc.bias
        return self.named["b"](self.named["a"](x))


class Required(nn.Module):
    """Asks for arguments that every call gives."""

    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x, skip, flag, *, masks):
        y = self.fc(x).relu()
        y = y * 2 if skip is None else y + skip
        y = y if flag is None or not flag else y.tanh()
        return y if masks is None or masks[1] is None else y * masks[1]


REQUIRED = {
    "none": ((None, None), {"masks": None}),
    "truths": ((None, True), {"masks": None}),
    "a tensor": ((randn(3, 8), False), {"masks": None}),
    "by name": ((), {"skip": None, "flag": False, "masks": [None, randn(8)]}),
    "in a tuple": ((randn(3, 8), None), {"masks": (None, None)}),
}


def test_required_arguments_that_are_none_are_none_for_forward():
    model = Required().eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for name in [*REQUIRED, *REQUIRED]:
            args, keywords = REQUIRED[name]
            assert_as_eager(model, fast, randn(3, 8), *args, **keywords)
            twin = copy.deepcopy(fast)
            assert_as_eager(model, twin, randn(3, 8), *args, **keywords)


class Annotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x: torch.Tensor, first: bool | None = None, second: bool | None = None):
        return self.fc(x).relu()


def test_annotations_may_be_equal_and_not_the_same():
    assert epilogues(fxfuse.optimize(Annotated().eval())) == ["relu(acc)"]


class Masks(nn.Module):
    """Asks for the items of a list, as networks with a mask for each layer do."""

    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x, masks=None, collected=None, **options):
        x = self.fc(x).relu()
        for mask in (*((None, None) if masks is None else (masks[0], masks[1])), options.get("more", [None])[0]):
            if mask is not None:
                x = x * mask
        if collected is not None:
            collected.append(x)
        return x * 2 if isinstance(masks, list) else x


ITEMS = {
    "none": {"masks": [None, None]},
    "a tuple of none": {"masks": (None, None)},
    "some": {"masks": [None, randn(8)]},
    "others": {"masks": (randn(8), None)},
    "all": {"masks": (randn(8), randn(8))},
    "truths": {"masks": [True, False]},
    "numbers": {"masks": (1, -1)},
    "in further keywords": {"more": [None]},
    "a tensor in further keywords": {"more": [randn(8), None]},
    "nested": {"more": [None, (None, randn(8))], "masks": [None, None]},
}


def test_items_of_arguments_that_are_none_are_none_for_forward():
    model = Masks().eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for name in [*ITEMS, *ITEMS]:  # in any order, on one model
            assert_as_eager(model, fast, randn(3, 8), **ITEMS[name])
    assert not fxfuse.explain(fast).skipped


def test_a_list_that_forward_changes_is_the_callers():
    model = Masks().eval()
    fast = fxfuse.optimize(model)
    for collected in ([], [None], [None, None]):
        assert fast(randn(3, 8), collected=collected) is collected[-1]


UNTRACEABLE = {
    "branch": Branching,
    "child": lambda: nn.Sequential(Branching(), nn.Linear(8, 8), nn.ReLU()),
    "grandchild": lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), Branching()), nn.Tanh()),
    "the same child twice": lambda: (lambda b: nn.Sequential(b, nn.Linear(8, 8), nn.ReLU(), b))(Branching()),
    "dispatching parent": Dispatching,
    "a scripted child": lambda: nn.Sequential(torch.jit.script(Branching()), nn.Linear(8, 8), nn.ReLU()),
    "a scripted child of a branch": lambda: Net(
        lambda m, x: m.s(x) if x.sum() > 0 else m.s(x) * 2,
        s=torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())),
    ),
    "numpy inside": lambda: Net(lambda m, x: torch.from_numpy(m.fc(x).detach().numpy()) * 2, fc=linear()),
    "shape arithmetic": lambda: Net(lambda m, x: m.fc(x).relu() * int(x.shape[0]), fc=linear()),
}  # fmt: skip


def doubled_if(answer, x):
    return x * 2 if answer else x


ASKING_FOR_CLASSES = {
    "an argument": lambda m, x: doubled_if(isinstance(x, torch.Tensor), m.fc(x).relu()),
    "an argument that may be a list": lambda m, x: m.fc(torch.cat([x] if isinstance(x, torch.Tensor) else x)).relu(),
    "is_tensor": lambda m, x: doubled_if(torch.is_tensor(m.fc(x)), x),
    "jit's isinstance": lambda m, x: doubled_if(torch.jit.isinstance(m.fc(x), torch.Tensor), x),
    "jit's isinstance, several": lambda m, x: doubled_if(torch.jit.isinstance(m.fc(x), (int, torch.Tensor)), x),
    "jit's isinstance, a list": lambda m, x: doubled_if(not torch.jit.isinstance(m.fc(x), list[torch.Tensor]), x),
    "no tuple": lambda m, x: doubled_if(not isinstance(m.fc(x), list | tuple), x),
    "a module's result": lambda m, x: doubled_if(isinstance(m.fc(x), torch.Tensor), x),
    "several results": lambda m, x: doubled_if(isinstance(m.gru(x), tuple), x),
    "one of several results": lambda m, x: doubled_if(isinstance(m.fc(x).chunk(2)[0], torch.Tensor), x),
    "a parameter": lambda m, x: doubled_if(isinstance(m.p, nn.Parameter), x),
    "no parameter": lambda m, x: doubled_if(isinstance(m.p * 2, nn.Parameter), x),
    "a shape": lambda m, x: doubled_if(isinstance(m.fc(x).shape, tuple), x),
    "a size": lambda m, x: doubled_if(isinstance(x.shape[0] // 2, int), x),
    "an abstract class": lambda m, x: doubled_if(isinstance(x.shape, collections.abc.Sequence), m.fc(x)),
    "a dtype": lambda m, x: doubled_if(isinstance(m.fc(x).dtype, torch.dtype), x),
    "an attribute that tensors lack": lambda m, x: doubled_if(hasattr(m.fc(x), "logits"), x),
    "a default": lambda m, x: x * getattr(m.fc(x), "_scale", 3),
    "what an untraced child returns": lambda m, x: doubled_if(isinstance(m.several(x), tuple), x),
    "type": lambda m, x: doubled_if(type(m.fc(x)) is torch.Tensor, x),
    "type of an argument": lambda m, x: doubled_if(type(x) in (torch.Tensor, nn.Parameter), m.fc(x)),
    "type of a shape": lambda m, x: doubled_if(torch.Size is type(x.shape), m.fc(x)),
    "a table of types": lambda m, x: x * {torch.Tensor: 2, list: 3}.get(type(m.fc(x)), 5),
    "a type's name": lambda m, x: doubled_if(type(x).__name__ == "Tensor", m.fc(x)),
    "a subclass": lambda m, x: doubled_if(issubclass(type(m.fc(x)), torch.Tensor), x),
    "type of a module": lambda m, x: doubled_if(type(m.fc) is nn.Linear and type(type(m.fc)) is type, m.fc(x)),
    "a class that forward makes": lambda m, x: m.fc(x) * type("Two", (), {"value": 2})().value,
    "__class__": lambda m, x: doubled_if(x.__class__ is torch.Tensor, m.fc(x)),
    "an attribute that shapes lack": lambda m, x: doubled_if(hasattr(x.shape, "prod"), m.fc(x)),
    "numpy's product of sizes": lambda m, x: m.fc(x) * np.prod(x.shape[1:]),
    "callable": lambda m, x: m.fc(x) if callable(x) else m.fc(x) * 2,
    "callable or a value": lambda m, x: default_of(m.fc(x)) + default_of(lambda: 2),
    "a function for each class": lambda m, x: x * factor_of(m.fc(x)),
    "case": lambda m, x: matched(m.fc(x)),
    "an argument's attribute that tensors lack": lambda m, x: doubled_if(hasattr(x, "logits"), m.fc(x)),
    "an argument's default": lambda m, x: m.fc(x) * getattr(x, "_scale", 3),
}


def default_of(value):
    return value() if callable(value) else value


@functools.singledispatch
def factor_of(x):
    return 2


@factor_of.register
def _(x: torch.Tensor):
    return 3


def matched(x):
    match (x, 1):
        case (torch.Tensor() as y, 1):
            return y * 2
        case _:
            return x


class Several(nn.Module):
    def forward(self, x):
        return (x, x) if x.sum() > -1e9 else x


@pytest.mark.parametrize("name", ASKING_FOR_CLASSES)
def test_questions_about_a_values_class(name):
    members = {"gru": nn.GRU(8, 4)} if name == "several results" else {}
    if name == "what an untraced child returns":
        members["several"] = Several()
    model = Net(ASKING_FOR_CLASSES[name], fc=linear(), p=randn(8), **members)
    assert_as_eager(model, fxfuse.optimize(model), X)


def caught(question, value):
    """What the model's code does if the question raises something."""
    try:
        return question(value)
    except Exception:
        return 5


CAUGHT = {
    "a branch": lambda m, x: m.fc(x) * caught(lambda y: 2 if y.sum() < 1e9 else 3, x),
    "a number": lambda m, x: m.fc(x) * caught(lambda y: float(y.abs().max()), x),
    "a whole number": lambda m, x: m.fc(x) * caught(lambda y: int(y.abs().max() * 9), x),
    "a list": lambda m, x: m.fc(x) * caught(lambda y: sum(y.tolist()[0]), x),
    "numpy": lambda m, x: m.fc(x) * caught(lambda y: float(y.detach().numpy().sum()), x),
    "rows": lambda m, x: m.fc(x) * caught(lambda y: torch.stack([row * 2 for row in y]), x),
    "a length": lambda m, x: m.fc(x) * caught(len, x),
    "a class": lambda m, x: m.fc(x) * caught(lambda y: 2 if isinstance(y.shape[0] / 2, int) else 3, x),
    "whether there is a gradient": lambda m, x: m.fc(x) * caught(lambda y: 2 if y.grad is None else 3, x),
    "a child's branch": lambda m, x: m.fc(x) * caught(m.branching, x),
}
AS_KEYS = {
    "a size in a dictionary": lambda m, x: m.fc(x) * {5: 2}.get(x.shape[0], 3),
    "a shape in a set": lambda m, x: doubled_if(x.shape in {(5, 8)}, m.fc(x)),
    "tensors in a set": lambda m, x: m.fc(x) * len({x, m.fc(x), x}),
    "shapes that are equal": lambda m, x: m.fc(x) * len({x.shape, (x * 2).shape}),
    "an argument in a dictionary": lambda m, x: m.fc(x) * {x: 2}.get(x, 5),
}


@pytest.mark.parametrize("name", [*CAUGHT, *AS_KEYS])
def test_what_a_trace_cannot_know_runs_as_python(name):
    """Also if the model's code catches the error that says so: at a call the question raises none."""
    model = Net({**CAUGHT, **AS_KEYS}[name], fc=linear(), branching=Branching())
    fast = fxfuse.optimize(model)
    assert_as_eager(model, fast, X)
    assert_as_eager(model, fast, X)
    assert bool(state_of(fast).captured.untraced) == (name not in ("tensors in a set", "an argument in a dictionary"))


def test_a_message_with_a_value_does_not_end_a_trace():
    """timm's layers write one at every call, for an assertion that a graph keeps."""

    def forward(m, x):
        torch._assert(x.shape[1] == 8, f"8 features are expected, not those of {x.shape}")
        return m.fc(x).relu()

    model = Net(forward, fc=linear())
    fast = fxfuse.optimize(model)
    assert_as_eager(model, fast, X)
    assert not state_of(fast).captured.untraced


def test_a_question_whose_error_is_caught_is_reported_with_its_line():
    with pytest.raises(fxfuse.CaptureError, match=r"test_capture.py:\d+ in Net.<lambda>: .*control flow"):
        fxfuse.optimize(Net(CAUGHT["a branch"], fc=linear()), strict=True)


IMPORTED_LATE = """
import torch
ones = torch.ones(2)
assert ones.requires_grad is False and float(ones.sum()) == 2 and isinstance(ones, torch.Tensor)
factor = ones[0].item() + 1
"""


def test_a_module_that_a_forward_imports_works_with_tensors(tmp_path, monkeypatch):
    """As Dynamo does in older versions of torch, when torch.utils.checkpoint imports it."""

    def forward(m, x):
        import imported_late

        return m.fc(x).relu() * imported_late.factor

    (tmp_path / "imported_late.py").write_text(IMPORTED_LATE)
    monkeypatch.syspath_prepend(tmp_path)
    model = Net(forward, fc=linear()).eval()
    fast = fxfuse.optimize(model)
    assert len(fxfuse.explain(fast).regions) == 1
    assert_as_eager(model, fast, X)


class Sparing(nn.Module):
    """Returns less than it could, after a question that no graph answers."""

    def __init__(self, kind):
        super().__init__()
        self.fc = linear()
        self.kind = kind

    def forward(self, x):
        x = self.fc(x)
        return self.kind(x if x.sum() > -1e9 else -x, None)


Pair = collections.namedtuple("Pair", "first second")


def unpacked(m, x):
    first, second = m.child(x)
    return m.fc(first) if second is None else m.fc(first + second)


def unpacked_after_a_question(m, x):
    second = m.fc(x)
    if second is not None:
        first, second = m.child(second)
    return m.fc(first).relu() if second is None else second.relu()


def weights_of_attention(m, x):
    first, weights = m.attention(x, x, x, need_weights=False)
    return first.relu() if weights is None else weights.relu()


ASKING_FOR_NONE = {
    "unpacked": unpacked,
    "unpacked after a question": unpacked_after_a_question,
    "an element": lambda m, x: (lambda both: both[0].relu() if both[1] is None else both[1].relu())(m.child(x)),
    "an attribute": lambda m, x: (lambda p: p.second.relu() if p.second is not None else p.first.relu())(m.child(x)),
    "weights of attention": weights_of_attention,
}


@pytest.mark.parametrize("name", ASKING_FOR_NONE)
def test_what_a_module_returns_may_be_none(name):
    attention = nn.MultiheadAttention(8, 2)
    model = Net(ASKING_FOR_NONE[name], fc=linear(), child=Sparing(Pair), attention=attention)
    for _ in range(2):
        assert_as_eager(model, fxfuse.optimize(model), X)


def test_no_question_is_asked_about_what_a_module_returns():
    """Its None is part of what the graph returns."""

    def forward(m, x):
        first, second = m.child(x)
        return m.fc(first).relu(), second

    model = Net(forward, fc=linear(), child=Sparing(Pair))
    fast = fxfuse.optimize(model)
    assert fast(X)[1] is None
    assert [untraced.path for untraced in state_of(fast).captured.untraced] == ["child"]


def test_arguments_of_another_class_than_before():
    model = Net(ASKING_FOR_CLASSES["an argument that may be a list"], fc=linear())
    fast = fxfuse.optimize(model)
    for _ in range(2):
        assert_as_eager(model, fast, X)
        assert_as_eager(model, fast, [X, X])
    assert len(fxfuse.explain(fast).regions) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", UNTRACEABLE)
def test_untraceable_models_compute_the_same(name):
    model = UNTRACEABLE[name]().eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for x in (X.abs(), -X.abs()):
            assert_as_eager(model, fast, x, exact=False)


def test_the_report_names_the_line_that_stopped_the_trace():
    found = fxfuse.explain(fxfuse.optimize(nn.Sequential(Branching(), nn.ReLU())))
    assert [item.node for item in found.skipped] == ["0"]
    line = Branching.forward.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}" in found.skipped[0].reason
    assert "control flow" in found.skipped[0].reason


def test_children_of_untraceable_modules_are_fused():
    model = Dispatching().eval()
    found = fxfuse.explain(fxfuse.optimize(model))
    assert [region.epilogue for region in found.regions].count("relu(acc)") >= 3
    assert {item.node for item in found.skipped} >= {"the model", "named.b"}


def test_what_follows_an_untraceable_child_is_fused():
    assert epilogues(fxfuse.optimize(nn.Sequential(Branching(), nn.Linear(8, 8), nn.Tanh()))) == ["tanh(acc)"]


def test_strict_names_the_line_instead():
    with pytest.raises(fxfuse.CaptureError, match=r"test_capture\.py:\d+ in Branching\.forward"):
        fxfuse.optimize(nn.Sequential(Branching(), nn.ReLU()), strict=True)


@pytest.mark.parametrize("mode", [True, False])
def test_modes_reach_untraceable_models(mode):
    model = Net(lambda m, x: m.inner(x) if x.sum() > -1e9 else x, inner=nn.Sequential(linear(), nn.Dropout(1.0)))
    fast = fxfuse.optimize(model.train(not mode))
    fast.train(mode)
    assert bool((fast(X) == 0).all()) is mode
    assert fast.training is mode and all(module.training is mode for module in fast.modules())
    assert all(module.training is not mode for module in model.modules())


# ------------------------------------------------------------------- Python that a graph does not hold


def counting(m, x):
    m.count.add_(1)
    return m.fc(x).relu() * (m.count * 2)


def growing(m, x):
    n = x.size(0)
    k = n
    k += 1
    return m.fc(x).relu() * n + k


def buffered(forward, **buffers):
    model = Net(forward, fc=linear())
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer)
    return model


def test_buffers_are_read_and_written_at_every_call():
    model = buffered(counting, count=torch.zeros(1)).eval()
    fast = fxfuse.optimize(copy.deepcopy(model))
    assert fast.count == 0
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(X), model(X))
    assert fast.count == 3 and not fxfuse.explain(fast).skipped


def test_sizes_of_buffers_answer_questions():
    model = buffered(
        lambda m, x: m.fc(x).relu() + (m.v[: x.shape[1]] if m.v.shape[0] > 4 and m.v.dim() == 1 else 0), v=randn(9)
    )
    fast = fxfuse.optimize(model.eval(), strict=True)
    with torch.no_grad():
        assert_as_eager(model, fast, X)


AUGMENTED = {
    "an alias": lambda m, x: (lambda y, z: (y.__iadd__(1), y * z)[1])(*[m.fc(x)] * 2),
    "the argument": lambda m, x: (x.__imul__(2), m.fc(x).relu())[1],
    "a number": growing,
    "a residual": lambda m, x: m.fc(x).__iadd__(x).relu(),
    "another dtype": lambda m, x: m.fc(x).__iadd__(x.double()).relu(),
}


@pytest.mark.parametrize("name", AUGMENTED)
def test_augmented_assignments_overwrite(name):
    model = Net(AUGMENTED[name], fc=linear()).eval()
    fast = fxfuse.optimize(model)
    assert not any("runs as Python" in item.reason for item in fxfuse.explain(fast).skipped)
    with torch.no_grad():
        assert_as_eager(model, fast, X, exact=False)
        inputs = [X.clone(), X.clone()]
        model(inputs[0]), fast(inputs[1])
        assert torch.equal(*inputs)


def test_a_residual_that_is_added_in_place_is_fused():
    model = Net(lambda m, x: m.fc(x).__iadd__(x).relu(), fc=linear()).eval()
    assert epilogues(fxfuse.optimize(model)) == ["relu(assign(acc + o0, acc))"]


def test_attributes_that_are_set_on_values():
    @dataclasses.dataclass
    class Result:
        value: torch.Tensor

    class Inner(Base):
        def forward(self, x):
            return Result(self.fc(x).relu() if x.sum() < 1e9 else x)

    def forward(m, x):
        result = m.inner(x)
        result.value = result.value * 2
        return result.value

    model = Net(forward, inner=Inner()).eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        assert_as_eager(model, fast, X, exact=False)
    assert "'value' of a value is set" in str(fxfuse.explain(fast, verbose=True))


def remembering(m, x):
    m.calls, m.last = m.calls + 1, m.fc(x).relu()
    return m.last * m.calls


def gathering(m, x):
    m.history.append(m.fc(x).relu())
    m.named["last"] = m.history[-1]
    return m.history[-1] * len(m.history)


STATEFUL = {"attributes": remembering, "containers": gathering}


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("inside", [False, True])
def test_attributes_that_a_forward_sets(name, inside):
    inner = Net(STATEFUL[name], fc=linear(), calls=0, history=[], named={})
    model = (nn.Sequential(inner, linear(), nn.Tanh()) if inside else inner).eval()
    fast = fxfuse.optimize(copy.deepcopy(model))
    stateful = fast[0] if inside else fast
    assert stateful.calls == 0 and not stateful.history and not stateful.named and not hasattr(stateful, "last")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(X), model(X))
    assert stateful.calls == inner.calls and len(stateful.history) == len(inner.history)
    report = fxfuse.explain(fast, verbose=True)
    text = " ".join(str(report).replace("│", " ").split())  # as it was before a table broke its lines
    assert "Net.forward: it sets the attribute" in text
    assert ("tanh(acc)" in epilogues(fast)) is inside
    with pytest.raises(fxfuse.CaptureError, match="it sets the attribute"):
        fxfuse.optimize(model, strict=True)


collected = contextvars.ContextVar("collected", default=None)


class Collecting(nn.Module):
    """Gathers what its layers return through hooks, installed at its first call, and a context variable."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(linear(), nn.Tanh()) for _ in range(3))
        self.hooked = False

    def forward(self, x):
        if not self.hooked:
            for layer in self.layers:
                layer.register_forward_hook(self.collect)
            self.hooked = True
        token = collected.set([])
        for layer in self.layers:
            x = layer(x)
        results = tuple(collected.get())
        collected.reset(token)
        return results

    @staticmethod
    def collect(module, args, result):
        if collected.get() is not None:
            collected.get().append(result)


@pytest.mark.parametrize("called_before", [False, True])
def test_hooks_that_read_context_variables(called_before):
    model = nn.Sequential(Collecting(), Net(lambda m, x: m.fc(x[0] + x[1] + x[2]).relu(), fc=linear())).eval()
    if called_before:
        model(X)
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for _ in range(2):
            assert_as_eager(model, fast, X)
    assert [item.node for item in fxfuse.explain(fast).skipped] == ["0"]
    assert epilogues(fast).count("tanh(acc)") == 3


def test_hooks_run_once_when_other_arguments_are_given():
    calls = []
    model = nn.Sequential(DefaultNone()).eval()
    model[0].register_forward_hook(lambda module, args, result: calls.append(module))
    fast = fxfuse.optimize(Net(lambda m, x: m.inner[0](x, mask=x) if x.sum() < 1e9 else x, inner=model).eval())
    with torch.no_grad():
        fast(X)
    assert len(calls) == 1


# ---------------------------------------------------------------------------------------- odd modules


def test_tied_modules_and_parameters_stay_tied():
    shared = linear()
    model = Net(lambda m, x: m.b(m.a(x).relu()).relu() + m.c(x), a=shared, b=shared, c=linear())
    model.c.weight = shared.weight
    model.eval()
    fast = fxfuse.optimize(model)
    assert list(fast.state_dict()) == list(model.state_dict())
    assert fast.a is fast.b and fast.c.weight is fast.a.weight is model.a.weight
    with torch.no_grad():
        assert_as_eager(model, fast, X)
        model.a.weight.mul_(2)
        assert_as_eager(model, fast, X)


def test_plain_tensor_attributes_are_shared():
    model = Net(lambda m, x: m.fc(x).relu() * m.scale, fc=linear())
    model.scale = torch.full((8,), 2.0)
    fast = fxfuse.optimize(model.eval())
    model.scale.mul_(2)
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))


def test_tensors_in_containers_are_shared():
    model = Net(lambda m, x: m.fc(x).relu() * m.scales[0], fc=linear())
    model.scales = [torch.full((8,), 2.0)]
    fast = fxfuse.optimize(model.eval())
    model.scales[0].mul_(2)
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))


def with_attribute(value):
    model = Net(lambda m, x: m.fc(x).relu(), fc=linear())
    model.extra = value
    return model


UNCOPYABLE = {
    "lock": threading.Lock,
    "generator": lambda: (i for i in range(3)),
    "module": lambda: types,
    "tensor with a history, in a list": lambda: [torch.ones(3, requires_grad=True) * 2],
}


@pytest.mark.parametrize("name", UNCOPYABLE)
def test_models_that_cannot_be_deep_copied(name):
    model = with_attribute(UNCOPYABLE[name]()).eval()
    with torch.no_grad():
        torch.testing.assert_close(fxfuse.optimize(model)(X), model(X))


def test_a_forward_set_on_an_instance_is_used():
    for change in (
        lambda m: setattr(m, "forward", types.MethodType(lambda self, x: -self.fc(x), m)),
        lambda m: setattr(m.fc, "forward", lambda x: x * 3),
        lambda m: setattr(m.act, "forward", lambda x: x * 3),
    ):
        model = Net(lambda m, x: m.act(m.fc(x)), fc=linear(), act=nn.ReLU()).eval()
        change(model)
        with torch.no_grad():
            torch.testing.assert_close(fxfuse.optimize(model)(X), model(X))


def test_parametrised_layers():
    for wrap in (nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm):
        model = nn.Sequential(wrap(linear()), nn.ReLU()).eval()
        with torch.no_grad():
            assert_as_eager(model, fxfuse.optimize(model), X, exact=False)


def test_compiled_models_are_accepted():
    model = nn.Sequential(linear(), nn.ReLU()).eval()
    with torch.no_grad():
        torch.testing.assert_close(fxfuse.optimize(torch.compile(model, backend="eager"))(X), model(X))


class Recorder:
    def __init__(self):
        self.seen = []

    def hook(self, module, args, output):
        self.seen.append(output)


class Scaled(nn.Module):
    """A user's, without children."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x):
        return x * self.scale


def hooked_model():
    return nn.Sequential(nn.Sequential(linear(), nn.ReLU()), linear(), nn.Tanh(), Scaled()).eval()


HOOKED = {"leaf": lambda m: m[1], "container": lambda m: m[0], "own": lambda m: m[3], "model": lambda m: m}


@pytest.mark.parametrize("where", HOOKED)
def test_hooks_run_at_every_call(where):
    model = hooked_model()
    recorder = Recorder()
    HOOKED[where](model).register_forward_hook(recorder.hook)
    fast = fxfuse.optimize(model)
    recorder.seen.clear()
    with torch.no_grad():
        fast(X), fast(X)
    assert [type(value) for value in recorder.seen] == [torch.Tensor] * 2


@pytest.mark.parametrize("where", HOOKED)
def test_hooks_that_change_values_do(where):
    model = hooked_model()
    HOOKED[where](model).register_forward_hook(lambda module, args, output: output + 1)
    HOOKED[where](model).register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with torch.no_grad():
        torch.testing.assert_close(fxfuse.optimize(model)(X), model(X))


def test_graph_modules_are_taken_as_they_are():
    model = fx.symbolic_trace(nn.Sequential(linear(), nn.ReLU()).eval())
    code = model.code
    fast = fxfuse.optimize(model)
    assert epilogues(fast) == ["relu(acc)"] and model.code == code
    with torch.no_grad():
        assert_as_eager(model, fast, X)


def test_an_optimised_model_inside_another():
    inner = fxfuse.optimize(nn.Sequential(linear(), nn.ReLU()).eval())
    model = nn.Sequential(inner, nn.Linear(8, 8), nn.Tanh()).eval()
    fast = fxfuse.optimize(model)
    assert sorted(epilogues(fast)) == ["relu(acc)", "tanh(acc)"]
    with torch.no_grad():
        assert_as_eager(model, fast, X, exact=False)


def test_an_optimised_model_inside_another_stays_one_node():
    """Its own mode, hooks and optional arguments keep their meaning."""
    inner = fxfuse.optimize(Net(lambda m, x: m.d(m.fc(x)).tanh(), fc=linear(), d=nn.Dropout(1.0)).eval())
    fast = fxfuse.optimize(nn.Sequential(inner, nn.Tanh()).eval())
    assert [node.target for node in fast.graph.nodes if node.op == "call_module"] == ["0", "1"]
    fast[0].d.train()
    assert torch.equal(fast(X), torch.zeros(5, 8))


KEYWORD_CALLS = {
    "batch norm": Net(lambda m, x: m.bn(input=m.c(x)), c=conv(), bn=nn.BatchNorm2d(8)),
    "in-place module": Net(lambda m, x: m.r(input=m.c(x)), c=conv(), r=nn.ReLU(inplace=True)),
    "dropout": Net(lambda m, x: m.d(input=m.c(input=x)).relu(), c=conv(), d=nn.Dropout(0.5)),
    "in-place function": Net(lambda m, x: F.relu(input=m.c(x), inplace=True).tanh(), c=conv()),
}


@pytest.mark.parametrize("name", KEYWORD_CALLS)
def test_arguments_given_by_name_inside_the_model(name):
    model = KEYWORD_CALLS[name].eval()
    with torch.no_grad():
        assert_as_eager(model, fxfuse.optimize(model), randn(2, 4, 6, 6))


@pytest.mark.parametrize("value", [3, None, "text", lambda x: x])
def test_only_modules_are_optimised(value):
    with pytest.raises(fxfuse.FxfuseError, match=r"nn\.Module"):
        fxfuse.optimize(value)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_scripts_are_refused():
    with pytest.raises(fxfuse.FxfuseError, match=r"before torch\.jit"):
        fxfuse.optimize(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())))


# -------------------------------------------------------------------------------------- overwritten values


def aliasing(make_alias):
    def forward(m, x):
        y = m.fc(x)
        alias = make_alias(y)
        changed = y.relu_()
        return alias + changed

    return forward


def overwriting_the_alias(make_alias):
    def forward(m, x):
        y = m.fc(x)
        changed = make_alias(y).relu_()
        return y + changed

    return forward


ALIASES = {
    "detach": lambda y: y.detach(),
    "contiguous": lambda y: y.contiguous(),
    "float": lambda y: y.float(),
    "to": lambda y: y.to(torch.float32),
    "type_as": lambda y: y.type_as(y),
    "identity": lambda y: F.dropout(y, training=False),
    "view": lambda y: y.view(-1).view(5, 8),
    "reshape": lambda y: y.reshape(5, 8),
    "slice": lambda y: y[:],
}


@pytest.mark.parametrize("pattern", [aliasing, overwriting_the_alias])
@pytest.mark.parametrize("name", ALIASES)
def test_values_that_share_memory_change_together(name, pattern):
    model = Net(pattern(ALIASES[name]), fc=linear()).eval()
    with torch.no_grad():
        # not against float64, where .float() is a copy
        assert_as_eager(model, fxfuse.optimize(model), X, exact=False)


def test_the_model_is_not_changed():
    model = nn.Sequential(nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU()), nn.Dropout(), Branching())
    model[1].register_forward_hook(lambda module, args, output: None)
    model.note = ["a", {"b": 1}]
    model.train()
    model[1].eval()

    def snapshot():
        modules = {
            name: (type(m), m.training, sorted(vars(m)), dict(m._forward_hooks)) for name, m in model.named_modules()
        }
        tensors = {name: (id(t), t._version) for name, t in model.state_dict(keep_vars=True).items()}
        return modules, tensors, copy.deepcopy(model.note)

    before = snapshot()
    fast = fxfuse.optimize(model)
    fast.eval()
    fast.train()
    fast.note.append(3)
    assert snapshot() == before


def test_two_optimised_models_share_weights():
    model = Net2(lambda m, x, y: m.fc(x).relu() + y, fc=linear()).eval()
    first, second = fxfuse.optimize(model), fxfuse.optimize(model)
    with torch.no_grad():
        first.fc.weight.mul_(2)
        torch.testing.assert_close(second(X, X), model(X, X))
        torch.testing.assert_close(first(X, X), model(X, X))


def test_models_run_in_other_threads_while_one_is_traced():
    """fx patches nn.Module for the time of a trace, in all threads."""
    tracing, ran = threading.Event(), threading.Event()

    def forward(m, x):
        tracing.set()
        assert ran.wait(10)
        return m.fc(x).relu()

    model = nn.Sequential(linear(), nn.Tanh()).eval()
    fast = fxfuse.optimize(model)
    traced = threading.Thread(target=fxfuse.optimize, args=(Net(forward, fc=linear()),))
    traced.start()
    try:
        assert tracing.wait(10)
        with torch.no_grad():
            assert_as_eager(model, fast, X)
    finally:
        ran.set()
        traced.join()


def test_traces_in_several_threads_leave_nothing_behind():
    before = nn.Module.__call__, nn.Module.__getattr__
    models = [Net(lambda m, x: (time.sleep(0.01), m.fc(x).relu())[1], fc=linear()).eval() for _ in range(8)]
    with ThreadPoolExecutor(len(models)) as pool:
        optimised = list(pool.map(fxfuse.optimize, models))
    assert (nn.Module.__call__, nn.Module.__getattr__) == before
    for fast in optimised:
        assert epilogues(fast) == ["relu(acc)"]


# ------------------------------------------------------------------------------------- autocast and gradient modes


def test_a_forward_that_switches_autocast_runs_as_python():
    def forward(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.relu(m.fc(x))
        return y + m.block(x)

    model = Net(forward, fc=linear(), block=nn.Sequential(linear(), nn.Tanh()))
    fast = fxfuse.optimize(model)
    assert_as_eager(model, fast, torch.randn(3, 8), exact=False)
    report = fxfuse.explain(fast)
    assert [region.epilogue for region in report.regions] == ["tanh(acc)"]
    assert "it switches autocast or gradients" in report.skipped[0].reason


def test_what_runs_without_gradients_still_does():
    def forward(m, x):
        with torch.no_grad():
            features = m.backbone(x)
        return torch.relu(m.head(features))

    model = Net(forward, backbone=nn.Sequential(linear(), nn.Tanh()), head=linear())
    fast = fxfuse.optimize(model)
    fast(torch.randn(3, 8)).sum().backward()
    assert model.backbone[0].weight.grad is None and model.head.weight.grad is not None
    assert "tanh(acc)" in [region.epilogue for region in fxfuse.explain(fast).regions]  # the backbone by itself


@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_table_by_dimensions_runs_as_python(with_gradients):
    """The error asks the key for its text, which no trace gives any more. Layers of einops have such tables."""
    model = Net(lambda m, x: m.fc(x) * {2: 1.0, 3: 2.0}[x.ndim], fc=linear())
    with torch.set_grad_enabled(with_gradients):
        fast = fxfuse.optimize(model)
        assert_as_eager(model, fast, X)
    (skipped,) = [each for each in fxfuse.explain(fast).skipped if "as Python" in each.reason]
    assert "tests/test_capture.py" in skipped.reason


def test_a_required_keyword_after_defaults_runs_as_python():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(linear(), nn.ReLU())

        def forward(self, x, scale=None, *, shift):
            return self.block(x) + shift

    model = Model().eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        assert_as_eager(model, fast, randn(2, 8), shift=randn(8))
        assert_as_eager(model, fast, randn(2, 8), raises=TypeError)
    assert "'shift' is required" in str(fxfuse.explain(fast, verbose=True)) and epilogues(fast) == ["relu(acc)"]


GLOBAL_HOOKS = {
    "forward": lambda hook: nn.modules.module.register_module_forward_hook(lambda m, args, result: hook(m)),
    "before forward": lambda hook: nn.modules.module.register_module_forward_pre_hook(lambda m, args: hook(m)),
    "backward": lambda hook: nn.modules.module.register_module_full_backward_hook(lambda m, *gradients: hook(m)),
    "before backward": lambda hook: nn.modules.module.register_module_full_backward_pre_hook(lambda m, g: hook(m)),
}


@pytest.mark.parametrize("registered", ["before optimize", "after"])
@pytest.mark.parametrize("name", GLOBAL_HOOKS)
def test_hooks_for_all_modules_are_called_for_all_modules(name, registered):
    branch = nn.Sequential(linear(), nn.Tanh(), Branching())
    model = nn.Sequential(nn.Sequential(linear(), nn.ReLU()), branch, linear(), nn.ReLU())
    fast = fxfuse.optimize(model)
    seen = []
    handle = GLOBAL_HOOKS[name](lambda m: seen.append([*dict(m.named_parameters())]))
    try:
        if registered == "before optimize":
            fast = fxfuse.optimize(model)
        assert not seen, "no hook is for a trace"
        called = []
        for call in (model, fast):
            call(X.clone().requires_grad_()).sum().backward()
            called.append([*seen])
            seen.clear()
    finally:
        handle.remove()
    assert called[0] == called[1] and len(called[0]) >= 8
    fast(X)
    assert not seen
    with torch.no_grad():
        assert_as_eager(model, fast, X, exact=False)


def test_a_model_that_counts_its_calls_stays_python():
    """Dynamo would capture it anew at every call, and not count those that raise."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.count, self.norm = 0, nn.InstanceNorm2d(2, affine=True)

        def forward(self, x):
            self.count += 1
            return self.norm(x.view(*x.shape) * self.count).relu() * 2

    model = Counting()
    fast = fxfuse.optimize(copy.deepcopy(model))
    for batch in (2, 2, 2, 0, 3, 0, 3):
        x = torch.randn(batch, 2, 4, 5)
        if batch:
            torch.testing.assert_close(fast(x), model(x))
        else:
            for each in (model, fast):
                with pytest.raises(IndexError):
                    each(x)
        assert fast.count == model.count
    assert state_of(fast).recapture is None or "count" in state_of(fast).recapture.reason


@pytest.mark.parametrize("example", [False, True], ids=["the third call", "an example"])
@pytest.mark.parametrize("differs", [False, True])
def test_models_that_compute_something_else_while_they_are_captured(differs, example):
    """As transformers' PaliGemma, whose mask is another then: eager's answers count."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x.view(*x.shape[:-1], -1) if x.shape[0] > 1 else x).relu()
            if torch.compiler.is_compiling() and differs:
                x = x * 1.25
            return {"result": self.second(x).tanh()}

    model = Model().eval()
    fast = fxfuse.optimize(copy.deepcopy(model), (torch.randn(4, 8),) if example else None)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(4, 8)
            torch.testing.assert_close(fast(x), model(x))
    skip_if_python(fast)
    recapture = state_of(fast).recapture
    if differs:
        assert not recapture.graphs and "computes something else than eager" in recapture.reason
        assert "something else" in str(fxfuse.explain(fast, verbose=True))
    else:
        assert len(recapture.graphs) == 1 and recapture.reason is None


def test_what_is_compared_with_eager_is_eager():
    """The model runs as a graph around a child that runs as Python until Dynamo captures it: that graph, whose images
    may lie in another layout, needs no kernels for the comparison."""

    class Child(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum(()).dim() else x + 1

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.child, self.second = nn.Linear(8, 8), Child(), nn.Linear(8, 8)

        def forward(self, x):
            return self.second(self.child(self.first(x).relu())).tanh()

    model, x = Model().eval(), randn(4, 8)
    fast = fxfuse.optimize(model, (x,))
    skip_if_python(fast)
    (graph,) = state_of(fast).recapture.graphs
    of_graph, of_python = (
        [plan for region in state_of(each).regions for plan in plans.of_region(region.number)] for each in (graph, fast)
    )
    assert len(of_graph) == 2 and not of_python
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))


def test_results_on_another_device_are_not_compared_with_arguments():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x):
            y = self.first(x.view(*x.shape[:-1], -1) if x.shape[0] > 1 else x).relu() * 2
            return y, torch.ones_like(x, device="meta")

    model, x = Model().eval(), randn(4, 8)
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for _ in range(5):
            result, other = fast(x)
            torch.testing.assert_close(result, model(x)[0])
            assert other.is_meta and other.shape == x.shape
    skip_if_python(fast)
    assert len(state_of(fast).recapture.graphs) == 1


@pytest.mark.parametrize("example", [False, True], ids=["the third call", "an example"])
def test_graphs_that_fail_where_eager_does_not(example):
    """torch (2.13) gives masked_select of fewer dimensions than the mask's a size that is too small."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("rows", torch.tensor([0, 7]))

        def forward(self, x):
            x = self.first(x.view(*x.shape[:-1], -1) if x.shape[0] > 1 else x).relu()
            return self.second(x[self.rows] if torch.compiler.is_compiling() else x).tanh()

    model = Model().eval()
    fast = fxfuse.optimize(copy.deepcopy(model), (torch.randn(4, 8),) if example else None)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(4, 8)
            torch.testing.assert_close(fast(x), model(x))
        torch.testing.assert_close(fast.rows, model.rows)
    skip_if_python(fast)
    recapture = state_of(fast).recapture
    assert not recapture.graphs and "fails where eager does not" in recapture.reason
    assert "index 7" in str(fxfuse.explain(fast, verbose=True))


def test_layers_with_a_call_of_their_own_are_captured():
    """As transformers' layers, whose classes decide in `__call__` whether they are checkpointed."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def __call__(self, x):
            return super().__call__(x * 2)

        def forward(self, x):
            return self.second(self.first(x.view(*x.shape[:-1], -1)).relu()).tanh() if x.shape[0] > 1 else x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def forward(self, x):
            if torch.compiler.is_compiling():
                raise AttributeError("shape")
            return self.layer(x) + 1 if x.shape[0] > 2 else x

    model = Model().eval()
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for _ in range(4):
            assert_as_eager(model, fast, torch.randn(4, 8))
    skip_if_python(fast)
    assert len(state_of(fast.layer).recapture.graphs) == 1
    assert state_of(fast).recapture.reason is not None, "the whole is tried first"
    seen = []
    for one in (model, fast):
        one.layer.register_forward_hook(lambda module, args, result: seen.append(module) or result * 2)
    with torch.no_grad():
        assert_as_eager(model, fast, torch.randn(4, 8))
    assert {type(module) for module in seen} == {Layer}, "and nothing that stands in for it"
    model.train(), fast.train()
    assert_as_eager(model, fast, torch.randn(4, 8))


@pytest.mark.parametrize("example", [False, True], ids=["the third call", "an example"])
def test_what_python_must_run_does_not_keep_the_rest_from_being_captured(example):
    """As LongT5's encoder, which raises where Dynamo captures it, beside its decoder, which does not."""

    class Part(nn.Module):
        def __init__(self, can_be_captured):
            super().__init__()
            self.can_be_captured = can_be_captured
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            if torch.compiler.is_compiling() and not self.can_be_captured:
                raise AttributeError("shape")
            return self.second(self.first(x.view(*x.shape[:-1], -1)).relu()).tanh()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Part(False), Part(True)

        def forward(self, x):
            return self.decoder(self.encoder(x)).sigmoid()

    model = Model().eval()
    fast = fxfuse.optimize(copy.deepcopy(model), (torch.randn(4, 8),) if example else None)
    assert state_of(fast).captured.graph is not None, "the model itself is traced"

    def check():
        with torch.no_grad():
            for _ in range(0 if example else 2):
                assert_as_eager(model, fast, torch.randn(4, 8))
            assert_as_eager(model, fast, torch.randn(4, 8))
        skip_if_python(fast)
        assert state_of(fast).recapture.reason is not None, "the whole is tried first"
        assert not state_of(fast.encoder).recapture.graphs
        assert all(state_of(graph).regions for graph in state_of(fast.decoder).recapture.graphs)
        return len(state_of(fast.decoder).recapture.graphs)

    assert check() == 1
    fast.train()
    model.train()
    assert_as_eager(model, fast, torch.randn(4, 8))
    fast.eval()
    model.eval()
    assert check() == 2, "one for each mode"
    report = fxfuse.explain(fast)
    assert [item.node for item in report.skipped if "runs as Python" in item.reason] == ["encoder"]
    assert "'decoder' was captured by Dynamo as 2 graphs" in report.text(verbose=True)
    assert list(fast.state_dict()) == list(model.state_dict())
    twin = copy.deepcopy(fast)
    assert_as_eager(model, twin, torch.randn(4, 8))


@pytest.mark.parametrize("once", [True, False])
def test_what_is_logged_once_does_not_keep_a_model_from_being_captured(once, monkeypatch, caplog):
    """As transformers' `logger.warning_once`; what is logged at every call keeps being."""
    log = logging.getLogger("a model's")
    method = functools.lru_cache(None)(lambda self, text: self.warning(text)) if once else logging.Logger.warning
    monkeypatch.setattr(logging.Logger, "warning_at_will", method, raising=False)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x):
            log.warning_at_will("it is padded")
            return self.first(x.view(*x.shape[:-1], -1)).relu() * 2

    model = Model().eval()
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        caplog.clear()
        for _ in range(5):
            want = model(X)
            torch.testing.assert_close(fast(X), want)
    assert sum(record.name == "a model's" for record in caplog.records) == (0 if once else 10)
    skip_if_python(fast)
    assert bool(state_of(fast).recapture.graphs) is once


def test_models_do_not_learn_from_each_other_that_sizes_vary():
    for rows in (4, 6):
        model = Net(lambda m, x: m.fc(x.view(*x.shape[:-1], -1)).relu() * 2, fc=linear()).eval()
        fast = fxfuse.optimize(model)
        with torch.no_grad():
            for _ in range(4):
                fast(torch.randn(rows, 8))
        skip_if_python(fast)
        (graph,) = state_of(fast).recapture.graphs
        given = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
        assert given and not any(isinstance(value, torch.SymInt) for value in given)


def test_sizes_that_a_graph_computes_of_numbers_are_numbers():
    """As Longformer's `torch.div(length, window)`: nobody need look at a tensor's value."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x):
            chunks = torch.div(x.shape[0], 2, rounding_mode="trunc")
            x = self.first(x.view(*x.shape[:-1], -1)).relu() * 2
            return x.view(chunks, 2, 8) + x.new_zeros((chunks + 0, 1, 8)) + (chunks - 1)

    model = Model().eval()
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for _ in range(6):
            assert_as_eager(model, fast, torch.randn(6, 8))
    skip_if_python(fast)
    (graph,) = state_of(fast).recapture.graphs
    assert len(state_of(graph).programs.programs) == 1, state_of(graph).programs.reason


def test_arguments_among_the_results_are_no_other_results():
    """As the biases that T5's layers hand on: Dynamo's graph does not return them."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x, bias):
            return bias, self.first(x.view(*x.shape[:-1], -1)).relu() + bias

    model = Model().eval()
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for _ in range(5):
            assert_as_eager(model, fast, torch.randn(4, 8), torch.randn(4, 8))
    skip_if_python(fast)
    recapture = state_of(fast).recapture
    assert len(recapture.graphs) == 1 and recapture.reason is None


def test_results_that_rounding_decides_are_no_other_results():
    """As those of detectors, which take the best few of many: of eager's own, an ulp beside, as much is another."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 64)

        def forward(self, x):
            x = self.first(x.view(*x.shape[:-1], -1)).tanh() * 3
            return (x * 2**24).remainder(3)  # of the last bits

    model = Model().eval()
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for _ in range(5):
            assert fast(torch.randn(40, 64)).shape == (40, 64)
    skip_if_python(fast)
    recapture = state_of(fast).recapture
    assert len(recapture.graphs) == 1 and recapture.reason is None


SEEN = []


def test_what_a_forward_does_to_others_happens_once():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x):
            SEEN.append(x.shape[0])
            return self.first(x.view(*x.shape[:-1], -1) if x.shape[0] > 1 else x).relu() * 2

    model = Model().eval()
    fast = fxfuse.optimize(model)
    SEEN.clear()  # fx ran it, too
    for calls in range(1, 9):
        fast(torch.randn(4, 8))
        assert [4] * calls == SEEN
        if calls == 4:  # later Dynamo is not asked any more: it guards the length of the list
            skip_if_python(fast)
            assert state_of(fast).recapture.graphs


# ------------------------------------------------------------------ Python's own functions while others trace


def test_type_means_the_same_to_all_other_code_while_a_model_is_traced():
    """Threads that compile import modules, and define classes, meanwhile."""
    own = builtins.type
    with proxies.answering():
        assert builtins.type is not own

        class Meta(type):
            def __call__(cls, *args):
                return super().__call__(*args)

        class Made(metaclass=Meta):
            pass

        assert type[int] == own[int] and isinstance(Made, type) and issubclass(Meta, type)
        assert type(Made) is Meta and isinstance(Made(), Made) and (type | None) is not None
    assert builtins.type is own and own(Made) is Meta and Meta.__mro__ == (Meta, own, object)


@pytest.mark.parametrize("outlived", ["by an import", "by another trace"])
def test_pythons_functions_come_back_whichever_thread_ends_last(outlived):
    def functions():
        return [vars(builtins)[name] for name in ("isinstance", "type", "callable")]

    own = functions()
    other = proxies._counted(imports=1) if outlived == "by an import" else proxies.answering()
    with proxies.answering():
        replaced = functions()
        other.__enter__()
        assert functions() == (own if outlived == "by an import" else replaced)
    assert functions() == (own if outlived == "by an import" else replaced)
    other.__exit__(None, None, None)
    assert all(one is own for one, own in zip(functions(), own, strict=True))
