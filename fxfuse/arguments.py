"""The arguments of one call of a model, as `optimize`, `verify` and `benchmark` take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from fxfuse.errors import FxfuseError

Inputs: TypeAlias = torch.Tensor | Sequence[Any] | Mapping[str, Any]
"""A tensor is the only argument. A tuple or list holds positional arguments, a mapping keyword arguments."""


def arguments_of(
    inputs: Inputs | None, kwargs: Mapping[str, Any] | None, name: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the call `model(*inputs, **kwargs)`.

    Args:
        inputs: see `Inputs`; None for no positional arguments.
        kwargs: further keyword arguments.
        name: the caller's name for `inputs`, for messages.

    Raises FxfuseError for anything else; the message says how to write it.
    """
    keywords = _keywords(kwargs, "kwargs")
    if inputs is None:
        return (), keywords
    if isinstance(inputs, torch.Tensor):
        return (inputs,), keywords
    if isinstance(inputs, Mapping):
        if kwargs is not None:
            raise FxfuseError(
                f"{name} is a mapping, which is keyword arguments, and kwargs has further ones; give one of them, or "
                f"{name}=({name},) for a model that takes the mapping itself"
            )
        return (), _keywords(inputs, name)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), keywords
    raise FxfuseError(
        f"{name} is a {type(inputs).__name__}; pass a tuple of positional arguments, or a dict of keyword arguments"
    )


def _keywords(given: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise FxfuseError(f"{name} is a {type(given).__name__}; pass a dict of keyword arguments")
    keywords = dict(given or {})
    for key in keywords:
        if not isinstance(key, str):
            raise FxfuseError(
                f"{name} is a mapping, which is keyword arguments, but {key!r} is no name; pass ({name},) for a model "
                "that takes the mapping itself"
            )
    return keywords
