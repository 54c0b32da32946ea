"""Step times of one model on the same data, side by side, as ratios.

    python benchmarks/step_time.py PROJECT [--model mlp] [--ranks 2] [--repeats 3]

PROJECT is a rendered project whose environment is installed (`nox -s demo` makes one in demo/). Contenders:
one bare process; torch DDP over Gloo; a bare hand-written Horovod loop; the project's own training command,
with its sampler, schedule, logging and tracking. All take 64 samples per rank and step, of the same random arrays,
and look at the loss every 10 steps. The contenders take turns, so that a busy moment of the machine hits all alike.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

BATCH, WINDOW, WINDOWS = 64, 10, 30
MODELS = {
    "mlp": ["model=mlp", "model.hidden=[512,512]", "data.shape=[8,8,1]"],
    "cnn": ["model=cnn", "model.width=32", "data.shape=[32,32,3]"],
}
SHAPES = {"mlp": (8, 8, 1), "cnn": (32, 32, 3)}


def measure(step: Callable[[int], object], finish: Callable[[], float]) -> float:
    """The median time of one step in ms, over windows of 10 steps of which the first are warm-up."""
    times = []
    for window in range(WINDOWS):
        start = time.perf_counter()
        for index in range(WINDOW):
            step(window * WINDOW + index)
        finish()
        times.append((time.perf_counter() - start) / WINDOW * 1000)
    return statistics.median(times[5:])


def bare_loop(package: str, model_name: str, rank: int, size: int, wrap: str) -> float:
    """A hand-written loop with nothing but the step in it; `wrap` makes it parallel."""
    import torch
    from torch import nn

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    shape = SHAPES[model_name]
    models = import_module(f"{package}.torch.models")
    torch.manual_seed(0)
    model: nn.Module = models.mlp(shape, 10, [512, 512]) if model_name == "mlp" else models.cnn(shape, 10)
    inputs, labels = torch.randn(4096, shape[2], *shape[:2]), torch.randint(10, (4096,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if wrap == "horovod":
        hvd = import_module("horovod.torch")
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    plan = _plan(rank, size)
    loss = torch.zeros(())

    def step(index: int) -> None:
        nonlocal loss
        rows = torch.tensor(next(plan))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
        torch.autograd.backward(loss)
        optimizer.step()

    return measure(step, lambda: float(loss.item()))


def _plan(rank: int, size: int) -> Iterator[list[int]]:
    import numpy as np

    for epoch in itertools.count():
        order = np.random.default_rng(epoch).permutation(4096)
        for batch in order.reshape(-1, BATCH * size):
            yield batch[rank * BATCH : (rank + 1) * BATCH].tolist()


def run_here(kind: str, package: str, model: str) -> None:
    """One rank of a contender: rank 0 prints its time."""
    rank, size = 0, 1
    if kind == "ddp":
        import torch.distributed

        torch.distributed.init_process_group("gloo")
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if kind == "horovod":
        hvd = import_module("horovod.torch")
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
    milliseconds = bare_loop(package, model, rank, size, kind)
    if rank == 0:
        print(f"milliseconds={milliseconds}")


class Contest:
    """Starts the contenders in the project's environment."""

    def __init__(self, project: Path, model: str, ranks: int) -> None:
        self.project, self.model, self.ranks = project, model, ranks
        self.package = next((project / "src").glob("*/train.py")).parent.name
        scripts = project / ".venv" / "bin"
        self.environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": ""}
        self.environment = {name: value for name, value in self.environment.items() if value}
        self.launcher = self._launcher()

    def _launcher(self) -> list[str]:
        """The command with which launch/local.sh starts ranks here."""
        script = (self.project / "launch" / "local.sh").read_text()
        trial = script.replace("exec mpirun", "echo mpirun").replace("exec horovodrun", "echo horovodrun")
        trial = trial.replace('cd "$(dirname "${BASH_SOURCE[0]}")/.."', "true")
        words = self._output(["bash", "-c", trial, "local.sh", "-n", str(self.ranks)]).split()
        return words[: words.index("python")]

    def _output(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self.project, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            sys.exit(f"error: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def bare(self, kind: str) -> float:
        """The time of a hand-written loop."""
        me = [str(Path(__file__).resolve()), str(self.project), "--model", self.model, "--contender", kind]
        starts = {
            "single": ["python"],
            "ddp": ["torchrun", "--standalone", "--nproc-per-node", str(self.ranks)],
            "horovod": [*self.launcher, "python"],
        }
        printed = self._output([*starts[kind], *me])
        return float(printed.split("milliseconds=")[1].split()[0])

    def ours(self) -> float:
        """The time of a step of the training command, from its own metrics.jsonl."""
        with tempfile.TemporaryDirectory() as folder:
            steps = WINDOW * WINDOWS
            epochs = -(-steps * BATCH * self.ranks // 4096)
            options = ["data=synthetic", *MODELS[self.model], f"data.batch_size={BATCH}", f"epochs={epochs}"]
            options += [f"evaluate_every={epochs}", f"checkpoint.every_epochs={epochs}"]
            command = ["python", "-m", f"{self.package}.train", f"hydra.run.dir={folder}/run", *options]
            self._output([*self.launcher, *command])
            lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
            rates = [line["samples_per_s"] for line in lines if "samples_per_s" in line and line["step"] % WINDOW == 0]
        return float(BATCH * self.ranks / statistics.median(rates[5:]) * 1000)


def main() -> None:
    """Run the contenders in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", type=Path)
    parser.add_argument("--model", choices=sorted(MODELS), default="mlp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--contender", choices=("single", "ddp", "horovod"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        package = next((options.project / "src").glob("*/train.py")).parent.name
        return run_here(options.contender, package, options.model)
    contest = Contest(options.project.resolve(), options.model, options.ranks)
    times: dict[str, list[float]] = {"one bare process": [], "torch DDP, Gloo": [], "bare Horovod": [], "ours": []}
    for _ in range(options.repeats):
        for name, kind in zip(times, ("single", "ddp", "horovod"), strict=False):
            times[name].append(contest.bare(kind))
        times["ours"].append(contest.ours())
    print(f"{options.model}, {options.ranks} ranks ({contest.launcher[0]}), {BATCH} samples per rank and step")
    best = {name: min(values) for name, values in times.items()}
    for name, milliseconds in best.items():
        print(f"{name:18} {milliseconds:8.2f} ms  {milliseconds / best['bare Horovod']:5.2f} of bare Horovod")


if __name__ == "__main__":
    main()
