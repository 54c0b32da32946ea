"""The noxfile, in a small project: pip's settings neither divert nor end an installation, and codes are kept."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from jobs import ROOT

PYPROJECT = """
[project]
name = "small"
requires-python = ">=3.10"
dependencies = ["numpy"]
[project.optional-dependencies]
horovod = ["horovod==0.28.1"]
torch = ["{framework}"]
"""
DIVERTED = [
    {"FORCE_COLOR": "1", "PIP_VERBOSE": "2"},
    {"PIP_USER": "1", "PIP_REQUIRE_VIRTUALENV": "1", "PIP_NO_DEPS": "1"},
    {"PIP_TARGET": "{folder}/elsewhere", "PIP_REPORT": "-"},
    {"PIP_PREFIX": "{folder}/elsewhere", "PIP_DRY_RUN": "1", "PIP_QUIET": "3"},
    {"PIP_CONFIG_FILE": "{folder}/pip.conf"},
]


def wheel(folder: Path, name: str, *needs: str) -> None:
    """A package with nothing in it but a module of its name."""
    info = f"{name.replace('-', '_')}-1.dist-info"
    lines = "".join(f"Requires-Dist: {need}\n" for need in needs)
    files = {f"{name.replace('-', '_')}/__init__.py": "", f"{info}/RECORD": ""}
    files |= {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{lines}"}
    files |= {f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-1-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A project whose framework is empty, with the noxfile of this one, in a folder with a space."""
    project, index = tmp_path / "a project", tmp_path / "index"
    for folder in (project / "scripts", index):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "noxfile.py", project)
    recipe = (ROOT / "scripts/build_horovod.py").read_text()
    (project / "scripts/build_horovod.py").write_text(recipe)
    (project / "pyproject.toml").write_text(PYPROJECT.format(framework="framework"))
    wheel(index, "numpy")
    wheel(index, "framework", "cuda-part")
    wheel(index, "cuda-part")
    (tmp_path / "pip.conf").write_text("[global]\nuser = true\nverbose = 2\n")
    return project


def install(project: Path, **settings: str) -> str:
    """Installs as far as Horovod, which refuses an empty framework."""
    folder = project.parent
    given = {name: text.format(folder=folder) for name, text in settings.items()}
    clean = {name: text for name, text in os.environ.items() if not name.startswith("PIP_")}
    clean |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / "index")}
    words = [sys.executable, "-m", "nox", "-s", "tests"]
    done = subprocess.run(words, cwd=project, env=clean | given, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("settings", DIVERTED, ids=lambda settings: "-".join(settings))
def test_pip_installs_into_the_environment(small: Path, settings: dict[str, str]) -> None:
    said = install(small, **settings)
    assert "Traceback" not in said
    assert "pip will now download a CUDA build: several GB, 1 CUDA packages" in said
    installed = {path.name for path in next(small.glob(".venv/lib/python*/site-packages")).iterdir()}
    assert {"framework", "numpy", "cuda_part"} <= installed
    assert not (small.parent / "elsewhere").exists()
    assert "No framework: torch or tensorflow is not installed" in said


def test_a_configuration_that_diverts_is_said(small: Path) -> None:
    (small.parent / "pip.conf").write_text(f"[install]\ntarget = {small.parent}/elsewhere\n")
    said = install(small, PIP_CONFIG_FILE="{folder}/pip.conf")
    assert "pip has not installed into" in said
    assert "pip config list' shows target, prefix or root" in said
    assert "Traceback" not in said


def test_an_announcement_ends_nothing(small: Path) -> None:
    """What pip cannot resolve is for the installation to say."""
    (small / "pyproject.toml").write_text(PYPROJECT.format(framework="not-there"))
    said = install(small)
    assert "Traceback" not in said
    assert "No matching distribution found for not-there" in said


def test_train_keeps_the_launchers_code(small: Path) -> None:
    """75 tells a scheduler that all is saved; nox itself would end with 1."""
    stamp = "import noxfile; noxfile.VENV.mkdir(); noxfile.STAMP.write_text(noxfile.fingerprint())"
    subprocess.run([sys.executable, "-c", stamp], cwd=small, check=True)  # so nothing is to be installed
    launcher = small / "launch/local.sh"
    launcher.parent.mkdir()
    launcher.write_text('#!/bin/sh\nprintf "[%s]" "$@"\nexit 75\n')
    launcher.chmod(0o755)
    words = [sys.executable, "-m", "nox", "-s", "train", "--", "-n", "2", "name='é 1'"]
    done = subprocess.run(words, cwd=small, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (75, "[-n][2][name='é 1']"), done.stderr
