"""Fixtures."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import ENGINES, SINGLE, start_job
from needs import pytest_runtest_setup as pytest_runtest_setup

collect_ignore = ["ranks"]  # test_ranks.py runs them
os.environ |= SINGLE
os.environ.pop("FORCE_COLOR", None)  # tests read what programs print

Job = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def full_precision() -> None:
    """Whatever an engine of an earlier test has set."""
    if keras := sys.modules.get("keras"):
        keras.config.set_dtype_policy("float32")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each engine of the project in turn; configs and jobs of the test take it, and without it the first one."""
    name = str(request.param)
    monkeypatch.setenv("TESTED_ENGINE", name)
    return name


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Runs a whole job of several ranks in `folder` (default: tmp_path/run) and returns what it printed."""

    def run(ranks: int, *overrides: str, folder: Path = tmp_path / "run") -> subprocess.CompletedProcess[str]:
        with start_job(ranks, folder, *overrides) as process:
            output, _ = process.communicate(timeout=180)
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    return run
