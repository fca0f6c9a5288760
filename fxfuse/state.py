"""What running a model changes beside its outputs: random numbers, Python attributes, buffers; and putting it back."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import importlib
import pickle
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxfuse.errors import FxfuseError
from fxfuse.locks import free_in_children

_MISSING: Final = object()
_LITERALS: Final = (bool, int, float, str, torch.dtype, torch.device)
_FOREIGN: Final = sys.stdlib_module_names | {"torch", "numpy", "fxfuse"}
"""Packages whose objects hold nothing that a user's forward keeps there (but for containers)."""


class TorchRandomState:
    """The states of torch's global generators: all that operators of torch draw from."""

    def __init__(self) -> None:
        with _STATES:
            self._states = [(generator, generator.get_state()) for generator in _generators()]

    def restore(self) -> None:
        with _STATES:
            for generator, state in self._states:
                generator.set_state(state)

    def is_present(self) -> bool:
        """Whether nobody has drawn since."""
        now = TorchRandomState()
        with torch._C.DisableTorchFunction():  # of a trace under way
            states = zip(self._states, now._states, strict=False)  # a GPU may have been met for the first time
            return all(before.equal(after) for (_, before), (_, after) in states)


class RandomState:
    """Those, and the states of Python's and numpy's."""

    def __init__(self) -> None:
        numpys = _numpy_random()
        self._python = random.getstate()
        self._numpy: Any = None if numpys is None else numpys.get_state()
        self._torch = TorchRandomState()

    def restore(self) -> None:
        random.setstate(self._python)
        numpys = _numpy_random()
        if self._numpy is not None and numpys is not None:
            numpys.set_state(self._numpy)
        self._torch.restore()

    def is_present(self) -> bool:
        """Whether nobody has drawn since."""
        numpys = _numpy_random()
        now = None if numpys is None else numpys.get_state()
        return self._python == random.getstate() and _is_same_numpy(self._numpy, now) and self._torch.is_present()


_STATES: Final = free_in_children(threading.RLock())
"""torch locks a generator and may then run Python (a collection of garbage), while another thread waits for the
generator with Python's lock in its hands."""


def _numpy_random() -> Any:
    """numpy.random, whole, also while another thread imports it; None if nobody has imported numpy."""
    return importlib.import_module("numpy.random") if "numpy" in sys.modules else None


def _generators() -> list[torch.Generator]:
    cuda = list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []
    return [torch.default_generator, *cuda]


def _is_same_numpy(before: Any, after: Any) -> bool:
    if before is None or after is None:
        return True
    return bool(before[1].tobytes() == after[1].tobytes() and before[2:] == after[2:])


class Draws:
    """Whether somebody draws random numbers from now on, with a global generator or one in an attribute of a model."""

    def __init__(self, *models: nn.Module) -> None:
        self._global = RandomState()
        self._own = Attributes(_with_captured(models))

    def any(self) -> bool:
        return not self._global.is_present() or self.of_its_own()

    def of_its_own(self) -> bool:
        """Whether one in an attribute was drawn from."""
        return self._own.have_drawn()


class _Noted(TorchDispatchMode):
    """Notes draws by torch's global generator on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Callable[[], Any]] = []
        self._drawn: list[torch.UntypedStorage] = []

    def have_drawn(self, tree: Any) -> bool:
        """Whether what was drawn is among what the tree's tensors hold."""
        storages = [tensor.untyped_storage() for tensor in _tensors_in(tree) if tensor.layout is torch.strided]
        return any(storage._cdata == drawn._cdata for storage in storages for drawn in self._drawn)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        made = _tensors_in(result)
        if draws and not _tensors_in((args, kwargs)) and all(tensor.device.type == "cpu" for tensor in made):
            self._drawn += [tensor.untyped_storage() for tensor in made]
            self.draws.append(functools.partial(func, *args, **kwargs))
        return result


