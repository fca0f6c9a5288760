"""The hooks of modules. They run beside a module's forward, so no kernel may stand for the module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes in which a module keeps its own hooks."""


def hooks_of(module: nn.Module) -> list[Mapping[int, Any]]:
    """The module's own hooks, by number: the dictionaries to which hooks are added and from which they are removed."""
    return [getattr(module, name) for name in HOOKS]


def has_hooks(module: nn.Module) -> bool:
    """Whether calling `module` runs more, or something else, than its class's forward."""
    return "forward" in vars(module) or any(hooks_of(module))


def why_no_kernel(module: nn.Module) -> str:
    """A report's text about a module that has hooks."""
    if any(map(is_in_parts, module.parameters(recurse=False))):
        return "has hooks, and parameters of which each process holds a part (DTensor)"
    return "has hooks"


def is_in_parts(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, of which each process holds a part."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)  # its module has another name before 2.5


_autograd: Final[Any] = torch._C._autograd
_top_hooks: Final[Any] = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
"""Missing in older versions of torch, 2.3 among them. There, hooks are noticed because disabling them fails."""


def keep_otherwise() -> bool:
    """Whether torch.autograd.graph.saved_tensors_hooks are set. A checkpoint's hooks need the same tensors to be kept
    when it runs the forward again, so nothing may run differently by then."""
    if _top_hooks is not None:
        return _top_hooks(True) is not None
    if _autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return False
    try:
        _autograd._saved_tensors_hooks_disable("")  # raises RuntimeError if there are any
    except RuntimeError:
        return True
    finally:
        _autograd._saved_tensors_hooks_enable()
    return False
