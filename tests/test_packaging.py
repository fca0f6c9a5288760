"""The package: what a wheel and an sdist contain, and that they work where there is no checkout."""

import email
import importlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import fxfuse

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fxfuse"


@pytest.fixture(scope="module")
def project():
    """pyproject.toml as setuptools reads it: its packages found, its version looked up."""
    from setuptools.config.pyprojecttoml import read_configuration

    return read_configuration(ROOT / "pyproject.toml", expand=True)


def files_of_the_package():
    """Paths below fxfuse/, without what Python leaves there."""
    return {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def test_every_file_that_is_no_code_is_package_data(project):
    data = project["tool"]["setuptools"]["package-data"]
    packaged = {path for package, patterns in data.items() for pattern in patterns
                for path in (ROOT / package.replace(".", "/")).glob(pattern)}  # fmt: skip
    others = {path for path in files_of_the_package() if path.suffix != ".py"}
    assert PACKAGE / "py.typed" in others and PACKAGE / "cuda" / "kernels" / "gemm.cuh" in others
    assert {str(path.relative_to(ROOT)) for path in others - packaged} == set()


def test_every_pattern_of_package_data_matches_something(project):
    for package, patterns in project["tool"]["setuptools"]["package-data"].items():
        for pattern in patterns:
            assert any((ROOT / package.replace(".", "/")).glob(pattern)), pattern


def test_every_folder_with_code_is_a_package(project):
    folders = {path.parent for path in files_of_the_package() if path.suffix == ".py"}
    named = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(project["tool"]["setuptools"]["packages"]) == named
    assert {"fxfuse", "fxfuse.cli", "fxfuse.cuda"} <= named


def test_the_version_is_that_of_the_package_and_in_the_changelog(project):
    assert project["project"]["version"] == fxfuse.__version__
    assert f'"{fxfuse.__version__}"' not in (ROOT / "pyproject.toml").read_text(), "it has one place"
    assert f"\n## {fxfuse.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_entry_points_name_what_exists(project):
    scripts, entry_points = project["project"]["scripts"], project["project"]["entry-points"]
    for target in [*scripts.values(), *(value for group in entry_points.values() for value in group.values())]:
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), target
    assert set(scripts) == {"fxfuse"}


# ------------------------------------------------------------------------------- built and installed

LEFT_OUT = shutil.ignore_patterns(
    ".git", "__pycache__", "build", "dist", "*.egg-info", ".venv", ".*_cache", ".hypothesis", "*.whl"
)

MODEL = """
import sys
from pathlib import Path
import torch
from torch import nn

compiled = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.Tanh()).eval(), backend="fxfuse")  # by its entry point
with torch.no_grad():
    compiled(torch.randn(4, 16))

import fxfuse
assert Path(fxfuse.__file__).is_relative_to(sys.prefix), fxfuse.__file__
(graph,) = fxfuse.compiled_graphs()
assert [region.kernel for region in fxfuse.explain(graph).regions] == ["linear by torch + one pass"]

model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(288, 4), nn.GELU())
model, x = model.eval(), torch.randn(2, 3, 8, 8)
with torch.no_grad():
    fast = fxfuse.optimize(model, (x,), strict=True)
    for _ in range(4):  # from the third call on as a program, which has C++ of its own
        fast(x)
verified = fxfuse.verify(model, fast, (x,))
assert verified, verified
print(fxfuse.explain(fast))
"""


def run(*command, cwd, **options):
    """What a program prints; its errors are the test's."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def built(kind, source, folder):
    """The sdist or wheel that setuptools builds of a source tree, as pip has it built."""
    folder.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    run(sys.executable, "-c", code, cwd=source)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def built_package(tmp_path_factory):
    """The sdist of this checkout, and the wheel that is built of what is in the sdist."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "checkout", ignore=LEFT_OUT)
    sdist = built("sdist", folder / "checkout", folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked, built("wheel", unpacked, folder / "wheel")


@pytest.mark.slow
def test_an_sdist_has_the_package_and_its_tests(built_package):
    unpacked, _ = built_package
    for folder in ("fxfuse", "tests", "benchmarks", "examples", "docs"):
        expected = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*")
                    if path.is_file() and not {"__pycache__", ".hypothesis"} & set(path.parts)}  # fmt: skip
        assert {path for path in expected if not (unpacked / path).is_file()} == set()
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml"):
        assert (unpacked / name).is_file(), name


@pytest.mark.slow
def test_a_wheel_has_every_file_of_the_package_and_true_metadata(built_package):
    _, wheel = built_package
    assert wheel.name == f"fxfuse-{fxfuse.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(archive.read(f"fxfuse-{fxfuse.__version__}.dist-info/METADATA"))
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == {str(path.relative_to(ROOT)) for path in files_of_the_package()}, "and nothing else"
    assert any(name.endswith("LICENSE") for name in names)
    assert metadata["License-Expression"] == "BSD-3-Clause" and metadata["Requires-Python"] == ">=3.10"
    assert {"torch>=2.3", "tabulate>=0.9"} <= set(metadata.get_all("Requires-Dist"))
    assert metadata["Author"] is None and metadata["Project-URL"] is None, "they are the owner's to give"


@pytest.mark.slow
def test_a_wheel_works_where_there_is_no_checkout(built_package, tmp_path):
    _, wheel = built_package
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site_packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # what fxfuse needs is this environment's, since there may be no network; a path file does not run its path files
    needed = {Path(importlib.import_module(name).__file__).parent.parent
              for name in ("torch", "tabulate", "ninja", "setuptools")}  # fmt: skip
    (site_packages / "needed.pth").write_text("".join(f"{folder}\n" for folder in needed))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FXFUSE_", "PYTHON"))}
    environment["FXFUSE_CACHE_DIR"] = str(tmp_path / "cache")
    outside = tmp_path / "outside"
    outside.mkdir()

    run(python, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet", wheel, cwd=outside, env=environment)
    (outside / "model.py").write_text(MODEL)
    assert "2 regions fused" in run(python, "model.py", cwd=outside, env=environment)

    script = tmp_path / "venv" / "bin" / "fxfuse"
    assert run(script, "--version", cwd=outside, env=environment) == f"fxfuse {fxfuse.__version__}\n"
    found = json.loads(run(script, "doctor", "--json", cwd=outside, env=environment))
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert found["ok"] and states["kernel on cpu"] == "ok" and states["cache"] == "ok"
    assert torch.__version__ in {check["facts"].get("version") for check in found["checks"]}
