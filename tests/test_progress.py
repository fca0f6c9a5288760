"""Progress: what callbacks are told while kernels compile and are measured, and when a bar is drawn."""

import io
import os
import sys
import threading
from concurrent.futures import Future

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse import build, plans, progress

X = torch.randn(4, 8)


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 8), nn.Mish()).eval()


@pytest.fixture
def events():
    """What a callback hears from now on."""
    heard = []
    with fxfuse.on_progress(heard.append):
        yield heard


def of(stage, events):
    return [(event.done, event.total) for event in events if event.stage == stage]


def test_each_kernel_that_is_compiled_begins_and_ends(new_cache, events):
    with torch.no_grad():
        fxfuse.optimize(model(), (X,))
    counts = of("compile", events)
    assert counts[0] == (0, 1), "the first that was asked for"
    assert counts[-1][0] == counts[-1][1] >= 2, "all are done"
    assert len(counts) == 2 * counts[-1][1], "each began and ended"
    assert all(done <= total for done, total in counts)
    assert counts == sorted(counts), "neither number ever falls"
    labels = [event.label for event in events]
    assert any("softplus" in label for label in labels) and any("mish" in label for label in labels)


def test_what_is_loaded_from_the_cache_is_no_step(new_cache, forget, events):
    with torch.no_grad():
        fxfuse.optimize(model(), (X,))
        events.clear()
        forget()
        fxfuse.optimize(model(), (X,))
    assert events == []


def test_a_kernel_that_does_not_compile_is_done_too(new_cache, events):
    with pytest.raises(fxfuse.BuildError):
        build.load(build.Source("this is no C++", label="a mistake"))
    assert of("compile", events) == [(0, 1), (1, 1)]


def test_problems_are_measured_one_after_the_other(events, monkeypatch):
    monkeypatch.setattr(plans, "_is_measured", lambda problem: problem.label != "known")
    drafts = plans.Drafts()
    for name in ("first", "second", "known"):
        draft = Future()
        draft.set_result(lambda: plans.Plan(None, None, provisional=True))
        drafts._calls[draft] = [plans._FirstCall(0, (), _Labelled(name), False, None)]
    drafts.decide()
    assert of("measure", events) == [(0, 2), (1, 2), (2, 2)]
    assert {event.label for event in events[1:]} == {"first", "second"}


class _Labelled:
    def __init__(self, label):
        self.label = label


def test_a_stage_that_an_error_ends_is_over(events):
    with pytest.raises(ZeroDivisionError), progress.steps("measure", 3) as step:
        step("one")
        raise ZeroDivisionError
    assert of("measure", events) == [(0, 3), (1, 3), (3, 3)]
    with progress.steps("measure", 1) as step:
        step("the next")
    assert of("measure", events)[-2:] == [(0, 1), (1, 1)], "what comes later counts from zero"


def test_a_removed_callback_hears_nothing(events):
    handle = fxfuse.on_progress(lambda event: pytest.fail("it was removed"))
    handle.remove()
    with progress.steps("measure", 1):
        assert len(events) == 1


def test_a_callback_that_raises_is_removed_and_the_others_go_on(events, caplog):
    calls = []

    def broken(event):
        calls.append(event)
        raise ValueError("no display")

    with fxfuse.on_progress(broken), progress.steps("measure", 2):
        pass
    assert len(calls) == 1 and of("measure", events) == [(0, 2), (2, 2)]
    assert "shows no more progress" in caplog.text and "no display" in caplog.text


def test_threads_tell_in_order_and_one_at_a_time(monkeypatch):
    inside, heard = threading.Lock(), []

    def callback(event):
        assert inside.acquire(blocking=False), "two calls at once"
        heard.append((event.total, event.done))
        inside.release()

    with fxfuse.on_progress(callback):
        threads = [threading.Thread(target=_many_steps) for _ in range(4)]
        with progress.steps("measure", 1):  # so that the count begins only once
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert len(heard) == 2 + 4 * 100 * 2
    assert heard == sorted(heard, key=lambda counts: sum(counts)), "every event is one step further"
    assert heard[-1] == (401, 401)


