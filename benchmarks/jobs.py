"""Starts jobs in a rendered project's own environment."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class Project:
    """A rendered project whose environment is installed.

    Attributes:
        package: Its Python package.
        launcher: The start of a command line; what follows runs on all ranks.
    """

    def __init__(self, folder: Path, ranks: int, transport: str = "auto") -> None:
        self.folder = folder.resolve()
        self.package = next((self.folder / "src").glob("*/train.py")).parent.name
        options = ["-n", str(ranks), "--transport", transport, "--command", "--"]
        self.launcher = ["python", "-m", f"{self.package}.launch", *options]
        path = f"{self.folder / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "PYTHONPATH": str(self.folder / "src")}
        self._environment.pop("OMP_NUM_THREADS", None)

    def output(self, command: list[str]) -> str:
        """What a command prints; ends this process if it fails."""
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            sys.exit(f"error: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def train(self, run: str, *options: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of a training on all ranks in the folder `run`."""
        self.output([*self.launcher, "python", "-m", f"{self.package}.train", f"hydra.run.dir={run}", *options])
        return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
