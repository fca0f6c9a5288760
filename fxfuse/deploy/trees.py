"""The structure of a call's arguments and results as data: nested lists, tuples and dicts, and their leaves.

    tree, leaves = flatten((x, {"mask": m}))
    unflatten(tree, iter(leaves))

A tree is a JSON value: ["leaf"], ["list", [tree, ...]], ["tuple", [...]], ["dict", [[key, tree], ...]], or for classes
that the reader of a package may not have, ["namedtuple", name, [[field, tree], ...]] and ["record", name, [...]].
Leaves come in the order of torch's pytree, which is also that of torch.export's graphs.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from torch.utils import _pytree as pytree

from fxfuse.errors import PackageError

Tree: TypeAlias = list[Any]
LEAF: Final[Tree] = ["leaf"]


class Record(dict[str, Any]):
    """A loaded model's result in the place of a dataclass, or a mapping of its own class (transformers' ModelOutput).

    It gives its items by name (`result["logits"]`), as attributes (`result.logits`) and by number (`result[0]`).
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return dict.__getitem__(self, name)
        except KeyError:
            raise AttributeError(f"this result has no '{name}'; it has {', '.join(self)}") from None

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """The values, in order."""
        return tuple(self.values())


def flatten(value: Any, what: str, records: bool) -> tuple[Tree, list[Any]]:
    """The structure of a value, and its leaves.

    Args:
        what: the value's name, for messages.
        records: whether objects with named parts may be in the value; if not, they are refused.

    Raises PackageError for an object that torch takes apart in a way of its own (transformers' caches).
    """
    leaves: list[Any] = []
    tree = _flatten(value, what, records, leaves)
    expected = pytree.tree_leaves(value)
    if len(leaves) != len(expected) or any(one is not other for one, other in zip(leaves, expected, strict=True)):
        raise PackageError(f"{what} holds an object that torch.export takes apart in a way that a package cannot keep")
    return tree, leaves


def _flatten(value: Any, what: str, records: bool, leaves: list[Any]) -> Tree:
    def parts(named: Any) -> list[Any]:
        return [[name, _flatten(part, what, records, leaves)] for name, part in named]

    if type(value) in (list, tuple):
        kind = "list" if type(value) is list else "tuple"
        return [kind, [_flatten(part, what, records, leaves) for part in value]]
    if type(value) in (dict, collections.OrderedDict):
        if not all(isinstance(key, str | int) for key in value):
            raise PackageError(f"{what} is a dict with keys that are neither text nor numbers")
        return ["dict", parts(value.items())]
    is_namedtuple = isinstance(value, tuple) and hasattr(value, "_fields")
    is_record = isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    if (is_namedtuple or is_record) and not records:
        raise PackageError(
            f"{what} is a {type(value).__name__}, whose class the reader of a package may not have; give tensors, "
            "lists, tuples and dicts"
        )
    if is_namedtuple:
        return ["namedtuple", type(value).__name__, parts(zip(value._fields, value, strict=True))]
    if isinstance(value, Mapping):
        return ["record", type(value).__name__, parts(value.items())]
    if is_record:
        fields = ((item.name, getattr(value, item.name)) for item in dataclasses.fields(value))
        return ["record", type(value).__name__, parts((name, part) for name, part in fields if part is not None)]
    leaves.append(value)
    return LEAF


def unflatten(tree: Tree, leaves: Iterator[Any]) -> Any:
    """The value of this structure with these leaves. Records and named tuples get classes of this module."""
    kind, *rest = tree
    if kind == "leaf":
        return next(leaves)
    if kind in ("list", "tuple"):
        parts = [unflatten(part, leaves) for part in rest[0]]
        return parts if kind == "list" else tuple(parts)
    if kind == "dict":
        return {key: unflatten(part, leaves) for key, part in rest[0]}
    named = {name: unflatten(part, leaves) for name, part in rest[1]}
    if kind == "record":
        return Record(named)
    return collections.namedtuple(rest[0], list(named))(**named)


def leaves_like(tree: Tree, value: Any) -> list[Any] | None:
    """The leaves of a value that has this structure; None if it has another."""
    leaves: list[Any] = []
    return leaves if _take(tree, value, leaves) else None


def _take(tree: Tree, value: Any, leaves: list[Any]) -> bool:
    kind, *rest = tree
    if kind == "leaf":
        leaves.append(value)
        return True
    if kind in ("list", "tuple"):
        alike = type(value) is (list if kind == "list" else tuple) and len(value) == len(rest[0])
        return alike and all(_take(part, item, leaves) for part, item in zip(rest[0], value, strict=True))
    if not isinstance(value, Mapping) or list(value) != [key for key, _ in rest[0]]:
        return False
    return all(_take(part, value[key], leaves) for key, part in rest[0])
