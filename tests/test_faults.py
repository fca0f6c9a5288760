"""Faults of the machine: compilers that hang, users who interrupt, processes that are killed or forked, full disks.

Compilers are scripts here wherever it is not their work that counts.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import linear, randn, wait_until
from torch import nn

import fxfuse
from fxfuse import build, cache, plans, toolchain
from fxfuse.cuda import exactness, tune
from fxfuse.errors import BuildError, ToolchainError

TEXT = (
    'extern "C" int fxfuse_launch(const void*, const uint64_t*, uint64_t) { return 0; }\n'
    'extern "C" const char* fxfuse_error(int) { return ""; }\n'
)
X = randn(5, 8)
SOON = 20.0
"""Seconds: "at once" on a busy machine, against compilers that take ten minutes."""


def kernel(name):
    return build.Source(f"{TEXT}// {name}", label=name)


@pytest.fixture
def compiler(new_cache, tmp_path, monkeypatch):
    """A function that makes CXX a shell script, which notes its process in the file that is returned."""

    def install(script):
        path, pids = tmp_path / "fake-g++", tmp_path / "pids"
        path.write_text(f"#!/bin/sh\necho $$ >> {shlex.quote(str(pids))}\n{script}\n")
        path.chmod(0o700)
        monkeypatch.setenv("CXX", str(path))
        return pids

    return install


def alive(pids):
    """Which of the processes noted in a file still run."""
    states = {}
    for pid in pids.read_text().split():
        try:
            states[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
    return [pid for pid, state in states.items() if state != "Z"]


def check_nothing_is_left(folder):
    assert not build._running
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


HANGING = {
    "for ever": "exec sleep 600",
    "when it compiles": 'case "$*" in *main.cpp*) exec sleep 600;; esac; exec g++ "$@"',
    "and ignores signals": "trap '' TERM INT HUP; while true; do sleep 600 & wait; done",
    "in a child": "sleep 600 | cat; exit 1",
}


# ------------------------------------------------------------------------------------------ time limits


@pytest.mark.parametrize("name", HANGING)
def test_a_compiler_that_hangs_is_ended_and_the_region_runs_in_torch(name, compiler, new_cache, monkeypatch):
    pids = compiler(HANGING[name])
    monkeypatch.setenv("FXFUSE_COMPILE_TIMEOUT", "0.5")
    monkeypatch.setattr(toolchain, "GRACE", 0.3)
    model = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Softsign(), linear(), nn.Sigmoid()).eval()
    fast = fxfuse.optimize(model)
    began = time.monotonic()
    with pytest.warns(fxfuse.FxfuseWarning, match=r"0\.5 s.*FXFUSE_COMPILE_TIMEOUT") as caught, torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
    assert time.monotonic() - began < SOON and len(caught) == 1
    assert all(region.kernel is None and region.fallback for region in fxfuse.explain(fast).regions)
    wait_until(lambda: not alive(pids))
    check_nothing_is_left(new_cache)


def test_a_kernel_that_takes_too_long_is_alone_where_others_compiled(compiler, new_cache, monkeypatch):
    compiler('grep -q slow main.cpp 2> /dev/null && case "$*" in *main.cpp*) exec sleep 600;; esac; exec g++ "$@"')
    build.load(kernel("quick"))
    monkeypatch.setenv("FXFUSE_COMPILE_TIMEOUT", "1")
    with pytest.raises(BuildError, match=r"slow: .*was ended after 1 s"):
        build.load(kernel("slow"))
    monkeypatch.delenv("FXFUSE_COMPILE_TIMEOUT")
    build.load(kernel("quick, too"))


def test_another_compiler_gets_its_chance_after_one_that_hangs(compiler, new_cache, monkeypatch):
    compiler(HANGING["for ever"])
    monkeypatch.setenv("FXFUSE_COMPILE_TIMEOUT", "0.3")
    for _ in range(2):
        with pytest.raises(ToolchainError, match="was ended"):
            build.load(kernel("a"))
    monkeypatch.delenv("FXFUSE_COMPILE_TIMEOUT")
    monkeypatch.delenv("CXX")
    build.load(kernel("a"))


@pytest.mark.parametrize("text", ["", "nonsense", "-1", "nan", "inf", "0"])
def test_limits_that_are_none_are_the_usual_one(text, monkeypatch):
    monkeypatch.setenv("FXFUSE_COMPILE_TIMEOUT", text)
    assert toolchain.limit() == toolchain.LIMIT


# ------------------------------------------------------------------------------------------ interrupts


@pytest.fixture
def interrupted(compiler, new_cache, monkeypatch):
    """Calls a function, sends SIGINT to this process alone once a compiler runs, and checks how all ends."""

    def call(function, hanging="for ever"):
        pids = compiler(HANGING[hanging])
        monkeypatch.setattr(toolchain, "GRACE", 0.3)

        def interrupt():
            wait_until(pids.exists)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            function()
        assert time.monotonic() - began < SOON
        thread.join()
        wait_until(lambda: not build._running and not alive(pids))
        check_nothing_is_left(new_cache)
        monkeypatch.delenv("CXX")

    return call


def six_kernels():
    names = (nn.Tanh, nn.Softsign, nn.Sigmoid, nn.SiLU, nn.Mish, nn.Hardswish)
    return nn.Sequential(*(layer for name in names for layer in (linear(), name()))).eval()


def works(model):
    """Whether a session goes on: nothing hangs, and kernels are built."""
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
    return all(region.kernel is not None for region in fxfuse.explain(fast).regions)


@pytest.mark.parametrize("hanging", HANGING)
def test_an_interrupt_ends_a_call_that_compiles(hanging, interrupted):
    model = nn.Sequential(linear(), nn.Tanh()).eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        interrupted(lambda: fast(X), hanging)
        torch.testing.assert_close(fast(X), model(X))
    assert fxfuse.explain(fast).regions[0].kernel is not None, "the call afterwards compiles"


def test_an_interrupt_ends_many_compilers(interrupted):
    model = six_kernels()
    interrupted(lambda: fxfuse.optimize(model, (X,)))
    assert works(model[:2])


def test_an_interrupt_ends_candidates_that_compile(interrupted):
    candidates = [tune.Candidate(name, name, lambda name=name: build.load(kernel(name))) for name in ("a", "b", "c")]
    interrupted(lambda: tune._compile(candidates))
    build.load(kernel("a"))


def test_an_interrupt_reaches_who_waits_in_another_thread(interrupted):
    with ThreadPoolExecutor(1) as pool:
        waiting = []

        def both():
            waiting.append(pool.submit(build.load, kernel("a")))
            build.load(kernel("a"))

        interrupted(both)
        assert isinstance(waiting[0].exception(SOON), KeyboardInterrupt)


# ---------------------------------------------------------------------------------------------- forks


def in_child(function):
    """Whether a forked process does it without an exception, and soon."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on where there are threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    return child


