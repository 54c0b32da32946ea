"""Fixtures."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import start_job

Job = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Runs a whole job of several ranks in `folder` (default: tmp_path/run) and returns what it printed."""

    def run(ranks: int, *overrides: str, folder: Path = tmp_path / "run") -> subprocess.CompletedProcess[str]:
        with start_job(ranks, folder, *overrides) as process:
            output, _ = process.communicate(timeout=180)
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    return run
