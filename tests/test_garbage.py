"""Pauses of Python's garbage collector: it is as it was afterwards, whatever happens inside."""

import contextlib
import gc
import threading

import pytest
import torch
from torch import nn

import fxfuse
from fxfuse.garbage import uncollected


@pytest.fixture(params=[True, False], ids=["on", "off"])
def before(request):
    """Whether the collector is on."""
    was_enabled = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if was_enabled else gc.disable)()


def test_it_is_off_inside_and_then_as_before(before):
    with uncollected():
        assert not gc.isenabled()
        with contextlib.suppress(KeyError), uncollected():
            raise KeyError
        assert not gc.isenabled()
    assert gc.isenabled() is before


def test_threads_that_overlap(before):
    first_is_in, second_is_in = threading.Event(), threading.Event()
    seen = []

    def first():
        with uncollected():
            first_is_in.set()
            second_is_in.wait()
        seen.append(gc.isenabled())

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait()
    with uncollected():
        second_is_in.set()
        thread.join()
    assert seen == [False] and gc.isenabled() is before


def test_it_is_on_after_steps_were_made():
    fast = fxfuse.optimize(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)))
    assert gc.isenabled()
    for _ in range(4):
        fast(torch.ones(3, 8)).sum().backward()
        assert gc.isenabled()
    with pytest.raises(RuntimeError):
        fast(torch.ones(3, 7))
    assert gc.isenabled()
