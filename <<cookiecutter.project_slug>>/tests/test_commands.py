"""Every `python -m <package>.X`: wrong options, closed pipes, full shared memory; each ends in one sentence or well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ENGINES, PACKAGE, ROOT, environment

SOURCES = ROOT / "src" / PACKAGE


def commands() -> list[str]:
    """What `python -m` runs, within the package: modules that say so, and folders with a __main__.py."""
    modules = [file for file in SOURCES.rglob("*.py") if '\nif __name__ == "__main__":' in file.read_text()]
    places = [file.with_suffix("") for file in modules] + [file.parent for file in SOURCES.rglob("__main__.py")]
    return sorted(".".join(place.relative_to(SOURCES).parts) for place in places)


COMMANDS = commands()
# The beginning of an option of each, which argparse would take for it.
BEGINNINGS = {
    "train": ["--cf", "job"],
    "compress": ["--cf", "job"],
    "checkpoints": ["list", "runs/none", "--jso"],
    "cluster.doctor": ["--quic"],
    "evaluate": ["runs/none", "--checkp", "best"],
    "export": ["runs/none", "best", "target", "--form", "onnx"],
    "launch": ["--dry"],
    "cluster.host_report": ["--wai"],
    "cluster.allreduce": ["torc"],
    "compress.measure": ["runs/none", "--js"],
    "launch.agent": ["--anything"],
}


def command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"{PACKAGE}.{name}", *arguments]


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = command(name, *arguments)
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run(words, env=environment(), check=False, timeout=60, **pipes)  # type: ignore[call-overload,no-any-return]


def test_all_commands_are_known() -> None:
    """But those of a room that was left out."""
    there = {path.stem for path in SOURCES.iterdir()}
    assert {name for name in BEGINNINGS if name.partition(".")[0] in there} == {*COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_options_that_are_wrong_or_cut_short(name: str) -> None:
    for arguments in (["--nonsense"], BEGINNINGS[name]):
        done = run(name, *arguments)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "launch.agent"])
def test_help_into_a_closed_pipe(name: str) -> None:
    """Stdout, and stderr for what is refused."""
    read, write = os.pipe()
    os.close(read)
    shown = subprocess.run(
        command(name, "--help"), env=environment(), stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    refused = subprocess.run(command(name, "--nonsense"), env=environment(), stderr=write, check=False)
    os.close(write)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert refused.returncode == 2


@pytest.mark.skipif("torch" not in ENGINES, reason="only PyTorch's loader hands on by shared memory")
@pytest.mark.parametrize("free", [0, 200])  # kB: too little to start workers, and for what they read
def test_full_shared_memory_is_named(tmp_path: Path, free: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small /dev/shm needs root")
    fill = "head -c 1M /dev/zero > /dev/shm/full 2>/dev/null;" if not free else ""
    script = f'mount -t tmpfs -o size={free or 100}k none /dev/shm && {{ {fill} exec "$@"; }}'
    words = command("train", "engine=torch", "data.workers=1", "data.batch_size=1024", f"hydra.run.dir={tmp_path}/run")
    isolated = ["unshare", "--mount", "bash", "-c", script, "bash", *words]
    done = subprocess.run(isolated, env=environment(), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said.startswith("error: /dev/shm is full")
    assert "--shm-size" in said