class _Readers(TorchFunctionMode):
    """Notes whether anything is asked of what was drawn, `tolist` and `numpy` included, which call no operator."""

    def __init__(self, noted: _Noted) -> None:
        super().__init__()
        self.found = False
        self._noted = noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or self._noted.have_drawn((args, kwargs))
        return func(*args, **(kwargs or {}))


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def draws_without_readers(call: Callable[[], Any]) -> list[Callable[[], Any]] | None:
    """What `call` draws on a CPU and nobody reads, to be drawn again where something else stands for it; None if it
    draws other random numbers, too.

    Models draw for each layer whether to leave it out, and ask in training only.
    """
    before = RandomState()
    with _Noted() as noted, _Readers(noted) as readers:
        results = call()
    after = RandomState()
    before.restore()
    for draw in noted.draws:
        draw()
    return noted.draws if after.is_present() and not (readers.found or noted.have_drawn(results)) else None


def seed(number: int) -> None:
    """Sets all global generators."""
    random.seed(number)
    numpys = _numpy_random()
    if numpys is not None:
        numpys.seed(number)
    torch.manual_seed(number)


class Attributes:
    """What modules' attributes are now, and what containers and objects among them hold."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before: list[tuple[nn.Module, str, Any, Any]] = []
        """Containers with the module and the attribute they were found in, and their contents; for a module's own
        attributes, "" stands for the name."""
        self.tensors: list[torch.Tensor] = []
        """Tensors among them, parameters excepted."""
        self._seen: set[int] = set()
        for module in modules:
            self._before.append((module, "", vars(module), dict(vars(module))))
            for name, value in vars(module).items():
                self._walk(module, name, value)

    def _walk(self, module: nn.Module, name: str, found: Any) -> None:
        values = [found]
        while values:
            value = values.pop()
            if isinstance(value, nn.Module | nn.Parameter | enum.Enum | type) or id(value) in self._seen:
                continue
            if isinstance(value, torch.Tensor):
                self._seen.add(id(value))
                self.tensors.append(value)
            elif isinstance(value, tuple):
                values.extend(value)
            elif (contents := _contents(value)) is not _MISSING:
                self._seen.add(id(value))
                self._before.append((module, name, value, contents))
                held = contents if isinstance(contents, dict | list) else []
                values.extend(held.values() if isinstance(held, dict) else held)

    def changes(self) -> dict[nn.Module, str]:
        """The modules that something was done to, with an attribute's name."""
        found: dict[nn.Module, str] = {}
        for module, name, value, before in self._before:
            if name:
                changed = [] if _is_same(_contents(value), before) else [name]
            else:
                changed = [
                    key
                    for key in {**before, **value}
                    if not _is_same(value.get(key, _MISSING), before.get(key, _MISSING))
                ]
            found.update((module, key) for key in changed)
        return found

    def have_drawn(self) -> bool:
        """Whether a generator among what they hold is in another state."""
        return any(
            _is_generator(value) and not _is_same(_contents(value), before) for *_, value, before in self._before
        )

    def hold_generators(self) -> bool:
        """Whether there is a generator of random numbers among what they hold."""
        return any(_is_generator(value) for *_, value, _ in self._before)

    def restore(self) -> None:
        """Undoes what was done, unless hooks were installed: who does that once, at the first call, has done it."""
        if any(name.endswith("_hooks") for name in self.changes().values()):
            return
        for _, name, value, before in self._before:
            if name and not _is_same(_contents(value), before):
                _put_back(value, before)
            elif not name and not _is_same(value, before):
                value.clear()
                value.update(before)


def _is_generator(value: Any) -> bool:
    """Whether it is a generator of random numbers, of torch, Python or numpy."""
    if isinstance(value, random.Random | torch.Generator):
        return True
    numpys = _numpy_random()
    return numpys is not None and isinstance(value, numpys.Generator | numpys.RandomState)


