"""Builds: what is cached and trusted, and what happens when tools, folders or sources are broken."""

import contextlib
import ctypes
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from array import array
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from helpers import Net, end_of_builds, linear, randn, wait_until
from torch import fx, nn

import fxfuse
from fxfuse import build, cache, guard, toolchain
from fxfuse.cuda import codegen, pointwise, tune
from fxfuse.expression import parse
from fxfuse.layout import Layout

X = randn(5, 8)


def run(model=None, strict=False):
    """Optimises a model, calls it once, checks the result, and returns the report's only region."""
    model = model or nn.Sequential(linear(), nn.Tanh()).eval()
    fast = fxfuse.optimize(model, strict=strict)
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
    (region,) = fxfuse.explain(fast).regions
    return region


@pytest.fixture
def builds(monkeypatch):
    """The names of the libraries built from now on."""
    names = []
    inline = build._load_inline

    def recording(sources, name, directory):
        names.append(name)
        return inline(sources, name, directory)

    monkeypatch.setattr(build, "_load_inline", recording)
    return names


def entries(cache):
    return sorted(path for path in cache.iterdir() if not path.name.startswith("."))


# ------------------------------------------------------------------------------------------- the cache


def test_a_kernel_is_built_once(new_cache, forget, builds):
    assert run().kernel is not None and run().kernel is not None
    assert len(builds) == 1
    forget()  # as another process
    assert run().kernel is not None
    assert len(builds) == 1 and len(entries(new_cache)) == 1


