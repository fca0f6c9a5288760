"""Notes and restores what running a model changes beside its outputs: random states, Python attributes, buffers."""

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

from fxfuse.dispatch_mode import DispatchMode
from fxfuse.errors import FxfuseError
from fxfuse.locks import free_in_children

_MISSING: Final = object()
_LITERALS: Final = (bool, int, float, str, torch.dtype, torch.device)
_FOREIGN: Final = sys.stdlib_module_names | {"torch", "numpy", "fxfuse"}
"""Packages in whose objects (containers excepted) a user's forward keeps nothing."""


class TorchRandomState:
    """The states of torch's global generators, from which torch's operators draw."""

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
        with torch._C.DisableTorchFunction():  # a trace may be under way
            states = zip(self._states, now._states, strict=False)  # a GPU may have been met for the first time
            return all(before.equal(after) for (_, before), (_, after) in states)


class RandomState:
    """The states of torch's, Python's and numpy's global generators."""

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
"""Held while states of torch's generators are read or set. torch locks a generator and may then run Python (a garbage
collection), while another thread, which holds Python's lock, waits for the generator."""


def _numpy_random() -> Any:
    """numpy.random, completely imported even while another thread imports it; None if nobody has imported numpy."""
    return importlib.import_module("numpy.random") if "numpy" in sys.modules else None


def _generators() -> list[torch.Generator]:
    cuda = list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []
    return [torch.default_generator, *cuda]


def _is_same_numpy(before: Any, after: Any) -> bool:
    if before is None or after is None:
        return True
    return bool(before[1].tobytes() == after[1].tobytes() and before[2:] == after[2:])


class Draws:
    """Notices draws of random numbers from now on, with a global generator or one in an attribute of a model."""

    def __init__(self, *models: nn.Module) -> None:
        self._global = RandomState()
        self._own = Attributes(_with_captured(models))

    def any(self) -> bool:
        return not self._global.is_present() or self.of_its_own()

    def of_its_own(self) -> bool:
        """Whether a generator in an attribute was drawn from."""
        return self._own.have_drawn()


class _Noted(DispatchMode):
    """Notes draws by torch's global generator on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Callable[[], Any]] = []
        self._drawn: list[torch.UntypedStorage] = []

    def have_drawn(self, tree: Any) -> bool:
        """Whether a tensor of the tree has the memory of one that was drawn."""
        storages = [tensor.untyped_storage() for tensor in _tensors_in(tree) if tensor.layout is torch.strided]
        return any(storage._cdata == drawn._cdata for storage in storages for drawn in self._drawn)

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        made = _tensors_in(result)
        if draws and not _tensors_in((args, kwargs)) and all(tensor.device.type == "cpu" for tensor in made):
            self._drawn += [tensor.untyped_storage() for tensor in made]
            self.draws.append(functools.partial(func, *args, **kwargs))
        return result


class _Readers(TorchFunctionMode):
    """Notes whether a tensor that was drawn is read, also by `tolist` and `numpy`, which call no operator."""

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
    """The draws of `call` on a CPU that nobody reads; None if it draws other random numbers, too.

    Something that replaces `call` must repeat them. Some models draw for each layer whether to leave it out, and read
    the number in training only.
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
    """Seeds all global generators."""
    random.seed(number)
    numpys = _numpy_random()
    if numpys is not None:
        numpys.seed(number)
    torch.manual_seed(number)


class Attributes:
    """The attributes of modules as they are now, with the contents of containers and objects among them."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before: list[tuple[nn.Module, str, Any, Any]] = []
        """For each container: the module and the attribute in which it was found, the container, and its contents. For
        a module's own attributes, the container is `vars(module)` and the attribute ""."""
        self.tensors: list[torch.Tensor] = []
        """The tensors among attributes and contents, parameters excepted."""
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
        """The modules that have changed, each with the name of a changed attribute."""
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
        """Whether a generator among attributes and contents is in another state."""
        return any(
            _is_generator(value) and not _is_same(_contents(value), before) for *_, value, before in self._before
        )

    def hold_generators(self) -> bool:
        """Whether there is a generator of random numbers among attributes and contents."""
        return any(_is_generator(value) for *_, value, _ in self._before)

    def restore(self) -> None:
        """Undoes changes, unless hooks were installed: a model that does so once, at its first call, has done it."""
        if any(name.endswith("_hooks") for name in self.changes().values()):
            return
        for _, name, value, before in self._before:
            if name and not _is_same(_contents(value), before):
                _put_back(value, before)
            elif not name and not _is_same(value, before):
                value.clear()
                value.update(before)


def _is_generator(value: Any) -> bool:
    """Whether a value is a generator of random numbers, of torch, Python or numpy."""
    if isinstance(value, random.Random | torch.Generator):
        return True
    numpys = _numpy_random()
    return numpys is not None and isinstance(value, numpys.Generator | numpys.RandomState)


def _numpys_state(generator: Any) -> Any:
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _contents(value: Any) -> Any:
    """A copy of the mutable contents of a container, an object or a generator; `_MISSING` for anything else."""
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
    """Whether `now` is the same object as `before`, or a container of the same objects, or an equal literal."""
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
    """A context that restores on leaving all that a forward may change, `tensors` included.

    Inside, gradients are on only if `gradients` is true. Batch normalisation in training mode counts into its buffers,
    dropout draws random numbers, models count their calls and keep what they computed. With gradients, `backward` may
    add to parameters' `grad`. The values of parameters are not restored.
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
    """A context that restores on leaving the modules' attributes, and the contents of containers among them."""
    attributes = Attributes(_with_captured(modules))
    try:
        yield
    finally:
        attributes.restore()


def _with_captured(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """All submodules of these modules. A fused module is replaced by the model that it stands for."""
    seen: set[nn.Module] = set()
    for model in modules:
        for module in model.modules():
            captured = getattr(vars(module).get("_fxfuse"), "captured", None)
            module = module if captured is None else captured.root
            if module not in seen:
                seen.add(module)
                yield module


def called_unchanged(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of `model` for copies of the arguments. All that its forward may change is restored.

    The model runs without gradients: with them it would keep all that it computes. If that raises, it runs again as the
    caller would run it: a forward may ask for derivatives (torch.autograd.grad), which exist with gradients only.
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
    """A copy for a model, which may overwrite its arguments or keep gradients there. No part of the caller's graph.

    It has the tensor's strides, which decide what is compiled, even if the tensor is a part of another one.
    """
    copy = _lying_alike(tensor.detach())
    copy.requires_grad_(tensor.requires_grad)
    if tensor.is_leaf:
        return copy
    with torch.enable_grad():
        return copy.clone()  # a leaf may not be overwritten, nor a view of one; what was computed may


def _lying_alike(tensor: torch.Tensor) -> torch.Tensor:
    """A copy. It has the same strides if no elements share memory except along expanded dimensions."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.clone()
    shape, strides = tensor.shape, tensor.stride()
    once = tensor[tuple(slice(0, 1 if stride == 0 else None) for stride in strides)]
    if torch._debug_has_internal_overlap(once) == 1:
        return tensor.clone()
    copy = torch.empty_strided(once.shape, once.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(once).expand(shape)
