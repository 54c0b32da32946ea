"""Step times of one model on the same data, side by side, as ratios.

    python benchmarks/step_time.py PROJECT [--engine torch] [--model mlp] [--ranks 2] [--repeats 3]

PROJECT is a rendered project whose environment is installed (`nox -s demo` makes one in demo/). Contenders:
one bare process; the framework's own way (torch DDP over Gloo, or tf.distribute's MultiWorkerMirroredStrategy);
a bare hand-written Horovod loop; the project's own training command, with its sampler, schedule, logging and tracking.
All take 64 samples per rank and step, of the same random arrays, and look at the loss every 10 steps. The contenders
take turns, so that a busy moment of the machine hits all alike.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from bare import BATCH, SAMPLES, WINDOW, WINDOWS
from jobs import Project

MODELS = {
    "mlp": ["model=mlp", "model.hidden=[512,512]", "data.shape=[8,8,1]"],
    "cnn": ["model=cnn", "model.width=32", "data.shape=[32,32,3]"],
}
RIVALS = {"torch": ("ddp", "torch DDP, Gloo"), "tensorflow": ("strategy", "MultiWorkerMirrored")}


class Contest:
    """Starts the contenders in the project's environment."""

    def __init__(self, folder: Path, engine: str, model: str, ranks: int) -> None:
        self.engine, self.model, self.ranks = engine, model, ranks
        self.project = Project(folder, ranks)
        self.transport = self._transport()

    def _transport(self) -> str:
        """How it starts ranks here."""
        said = self.project.output([*self.project.launcher[:-2], "--dry-run"])
        return "MPI" if said.startswith("mpirun") else "Gloo"

    def bare(self, kind: str) -> float:
        """The time of a hand-written loop."""
        script = Path(__file__).resolve().with_name(f"bare_{self.engine}.py")
        starts = {
            "single": ["python"],
            "ddp": ["torchrun", "--standalone", "--nproc-per-node", str(self.ranks)],
            "strategy": ["bash", "-c", 'RANK=1 python "$@" & RANK=0 python "$@"; wait', "bash"],
            "horovod": [*self.project.launcher, "python"],
        }
        printed = self.project.output([*starts[kind], str(script), self.project.package, self.model, kind])
        return float(printed.split("milliseconds=")[1].split()[0])

    def ours(self) -> float:
        """The time of a step of the training command, from its own metrics.jsonl."""
        with tempfile.TemporaryDirectory() as folder:
            steps = WINDOW * WINDOWS
            epochs = -(-steps * BATCH * self.ranks // SAMPLES)
            options = [
                f"engine={self.engine}",
                "data=synthetic",
                *MODELS[self.model],
                f"data.batch_size={BATCH}",
                f"epochs={epochs}",
            ]
            options += [f"evaluate_every={epochs}", f"checkpoint.every_epochs={epochs}"]
            lines = self.project.train(f"{folder}/run", *options)
            rates = [line["samples_per_s"] for line in lines if "samples_per_s" in line and line["step"] % WINDOW == 0]
        return float(BATCH * self.ranks / statistics.median(rates[5:]) * 1000)


def main() -> None:
    """Run the contenders in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", type=Path)
    parser.add_argument("--engine", choices=sorted(RIVALS), default="torch")
    parser.add_argument("--model", choices=sorted(MODELS), default="mlp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    contest = Contest(options.project, options.engine, options.model, options.ranks)
    rival, name_of_rival = RIVALS[options.engine]
    kinds = {"one bare process": "single", name_of_rival: rival, "bare Horovod": "horovod"}
    times: dict[str, list[float]] = {name: [] for name in (*kinds, "ours")}
    for _ in range(options.repeats):
        for name, kind in kinds.items():
            times[name].append(contest.bare(kind))
        times["ours"].append(contest.ours())
    started = f"{options.ranks} ranks ({contest.transport})"
    print(f"{options.engine}, {options.model}, {started}, {BATCH} samples per rank and step")
    best = {name: min(values) for name, values in times.items()}
    for name, milliseconds in best.items():
        print(f"{name:20} {milliseconds:8.2f} ms  {milliseconds / best['bare Horovod']:5.2f} of bare Horovod")


if __name__ == "__main__":
    main()
