"""What compressed gradients send, how well they train, and what a step costs, beside gradients as they are.

    python benchmarks/gradient_compression.py PROJECT [--model mlp] [--ranks 2] [--epochs 20] [--seeds 3]

PROJECT is a rendered PyTorch project whose environment is installed (`nox -s demo` makes one in demo/). Bytes are those
that a rank hands to Horovod's allreduces in one step. The trainings take turns on the digits; a step's time is the
median over all seeds, as a part of that without compression.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WAYS = {
    "none": ["horovod.compression=none"],
    "fp16": ["horovod.compression=fp16"],
    "powersgd, rank 4": ["horovod.compression=powersgd", "horovod.powersgd_rank=4"],
    "powersgd, rank 2": ["horovod.compression=powersgd", "horovod.powersgd_rank=2"],
}


def count(package: str, options: list[str]) -> None:
    """On each rank: print the bytes of one step."""
    from hydra import compose, initialize_config_module

    rooms = {name: importlib.import_module(f"{package}.{name}") for name in ("build", "distributed", "engine")}
    with initialize_config_module(f"{package}.conf", version_base="1.3"):
        config = compose("train", ["engine=torch", "name=count", *options])
    communicator = rooms["distributed"].open_communicator("torch", config.horovod)
    engine = rooms["engine"].open_engine(config, communicator)
    splits = rooms["build"].open_data(config)
    state = rooms["build"].fresh_state(config, splits, communicator)
    shares = rooms["build"].open_sampler(config, communicator, state).shares(state.position, epochs=1)
    share, batch = next(engine.train_batches(splits.train, shares))
    sent: list[int] = []
    for name in ("allreduce_async_", "grouped_allreduce_"):
        setattr(communicator.hvd, name, counting(getattr(communicator.hvd, name), sent))
    engine.train_step(share, batch, 0.1)
    print(f"bytes={sum(sent)}")


def counting(call: Any, sent: list[int]) -> Any:
    """The same call, noting how much it was given."""

    def noting(tensors: Any, *arguments: Any, **options: Any) -> Any:
        sent.extend(tensor.nbytes for tensor in (tensors if isinstance(tensors, list) else [tensors]))
        return call(tensors, *arguments, **options)

    return noting


class Trials:
    """Starts jobs in the project's environment."""

    def __init__(self, project: Path, ranks: int) -> None:
        self.project, self.ranks = project, ranks
        self.package = next((project / "src").glob("*/train.py")).parent.name
        path = f"{project / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": str(project / "src")}

    def launch(self, *words: str) -> str:
        """What a job of all ranks prints."""
        command = ["python", "-m", f"{self.package}.launch", "-n", str(self.ranks), *words]
        done = subprocess.run(
            command, cwd=self.project, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            sys.exit(f"error: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def count(self, options: list[str]) -> int:
        """Bytes per step and rank."""
        script = [sys.argv[0], "--count", self.package, *options]
        said = self.launch("--command", "--", "python", *script)
        return int(said.split("bytes=")[1].split()[0])

    def train(self, options: list[str]) -> tuple[float, float]:
        """Validation accuracy at the end, and the median time of a step in relative units."""
        with tempfile.TemporaryDirectory() as folder:
            self.launch("engine=torch", f"hydra.run.dir={folder}", "tracking.tensorboard=false", *options)
            lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        speeds = [line["samples_per_s"] for line in lines if "samples_per_s" in line]
        accuracy: float = [line["val/accuracy"] for line in lines if "val/accuracy" in line][-1]
        return accuracy, 1 / statistics.median(speeds[3:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", type=lambda text: Path(text).resolve())
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    sys.argv[0] = str(Path(sys.argv[0]).resolve())
    trials = Trials(options.project, options.ranks)
    results: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for seed in range(options.seeds):
        for way, words in WAYS.items():
            more = [f"model={options.model}", f"epochs={options.epochs}", f"seed={seed}"]
            results[way].append(trials.train([*words, *more]))
    plain = statistics.median(time for _, time in results["none"])
    for way, words in WAYS.items():
        sent = trials.count([*words, f"model={options.model}"])
        accuracies = [accuracy for accuracy, _ in results[way]]
        each = ", ".join(f"{100 * one:.2f}" for one in accuracies)
        time = statistics.median(time for _, time in results[way]) / plain
        mean = 100 * statistics.mean(accuracies)
        print(f"{way:17} {sent:8,} bytes a step   accuracy {mean:.2f} % ({each})   step {time:.2f} of none")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--count"]:
        count(sys.argv[2], sys.argv[3:])
    else:
        main()
