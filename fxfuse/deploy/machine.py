"""What the kernels of a package need of the machine and the software that load it.

Kernels are extension modules for one version of Python. One of them knows where torch keeps a tensor's sizes. Code for
a CPU uses all instructions of the machine that compiled it, or those of one of x86-64's levels.
"""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from fxfuse import build
from fxfuse.cuda import gpu
from fxfuse.errors import PackageError

_LEVELS: Final[Mapping[str, str]] = {
    "x86-64": "",
    "x86-64-v2": "cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
}
"""The micro-architecture levels of the x86-64 psABI: the features, by Linux's names, that each level adds."""

_OTHERS: Final = """3dnowprefetch adx aes amx_bf16 amx_fp16 amx_int8 amx_tile avx512_4fmaps avx512_4vnniw avx512_bf16
    avx512_bitalg avx512_fp16 avx512_vbmi2 avx512_vnni avx512_vp2intersect avx512_vpopcntdq avx512er avx512ifma avx512pf
    avx512vbmi avx_ifma avx_ne_convert avx_vnni avx_vnni_int8 cldemote clflushopt clwb clzero enqcmd fma4 fsgsbase gfni
    movdir64b movdiri mwaitx pclmulqdq pku ptwrite rdpid rdrand rdseed serialize sha_ni sse4a tbm vaes vpclmulqdq
    waitpkg wbnoinvd xop xsavec xsaveopt xsaves"""
_X86: Final = frozenset(f"{' '.join(_LEVELS.values())} {_OTHERS}".split())
"""Linux's names of the features whose instructions a compiler may use for -march=native."""


def features() -> frozenset[str]:
    """The instructions that this CPU knows, by Linux's names."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), ":").partition(":")[2].split()
    return frozenset(found) & _X86 if platform.machine() == "x86_64" else frozenset(found)


def features_of(cpu: str) -> list[str]:
    """The features that code for "native" or one of x86-64's levels may use. Raises PackageError for another name."""
    if cpu == "native":
        return sorted(features())
    if cpu not in _LEVELS or platform.machine() != "x86_64":
        raise PackageError(f"kernels cannot be compiled for {cpu!r}; for CPUs there are native, {', '.join(_LEVELS)}")
    names = list(_LEVELS)
    return sorted({name for level in names[: names.index(cpu) + 1] for name in _LEVELS[level].split()})


def portable() -> str:
    """The CPU that a package's code is compiled for where its GPU is not here. This code only queues GPU kernels."""
    return "x86-64-v2" if platform.machine() == "x86_64" else "native"


def here() -> dict[str, Any]:
    """The versions that must be the same where a package is loaded, by the names that messages use."""
    from fxfuse import __version__

    return {
        "fxfuse": __version__,
        "fxfuse's kernel headers": build.package_digest()[:16],
        "torch": torch.__version__.partition("+")[0],
        "Python": str(sysconfig.get_config_var("SOABI")),
        "platform": sysconfig.get_platform(),
        "torch's C++ ABI": "new" if torch.compiled_with_cxx11_abi() else "old",
    }


def check(saved: Mapping[str, Any], what: str) -> None:
    """Raises PackageError, which names the first difference between this machine and the one that saved the package.

    Args:
        saved: `here()` of that machine, and "cuda", "cpu" (features) and "architectures" of the kernels.
        what: the package's name, for the message.
    """
    for name, value in here().items():
        if saved.get(name) != value:
            raise PackageError(
                f"{what} was saved for {name} {saved.get(name)}, here it is {value}; save it again with what is here"
            )
    missing = sorted(set(saved["cpu"]) - features())
    if missing:
        raise PackageError(
            f"{what} has code for a CPU with {', '.join(missing)}, which this one has not; save it with "
            'architectures=("x86-64-v3",), or another level that all machines have'
        )


def check_cuda(saved: Mapping[str, Any], what: str) -> None:
    """Raises PackageError unless torch finds a GPU here, and has the CUDA version of the package's kernels."""
    if not torch.cuda.is_available():
        raise PackageError(f"{what} was saved for a GPU, and torch finds none here")
    if saved["cuda"] != torch.version.cuda:
        raise PackageError(
            f"{what} was saved with CUDA {saved['cuda']}, torch has {torch.version.cuda} here; save it with a torch of "
            "this CUDA version, or with an nvcc of it where torch has no CUDA"
        )


def check_gpu(saved: Mapping[str, Any], device: torch.device, what: str) -> bool:
    """Raises PackageError unless the package's kernels run on this GPU. Returns whether they were made without one."""
    own = gpu.architecture(torch.cuda.get_device_capability(device))
    if own not in saved["architectures"]:
        listed: Sequence[str] = saved["architectures"]
        raise PackageError(
            f"{what} has kernels for {', '.join(listed) or 'no GPU'}; {device} is {own}. Save it on a machine with "
            f'such a GPU, or anywhere from a model on the CPU by architectures=("{own}",)'
        )
    return own in saved["unmeasured"]