def _many_steps():
    for _ in range(100):
        with progress.steps("measure", 1):
            pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_counts_its_own_steps(events):
    with progress._counting, progress._delivering:  # as if other threads were at it
        progress._counts["measure"][:] = 3, 7
        child = os.fork()
        if not child:
            events.clear()
            with progress.steps("measure", 1):
                pass
            os._exit(0 if of("measure", events) == [(0, 1), (1, 1)] and progress._bars._ended else 1)
        progress._counts["measure"][:] = 0, 0
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ------------------------------------------------------------------------------------------------- bars


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "callbacks", "drawn"),
    [
        (Terminal, {}, 0, True),
        (io.StringIO, {}, 0, False),
        (Terminal, {"FXFUSE_PROGRESS": "0"}, 0, False),
        (Terminal, {}, 1, False),
    ],
    ids=["a terminal", "a file", "switched off", "a callback in its place"],
)
def test_a_bar_is_drawn_on_a_terminal_only(stream, environment, callbacks, drawn, monkeypatch):
    pytest.importorskip("tqdm")
    written = stream()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(progress, "_bars", progress._Bars())
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    handles = [fxfuse.on_progress(lambda event: None) for _ in range(callbacks)]
    with progress.steps("measure", 2) as step:
        step("linear: relu(acc)")
    for handle in handles:
        handle.remove()
    assert ("fxfuse measures" in written.getvalue() and "linear: relu(acc)" in written.getvalue()) == drawn
    assert bool(written.getvalue()) == drawn
    assert not progress._bars._drawn, "it is closed"


def test_a_bar_goes_when_a_callback_comes(monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "_bars", progress._Bars())
    with progress.steps("measure", 2) as step:
        assert progress._bars._drawn
        with fxfuse.on_progress(lambda event: None):
            step("linear: relu(acc)")
            assert not progress._bars._drawn


def test_without_tqdm_a_line_says_once_what_is_waited_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    written = Terminal()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(progress, "_bars", progress._Bars())
    for _ in range(2):
        with progress.steps("measure", 1):
            pass
    with progress.steps("compile", 1):
        pass
    first, second = written.getvalue().splitlines()
    assert "measures" in first and "pip install tqdm" in first
    assert "compiles" in second and "pip" not in second


def test_without_a_terminal_nothing_is_written(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(progress, "_bars", progress._Bars())
    with progress.steps("measure", 1):
        pass
    assert written.getvalue() == ""


def test_a_notebook_shows_it(monkeypatch):
    notebooks = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    monkeypatch.setitem(sys.modules, "tqdm", None)
    written = notebooks()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(progress, "_bars", progress._Bars())
    with progress.steps("measure", 1):
        pass
    assert "fxfuse measures" in written.getvalue()


class Asking(nn.Module):
    """Python decides by a value, so that no trace is whole."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, scales=(1.0, 2.0)):
        y = torch.tanh(self.first(x))
        for part in y.unbind(0):
            y = y + part * scales[len(part) % 2]
        return F.gelu(self.second(y))


def test_what_captures_is_told(events):
    fast = fxfuse.optimize(Asking().eval())
    with torch.no_grad():
        for _ in range(3):
            fast(X)
    assert of("capture", events) == [(0, 1), (1, 1)]
    assert next(event.label for event in events if event.stage == "capture") == "Asking"


def test_a_training_step_that_is_traced_is_told(events):
    fast = fxfuse.optimize(nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    for _ in range(3):
        fast(X).sum().backward()
    assert of("capture", events) == [(0, 1), (1, 1)]


def test_contestants_that_get_ready_are_told(events):
    module = model()
    fxfuse.benchmark(module, fxfuse.optimize(module), (X,), compare=("eager",), seconds=0.01)
    labels = [event.label for event in events if event.stage == "compare" and not event.done]
    assert labels == ["eager", "fxfuse"]
