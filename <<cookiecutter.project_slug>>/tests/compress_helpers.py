"""What the tests of compression share: a trained source and jobs that compress it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from jobs import PACKAGE, SINGLE, current_engine, environment, run_ranks
from omegaconf import DictConfig

SOURCE = ("model=cnn", "model.width=16", "epochs=6", "tracking.tensorboard=false", "checkpoint.asynchronous=false")


def command(source: Path, folder: Path, *overrides: str) -> list[str]:
    return ["-m", f"{PACKAGE}.compress", f"from={source}", "name=it", f"hydra.run.dir={folder}", *overrides]


def alone() -> dict[str, str]:
    """The environment of a single process."""
    return {**environment(), **SINGLE}


def make_source(folder: Path, *overrides: str) -> Path:
    """Train a small network with one process."""
    arguments = ["-m", f"{PACKAGE}.train", f"engine={current_engine()}", f"hydra.run.dir={folder}", *SOURCE, *overrides]
    result = subprocess.run([sys.executable, *arguments], env=alone(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def run_compress(source: Path, folder: Path, *overrides: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    arguments = command(source, folder, *overrides)
    if ranks > 1:
        return run_ranks(ranks, *arguments)
    return subprocess.run([sys.executable, *arguments], env=alone(), capture_output=True, text=True, check=False)


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def zeros_in(folder: Path) -> float:
    """The fraction of zeros in the weights of a written model, counted anew."""
    from safetensors.numpy import load_file

    weights = [array for array in load_file(folder / "artefact" / "model" / "model.safetensors").values()]
    weights = [array for array in weights if array.ndim > 1]
    return sum(int((array == 0).sum()) for array in weights) / sum(array.size for array in weights)


def compress_config(source: Path, *overrides: str) -> DictConfig:
    """The config as Hydra's entry gives it to compress()."""
    with initialize_config_module(f"{PACKAGE}.conf", version_base="1.3"):
        return compose("compress", [f"from={source}", "name=it", *overrides])
