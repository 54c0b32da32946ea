"""A machine that lacks a program: tests that need it are skipped with the way to get it, and fail in CI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROJECT_FOLDER, ROOT
from needs import PACKAGES

NEEDING = """
import pytest
from needs import need, pytest_runtest_setup

@pytest.mark.needs("shellcheck")
def test_mark(): pass

def test_call(): need("sshd")

@pytest.mark.root
def test_root(): pass

def test_free(): need("sh")
"""
SAID = (
    "shellcheck is missing: apt-get install shellcheck",
    "sshd is missing: apt-get install openssh-server",
    "mounting and making networks needs root",
)


def start(folder: Path, **settings: str) -> "subprocess.CompletedProcess[str]":
    """Tests as another user may, on a machine whose PATH has one program."""
    (folder / "test_it.py").write_text(NEEDING)
    text = (ROOT / PROJECT_FOLDER / "tests/needs.py").read_text()
    (folder / "needs.py").write_text(text.replace('"/usr/sbin", "/sbin"', "").replace("os.geteuid()", "1"))
    (folder / "conftest.py").write_text("from needs import pytest_runtest_setup\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    needs\n    root\n")
    (folder / "bin").mkdir(exist_ok=True)
    for name in ("sh", "unshare", "mount"):
        (folder / "bin" / name).unlink(missing_ok=True)
        (folder / "bin" / name).symlink_to("/bin/true")
    environment = {key: value for key, value in os.environ.items() if key != "CI"} | settings
    words = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(folder)]
    environment |= {"PATH": str(folder / "bin"), "COLUMNS": "200"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_newcomer_is_told(tmp_path: Path) -> None:
    done = start(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 3 skipped" in done.stdout
    for sentence in SAID:
        assert sentence in done.stdout


def test_ci_fails(tmp_path: Path) -> None:
    done = start(tmp_path, CI="true")
    assert done.returncode == 1, done.stdout
    assert "1 passed" in done.stdout
    assert "failed" in done.stdout or "errors" in done.stdout
    for sentence in SAID:
        assert sentence in done.stdout


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """This machine's programs, without those that only tests need."""
    missing = {*PACKAGES, "buildah", "debootstrap", "faketime", "shellcheck"} - {"git"}
    for program in Path("/usr/bin").iterdir():
        if program.name not in missing:
            (tmp_path / program.name).symlink_to(program)
    return tmp_path


@pytest.mark.parametrize("tests", ["render.py::test_launch_scripts", "kubernetes.py", "image.py", "slurm.py"])
def test_own_tests_on_a_bare_machine(tests: str, bare: Path) -> None:
    """None ends in an error."""
    environment = {key: value for key, value in os.environ.items() if key != "CI"} | {"PATH": str(bare)}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/test_{tests}"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "skipped" in done.stdout
