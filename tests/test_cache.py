"""fxfuse.cache: what is listed, kept and removed. The kernels here are files of any contents; none is loaded."""

import hashlib
import os
import subprocess
import sys
import time

import pytest

from fxfuse import cache

DAY = cache.LEFT_OVER


def make_entry(folder, number, size=1000, age=0.0):
    """A kernel's entry with a library of `size` bytes that was last used `age` seconds ago."""
    key = f"{number:032x}"
    with cache.building(key) as path:
        (path / "built.so").write_bytes(bytes(size))
        cache.finish(path / "built.so", key, "g++", "its text", f"kernel {number}")
    entry = folder / cache.entry_name(key, "g++")
    used = time.time() - age
    os.utime(entry / "manifest.json", (used, used))
    return entry


def age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


@pytest.fixture
def folder(new_cache, tmp_path, monkeypatch):
    """The empty cache, and a temporary folder of its own."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.delenv("FXFUSE_CACHE_LIMIT", raising=False)
    new_cache.mkdir(mode=0o700)
    return new_cache


def test_kernels_are_listed_last_used_first(folder):
    paths = [make_entry(folder, number, age=number) for number in range(3)]
    found = cache.entries()
    assert [entry.path for entry in found] == paths
    assert [entry.label for entry in found] == ["kernel 0", "kernel 1", "kernel 2"]
    for entry in found:
        assert entry.bytes == sum(path.stat().st_size for path in entry.path.iterdir()) > 1000
        assert entry.used == (entry.path / "manifest.json").stat().st_mtime


def test_a_library_that_kernels_share_counts_once(folder):
    with cache.building(f"{1:032x}") as path:
        (path / "built.so").write_bytes(bytes(90_000))
        for number in range(3):
            cache.share(path / "built.so", f"{number:032x}", "g++", "its text", f"kernel {number}")
    assert not cache.verify()
    assert sum(entry.bytes for entry in cache.entries()) < 100_000
    assert cache.clear() < 100_000 and not cache.entries()


def test_a_cache_that_does_not_exist_is_empty(new_cache):
    assert cache.entries() == [] and cache.verify() == {} and cache.prune() == 0 and cache.clear() == 0
    assert not new_cache.exists()


def test_verify_names_what_is_wrong_and_leaves_it(folder):
    whole, damaged, renamed = (make_entry(folder, number) for number in range(3))
    next(damaged.glob("*.so")).write_bytes(b"")
    renamed = renamed.rename(folder / f"{7:032x}-00000000")
    bad = cache.verify()
    assert set(bad) == {damaged, renamed} and "damaged" in bad[damaged] and "another" in bad[renamed]
    assert whole.exists() and damaged.exists()


@pytest.mark.parametrize(
    ("limit", "kept"), [("10K", 4), ("3000", 1), ("0", 0), ("1M", 4), ("2 gib", 4), ("nonsense", 4), ("-1", 4)]
)
def test_kernels_beyond_the_limit_go_those_used_longest_ago_first(folder, monkeypatch, limit, kept):
    paths = [make_entry(folder, number, size=2000, age=number) for number in range(4)]
    monkeypatch.setenv("FXFUSE_CACHE_LIMIT", limit)
    before = cache.entries()
    assert cache.prune() == sum(entry.bytes for entry in before[kept:])
    assert [path.exists() for path in paths] == [True] * kept + [False] * (4 - kept)


def test_a_limit_may_be_given(folder):
    paths = [make_entry(folder, number, size=2000, age=number) for number in range(2)]
    cache.prune(limit=3000)
    assert [path.exists() for path in paths] == [True, False]


LEFT_OVER = {
    "a build": f".{0:032x}-abc_1",
    "a failed build": f"failed-{0:032x}",
    "something half removed": ".removed-0011",
}


@pytest.mark.parametrize("name", LEFT_OVER.values(), ids=LEFT_OVER)
def test_what_nobody_finished_goes_after_a_day(folder, name):
    path = folder / name
    path.mkdir()
    (path / "main.cpp").write_text("int x;")
    age(path, DAY - 100)
    assert cache.prune() == 0 and path.exists()
    age(path, DAY + 100)
    assert cache.prune() == 6 and not path.exists()


def test_a_build_that_runs_stays_however_old_its_folder_is(folder):
    with cache.building("0" * 32) as path:
        age(path, 2 * DAY)
        cache.prune()
        cache.clear()
        assert path.exists()
    assert not path.exists()


def test_temporary_caches_of_processes_that_were_killed_go_after_a_day(folder, tmp_path):
    left = tmp_path / "temporary" / "fxfuse-cache-abc_1"
    left.mkdir()
    descriptor = cache.lock(left)
    age(left, DAY + 100)
    assert cache.prune() == 0 and left.exists(), "its process lives"
    os.close(descriptor)
    cache.prune()
    assert not left.exists()


TEMPORARY = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("cache", sys.argv[1])
cache = importlib.util.module_from_spec(spec)
sys.modules["cache"] = cache
spec.loader.exec_module(cache)
folder = cache.writable()
(folder / "kernel").write_text("")
child = os.fork()
if child == 0:
    sys.exit()  # runs what is registered for the end of a process
assert os.waitpid(child, 0)[1] == 0
assert folder.exists()
print(folder)
"""


