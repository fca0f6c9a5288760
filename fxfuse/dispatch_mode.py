"""The base of fxfuse's dispatch modes, which do not import Dynamo."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A TorchDispatchMode whose subclasses define `dispatch(func, args, kwargs)`.

    torch wraps the `__torch_dispatch__` of each mode, so that Dynamo does not trace into it. The wrapper imports Dynamo
    at the first operator, which takes one to five seconds. Here it is used only where Dynamo has been imported already.
    """

    _untraced: ClassVar[Callable[..., Any]]
    """`dispatch`, wrapped."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._untraced = torch._disable_dynamo(cls.dispatch, recursive=True)  # type: ignore[attr-defined]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch shall not wrap __torch_dispatch__ itself

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of an operator that is called within the mode."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, _: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        dispatch = self._untraced if "torch._dynamo" in sys.modules else self.dispatch
        return dispatch(func, args, kwargs or {})