def ended_well(child):
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


def test_a_process_that_is_forked_during_a_build_does_not_wait_for_it(compiler, monkeypatch):
    pids = compiler(HANGING["for ever"])
    monkeypatch.setattr(toolchain, "GRACE", 0.3)
    model = nn.Sequential(linear(), nn.Tanh()).eval()
    fast = fxfuse.optimize(model)

    def child():
        del os.environ["CXX"]
        with torch.no_grad():
            fast(X)
        assert fxfuse.explain(fast).regions[0].kernel is not None

    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        building = pool.submit(torch.no_grad()(fast), X)
        wait_until(pids.exists)
        try:
            assert ended_well(in_child(child))
        finally:
            build.interrupt()
        assert isinstance(building.exception(SOON), KeyboardInterrupt)


@pytest.mark.parametrize("lock", [build._lock, build._loading, plans._lock, exactness.measuring, toolchain._redirected])
def test_locks_that_others_hold_are_free_in_a_child(lock):
    held, may_end = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            may_end.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)

    def child():
        assert lock.acquire(timeout=5)

    try:
        assert ended_well(in_child(child))
    finally:
        may_end.set()
        thread.join()


def test_eight_processes_may_build_the_same_kernels_at_once(new_cache):
    go = new_cache.parent / "go"

    def child():
        wait_until(go.exists)
        for name in "ab":
            build.load(kernel(name))(b"", 0)

    children = [in_child(child) for _ in range(8)]
    go.touch()
    assert [ended_well(child) for child in children] == [True] * 8
    assert len(list(new_cache.iterdir())) == len(cache.entries()) == 2 and not cache.verify()


