"""The module that fxfuse.load returns: the model's tensors under their own names, and a fused graph for each kind of
call that it was saved for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx, nn

from fxfuse import packaged
from fxfuse.capture import Captured
from fxfuse.deploy import graphs
from fxfuse.deploy.entries import Arguments, Entry, TensorKind, bound, signature_of
from fxfuse.deploy.trees import LEAF, unflatten
from fxfuse.errors import PackageError
from fxfuse.module import FusedModule
from fxfuse.replacement import Settings
from fxfuse.state import called_unchanged

GRAPHS: Final = "graphs.json"
"""The member of a package from which `module_of` makes a module."""
CALLS: Final = 4
"""Calls of each example when a package is made or warmed up: the second records a program, the third runs it."""
_TABLES: Final = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")

_PLAIN: Final = frozenset((torch.Tensor, nn.Parameter))
_MOST_KNOWN: Final = 256


class LoadedModule(nn.Module):
    """A model that was loaded from a package. It is for inference: it has no training mode, and needs no no_grad().

    Calls that the model was not saved for (`entries`) raise PackageError.
    """

    def __init__(
        self, root: nn.Module, entries: Sequence[Entry], examples: Sequence[Mapping[str, Any]],
        signature: inspect.Signature, settings: Settings, device: torch.device, name: str, builds: bool,
        cuda_graphs: bool, unmeasured: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            root: a tree of modules without code, which has the model's tensors.
            examples: for each saved call, its entry's number and how its tensors lie in memory.
            device: where tensors are that were on the device the package was saved for.
            name: what messages call the package.
            builds: whether kernels that the package does not have are compiled.
            unmeasured: whether kernels were chosen without such a device, and so without measuring.
        """
        super().__init__()
        for table in _TABLES:
            self.__dict__[table] = root.__dict__[table]
        self._entries, self._examples, self._device = tuple(entries), tuple(examples), device
        self._signature = signature
        self._known: dict[Any, tuple[int, list[int]]] = {}
        """By kind of a call with tensors alone: the graph's number, and the places of its arguments in the call."""
        self._name, self._only = name, (None if builds else name, unmeasured)
        # a tuple, so that the graphs are no submodules
        self._fused = tuple(_fused(root, entry, settings, device, cuda_graphs) for entry in entries)
        super().train(False)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The calls that the model was saved for. str() of an entry describes its calls."""
        return self._entries

    @property
    def graphs(self) -> tuple[FusedModule, ...]:
        """The fused graph of each entry."""
        return self._fused

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        kind = None
        if _PLAIN.issuperset(map(type, given)):  # a look-up takes a tenth of the time of the checks below
            kind = (len(args), *kwargs, *[(tensor.shape, tensor.dtype) for tensor in given])
            known = self._known.get(kind)
            if known is not None:
                number, order = known
                return self._run(number, [given[place] for place in order])
        arguments = bound(self._signature, args, kwargs)
        for number, entry in enumerate(self._entries):
            leaves = entry.tensors_of(arguments)
            if leaves is not None:
                places = {id(value): place for place, value in enumerate(given)}
                if kind is not None and len(places) == len(given) == len(leaves):
                    if len(self._known) >= _MOST_KNOWN:
                        self._known.clear()
                    self._known[kind] = number, [places[id(leaf)] for leaf in leaves]
                return self._run(number, leaves)
        raise self._unknown(arguments)

    def _run(self, number: int, leaves: Sequence[Any]) -> Any:
        with packaged.only(*self._only):
            results = self._fused[number].forward(*leaves)
        outputs = self._entries[number].outputs
        return results[0] if outputs == LEAF else unflatten(outputs, iter(results))

    def _unknown(self, arguments: Arguments) -> PackageError:
        kinds = "".join(f"\n  {entry}" for entry in self._entries)
        return PackageError(
            f"{self._name} has no graph for a call with {_described(arguments)}: save it again with an example like "
            f"this one, too. It was saved for calls with{kinds}"
        )

    def warm_up(self) -> LoadedModule:
        """Makes calls like those that the model was saved for, on zeros, so that later ones are as fast as any.

        The first calls of a process take a second or two: they import parts of torch, plan and record. Buffers and the
        random state are as before afterwards. Returns the module itself.
        """
        for example in self._examples:
            number = example["entry"]
            leaves = [
                self._zeros(laid, expected) if isinstance(expected, TensorKind) else expected
                for laid, expected in zip(example["leaves"], self._entries[number].leaves, strict=True)
            ]
            for _ in range(CALLS):
                with packaged.only(*self._only):
                    called_unchanged(self._fused[number], leaves, {})
        return self

    def _zeros(self, laid: Mapping[str, Any], kind: TensorKind) -> torch.Tensor:
        device = self._device if laid["device"] == self._device.type else torch.device("cpu")
        return torch.empty_strided(laid["shape"], laid["strides"], dtype=kind.dtype, device=device).zero_()

    def train(self, mode: bool = True) -> LoadedModule:
        """As nn.Module.train, for mode=False. Raises PackageError for mode=True."""
        if mode:
            raise PackageError(f"{self._name} was saved in evaluation mode, and has no other")
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadedModule:
        raise PackageError(f"a loaded model cannot be copied; load {self._name} again")

    def __reduce__(self) -> Any:
        raise PackageError(f"a loaded model cannot be pickled; copy the file of {self._name}")


def _fused(root: nn.Module, entry: Entry, settings: Settings, device: torch.device, cuda_graphs: bool) -> FusedModule:
    module = fx.GraphModule(nn.Module(), fx.Graph())
    for table in _TABLES:
        module.__dict__[table] = root.__dict__[table]
    module.training = False
    module.graph = graphs.rebuilt(entry.nodes, device)
    return FusedModule(Captured(module, graphs.rebuilt(entry.nodes, device)), settings, cuda_graphs)


def module_of(
    described: Mapping[str, Any], tree: nn.Module, device: torch.device, name: str, builds: bool,
    unmeasured: bool = False,
) -> LoadedModule:  # fmt: skip
    """The module that a package's GRAPHS describe; the arguments are LoadedModule's."""
    return LoadedModule(
        tree, [Entry.of(entry) for entry in described["entries"]], described["examples"],
        signature_of(described["signature"]), Settings(**described["settings"]), device, name, builds,
        bool(described["cuda_graphs"]), unmeasured,
    )  # fmt: skip


def _described(arguments: Arguments) -> str:
    def said(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__

    return f"({', '.join(f'{name}: {said(value)}' for name, value in arguments.items())})"
