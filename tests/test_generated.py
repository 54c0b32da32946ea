"""A generated project works: its own lint, types and tests, and a job of two processes."""

import json
import re
from pathlib import Path

import pytest
from conftest import KNOW_AN_ENGINE, nox

pytestmark = pytest.mark.slow


@pytest.fixture(params=["project", "tensorflow_project"])
def one_wing(request: pytest.FixtureRequest) -> Path:
    """A project with one framework."""
    project: Path = request.getfixturevalue(request.param)
    return project


def test_lint_and_types(one_wing: Path) -> None:
    nox(one_wing, "lint")


def test_quick_tests_of_one_wing(one_wing: Path) -> None:
    """Those that know an engine; all others, and the slow ones, run in the project that has both."""
    assert re.search(r"\d+ passed", nox(one_wing, "tests", "-m", "not slow", "-n", "2", "-k", KNOW_AN_ENGINE))


def test_two_processes_learn(one_wing: Path) -> None:
    nox(one_wing, "train", "-n", "2", "name=pair")
    run = one_wing / "runs/pair"
    assert {"rank-0.log", "rank-1.log"} <= {path.name for path in (run / "logs").iterdir()}
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(record.get("val/accuracy", 0) for record in records) >= 0.97


def test_second_start_installs_nothing(project: Path) -> None:
    nox(project, "train", "-n", "1", "name=cold", "epochs=1")
    assert "install" not in nox(project, "train", "-n", "1", "name=warm", "epochs=1")


def test_all_lint_and_types(full_project: Path) -> None:
    nox(full_project, "lint")


@pytest.mark.timeout(5400)
def test_all_own_tests(full_project: Path) -> None:
    assert re.search(r"\d+ passed", nox(full_project, "tests", "-m", "not slow", "-n", "2"))
    assert re.search(
        r"\d+ passed", nox(full_project, "tests", "-m", "slow and not alone", "-n", "2", "--dist", "loadfile")
    )
    assert re.search(r"\d+ passed", nox(full_project, "tests", "-m", "alone"))