def test_a_process_that_is_killed_during_a_build_leaves_what_is_removed_a_day_later(compiler, new_cache):
    pids = compiler(HANGING["for ever"])
    child = in_child(lambda: build.load(kernel("a")))
    wait_until(pids.exists)
    (left,) = new_cache.iterdir()
    old = time.time() - 2 * cache.LEFT_OVER
    os.utime(left, (old, old))
    assert cache.prune() == 0 and left.exists(), "the process still lives"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for pid in alive(pids):
        os.kill(int(pid), signal.SIGKILL)
    cache.prune()
    assert not left.exists()
    os.environ.pop("CXX")
    build.load(kernel("a"))


# -------------------------------------------------------------------------------------------- file systems


@pytest.fixture
def file_system(tmp_path):
    """A function that mounts a small file system of its own, where that is allowed; it returns the folder."""
    folder = tmp_path / "mounted"
    folder.mkdir(mode=0o700)

    def mount(options):
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True).returncode:
            pytest.skip("mounting is not allowed here")
        folder.chmod(0o700)
        return folder

    yield mount
    subprocess.run(["umount", "-l", folder], capture_output=True)


def test_a_full_file_system_gives_a_warning_and_eager_results(forget, file_system, monkeypatch):
    folder = file_system("size=16k")
    monkeypatch.setenv("FXFUSE_CACHE_DIR", str(folder))
    model = nn.Sequential(linear(), nn.Tanh()).eval()
    fast = fxfuse.optimize(model)
    with pytest.warns(fxfuse.FxfuseWarning, match="(?i)no space|did not compile"), torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))


def test_a_file_system_that_is_full_after_the_build_does_no_harm(new_cache, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "write_document", full)
    build.load(kernel("a"))(b"", 0)
    check_nothing_is_left(new_cache)
    assert list(new_cache.iterdir()) == []


def test_a_read_only_cache_is_read(forget, file_system, monkeypatch, caplog):
    folder = file_system("size=10m")
    monkeypatch.setenv("FXFUSE_CACHE_DIR", str(folder))
    build.load(kernel("a"))
    before = sorted(folder.rglob("*"))
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    forget()
    monkeypatch.setattr(build, "_load_inline", None)  # what is there need not be built
    build.load(kernel("a"))(b"", 0)
    assert not caplog.records and sorted(folder.rglob("*")) == before
    monkeypatch.undo()
    monkeypatch.setenv("FXFUSE_CACHE_DIR", str(folder))
    build.load(kernel("b"))(b"", 0)
    assert sorted(folder.rglob("*")) == before
    assert [record.levelname for record in caplog.records] == ["WARNING"]


LIMITED = textwrap.dedent("""
    import resource, sys, warnings
    import torch
    from torch import nn
    import fxfuse
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).eval()
    fast, x = fxfuse.optimize(model), torch.ones(2, 8)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        torch.testing.assert_close(fast(x), model(x))
    assert [warning.category for warning in caught] == [fxfuse.FxfuseWarning], caught
    assert fxfuse.explain(fast).regions[0].kernel is None
""")


def test_files_that_may_not_grow_give_a_warning_and_eager_results(new_cache):
    subprocess.run([sys.executable, "-c", LIMITED], check=True, timeout=100)


# --------------------------------------------------------------------------------- names, and what is written

ANYWHERE = textwrap.dedent("""
    import logging, pathlib
    import torch
    from torch import nn
    import fxfuse
    logging.getLogger("fxfuse").setLevel(logging.INFO)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).eval()
    fast, x = fxfuse.optimize(model, strict=True), torch.ones(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert fxfuse.explain(fast).regions[0].kernel is not None
    print(pathlib.Path(fxfuse.__file__).parent)
""")


