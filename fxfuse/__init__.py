"""fxfuse: one kernel for every Linear or Conv2d and the pointwise work after it.

Start with `optimize`; `explain`, `verify` and `benchmark` say what it did, how exact it is and how fast.
"""

__version__ = "0.1.0"  # before the imports: backend.py tells importlib.metadata, which they may ask

from fxfuse import cache
from fxfuse.backend import compiled_graphs
from fxfuse.benchmark import Benchmark, benchmark
from fxfuse.deploy import LoadedModule, Saved, load, merge, save
from fxfuse.errors import (
    BuildError,
    CaptureError,
    ExpressionError,
    FxfuseError,
    FxfuseWarning,
    LaunchError,
    MissingKernelError,
    PackageError,
    ToolchainError,
    UnsupportedError,
)
from fxfuse.ops import register_pointwise
from fxfuse.optimize import optimize
from fxfuse.progress import Progress, on_progress
from fxfuse.report import Report, explain
from fxfuse.source import source
from fxfuse.verify import Verification, verify

__all__ = [
    "Benchmark",
    "BuildError",
    "CaptureError",
    "ExpressionError",
    "FxfuseError",
    "FxfuseWarning",
    "LaunchError",
    "LoadedModule",
    "MissingKernelError",
    "PackageError",
    "Progress",
    "Report",
    "Saved",
    "ToolchainError",
    "UnsupportedError",
    "Verification",
    "benchmark",
    "cache",
    "compiled_graphs",
    "explain",
    "load",
    "merge",
    "on_progress",
    "optimize",
    "register_pointwise",
    "save",
    "source",
    "verify",
]
