"""Train a model: python -m <package>.train [option=value ...], alone or under launch/local.sh, mpirun or srun."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from . import resume
from .addresses import guarded
from .assemble import fresh_state, open_cadence, open_data, open_sampler, open_schedule, open_store
from .checkpoints.store import Store
from .data import Splits
from .engine import Engine, open_engine
from .errors import UserError, end_hydra_well, end_well
from .loop import Loop
from .options import check_options
from .preemption import Preemption
from .ranks import Communicator, launched_rank, open_communicator
from .run_folder import TRAINING, check_folder
from .saving import Saver, upload_newest
from .tables import print_table
from .tracking import METRICS, Tracker, open_log, read_metrics
from .train_state import TrainState


@dataclass(frozen=True)
class Run:
    """The parts that live as long as the training."""

    config: DictConfig
    folder: Path
    communicator: Communicator
    preemption: Preemption
    splits: Splits
    engine: Engine
    store: Store


def train(config: DictConfig, folder: Path) -> TrainState:
    """Build the parts of a run, train, and leave its records in `folder`."""
    run = open_run(config, folder, TRAINING)
    return carry_on(run, lambda: begin(run), lambda: None)


def carry_on(run: Run, begin: Callable[[], None], record: Callable[[], None]) -> TrainState:
    """Train from where the run had come to, if there is anything left to train.

    Args:
        run: Its parts.
        begin: Sets the first weights of a new run.
        record: Writes down more than the options, on the writing rank, once it is certain that something will train.
    """
    with ExitStack() as closing:
        folder = run.communicator.on_writer(lambda: take_folder(run, closing), "folder")
        fresh = fresh_state(run.config, run.splits, run.communicator)
        if folder is None:
            begin()
            return fit(run, fresh, record)
        cadence = open_cadence(run.config)
        start = run.communicator.together(lambda: resume.read_start(folder, fresh, run.config, cadence), "plan")
        if start.finished:
            return show_result(run, start.saved)
        resume.restore(run.communicator, run.engine, start)
        return fit(run, start.state, record, resumed=True)


def begin(run: Run) -> None:
    """Take the weights of another run if the config names one."""
    if run.config.weights_from is not None:
        report = resume.load_weights(run.communicator, run.engine, run.store, str(run.config.weights_from))
        if run.communicator.writes:
            print_table(("weights", ""), report.items())


def open_run(config: DictConfig, folder: Path, kind: str) -> Run:
    """Check the config and the folder, start Horovod, build the model and read the data."""
    OmegaConf.resolve(config)
    check_options(config)
    check_folder(folder, kind)
    open_log(folder, launched_rank())
    communicator = open_communicator(config.engine, config.horovod)
    preemption = Preemption(communicator)
    preemption.listen()
    engine = open_engine(config, communicator)
    splits = communicator.together(lambda: open_data(config), "data")
    return Run(config, folder, communicator, preemption, splits, engine, open_store(config, folder))


def take_folder(run: Run, closing: ExitStack) -> Path | None:
    """Lock the run's folder and choose the checkpoint to go on from."""
    closing.enter_context(run.store.lock())
    read_metrics(run.folder / METRICS)
    return resume.find_start(run.store, str(run.config.resume))


def write_options(config: DictConfig, folder: Path) -> None:
    """Write down in .hydra/ what runs in a folder."""
    (folder / ".hydra").mkdir(exist_ok=True)
    for name, options in (("config.yaml", config), ("overrides.yaml", HydraConfig.get().overrides.task)):
        OmegaConf.save(options, folder / ".hydra" / f"{name}.tmp")
        (folder / ".hydra" / f"{name}.tmp").replace(folder / ".hydra" / name)


def show_result(run: Run, state: TrainState) -> TrainState:
    """What a finished run has come to; a mirror gets what it still lacks."""
    run.communicator.on_writer(lambda: upload_newest(run.config, run.store), "mirror")
    if run.communicator.writes:
        print_table(("training finished", ""), summary(run, state).items())
    return state


def fit(run: Run, state: TrainState, record: Callable[[], None], resumed: bool = False) -> TrainState:
    """Train from `state`, which a checkpoint may hold already, to the end and show what came of it."""
    config, communicator = run.config, run.communicator
    sampler = communicator.together(lambda: open_sampler(config, communicator, state), "sampler")
    schedule = communicator.together(lambda: open_schedule(config, state), "schedule")
    saved = state if resumed else None
    saver = communicator.together(lambda: Saver(config, communicator, run.engine, run.store, saved), "saver")
    communicator.on_writer(record, "record")
    communicator.on_writer(lambda: write_options(config, run.folder), "options")
    tracker = Tracker(
        run.folder,
        writes=communicator.writes,
        epochs=config.epochs,
        start=sampler.progress(state.position),
        step=state.step,
        tensorboard=config.tracking.tensorboard,
    )
    loop = Loop(
        communicator=communicator,
        engine=run.engine,
        splits=run.splits,
        sampler=sampler,
        schedule=schedule,
        tracker=tracker,
        save=saver,
        preemption=run.preemption,
        cadence=open_cadence(config),
        evaluation_batch=config.data.evaluation_batch,
        compression=str(config.horovod.compression),
    )
    began = time.monotonic()
    try:
        final = loop.fit(state)
    except UserError as error:
        if error.agreed:  # all ranks are here
            saver.close(mirror_timeout=1.0)
        tracker.close()
        raise
    saver.close()
    tracker.close(summary(run, final, time.monotonic() - began))
    return final


def summary(run: Run, state: TrainState, seconds: float | None = None) -> dict[str, str]:
    """The rows of the table at the end."""
    impatient = open_cadence(run.config).out_of_patience(state)
    ended = f"no better accuracy in {state.stale} evaluations (patience={run.config.patience})"
    return {
        "validation accuracy": f"{100 * state.metrics['val/accuracy']:.2f} %",
        "best validation accuracy": f"{100 * (state.best or 0):.2f} %",
        "epochs, steps": f"{state.position.epoch}, {state.step}",
        "ranks, global batch": f"{state.world_size}, {state.global_batch}",
        **({"ended early": ended} if impatient else {}),
        **({"time": f"{seconds:.1f} s"} if seconds is not None else {}),
        "run folder": os.path.relpath(run.folder),
        "curves": os.path.relpath(run.folder / "curves.png"),
    }


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    """Hydra's entry."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    end_well(lambda: train(config, folder), launched_rank)


if __name__ == "__main__":
    end_hydra_well(guarded(main), launched_rank)