def test_the_cache_is_private(new_cache):
    run()
    for path in (new_cache, *entries(new_cache)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


KERNEL = build.Source(
    'extern "C" int fxfuse_launch(const void*, const uint64_t*, uint64_t) { return 0; }'
    'extern "C" const char* fxfuse_error(int) { return ""; }',
    label="nothing",
)
OTHER_KERNEL = build.Source(KERNEL.text + "// another", label="nothing else")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A cache with two kernels, KERNEL's and OTHER_KERNEL's, in that order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXFUSE_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        patch.setattr(build, "_loaded", {})
        for source in (KERNEL, OTHER_KERNEL):
            build.load(source)
        return [cache.find(build._key(source), None)[0] for source in (KERNEL, OTHER_KERNEL)]


@pytest.fixture
def entry(kernels, new_cache, builds, monkeypatch):
    """KERNEL's folder in a cache where both kernels lie; what is built anew takes no compiler."""

    def copied(sources, name, directory):
        builds.append(name)
        shutil.copy(kernels[0] / f"{name}.so", directory)

    monkeypatch.setattr(build, "_load_inline", copied)
    new_cache.mkdir(mode=0o700)
    for kernel in kernels:
        shutil.copytree(kernel, new_cache / kernel.name)
    return new_cache / kernels[0].name


def library(entry):
    return next(entry.glob("*.so"))


def manifest(change):
    """Damage that changes what the manifest says, its digest with it."""

    def damage(entry):
        path = entry / "manifest.json"
        value = json.loads(path.read_text())["value"]
        change(value)
        cache.write_document(path, entry.name[:32], value)

    return damage


def library_elsewhere(entry):
    shutil.copy(library(entry), entry.parent.parent / library(entry).name)
    manifest(lambda value: value.update(library=f"../../{value['library']}"))(entry)


def other_kernel(entry):
    """The other kernel's entry under this one's name."""
    (other,) = [path for path in entry.parent.iterdir() if path != entry]
    shutil.rmtree(entry)
    other.rename(entry)
    return entry


def other_kernel_with_this_manifest(entry):
    """The other kernel's library with all but its code being this one's."""
    this = library(entry).name
    library(other_kernel(entry)).rename(entry / this)
    sha256 = hashlib.sha256((entry / this).read_bytes()).hexdigest()
    value = {"library": this, "sha256": sha256, "label": "", "compilers": ""}
    cache.write_document(entry / "manifest.json", entry.name[:32], value)


def linked(path):
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def no_kernel(entry):
    """A library that Python cannot import."""
    subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", library(entry)], check=True)
    sha256 = hashlib.sha256(library(entry).read_bytes()).hexdigest()
    manifest(lambda value: value.update(sha256=sha256))(entry)


def a_pipe(path):
    path.unlink()
    os.mkfifo(path, 0o600)


DAMAGES = {
    "truncated library": lambda entry: os.truncate(library(entry), 5000),
    "empty library": lambda entry: os.truncate(library(entry), 0),
    "missing library": lambda entry: library(entry).unlink(),
    "library without a kernel": no_kernel,
    "library elsewhere": library_elsewhere,
    "linked library": lambda entry: linked(library(entry)),
    "missing manifest": lambda entry: (entry / "manifest.json").unlink(),
    "empty manifest": lambda entry: (entry / "manifest.json").write_text(""),
    "manifest of something else": lambda entry: (entry / "manifest.json").write_text("[]"),
    "manifest of numbers": manifest(lambda value: value.update(library=5)),
    "manifest without a library": manifest(dict.clear),
    "nested manifest": lambda entry: (entry / "manifest.json").write_text("[" * 10_000),
    "binary manifest": lambda entry: (entry / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "linked manifest": lambda entry: linked(entry / "manifest.json"),
    "manifest that is a pipe": lambda entry: a_pipe(entry / "manifest.json"),
    "manifest that is a folder": lambda entry: ((entry / "manifest.json").unlink(), (entry / "manifest.json").mkdir()),
    "empty entry": lambda entry: [path.unlink() for path in entry.iterdir()],
    "entry that is a file": lambda entry: (shutil.rmtree(entry), entry.write_text("")),
    "linked entry": linked,
    "entry that all may write": lambda entry: entry.chmod(0o777),
    "another kernel's entry": other_kernel,
    "another kernel's library": other_kernel_with_this_manifest,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_entries_are_built_anew(name, entry, builds):
    DAMAGES[name](entry)
    build.load(KERNEL)(b"", 0)
    assert len(builds) == 1 and library(entry).is_file() and not cache.verify()


def test_an_entry_that_was_built_anew_is_used(entry, builds, forget):
    (entry / "manifest.json").unlink()
    for _ in range(2):
        build.load(KERNEL)(b"", 0)
        forget()
    assert len(builds) == 1


def test_whole_entries_are_used(entry, builds):
    build.load(KERNEL)(b"", 0)
    build.load(OTHER_KERNEL)(b"", 0)
    assert not builds


def test_loading_a_kernel_notes_that_it_was_used(entry):
    long_ago = time.time() - 1e6
    os.utime(entry / "manifest.json", (long_ago, long_ago))
    build.load(KERNEL)
    assert cache.entries()[0].path == entry and time.time() - cache.entries()[0].used < 1000


def test_a_processs_first_build_removes_what_is_too_much(entry, monkeypatch):
    other = next(path for path in entry.parent.iterdir() if path != entry)
    os.utime(other / "manifest.json", (0, 0))
    (entry / "manifest.json").unlink()
    monkeypatch.setenv("FXFUSE_CACHE_LIMIT", str(sum(path.stat().st_size for path in other.iterdir()) + 2000))
    monkeypatch.setattr(build, "_finished", 0)
    build.load(KERNEL)
    for thread in threading.enumerate():
        if thread.name.startswith("fxfuse"):
            thread.join(60)
    assert entry.exists() and not other.exists()


@pytest.mark.parametrize("file", ["library", "manifest"])
def test_any_flipped_bit_is_noticed(file, entry):
    path = library(entry) if file == "library" else entry / "manifest.json"
    whole = path.read_bytes()
    for position in range(0, len(whole), max(1, len(whole) // 200)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        assert cache.verify() or (file == "manifest" and json.loads(flipped) == json.loads(whole)), position
    path.write_bytes(whole)
    assert not cache.verify()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to others")
@pytest.mark.parametrize("part", ["entry", "library", "manifest"])
def test_what_belongs_to_others_is_not_loaded(part, entry, builds):
    path = {"entry": entry, "library": library(entry), "manifest": entry / "manifest.json"}[part]
    os.chown(path, 65534, 65534)
    build.load(KERNEL)(b"", 0)
    assert len(builds) == 1


def test_other_compilers_have_entries_of_their_own(entry, builds, monkeypatch, forget):
    monkeypatch.setattr(toolchain, "identity", lambda cuda: "another")
    build.load(KERNEL)
    assert len(builds) == 1 and entry.exists()
    monkeypatch.undo()


@pytest.mark.parametrize("name", ["CXX that does not exist", "empty PATH", "no ninja"])
def test_finished_kernels_need_no_compiler(name, entry, monkeypatch, builds):
    MISSING[name][0](monkeypatch)
    build.load(KERNEL)(b"", 0)
    assert not builds
    with pytest.raises(fxfuse.ToolchainError):
        build.load(build.Source("not yet built"))


def test_a_build_that_was_killed_leaves_no_harm(new_cache, builds):
    new_cache.mkdir(mode=0o700)
    (new_cache / ".0123-leftover").mkdir()
    (new_cache / ".0123-leftover" / "main.cpp").write_text("int x")
    assert run().kernel is not None


def test_a_cache_that_vanishes_is_made_again(new_cache):
    run()
    shutil.rmtree(new_cache)
    assert run(nn.Sequential(linear(), nn.Softsign()).eval()).kernel is not None


def refuse(new_cache, monkeypatch):
    """Makes every write into the cache fail, whoever runs the tests (root may write anywhere)."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != new_cache and access(path, mode))


def be_somebody_else(new_cache, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: new_cache.stat().st_uid + 1)


BAD_CACHES = {
    "not writable": refuse,
    "somebody else's": be_somebody_else,
    "group-writable": lambda cache, monkeypatch: cache.chmod(0o770),
    "world-writable": lambda cache, monkeypatch: cache.chmod(0o707),
    "a file": lambda cache, monkeypatch: (cache.rmdir(), cache.write_text("")),
}


@pytest.mark.parametrize("name", BAD_CACHES)
def test_an_unusable_cache_is_left_alone(name, new_cache, monkeypatch, caplog):
    new_cache.mkdir(mode=0o700)
    BAD_CACHES[name](new_cache, monkeypatch)
    assert run().kernel is not None
    assert new_cache.is_file() or not list(new_cache.iterdir())
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert str(new_cache) in warning.message and "FXFUSE_CACHE_DIR" in warning.message


@pytest.mark.parametrize("name", ["with space", "ünïcode", "relative"])
def test_cache_folders_may_have_any_name(name, forget, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FXFUSE_CACHE_DIR", name if name == "relative" else str(tmp_path / name))
    assert run().kernel is not None
    assert entries(tmp_path / name)


def test_the_cache_folder_by_environment(monkeypatch):
    monkeypatch.delenv("FXFUSE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(cache.directory()) == "/xdg/fxfuse"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(cache.directory()) == "/home/somebody/.cache/fxfuse"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # which the specification says to ignore
    assert str(cache.directory()) == "/home/somebody/.cache/fxfuse"


def test_who_asks_for_built_kernels_only_does_not_wait_for_one_that_is_being_built(new_cache, monkeypatch):
    begun, may_end, inline = threading.Event(), threading.Event(), build._load_inline

    def slow(*args):
        begun.set()
        assert may_end.wait(60)
        inline(*args)

    monkeypatch.setattr(build, "_load_inline", slow)
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(build.load, KERNEL)
        assert begun.wait(60)
        try:
            with build.built_only(), pytest.raises(build.NotBuilt):
                build.load(KERNEL)
        finally:
            may_end.set()
        launch = building.result()
    with build.built_only():
        assert build.load(KERNEL) is launch


# --------------------------------------------------------------------------------------------- units


def returning(number, text=""):
    """A kernel that writes a number; all define the same names."""
    return build.Source(
        f"{text}namespace fxfuse::fxfuse_kernel {{ constexpr uint64_t kNumber = {number}; }}"
        'extern "C" int fxfuse_launch(const void*, const uint64_t* pointers, uint64_t) {'
        "    *reinterpret_cast<uint64_t*>(pointers[0]) = fxfuse::fxfuse_kernel::kNumber; return 0; }"
        'extern "C" const char* fxfuse_error(int) { return ""; }',
        label=f"kernel {number}",
    )


@pytest.fixture
def units(monkeypatch, new_cache, forget):
    """What is compiled together from now on, by the kernels' labels, on one processor."""
    end_of_builds()
    monkeypatch.setattr(build, "PROCESSORS", 1)
    build._renew()
    labels, inline = [], build._load_inline

    def recording(sources, name, directory):
        labels.append([source.label for source in sources.values()])
        return inline(sources, name, directory)

    monkeypatch.setattr(build, "_load_inline", recording)
    yield labels
    end_of_builds()
    monkeypatch.undo()
    build._renew()


def loaded_at_once(sources):
    """Futures of kernels that were all asked for before the first was compiled."""
    pool = ThreadPoolExecutor(len(sources))
    with contextlib.ExitStack() as stack:
        for _ in range(build.PROCESSORS):
            stack.enter_context(build._compilers[False])
        futures = [pool.submit(build.load, source) for source in sources]
        wait_until(lambda: len(build._waiting) == len(sources))
    pool.shutdown(wait=False)
    return futures


def number_of(launch):
    word = array("Q", [0])
    launch(b"", 0, word.buffer_info()[0])
    return word[0]


def test_kernels_that_wait_are_compiled_together(units, forget):
    sources = [returning(number) for number in range(12)]
    assert [number_of(launch.result()) for launch in loaded_at_once(sources)] == list(range(12))
    assert sorted(map(len, units)) == [12 - build.MOST_OF_A_UNIT, build.MOST_OF_A_UNIT]
    assert len(cache.entries()) == 12 and not cache.verify()
    forget()  # as another process
    assert [number_of(build.load(source)) for source in sources] == list(range(12))
    assert len(units) == 2


def test_no_kernel_waits_for_others_while_a_processor_is_free(units, monkeypatch):
    monkeypatch.setattr(build, "PROCESSORS", 4)
    build._renew()
    for launch in loaded_at_once([returning(number) for number in range(4)]):
        launch.result()
    assert sorted(units) == [[f"kernel {number}"] for number in range(4)]


def test_kernels_of_one_maker_are_compiled_together(units):
    """Such as those of a convolution by way of channels_last: a copy there, the convolution, a pass back."""
    sources = [returning(number) for number in range(3)]

    def made():
        return [build.load(source) for source in sources]

    with build._compilers[False], build.begun() as missing:
        stand_ins = made()
    assert missing == sources and len({launch.__self__.functions for launch in stand_ins}) == 3
    assert [number_of(launch) for launch in made()] == [0, 1, 2]
    assert units == [["kernel 0", "kernel 1", "kernel 2"]]
    with build.begun() as missing:
        assert [number_of(launch) for launch in made()] == [0, 1, 2]
    assert not missing


def test_kernels_of_a_candidate_are_compiled_together(units):
    sources = [returning(number) for number in range(3)]

    def made():
        launches = [build.load(source) for source in sources]
        return lambda: [number_of(launch) for launch in launches]

    with build._compilers[False]:
        run = ThreadPoolExecutor(1).submit(tune._built, tune.Candidate("three kernels", "three kernels", made))
        wait_until(lambda: len(build._waiting) == 3)
    assert run.result()() == [0, 1, 2]
    assert len(units) == 1


@pytest.mark.parametrize("processors, kernels, sizes", [(3, 7, [1, 3, 3]), (2, 3, [1, 2]), (1, 20, [10, 10])])
def test_kernels_of_one_request_share_the_processors_evenly(units, monkeypatch, processors, kernels, sizes):
    monkeypatch.setattr(build, "PROCESSORS", processors)
    build._renew()
    sources = [returning(number) for number in range(kernels)]
    assert [number_of(launch) for launch in build.load_each([*sources, sources[0]])] == [*range(kernels), 0]
    assert sorted(map(len, units)) == sizes
    assert build.load_each(sources) == [build.load(source) for source in sources]
    assert len(units) == len(sizes)


def test_kernels_can_be_begun_before_they_are_loaded(units):
    good, bad = returning(0), returning(1, "no C++;")
    build.begin([good, bad])
    end_of_builds()
    assert len(units) > 1  # the bad one is compiled by itself, too
    done = len(units)
    build.begin([good])
    assert number_of(build.load(good)) == 0 and len(units) == done
    with pytest.raises(fxfuse.BuildError, match="kernel 1 did not compile"):
        build.load(bad)


def test_without_a_compiler_nothing_is_begun(units, monkeypatch):
    def none(cuda):
        raise fxfuse.ToolchainError("no compiler")

    monkeypatch.setattr(toolchain, "check", none)
    build.begin([returning(0)])
    assert not build._running and not build._waiting


def test_a_kernel_that_does_not_compile_spoils_no_other(units):
    launches = loaded_at_once([returning(number, "no C++;" if number == 2 else "") for number in range(5)])
    with pytest.raises(fxfuse.BuildError, match="kernel 2 did not compile"):
        launches.pop(2).result()
    assert [number_of(launch.result()) for launch in launches] == [0, 1, 3, 4]
    assert len(cache.entries()) == 4


def test_kernels_for_other_architectures_are_not_compiled_together(units, monkeypatch):
    monkeypatch.setattr(build, "_running", {})
    kinds = [(8, 0), None, (9, 0), (8, 0), None]
    waiting = [build._Build(build.Source(str(at), kind), str(at), None, None) for at, kind in enumerate(kinds)]
    monkeypatch.setattr(build, "_waiting", list(waiting))
    taken = [[each.key for each in build._next_unit(cuda)] for cuda in (True, False, True, True)]
    assert taken == [["0", "3"], ["1", "4"], ["2"], []]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_unit_of_cuda_kernels_compiles(tmp_path):
    layout = Layout((8, 64, 4096), ((64 * 4096, 4096, 1),))
    sources = {
        str(dtype): build.Source(codegen.generate(parse(epilogue), dtype, (), pointwise.kernel(layout, dtype, dtype)))
        for epilogue, dtype in (("gelu(acc)", torch.float32), ("gelu(acc)", torch.bfloat16), ("relu(acc)", torch.half))
    }
    sources = {f"key{number}": source for number, source in enumerate(sources.values())}
    (tmp_path / "unit.cu").write_text(build.unit_text(sources))
    include = [build.PACKAGE, build.PACKAGE / "cuda" / "kernels", sysconfig.get_path("include")]
    flags = [*build.CUDA_FLAGS, "-arch=sm_80", "-Xcompiler", "-fPIC", *(f"-I{folder}" for folder in include)]
    subprocess.run(["nvcc", *flags, "-c", "unit.cu", "-o", "unit.o"], cwd=tmp_path, check=True)


# ------------------------------------------------------------------------------------------- the tools


def no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")


def no_programs(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")


def no_ninja(monkeypatch):
    which = shutil.which
    monkeypatch.setattr(toolchain, "_ninja_directory", lambda: None)
    monkeypatch.setattr(
        shutil, "which", lambda name, *args, **kw: None if name == "ninja" else which(name, *args, **kw)
    )


MISSING = {
    "CXX that does not exist": (no_compiler, "CXX"),
    "empty PATH": (no_programs, r"no C\+\+ compiler found: install"),
    "no ninja": (no_ninja, "pip install ninja"),
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_tools_give_one_warning_and_eager_results(name, new_cache, monkeypatch):
    remove, advice = MISSING[name]
    remove(monkeypatch)
    model = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Softsign()).eval()  # two kernels, one warning
    fast = fxfuse.optimize(model)
    with pytest.warns(fxfuse.FxfuseWarning, match=advice) as caught, torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
        fast(randn(7, 8))
    assert len(caught) == 1
    assert all(region.kernel is None and region.fallback for region in fxfuse.explain(fast).regions)


@pytest.mark.parametrize("name", MISSING)
def test_missing_tools_raise_if_strict(name, new_cache, monkeypatch):
    remove, advice = MISSING[name]
    remove(monkeypatch)
    with pytest.raises(fxfuse.ToolchainError, match=advice):
        run(strict=True)


def test_building_leaves_the_environment_alone(new_cache):
    before = dict(os.environ)
    run()
    assert dict(os.environ) == before


@pytest.mark.skipif(sys.platform != "linux", reason="only there threads have priorities of their own")
def test_compilers_leave_processors_to_the_process_that_waits_for_them(new_cache, monkeypatch):
    inline, nice = build._load_inline, []

    def recording(*args):
        nice.append(int(subprocess.check_output(["nice"])))  # as a compiler would find it
        inline(*args)

    monkeypatch.setattr(build, "_load_inline", recording)
    before = os.nice(0)
    run()
    assert nice == [min(19, before + build.COMPILERS_NICE)] and os.nice(0) == before


def test_a_kernel_for_a_gpu_has_its_binding_in_the_same_file(tmp_path, monkeypatch):
    """In nvcc's pass for the host; NVRTC and the passes for a device do not know Python."""
    given = {}
    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", lambda **arguments: given.update(arguments))
    monkeypatch.setattr("inspect.signature", lambda function: SimpleNamespace(parameters={}))
    build._load_inline({"key": build.Source("int kernel;", (8, 0))}, "name", tmp_path)
    assert given["cpp_sources"] == [""]
    (text,) = given["cuda_sources"]
    assert "\nint kernel;\n" in text
    assert text.startswith('#ifndef __CUDA_ARCH__\n#include "binding.h"\n#endif\n')
    assert text.endswith("#ifndef __CUDA_ARCH__\nFXFUSE_KERNEL(fxfuse_key, 0)\n#endif\n")


def test_a_launch_says_what_is_wrong_with_its_arguments(new_cache):
    launch = build.load(returning(7))
    written = ctypes.c_uint64()
    assert launch(b"", 0, ctypes.addressof(written)) is None and written.value == 7
    for arguments, error in (
        ((b"",), TypeError),
        ((b"", 0, *range(65)), TypeError),
        (("no bytes", 0), TypeError),
        ((b"", "no stream"), TypeError),
        ((b"x" * 4097, 0), ValueError),
        ((b"", 0, -1), OverflowError),
    ):
        with pytest.raises(error):
            launch(*arguments)


def test_a_failed_launch_raises_what_the_kernel_says_of_it(new_cache):
    launch = build.load(
        build.Source(
            'extern "C" int fxfuse_launch(const void*, const uint64_t*, uint64_t) { return 3; }'
            'extern "C" const char* fxfuse_error(int code) { return code == 3 ? "out of luck" : ""; }'
        )
    )
    with pytest.raises(RuntimeError, match=re.escape("out of luck (error 3)")):
        launch(b"", 0)


def test_only_what_calls_torch_is_linked_to_it(new_cache):
    """Its libraries have half a gigabyte of names and code: reading them takes a third of a small kernel's time."""
    for source, calls_torch in ((returning(1), False), (guard.SOURCE, True)):
        [(_, library)] = build.libraries_of([source])
        assert (b"libc10.so" in library.read_bytes()) == calls_torch


# ------------------------------------------------------------------------------------- broken sources


def broken(x):
    return x * 2


fx.wrap("broken")


@pytest.fixture(scope="module")
def broken_model(own_operations):
    fxfuse.register_pointwise("broken", reference=broken, code="no_such_function({0})", spellings=(broken,))
    return Net(lambda m, x: broken(m.fc(x)), fc=linear()).eval()


def test_compile_errors_give_a_warning_with_the_compilers_words(new_cache, broken_model):
    with pytest.warns(fxfuse.FxfuseWarning, match="no_such_function") as caught:
        region = run(broken_model)
    assert region.kernel is None and "did not compile" in region.fallback
    (kept,) = [path for path in entries(new_cache) if "broken" not in path.name]
    assert str(kept) in str(caught[0].message)
    assert any("no_such_function" in path.read_text() for path in kept.glob("*.cpp"))


def test_compile_errors_raise_if_strict(new_cache, broken_model):
    for _ in range(2):  # and again at the next call
        with pytest.raises(fxfuse.BuildError, match="no_such_function") as caught:
            run(broken_model, strict=True)
        (kept,) = entries(new_cache)
        assert str(kept) in str(caught.value)


def test_a_full_disk_is_not_the_models_problem(new_cache, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.warns(fxfuse.FxfuseWarning, match="No space left"):
        assert run().kernel is None


def test_disk_errors_after_the_build_do_not_stop_it(new_cache, monkeypatch):
    real = json.dumps

    def full(value, *args, **kwargs):
        if isinstance(value, dict) and "sha256" in value:
            raise OSError(28, "No space left on device")
        return real(value, *args, **kwargs)

    monkeypatch.setattr(json, "dumps", full)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxfuse.FxfuseWarning)
        run()


def build_in_child(directory):
    os.environ["FXFUSE_CACHE_DIR"] = directory
    return run().kernel is not None


def test_a_worker_can_build(new_cache):
    """A DataLoader's worker, for instance."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(build_in_child, (str(new_cache),))
