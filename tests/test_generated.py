"""A generated project works: its own lint, types and tests, and a job of two processes."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import COMBINATIONS, KNOW_AN_ENGINE, Answers, check, label, nox, render

FRAMEWORKS = {"torch": ("torch",), "tensorflow": ("tensorflow", "keras")}
# These have time limits that hold only while no other test runs.
ALONE = [f"tests/machinery/test_{name}.py" for name in ("hosts_job", "strangers", "supervise")]
IMPORT_ALL = """
import importlib, pkgutil, my_training
for module in pkgutil.walk_packages(my_training.__path__, "my_training."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def own_tests(project: Path, *arguments: str) -> None:
    """The tests of a project; in CI none may be left out."""
    said = nox(project, "tests", *arguments)
    assert re.search(r"\d+ passed", said)
    assert not os.environ.get("CI") or not re.search(r"\d+ skipped", said), said


def check_learns(run: Path) -> None:
    assert {"rank-0.log", "rank-1.log"} <= {path.name for path in (run / "logs").iterdir()}
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(record.get("val/accuracy", 0) for record in records) >= 0.97


@pytest.mark.slow
def test_lint_and_types(project: Path) -> None:
    nox(project, "lint")


@pytest.mark.slow
def test_own_tests(project: Path) -> None:
    own_tests(project)


@pytest.mark.slow
def test_two_processes_learn(project: Path) -> None:
    nox(project, "train", "-n", "2", "name=pair")
    check_learns(project / "runs/pair")


@pytest.mark.slow
def test_second_start_installs_nothing(project: Path) -> None:
    nox(project, "train", "-n", "1", "name=cold", "epochs=1")
    assert "install" not in nox(project, "train", "-n", "1", "name=warm", "epochs=1")


@pytest.mark.long
def test_all_lint_and_types(full_project: Path) -> None:
    nox(full_project, "lint")


@pytest.mark.long
@pytest.mark.parametrize("which", ["not slow", "slow"])
def test_all_own_tests(which: str, full_project: Path) -> None:
    """Those of the machinery too."""
    own_tests(full_project, "-m", which, "-n", "2", "--dist", "loadfile", *(f"--ignore={file}" for file in ALONE))


@pytest.mark.long
def test_what_runs_alone(full_project: Path) -> None:
    own_tests(full_project, *ALONE)


@pytest.fixture
def beside(
    full_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Answers]:
    """Answers of a project that runs in the environment of the full one, as if it had its own framework alone."""
    nox(full_project, "tests", "--version")
    answers: Answers = request.param
    others = [
        name for wing, names in FRAMEWORKS.items() if answers["framework"] not in (wing, "both") for name in names
    ]
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({others}))\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{tmp_path / 'my-training/src'}")
    monkeypatch.setenv("PATH", f"{full_project / '.venv/bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("VIRTUAL_ENV", str(full_project / ".venv"))
    monkeypatch.setenv("MYPY_CACHE_DIR", str(full_project / ".mypy_cache"))
    yield answers


@pytest.mark.long
@pytest.mark.parametrize("beside", COMBINATIONS, ids=label, indirect=True)
def test_every_combination_is_sound(beside: Answers, template: Path, tmp_path: Path) -> None:
    """Style, types, and each module can be imported."""
    project = render(template, tmp_path, **{**beside, "python_version": "3.10"})
    for words in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"], ["python", "-c", IMPORT_ALL]):
        check(*words, cwd=project)


@pytest.mark.long
@pytest.mark.parametrize("beside", [{"framework": "tensorflow"}], ids=label, indirect=True)
def test_one_framework_alone(beside: Answers, template: Path, tmp_path: Path) -> None:
    """The tests that know it, and a job; the default project has the other one, and an environment of its own."""
    project = render(template, tmp_path, **beside)
    check("pytest", "-m", "not slow", "-n", "2", "-k", KNOW_AN_ENGINE, cwd=project)
    check("launch/local.sh", "-n", "2", "name=pair", cwd=project)
    check_learns(project / "runs/pair")
