"""Fixtures: a kernel cache of the session's own, and a process that has forgotten what it compiled."""

import os
import signal

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch: OpenMP's threads of several workers would wait for processors
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))

import pytest
from helpers import end_of_builds

from fxfuse import build, cache, ops, plans
from fxfuse.cuda import exactness, gpu, plan, prepare, tune
from fxfuse.problem import anchor_meta
from fxfuse.program import Programs

MOST_WORKERS = 8
"""Of pytest-xdist: each takes 0.5 GB, more beside a GPU, and starts compilers."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """How many processes `pytest -n auto` starts."""
    return min(os.cpu_count() or 1, MOST_WORKERS)


def pytest_configure(config):
    """Tests interrupt themselves, which a process ignores that a script's shell started in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory):
    """Kernels are compiled once a session, and the user's own cache is neither read nor written."""
    session = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # all workers' folders are in the session's
        session = session.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXFUSE_CACHE_DIR", str(session / "kernels"))
        patch.delenv("FXFUSE_DISABLE", raising=False)
        patch.setenv("FXFUSE_TUNE", "0")  # tests of tuning switch it on; the others need one kernel only
        yield


@pytest.fixture(scope="module")
def own_operations():
    """What a test module registers in the op table is gone after it."""
    with pytest.MonkeyPatch.context() as patch:
        for table in ("_by_name", "_by_spelling", "_overwriting"):
            patch.setattr(ops, table, dict(getattr(ops, table)))
        yield


@pytest.fixture
def forget(monkeypatch):
    """Call it to make the process as a new one: no plans, no loaded kernels, no warnings given."""

    def forget_everything():
        for table in ("_plans", "_latest", "shortcuts"):
            monkeypatch.setattr(plans, table, {})
        monkeypatch.setattr(plans, "_warned", set())
        monkeypatch.setattr(build, "_loaded", {})
        cache._temporary.cache_clear()
        monkeypatch.setattr(cache, "_used_instead", [])
        for table in ("_hung", "_worked"):
            monkeypatch.setattr(build, table, type(getattr(build, table))())

    end_of_builds()
    forget_everything()
    yield forget_everything
    cache._temporary.cache_clear()


@pytest.fixture
def new_cache(forget, tmp_path, monkeypatch):
    """An empty kernel cache in a process that has loaded nothing."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("FXFUSE_CACHE_DIR", str(directory))
    return directory


@pytest.fixture
def without_programs(monkeypatch):
    """Every call runs the graph's own code."""
    monkeypatch.setattr(Programs, "call", lambda self, forward, args, kwargs: forward(*args, **kwargs))


@pytest.fixture
def sources(monkeypatch):
    """The distinct kernel sources that are asked for from now on."""
    seen = set()
    load = build.load

    def recording(source):
        if "executor.h" not in source.text and "guard.h" not in source.text:  # no kernels
            seen.add(source.text)
        return load(source)

    monkeypatch.setattr(build, "load", recording)
    return seen


@pytest.fixture
def ranked(monkeypatch):
    """A function from a problem and a GPU's compute capability to the candidates, best first. Needs no GPU."""
    monkeypatch.setattr(tune, "draft", lambda problem, candidates: candidates)
    monkeypatch.setattr(exactness, "eager_uses_tf32", lambda problem: True)
    monkeypatch.setattr(prepare, "eager_error", lambda problem: None)

    def candidates(problem, capability=(8, 0)):
        standing = gpu.Standing(gpu.ARCHITECTURES[capability])
        monkeypatch.setattr(gpu._thread, "standing", standing)  # also while candidates are built
        return plan.draft(problem, anchor_meta(problem))

    return candidates
