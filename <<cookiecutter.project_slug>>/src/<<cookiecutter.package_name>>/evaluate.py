"""Measure a checkpoint on the validation data: python -m <package>.evaluate runs/<name> [--checkpoint best].

The run's own config is used; options may follow, as in data.root=/elsewhere. Works alone or with several ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from .assemble import open_data
from .checkpoints.store import Store
from .engine import Engine, open_engine
from .errors import Parser, UserError, end_well
from .loop import evaluate
from .options import read_options
from .ranks import launched_rank, open_communicator
from .trust import add_trust
from .weights import FILE


def run_config(run: Path, changes: list[str], trusted: Sequence[str] = ()) -> DictConfig:
    """The config that a run was started with, with some options changed; `trusted` as for trust.check().

    Its timeline is left out: it tells of the training, and what reads this config would write over it.

    Raises:
        UserError: if the folder is not a run's, an option does not exist, or what it names is not trusted.
    """
    file = run / ".hydra" / "config.yaml"
    if not file.exists():
        raise UserError(f"{run} is no run: it has no .hydra/config.yaml; name a folder such as runs/<name>")
    return read_options(file, ["horovod.timeline=null", *changes], trusted)


def evaluate_run(run: Path, which: str, changes: list[str], trusted: Sequence[str] = ()) -> dict[str, float | str]:
    """Loss and accuracy of one checkpoint, measured by all ranks together; `trusted` as for trust.check()."""
    config = run_config(run, changes, trusted)
    communicator = open_communicator(config.engine, config.horovod)
    engine = open_engine(config, communicator)
    splits = communicator.together(lambda: open_data(config), "data")
    store = Store(run / "checkpoints")
    folder = communicator.on_writer(lambda: store.find_good(which).folder, "checkpoint")
    communicator.together(lambda: load_all(engine, folder), "weights")
    return {"checkpoint": str(folder), **evaluate(communicator, engine, splits, config.data.evaluation_batch)}


def load_all(engine: Engine, folder: Path) -> None:
    """Take every weight of a checkpoint or model folder.

    Raises:
        UserError: if it is of another architecture, or holds a file for another runtime instead.
    """
    if not (folder / FILE).exists():
        raise UserError(f"{folder} has no {FILE}, as after quantization: name a checkpoint that was trained")
    misfits = [f"{name} {what}" for name, what in engine.load_weights(folder).items() if what != "loaded"]
    if misfits:
        raise UserError(f"{folder} is of another model: {misfits[0]}; use it with the options it was made with")


def main() -> None:
    """Read the command line and print one line of JSON."""
    parser = Parser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--checkpoint", default="best", help="best, latest, a step, a tag or a folder")
    add_trust(parser)
    parser.add_argument("changes", nargs="*", help="options that differ from the run's")
    options = parser.parse_intermixed_args()
    result = evaluate_run(options.run, options.checkpoint, options.changes, options.trust)
    if launched_rank() == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    end_well(main, launched_rank)