def test_the_temporary_cache_goes_with_its_process_and_not_with_a_child(folder, tmp_path, monkeypatch):
    file = tmp_path / "a file"
    file.touch()
    environment = {**os.environ, "FXFUSE_CACHE_DIR": str(file), "TMPDIR": str(tmp_path / "temporary")}
    command = [sys.executable, "-c", TEMPORARY, cache.__file__]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout
    assert output.startswith(str(tmp_path / "temporary" / "fxfuse-cache-"))
    assert list((tmp_path / "temporary").iterdir()) == []


def test_other_peoples_folders_are_left_alone(folder, tmp_path):
    """Whatever FXFUSE_CACHE_DIR names, and in the system's temporary folder."""
    names = ["notes", ".git", "0123", "failed-experiment", ".removed", "fxfuse_thing", "f" * 33, "photos-00000000"]
    others = [folder / name for name in names] + [tmp_path / "temporary" / "fxfuse-cache-mine", folder / "main.cpp"]
    for path in others:
        path.mkdir()
        age(path, 10 * DAY)
    cache.prune(limit=0)
    cache.clear()
    assert all(path.is_dir() for path in others)


def test_links_are_removed_and_not_followed(folder, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("text")
    (folder / f"{0:032x}-00000000").symlink_to(precious)
    (folder / f"failed-{0:032x}").symlink_to(precious)
    (folder / "choices").symlink_to(precious)
    cache.clear()
    assert (precious / "thesis").read_text() == "text"
    assert [path.name for path in folder.iterdir()] == ["choices"]


def test_clear_removes_kernels_and_choices(folder):
    make_entry(folder, 0)
    cache.write_document(folder / "choices" / "x.json", "x", {"name": "a"})
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert cache.clear() == size and list(folder.iterdir()) == []


def test_a_document_is_read_for_its_key_only(folder):
    cache.write_document(folder / "choices" / "x.json", "x", {"name": "a", "times": [1.5, None]})
    assert cache.read_document(folder, "choices", "x.json", key="x") == {"name": "a", "times": [1.5, None]}
    with pytest.raises(cache.UNREADABLE):
        cache.read_document(folder, "choices", "x.json", key="y")


@pytest.mark.parametrize("name", ["..", "../x", "", "/etc/passwd", "a\0b"])
def test_names_do_not_lead_out_of_the_cache(folder, name):
    with pytest.raises(ValueError):
        cache.read(folder, name)
    with pytest.raises((ValueError, OSError)):
        cache.read(folder, name, "x")


def test_a_library_is_hashed_as_a_whole(folder):
    entry = make_entry(folder, 1, size=3_000_000)
    assert cache.library_of(entry).name == f"fxfuse_{1:032x}.so"
    assert hashlib.sha256(bytes(3_000_000)).hexdigest() in (entry / "manifest.json").read_text()
