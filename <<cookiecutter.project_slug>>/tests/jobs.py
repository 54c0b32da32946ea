"""What the tests share: composed configs, records of runs, and jobs of several ranks."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from needs import need_root
from omegaconf import DictConfig, open_dict
from waiting import wait_until

PACKAGE = "<< cookiecutter.package_name >>"
ROOT = Path(__file__).resolve().parent.parent
ENGINES = [name for name in ("torch", "tensorflow") if (ROOT / "src" / PACKAGE / name).is_dir()]
CONF = ROOT / "src" / PACKAGE / "conf"
RANKS = Path(__file__).resolve().parent / "ranks"
RANK_SESSION = RANKS.with_name("rank_session.py")
# Half a step of a small run: enough for everything to happen once.
SMALL = ("epochs=2", "data.evaluation_batch=64", "tracking.tensorboard=false")

# A single process needs no MPI, and of two frameworks in one process only one could use it.
SINGLE = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}

Lines = list[dict[str, float]]


def choices(group: str) -> list[str]:
    """What a group of conf/ offers."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def current_engine() -> str:
    """The engine that the fixture of this name has chosen, for this process and those that it starts."""
    return os.environ.get("TESTED_ENGINE", ENGINES[0])


def compose_config(*overrides: str) -> DictConfig:
    """The config as Hydra's entry gives it to train()."""
    with initialize_config_module(f"{PACKAGE}.conf", version_base="1.3"):
        config = compose("train", [f"engine={current_engine()}", *overrides], return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    return config


def read_lines(folder: Path) -> Lines:
    """A run's metrics.jsonl; of a running one without a line that is still being written."""
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def values(folder: Path, name: str) -> list[float]:
    """One metric of a run, in order."""
    return [line[name] for line in read_lines(folder) if name in line]


def environment() -> dict[str, str]:
    """This environment for jobs: the interpreter's own folder first, the tests' modules importable, any transport."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    modules = os.pathsep.join([str(RANKS), str(RANKS.parent), os.environ.get("PYTHONPATH", "")])
    inherited = {key: value for key, value in os.environ.items() if key not in SINGLE}
    return {**inherited, "PATH": path, "PYTHONPATH": modules}


class StartedJob(subprocess.Popen[str]):
    """A job that does not go on when the test that watches it has failed."""

    def __exit__(self, kind: type[BaseException] | None, *more: Any) -> None:
        if kind:
            self.terminate()
        super().__exit__(kind, *more)


def start_job(ranks: int, folder: Path, *overrides: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start training through the project's own launcher."""
    settings = [f"engine={current_engine()}", f"hydra.run.dir={folder}", *overrides]
    command = ["launch/local.sh", "-n", str(ranks), *options, *settings]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return StartedJob(command, cwd=ROOT, env=environment(), text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def run_ranks(ranks: int, *arguments: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    """Run python with these arguments on several ranks over Gloo."""
    command = launched(ranks, sys.executable, *arguments)
    return subprocess.run(command, env=environment(), text=True, capture_output=True, timeout=timeout, check=False)


def launched(ranks: int, *command: str, options: tuple[str, ...] = ("--transport", "gloo")) -> list[str]:
    """The command line that runs a command on several ranks."""
    return [sys.executable, "-m", f"{PACKAGE}.launch", "-n", str(ranks), *options, "--command", "--", *command]


def wait_for_training(run: Path, lines: int = 3) -> None:
    """Return when the run's metrics.jsonl has more than so many lines."""
    file = run / "metrics.jsonl"
    wait_until(lambda: file.exists() and len(read_lines(run)) > lines, f"training in {run}")


def wait_for_process(run: Path, rank: int, start: int = 1) -> int:
    """The process of a rank in the so many-th start of a run, once it has said so in its log."""
    log = run / "logs" / f"rank-{rank}.log"

    def said() -> list[str]:
        return re.findall(r"process (\d+)", log.read_text())[start - 1 :] if log.exists() else []

    return int(wait_until(said, f"a process in {log}")[0])


def is_alive(process: int) -> bool:
    """Whether it runs; what is dead but not yet reaped by its parent does not."""
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A small file system in memory."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    need_root()
    subprocess.run(mount, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
