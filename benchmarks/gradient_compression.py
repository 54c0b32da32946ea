"""What compressed gradients send, how well they train, and what a step costs, beside gradients as they are.

    python benchmarks/gradient_compression.py PROJECT [--model mlp] [--ranks 2] [--epochs 20] [--seeds 3]

PROJECT is a rendered PyTorch project whose environment is installed (`nox -s demo` makes one in demo/). Bytes are those
that a rank hands to Horovod's allreduces in one step. The trainings take turns on the digits; a step's time is the
median over all seeds, as a part of that without compression. With a slow network between the ranks, as root:

    unshare --net sh -c 'ip link set lo up mtu 1500
        tc qdisc add dev lo root tbf rate 100mbit burst 64kb latency 1s
        python benchmarks/gradient_compression.py PROJECT --transport gloo'
"""

import argparse
import importlib
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from jobs import Project

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


def count_on_ranks(project: Project, options: list[str]) -> int:
    """Bytes per step and rank."""
    script = [str(Path(__file__).resolve()), "--count", project.package, *options]
    said = project.output([*project.launcher, "python", *script])
    return int(said.split("bytes=")[1].split()[0])


def train(project: Project, options: list[str]) -> tuple[float, float]:
    """Validation accuracy at the end, and the median time of a step in relative units."""
    with tempfile.TemporaryDirectory() as folder:
        lines = project.train(f"{folder}/run", "engine=torch", "tracking.tensorboard=false", *options)
    speeds = [line["samples_per_s"] for line in lines if "samples_per_s" in line]
    accuracy: float = [line["val/accuracy"] for line in lines if "val/accuracy" in line][-1]
    return accuracy, 1 / statistics.median(speeds[3:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", type=Path)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--transport", default="auto")
    options = parser.parse_args()
    project = Project(options.project, options.ranks, options.transport)
    results: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for seed in range(options.seeds):
        for way, words in WAYS.items():
            more = [f"model={options.model}", f"epochs={options.epochs}", f"seed={seed}"]
            results[way].append(train(project, [*words, *more]))
    plain = statistics.median(time for _, time in results["none"])
    for way, words in WAYS.items():
        sent = count_on_ranks(project, [*words, f"model={options.model}"])
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
