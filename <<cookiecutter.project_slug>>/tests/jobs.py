"""What the tests share: composed configs, records of runs, and jobs of several ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

PACKAGE = "<< cookiecutter.package_name >>"
ROOT = Path(__file__).resolve().parent.parent
RANKS = Path(__file__).resolve().parent / "ranks"
# Half a step of a small run: enough for everything to happen once.
SMALL = ("epochs=2", "data.evaluation_batch=64", "tracking.tensorboard=false")

Lines = list[dict[str, float]]


def compose_config(*overrides: str) -> DictConfig:
    """The config as Hydra's entry gives it to train()."""
    with initialize_config_module(f"{PACKAGE}.conf", version_base="1.3"):
        config = compose("train", list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    return config


def read_lines(folder: Path) -> Lines:
    """A run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def values(folder: Path, name: str) -> list[float]:
    """One metric of a run, in order."""
    return [line[name] for line in read_lines(folder) if name in line]


def environment() -> dict[str, str]:
    """This environment, with the interpreter's own folder first and the tests' modules importable."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    modules = os.pathsep.join([str(RANKS), str(RANKS.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PATH": path, "PYTHONPATH": modules, "COLUMNS": "120"}


def start_job(ranks: int, folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """Start training through the project's own launcher."""
    command = ["launch/local.sh", "-n", str(ranks), f"hydra.run.dir={folder}", *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def run_ranks(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run python with these arguments on several ranks over Gloo."""
    launcher = ["horovodrun", "--gloo", "--network-interfaces", "lo", "-np", str(ranks)]
    command = [*launcher, sys.executable, *arguments]
    return subprocess.run(command, env=environment(), text=True, capture_output=True, timeout=180, check=False)
