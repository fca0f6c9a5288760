"""The exceptions that fxfuse raises, all derived from FxfuseError, and its warning."""

from __future__ import annotations


class FxfuseError(Exception):
    """Base of every error that fxfuse raises on its own account."""


class ExpressionError(FxfuseError):
    """An epilogue's text does not follow the grammar, or names an operation that is not in the table."""


class CaptureError(FxfuseError):
    """A model, or a part of it, could not be traced: with `strict=True`, or because parameters are missing."""


class UnsupportedError(FxfuseError):
    """A region cannot run as one kernel for these tensors (raised only with `strict=True`)."""


class ToolchainError(FxfuseError):
    """A compiler or build tool is missing; the message says what to install."""


class BuildError(FxfuseError):
    """A generated kernel did not compile; the message has the compiler's output and the source's path."""


class MissingKernelError(ToolchainError):
    """A call of a loaded package needs a kernel that the package does not have, and none is compiled."""


class PackageError(FxfuseError):
    """A model cannot be saved as a package, or a package cannot be loaded: the message says why and what helps."""


class LaunchError(FxfuseError):
    """A kernel could not be launched; the message names the kernel and the device's error."""


class FxfuseWarning(UserWarning):
    """A region runs in torch although it was fused; the text says why and what helps."""


def first_line(error: BaseException) -> str:
    """The first line of any error's message. The name of its class, if it has none, or if asking for it raises.

    Asking raises where the message would show one of fx's proxies after its trace has ended, as a KeyError's does.
    """
    try:
        message = str(error).strip()
    except Exception:
        message = ""
    return message.partition("\n")[0] or type(error).__name__
