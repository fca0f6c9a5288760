"""Arguments copied into a CUDA graph's buffers by one launch, on the emulated GPU."""

import ctypes
import types

import emulator
import pytest
import torch

from fxfuse import build
from fxfuse.program import copies

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs Linux and g++")


@pytest.fixture
def launches(monkeypatch):
    """What was launched on the emulated GPU."""
    made = []

    def load(source):
        library = emulator.compiled(source.text)

        def launch(params, stream, *addresses):
            made.append(addresses)
            assert library.fxfuse_launch(params, (ctypes.c_uint64 * len(addresses))(*addresses), 0) == 0

        return launch

    monkeypatch.setattr(copies, "build", types.SimpleNamespace(load=load, Source=build.Source))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return made


def like(*tensors):
    torch.manual_seed(0)
    return [
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).random_(0, 2).to(tensor.dtype)
        for tensor in tensors
    ]


KINDS = [
    torch.zeros(3, 5, dtype=torch.int64),
    torch.zeros(2, 3, 4, 7).to(memory_format=torch.channels_last),
    torch.zeros(1000, dtype=torch.bfloat16),
    torch.zeros((), dtype=torch.float64),
    torch.zeros(17, dtype=torch.bool),
    torch.zeros(6, 9, dtype=torch.float16).t(),
]


@pytest.mark.parametrize("kinds", [KINDS[:3], KINDS[3:], [KINDS[1]] * 7], ids=["some", "others", "many alike"])
def test_all_are_copied_by_one_launch(kinds, launches):
    buffers, values = [torch.zeros_like(one) for one in kinds], like(*kinds)
    copy = copies.launch_of(buffers)
    assert copy is not None and copy(values) and len(launches) == 1
    for buffer, value in zip(buffers, values, strict=True):
        assert torch.equal(buffer, value)


def test_more_than_a_launch_holds_is_left_to_torch(launches):
    assert copies.launch_of(KINDS) is None


def test_tensors_that_lie_elsewhere_are_left_to_torch(launches):
    copy = copies.launch_of([torch.zeros(8), torch.zeros(4)])
    assert copy is not None and not copy([torch.zeros(8), torch.zeros(5)[1:]]) and not launches


@pytest.mark.parametrize(
    "buffer", [torch.zeros(0), torch.zeros(4, 6)[:, ::2], torch.zeros(3, dtype=torch.complex64), torch.zeros(9)[1:]]
)
def test_what_loops_do_not_move_is_left_to_torch(buffer, launches):
    assert copies.launch_of([torch.zeros(4), buffer]) is None