def test_a_package_under_any_path_builds_and_writes_nowhere_but_in_its_cache(tmp_path):
    odd = tmp_path / "my $HOME 'n \" $x dir"
    names = ("site", "cache", "home", "temporary", "here")
    folders = {name: odd / name for name in names}
    for folder in folders.values():
        folder.mkdir(parents=True, mode=0o700)
    shutil.copytree(build.PACKAGE, folders["site"] / "fxfuse", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {
        **os.environ, "PYTHONPATH": str(folders["site"]), "FXFUSE_CACHE_DIR": str(folders["cache"]),
        "HOME": str(folders["home"]), "TMPDIR": str(folders["temporary"]), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    environment.pop("XDG_CACHE_HOME", None)
    output = subprocess.run(
        [sys.executable, "-c", ANYWHERE], env=environment, cwd=folders["here"], check=True, timeout=100,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert output.stdout.strip() == str(folders["site"] / "fxfuse")
    assert len(list(folders["cache"].iterdir())) == 1
    assert list(folders["home"].iterdir()) == [] and list(folders["here"].iterdir()) == []
    left = [path for path in folders["temporary"].iterdir() if not path.name.startswith("torchinductor_")]
    assert left == [], "torch makes a folder of its own, where the system's temporary files belong"


@pytest.mark.parametrize("command", ["g++ -pipe", "env g++", "env 'g++' -DODD='\"a $b\"'", "  g++  ", ""])
def test_the_compiler_may_be_a_command(command, new_cache, monkeypatch, caplog):
    monkeypatch.setenv("CXX", command)
    build.load(kernel("a"))(b"", 0)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_the_compiler_may_lie_under_any_path(new_cache, tmp_path, monkeypatch):
    program = tmp_path / "a $b 'c" / "g++"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nexec g++ "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("CXX", str(program))
    build.load(kernel("a"))(b"", 0)


@pytest.mark.parametrize("command", ["'unfinished", "nowhere -x", " "])
def test_commands_that_are_none_are_no_compiler(command, new_cache, monkeypatch):
    monkeypatch.setenv("CXX", command)
    with pytest.raises(ToolchainError, match="CXX"):
        build.load(kernel("a"))


def test_an_old_torch_includes_headers_that_are_empty(new_cache, monkeypatch):
    """load_inline before torch 2.7 has no `no_implicit_headers`; torch's own take a minute to compile."""

    class Signature:
        parameters = ()

    monkeypatch.setattr("inspect.signature", lambda function: Signature)
    torch_is_there = "#if defined(TORCH_CHECK) || defined(C10_API)\n#error torch's headers are included\n#endif\n"
    written, finish = [], cache.finish

    def noting(library, *others):
        written.extend(path.read_text() for path in library.parent.glob("*.cpp"))
        finish(library, *others)

    monkeypatch.setattr(cache, "finish", noting)
    build.load(build.Source(torch_is_there + TEXT))(b"", 0)
    assert any("torch/extension.h" in text for text in written)


def test_only_the_architecture_in_the_flags_is_compiled_for(tmp_path):
    """Older versions of torch add all GPUs that they see, whatever the flags say."""
    from torch.utils import cpp_extension

    flags = []
    toolchain.Job().run(lambda: flags.append(cpp_extension._get_cuda_arch_flags()), tmp_path)
    assert flags == [[]]


def test_other_builds_of_torch_extensions_are_left_alone(new_cache, tmp_path):
    """A user's own load_inline, after ours has been redirected."""
    from torch.utils import cpp_extension

    build.load(kernel("a"))
    text = '#include <Python.h>\nPyMODINIT_FUNC PyInit_own() { static PyModuleDef m = {PyModuleDef_HEAD_INIT, "own"};'
    directory = tmp_path / "own"
    directory.mkdir()
    (directory / "own.cpp").write_text(text + " return PyModule_Create(&m); }")
    own = cpp_extension.load("own", [str(directory / "own.cpp")], build_directory=str(directory))
    assert own.__name__ == "own"
