"""The Horovod recipe with the real compiler and the real package index; one cached build serves all."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, nox
from waiting import wait_until

RECIPE = ROOT / "<<cookiecutter.project_slug>>/scripts/build_horovod.py"


def make_recipe(folder: Path, pattern: str = "", replacement: str = "") -> Path:
    """The recipe in a small project, if need be with one text in it changed."""
    text = RECIPE.read_text()
    assert pattern in text
    (folder / "scripts").mkdir(parents=True)
    (folder / "pyproject.toml").write_text('extra = ["horovod==0.28.1"]')
    script = folder / "scripts/build_horovod.py"
    script.write_text(text.replace(pattern, replacement, 1) if pattern else text)
    return script


def start(python: Path | str, script: Path, *arguments: str, **settings: str) -> "subprocess.CompletedProcess[str]":
    command = [str(python), str(script), *arguments]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)


@pytest.fixture(scope="session")
def python(full_project: Path) -> Path:
    """The Python of the project that the slow tests share; its installation has built or found the wheel."""
    nox(full_project, "tests", "--version")
    return full_project / ".venv/bin/python"


@pytest.fixture(scope="session")
def wheel(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of an unchanged recipe."""
    done = start(python, make_recipe(tmp_path_factory.mktemp("recipe")))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, "stdout is for the path alone"
    return Path(done.stdout.strip())


@pytest.fixture
def cache(wheel: Path, tmp_path: Path) -> Path:
    """A cache that has the tools and the sdist, but no wheel."""
    folder = tmp_path / "a cache"  # as in a home with a space
    folder.mkdir()
    home = wheel.parent.parent
    for known in [*home.glob("tools-*"), *home.glob("horovod-*.tar.gz")]:
        (folder / known.name).symlink_to(known)
    return folder


def leftovers(cache: Path) -> list[Path]:
    """Wheels, and folders of builds that have ended."""
    return [*cache.glob("*/*.whl"), *cache.glob("*/work")]


def test_rendering_leaves_the_recipe_as_it_is() -> None:
    assert not re.search(r"<<|<%|<#", RECIPE.read_text())


def test_no_compiler(tmp_path: Path) -> None:
    torch = tmp_path / "site/torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text("__version__ = '2.13.0+cpu'\n")
    settings = {"PYTHONPATH": str(tmp_path / "site"), "PATH": str(tmp_path), "HOROVOD_WHEEL_CACHE": str(tmp_path / "c")}
    done = start(sys.executable, make_recipe(tmp_path / "project"), **settings)
    assert done.returncode == 2
    assert "'g++' was not found on PATH; install one (Debian/Ubuntu: apt-get install g++)" in done.stderr
    assert not done.stdout
    assert not (tmp_path / "c").exists()


@pytest.mark.long
def test_a_cached_wheel_is_not_built_again(python: Path, wheel: Path, tmp_path: Path) -> None:
    built = wheel.stat().st_mtime_ns
    done = start(python, make_recipe(tmp_path / "project"), "--wheel-dir", str(tmp_path / "dist"))
    assert wheel.stat().st_mtime_ns == built
    copy = tmp_path / "dist" / wheel.name
    assert done.stdout == f"{copy}\n"
    assert hashlib.sha256(copy.read_bytes()).digest() == hashlib.sha256(wheel.read_bytes()).digest()
    assert start(python, make_recipe(tmp_path / "again"), "--print-key").stdout.strip() == wheel.parent.name


@pytest.mark.long
def test_wheel_is_small_and_says_what_it_needs(wheel: Path) -> None:
    assert wheel.stat().st_size < 2e6  # for two frameworks
    assert re.match(r"horovod-0\.28\.1\+torch\d+\.\d+\.\d+\.", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        needs = re.findall(r"^Requires-Dist: ([\w.-]+)$", archive.read(metadata).decode(), re.MULTILINE)
    assert sorted(needs) == ["cloudpickle", "packaging", "psutil", "pyyaml"]


@pytest.mark.long
def test_edit_that_no_longer_fits(python: Path, cache: Path, tmp_path: Path) -> None:
    script = make_recipe(tmp_path / "project", r"^.*xla_mpi_ops\.cc.*\n", r"^.*xla_mpi_ops\.cpp.*\n")
    done = start(python, script, HOROVOD_WHEEL_CACHE=str(cache))
    assert done.returncode == 1
    assert "The edit of horovod/tensorflow/CMakeLists.txt (TensorFlow >= 2.19" in done.stderr
    assert not leftovers(cache)


@pytest.mark.long
def test_wrong_hash(python: Path, cache: Path, tmp_path: Path) -> None:
    (cache / "horovod-0.28.1.tar.gz").unlink()
    script = make_recipe(tmp_path / "project", '"0.28.1": "92a43f5a', '"0.28.1": "00000000')
    done = start(python, script, HOROVOD_WHEEL_CACHE=str(cache))
    assert done.returncode == 1
    assert "download ended with exit code 1: ERROR: THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert not leftovers(cache)
    assert not (cache / "horovod-0.28.1.tar.gz").exists()


@pytest.mark.long
def test_compiler_error_is_named(python: Path, cache: Path, tmp_path: Path) -> None:
    script = make_recipe(tmp_path / "project", "#include <stdexcept>\\n", "#error out of order\\n")
    done = start(python, script, HOROVOD_WHEEL_CACHE=str(cache))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "compile ended with exit code 1: " in last
    assert "error: #error out of order" in last
    log = Path(re.findall(r"all of its output: (.+)\)", last)[0])
    assert "out of order" in log.read_text()
    assert not leftovers(cache)


@pytest.mark.long
def test_killed_build_leaves_nothing(python: Path, cache: Path, tmp_path: Path) -> None:
    script = make_recipe(tmp_path / "project")
    environment = os.environ | {"HOROVOD_WHEEL_CACHE": str(cache)}
    with subprocess.Popen([python, script], env=environment, stderr=subprocess.DEVNULL) as build:
        wait_until(lambda: list(cache.glob("*/work/horovod-*")) or build.poll() is not None, "the sources", 300)
        build.terminate()
        assert build.wait(20) == 143
    assert not leftovers(cache)


@pytest.mark.long
def test_wheel_that_fails_its_proof_is_refused(python: Path, cache: Path, wheel: Path, tmp_path: Path) -> None:
    script = make_recipe(tmp_path / "project", "[3.0, 5.0]", "[3.0, 6.0]")
    text = script.read_text()
    quick = f"import shutil; return Path(shutil.copy({str(wheel)!r}, self.work))"  # the wheel is built already
    script.write_text(
        text.replace("def compile(self, source: Path) -> Path:", f"def compile(self, source):\n        {quick}")
    )
    shutil.rmtree(cache / "none", ignore_errors=True)
    done = start(python, script, HOROVOD_WHEEL_CACHE=str(cache))
    assert done.returncode == 1
    assert "proof of gloo ended with exit code" in done.stderr
    assert "wrong sum" in done.stderr
    assert not leftovers(cache)