def _numpys_state(generator: Any) -> Any:
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _contents(value: Any) -> Any:
    """A copy of what may be changed in place in a container, an object or a generator; `_MISSING` of anything else."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | collections.deque):
        return list(value)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if _is_generator(value):
        return pickle.dumps(_numpys_state(value))
    package = type(value).__module__.partition(".")[0]
    if isinstance(value, types.SimpleNamespace) or (package not in _FOREIGN and hasattr(value, "__dict__")):
        return dict(vars(value))
    return _MISSING


def _put_back(value: Any, contents: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(contents)
    elif isinstance(value, torch.Generator):
        value.set_state(torch.frombuffer(bytearray(contents), dtype=torch.uint8))
    elif _is_generator(value):
        state = pickle.loads(contents)
        if hasattr(value, "bit_generator"):
            value.bit_generator.state = state
        else:
            value.set_state(state)
    else:
        held = value if isinstance(value, dict | list | collections.deque | set) else vars(value)
        held.clear()
        (held.update if isinstance(held, dict | set) else held.extend)(contents)


def _is_same(now: Any, before: Any) -> bool:
    """Whether it is the same object, or a container of the same objects, or an equal literal."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, dict):
        now, before = [*now, *now.values()], [*before, *before.values()]
    if isinstance(now, list):
        return len(now) == len(before) and all(
            one is other or (type(one) is type(other) and isinstance(one, _LITERALS) and one == other)
            for one, other in zip(now, before, strict=True)
        )
    return isinstance(now, (*_LITERALS, tuple, set, bytes)) and bool(now == before)


@contextlib.contextmanager
def unchanged(*modules: nn.Module, gradients: bool = False, tensors: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Inside, runs without gradients unless told otherwise; afterwards, all that a forward may change is what it was,
    `tensors` included.

    Batch normalisation in training mode counts into its buffers, dropout draws random numbers, models count their
    calls and keep what they computed; with gradients, `backward` may add to parameters' `grad`. The values of
    parameters are not looked after.
    """
    modules = tuple(_with_captured(modules))
    attributes = Attributes(modules)
    randomness = RandomState()
    parameters = {item for module in modules for item in module.parameters(recurse=False)} if gradients else set()
    slots = [(parameter, parameter.grad) for parameter in parameters]
    with torch.no_grad():
        held = [*attributes.tensors, *tensors, *(grad for _, grad in slots if grad is not None)]
        values = [(tensor, tensor.detach().clone()) for tensor in held]
        try:
            with torch.set_grad_enabled(gradients):
                yield
        finally:
            for parameter, grad in slots:
                parameter.grad = grad
            attributes.restore()
            for tensor, value in values:
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.data.copy_(value)  # not a change that autograd would take notice of
            randomness.restore()


@contextlib.contextmanager
def same_attributes(*modules: nn.Module) -> Iterator[None]:
    """Afterwards, the modules' attributes, and what containers among them hold, are what they were."""
    attributes = Attributes(_with_captured(modules))
    try:
        yield
    finally:
        attributes.restore()


def _with_captured(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """All modules of these, where they are fused graphs the models that these stand for."""
    seen: set[nn.Module] = set()
    for model in modules:
        for module in model.modules():
            captured = getattr(vars(module).get("_fxfuse"), "captured", None)
            module = module if captured is None else captured.root
            if module not in seen:
                seen.add(module)
                yield module


def called_unchanged(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `model` makes of copies of the arguments; afterwards, all that its forward may change is what it was.

    It runs without gradients, for which it would keep all that it computes. Where that raises, it runs again as the
    caller would run it: a forward may ask for derivatives (torch.autograd.grad), which are there with gradients only.
    """
    try:
        return _called(model, args, kwargs, gradients=False)
    except FxfuseError:
        raise
    except Exception:  # whatever a forward raises
        if not torch.is_grad_enabled():
            raise
    return _called(model, args, kwargs, gradients=True)


def _called(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], gradients: bool) -> Any:
    with unchanged(model, gradients=gradients):
        args, kwargs = pytree.tree_map_only(torch.Tensor, copied, (tuple(args), dict(kwargs)))
        return model(*args, **kwargs)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, since a model may overwrite what it is given, or keep gradients there; no part of the caller's graph.

    Its strides are the tensor's, which decide what is compiled, also those of a part of another one.
    """
    copy = _lying_alike(tensor.detach())
    copy.requires_grad_(tensor.requires_grad)
    if tensor.is_leaf:
        return copy
    with torch.enable_grad():
        return copy.clone()  # a leaf may not be overwritten, nor a view of one; what was computed may


def _lying_alike(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, where no two elements but those of an expanded dimension share memory."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.clone()
    shape, strides = tensor.shape, tensor.stride()
    once = tensor[tuple(slice(0, 1 if stride == 0 else None) for stride in strides)]
    if torch._debug_has_internal_overlap(once) == 1:
        return tensor.clone()
    copy = torch.empty_strided(once.shape, once.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(once).expand(shape)
