"""Drives an optimised model and an eager copy the same way, and compares all that a caller can see."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import pickle
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxfuse
from fxfuse.verify import leaves_of

from . import noise
from .draw import Case

CLOSE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative difference (Frobenius) up to which nobody asks further."""
ULPS = 4
"""What a result may err by beside twice eager's error."""


@dataclass
class Finding:
    """One difference from eager."""

    kind: str
    step: int
    text: str


@dataclass
class Seen:
    """What a caller sees of one step."""

    error: BaseException | None = None
    outputs: tuple[Any, ...] = ()
    inputs: tuple[torch.Tensor, ...] = ()
    gradients: dict[str, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    random: tuple[Any, ...] = ()
    structure: Any = None
    aliases: tuple[Any, ...] = ()


def run(case: Case, optimize: Callable[[nn.Module], nn.Module] | None = None) -> Finding | None:
    """The first difference between eager and what `optimize` (fxfuse's) makes of it, if there is one."""
    namespace = types.ModuleType("fxfuse_fuzz_case")
    sys.modules[namespace.__name__] = namespace  # pickle imports it
    exec(compile(case.source(), f"<case {case.seed}>", "exec"), namespace.__dict__)
    torch.manual_seed(case.seed)
    eager: nn.Module = namespace.Model().to(case.device, getattr(torch, case.dtype))
    random.seed(case.seed)
    try:
        fast = (optimize or fxfuse.optimize)(copy.deepcopy(eager))
    except Exception as error:
        return Finding("optimize raises", -1, f"{type(error).__name__}: {error}")
    calls = ["none", *case.steps]
    for index, step in enumerate(calls):
        what, batch, layout = ("call", 3, "plain") if step == "none" else step
        seed = case.seed * 100 + index
        before = _copy(eager)
        sides = []
        for model in (eager, fast):
            seen, model = _step(model, case, what, batch, layout, seed)
            sides.append((seen, model))
        (want, eager), (have, fast) = sides

        again = _Again(before, case, what, batch, layout, seed)
        finding = _compare(want, have, again, index - 1)
        if finding is not None and finding.kind == "exceptions" and batch == 0 and again.raises(batch=3):
            return None  # that the batch is empty spares eager, which checks less then, and nothing else
        if finding is not None:
            return finding
        _even_out(eager, fast)
        if want.error is not None and what not in ("call", "no_grad", "inference", "autocast", "repeat"):
            return None  # half of a conversion: nothing can be said of what follows
        if case.seed % 8 < 4:
            del want, have, sides, seen  # graphs of training steps copy gradients if somebody keeps the last ones
    return None


def _even_out(eager: nn.Module, fast: nn.Module) -> None:
    """Gives `fast` eager's state: that running means differ by rounding has been judged, and is not judged again."""
    theirs = _tensors(fast)
    for name, tensor in _tensors(eager).items():
        if name in theirs and theirs[name].shape == tensor.shape and not torch.equal(theirs[name], tensor):
            with torch.inference_mode(theirs[name].is_inference()), torch.no_grad():
                theirs[name].data.copy_(tensor)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers, and tensors in attributes."""
    attributes = {f"attribute t{k}": getattr(model, f"t{k}", None) for k in range(9)}
    kept = {name: value for name, value in attributes.items() if isinstance(value, torch.Tensor)}
    return dict([*model.named_parameters(), *model.named_buffers()]) | kept


def _copy(model: nn.Module) -> nn.Module | None:
    try:
        return copy.deepcopy(model)
    except Exception:
        return None


@dataclass
class _Again:
    """A step of eager's that can be run again, on a copy of the model as it was before."""

    before: nn.Module | None
    case: Case
    what: str
    batch: int
    layout: str
    seed: int

    def _run(self, batch: int, double: torch.dtype | None, perturbed: noise.Perturbed | None = None) -> Seen | None:
        twin = None if self.before is None else _copy(self.before)
        if twin is None:
            return None
        twin = twin if double is None else twin.to(double)
        return _step(twin, self.case, self.what, batch, self.layout, self.seed, double, perturbed)[0]

    def raises(self, batch: int) -> bool:
        seen = self._run(batch, None)
        return seen is not None and seen.error is not None

    @functools.cached_property
    def exact(self) -> Seen | None:
        """What is seen of it in float64."""
        seen = self._run(self.batch, torch.float64)
        return None if seen is None or seen.error is not None else seen

    @functools.cached_property
    def perturbed(self) -> list[Seen]:
        """What is seen of it where every operation errs."""
        if self.what in ("export", "compile"):  # which trace
            return []
        runs = (self._run(self.batch, None, noise.Perturbed(k)) for k in range(noise.SAMPLES))
        return [seen for seen in runs if seen is not None and seen.error is None]


def make_input(case: Case, batch: int, layout: str, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers for the same seed, whatever the dtype."""
    shape = (batch, *case.inputs)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(getattr(torch, case.dtype)).to(case.device, dtype)
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "expanded":
        return x[:1].expand(shape)
    if layout == "sliced":
        return torch.stack((x, x + 1), -1)[..., 0]
    if layout == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x


def _step(
    model: nn.Module, case: Case, what: str, batch: int, layout: str, seed: int, double: torch.dtype | None = None,
    perturbed: noise.Perturbed | None = None,
) -> tuple[Seen, nn.Module]:  # fmt: skip
    seen = Seen()
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        changed = _change(model, what, seed)
        model = changed if changed is not None else model
        _call(model, case, what, batch, layout, seed, double, seen, perturbed or contextlib.nullcontext())
    except Exception as error:
        seen.error = error
    cuda = torch.cuda.get_rng_state() if case.device == "cuda" else torch.empty(0)
    seen.random = (random.getstate(), torch.get_rng_state(), cuda)
    seen.state = _state(model)
    return seen, model


def _change(model: nn.Module, what: str, seed: int) -> nn.Module | None:
    """What a step does before the call; a model if it is another one from then on."""
    match what:
        case "train":
            model.train()
        case "eval":
            model.eval()
        case "deepcopy":
            return copy.deepcopy(model)
        case "pickle":
            return pickle.load(io.BytesIO(pickle.dumps(model)))  # type: ignore[no-any-return]
        case "state_dict":
            model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
        case "update":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.75).add_(0.01)
        case "replace":
            for module in model.modules():
                for name, parameter in list(module._parameters.items()):
                    if parameter is not None:
                        setattr(module, name, nn.Parameter(parameter.detach() * 0.5))
        case "hook":
            model.register_forward_hook(lambda module, args, out: pytree.tree_map(_doubled, out))
        case "hook child":
            for child in model.children():
                child.register_forward_hook(lambda module, args, out: pytree.tree_map(_doubled, out))
                model.train(not model.training)  # when hooks on children are seen at the latest
                model.train(not model.training)
        case "flag" if hasattr(model, "flag"):
            model.flag = not model.flag
        case "bias None":
            for child in model.children():
                if "bias" in child._parameters:
                    child.bias = None
        case "double" | "half" | "bfloat16":
            model.to(getattr(torch, {"double": "float64", "half": "float16"}.get(what, what)))
    return None


def _doubled(value: Any) -> Any:
    return value * 2 if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def _mode(what: str, device: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if what in ("no_grad", "repeat"):
            stack.enter_context(torch.no_grad())
        if what == "inference":
            stack.enter_context(torch.inference_mode())
        if what == "autocast":
            stack.enter_context(torch.autocast(device, dtype=torch.bfloat16))
        yield


def _call(
    model: nn.Module, case: Case, what: str, batch: int, layout: str, seed: int, double: torch.dtype | None, seen: Seen,
    perturbed: Any,
) -> None:  # fmt: skip
    floating = [tensor.dtype for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    dtype = double or (floating[0] if floating else getattr(torch, case.dtype))
    x = make_input(case, batch, layout, seed, dtype)
    leaf = None
    grad = what not in ("no_grad", "inference", "repeat", "vmap", "func_grad", "export") and seed % 3 != 0
    if grad and layout != "expanded":
        leaf = x.detach().requires_grad_()
        x = leaf * 1 if layout == "plain" else leaf  # of a leaf in place is an error, of its copy not
    arguments = (x,) if not case.argument or seed % 2 else (x, make_input(case, batch, "plain", seed + 1, dtype))
    with perturbed, _mode(what, case.device):
        result = _called(model, case, what, arguments)
        if what == "repeat":  # shapes that come again take short cuts
            result = [result, model(*arguments), model(*arguments), *_in_other_modes(model, arguments, seed)]
    leaves = tuple(leaves_of(result))
    seen.outputs, seen.structure = leaves, _structure(result)
    seen.inputs = tuple(argument.detach() for argument in arguments)
    seen.aliases = _aliases(leaves, arguments, model)
    if grad:
        with perturbed:
            _backward(model, leaf, tuple(result.values()) if isinstance(result, dict) else leaves, seen)


def _called(model: nn.Module, case: Case, what: str, arguments: tuple[Any, ...]) -> Any:
    match what:
        case "functional_call":
            weights = {name: value * 0.5 for name, value in model.named_parameters()}
            return torch.func.functional_call(model, weights, arguments)
        case "vmap":
            return torch.func.vmap(model, randomness="same")(*(argument.unsqueeze(0) for argument in arguments))
        case "func_grad":

            def loss(*values: Any) -> torch.Tensor:
                return _first(leaves_of(model(*values))).float().sum()

            return torch.func.grad(loss)(*arguments)
        case "export":
            return torch.export.export(model, arguments).module()(*arguments)
        case "compile":
            torch._dynamo.reset()
            return torch.compile(model, backend="eager")(*arguments)
        case "threads":
            results: list[Any] = [None] * 2
            thread = threading.Thread(target=_without_gradients, args=(model, arguments, results))
            if not case.is_stateful():  # else the threads' order decides
                thread.start()
            result = model(*arguments)
            if thread.ident is not None:
                thread.join()
            return result
    return model(*arguments)


def _in_other_modes(model: nn.Module, arguments: Any, seed: int) -> list[Any]:
    """The same call in modes that none before it had, in any order."""
    modes = [torch.enable_grad, torch.inference_mode, torch.no_grad, torch.enable_grad]
    random.Random(seed).shuffle(modes)
    results = []
    for mode in modes:
        with mode():
            results.append(model(*arguments))
    return results


def _without_gradients(model: Callable[..., Any], arguments: Any, results: list[Any]) -> None:
    with torch.no_grad():
        results[0] = model(*copy.deepcopy([argument.detach() for argument in arguments]))


def _first(leaves: list[Any]) -> torch.Tensor:
    return next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _structure(result: Any) -> Any:
    if isinstance(result, list | tuple):
        return (type(result).__name__, tuple(map(_structure, result)))
    return (type(result).__name__, tuple(result) if isinstance(result, dict) else ())


def _backward(model: nn.Module, leaf: torch.Tensor | None, leaves: tuple[Any, ...], seen: Seen) -> None:
    due = [out for out in leaves if isinstance(out, torch.Tensor) and out.requires_grad]
    if not due:
        return
    model.zero_grad()
    sum((out.double() if not out.is_complex() else out.abs()).sin().sum() for out in due).backward()  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        seen.gradients[name] = parameter.grad
        parameter.grad = None
    seen.gradients["the input"] = None if leaf is None else leaf.grad


def _aliases(leaves: tuple[Any, ...], arguments: tuple[Any, ...], model: nn.Module) -> tuple[Any, ...]:
    """For each output the first output, input, parameter or buffer that shares its memory; and which are identical."""
    state = [*model.named_parameters(), *model.named_buffers()]
    known: list[tuple[str, Any]] = [(f"input {i}", argument) for i, argument in enumerate(arguments)] + sorted(
        state, key=lambda pair: pair[0]
    )
    found = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(leaf):
            continue
        at = leaf.untyped_storage().data_ptr() if leaf.numel() else 0
        shares = [name for name, other in known if at and other.untyped_storage().data_ptr() == at]
        same = [name for name, other in known if other is leaf]
        found.append((shares[:1], same[:1], leaf.storage_offset() if shares else 0))
        known.append((f"output {index}", leaf))
    return tuple(found)


def _state(model: nn.Module) -> dict[str, Any]:
    state = dict([*model.named_parameters(), *model.named_buffers()])
    held: dict[str, Any] = {name: value.detach().clone() for name, value in state.items()}
    held |= {f"{name}'s flag": value.requires_grad for name, value in state.items()}
    for name in [f"n{k}" for k in range(9)] + [f"t{k}" for k in range(9)]:
        value = getattr(model, name, None)
        if isinstance(value, int):
            held[f"attribute {name}"] = value
        elif isinstance(value, torch.Tensor):
            held[f"attribute {name}"] = value.detach().clone()
    return held


# ------------------------------------------------------------------------------------------ comparing


def _compare(want: Seen, have: Seen, again: _Again, step: int) -> Finding | None:
    if (want.error is None) != (have.error is None) or type(want.error) is not type(have.error):
        return Finding("exceptions", step, f"eager: {_said(want.error)}\nfxfuse: {_said(have.error)}")
    if want.error is not None:
        return None  # how far it came: operands are computed, and drawn, before the operation that raises
    if want.structure != have.structure or len(want.outputs) != len(have.outputs):
        return Finding("structure", step, f"eager: {want.structure}\nfxfuse: {have.structure}")
    # those of a gradient that nobody has accumulated depend on the order of backward's operations, and of vmap's own
    # dimension, which is of size 1, and of empty results, on how its layers are entered
    strides = again.what != "func_grad" and not (again.what == "vmap" and again.batch == 0)
    from_dimension = int(again.what == "vmap") if strides else sys.maxsize
    for index, (one, other) in enumerate(zip(want.outputs, have.outputs, strict=True)):
        text = _difference(one, other, again, lambda seen, index=index: seen.outputs[index], from_dimension)
        if text:
            return Finding(text.partition(":")[0], step, f"output {index}: {text}")
    if want.aliases != have.aliases:
        return Finding("aliasing", step, f"eager: {want.aliases}\nfxfuse: {have.aliases}")
    for index, (one, other) in enumerate(zip(want.inputs, have.inputs, strict=False)):
        text = _difference(one, other, again, lambda seen, index=index: seen.inputs[index])
        if text:
            return Finding("mutated input", step, f"input {index}: {text}")
    for kind in ("gradients", "state"):
        ones, others = getattr(want, kind), getattr(have, kind)
        if set(ones) != set(others):
            return Finding(kind, step, f"eager has {sorted(ones)}, fxfuse {sorted(others)}")
        for name, one in ones.items():
            text = _difference(
                one, others[name], again, lambda seen, kind=kind, name=name: getattr(seen, kind).get(name),
                is_sum=kind == "gradients",
            )  # fmt: skip
            if text:
                return Finding(kind, step, f"{name}: {text}")
    # where values decide how many numbers are drawn (RReLU), rounding does
    if not _drew_alike(want, have) and all(_drew_alike(want, seen) for seen in again.perturbed):
        return Finding("random state", step, "the generators differ afterwards")
    return None


def _drew_alike(one: Seen, other: Seen) -> bool:
    return one.random[0] == other.random[0] and all(map(torch.equal, one.random[1:], other.random[1:]))


def _said(error: BaseException | None) -> str:
    return "nothing raised" if error is None else f"{type(error).__name__}: {error}"[:1500]


def _difference(
    want: Any, have: Any, again: _Again, of: Callable[[Seen], Any], from_dimension: int = 0, is_sum: bool = False,
) -> str | None:  # fmt: skip
    """In words, the kind first; `of` finds the same tensor in what is seen of another run.

    Strides are compared from that dimension on. Those of a sum of gradients, along dimensions of size 1, are of the one
    that backward came to first.
    """
    if not isinstance(want, torch.Tensor) or not isinstance(have, torch.Tensor):
        if isinstance(want, torch.Tensor) or isinstance(have, torch.Tensor) or want != have:
            return f"value: {have!r} instead of {want!r}"
        return None
    for kind in ("dtype", "shape", "requires_grad", "device"):
        if getattr(want, kind) != getattr(have, kind):
            return f"{kind}: {getattr(have, kind)} instead of {getattr(want, kind)}"
    if type(want) is not type(have):
        return f"type: {type(have).__name__} instead of {type(want).__name__}"
    strides = [
        [stride for size, stride in zip(seen.shape, seen.stride(), strict=True) if size > 1 or not is_sum]
        for seen in (want, have)
    ]
    if strides[0][from_dimension:] != strides[1][from_dimension:]:
        return f"strides: {have.stride()} instead of {want.stride()}"
    one, other = want.detach(), have.detach()
    if not (one.is_floating_point() or one.is_complex()):
        return None if torch.equal(one, other) else f"value: {one.dtype} differs"
    one, other = _real(one), _real(other)
    text = _wrong(one, other, again, of)
    if text is None:
        return None
    samples = [_real(sample) for sample in map(of, again.perturbed) if isinstance(sample, torch.Tensor)]
    alike = [sample for sample in samples if sample.shape == one.shape]
    return None if alike and noise.explains(one, other, alike) else text


def _real(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _wrong(one: torch.Tensor, other: torch.Tensor, again: _Again, of: Callable[[Seen], Any]) -> str | None:
    """How far `other` is from `one`, unless they are close or float64 finds both as good."""
    if torch.equal(one.isnan(), other.isnan()) and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)):
        return None
    right = None if again.exact is None else of(again.exact)
    judged = isinstance(right, torch.Tensor) and _real(right).shape == one.shape
    right = _real(right).double() if isinstance(right, torch.Tensor) and judged else None
    differ = (one.isnan() != other.isnan()) | (one.isinf() != other.isinf())
    # 16 bits overflow on the way to a finite number, where float32 does not; and sqrt(gelu(x)) is -0 in them where
    # gelu(x) was rounded to that, but NaN in float64
    fine = ~one.isfinite() & other.isfinite()
    if right is not None:
        fine = (right.isnan() == other.isnan()) & (right.isinf() == other.isinf())
        if one.dtype == torch.float16 and ".half()" in again.case.source():  # then float64's model overflows, too
            fine |= one.isinf() & other.isfinite()
    if bool((differ & ~fine).any()):
        return "NaN and infinities: in other places"
    finite = one.isfinite()
    size = float(one[finite].double().norm()) or 1.0
    apart = float((one[finite].double() - other[finite].double()).norm()) / size
    if apart <= CLOSE[one.dtype] and not differ.any():
        return None
    if right is None:
        return f"value: {apart:.2e} from eager"
    # where eager's number has overflowed, ours may be inexact and yet the better one
    both = one.isfinite() & other.isfinite() & right.isfinite()
    norm = float(right[both].norm()) or 1.0
    eager, ours = (float((value.double() - right)[both].norm()) / norm for value in (one, other))
    right_enough = ours <= 2 * eager + ULPS * torch.finfo(one.dtype).eps
    return None if right_enough else f"value: error {ours:.2e}, eager's {eager:.2e}"
