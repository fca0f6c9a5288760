"""torch's precision switches, of both generations, set in any order."""

import pytest
import torch

from fxfuse.cuda import precision


def contradicts():
    raise RuntimeError("a mix of the legacy and new APIs to set the TF32 precision")


CASES = {
    "nothing set": ("none", "none", lambda: False, False),
    "old switch": ("none", "none", lambda: True, True),
    "new switch": ("tf32", "none", contradicts, True),
    "new switch against the general one": ("ieee", "tf32", contradicts, False),
    "general switch": ("none", "tf32", contradicts, True),
    "general switch, off": ("none", "ieee", contradicts, False),
    "general switch that CUDA does not know": ("none", "bf16", contradicts, False),
    "new switch taken back after the old one was set": ("none", "none", contradicts, False),
}


@pytest.mark.parametrize("name", CASES)
def test_tf32_is_allowed_where_torch_uses_it(name, monkeypatch):
    own, general, old, allowed = CASES[name]
    settings = {("cuda", "conv"): own, ("generic", "all"): general}
    monkeypatch.setattr(torch._C, "_get_fp32_precision_getter", lambda *of: settings[of], raising=False)
    assert precision._reader("conv", old)() is allowed


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_torchs_switches_are_followed(kind):
    switches = torch.backends.cudnn if kind == "conv2d" else torch.backends.cuda.matmul
    before = switches.allow_tf32
    try:
        for allowed in (True, False, True):
            switches.allow_tf32 = allowed
            assert precision.tf32_allowed(kind) is allowed
            assert precision.precision(kind, torch.float32) == ("tf32" if allowed else "tf32x3")
            assert precision.precision(kind, torch.float16) == "fp16"
    finally:
        switches.allow_tf32 = before


def test_fast_float32_is_for_matrix_products_in_full_precision():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        for allowed in (True, False):
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
            found = [precision.precision(kind, torch.float32, "fast") for kind in ("linear", "conv2d")]
            assert found == (["tf32", "tf32"] if allowed else ["fp16x3", "tf32x3"])
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
