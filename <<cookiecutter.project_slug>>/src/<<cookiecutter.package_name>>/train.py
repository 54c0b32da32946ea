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
from .build import fresh_state, open_cadence, open_data, open_sampler, open_schedule, open_store
from .checkpoint import Store
from .data import Splits
from .distributed import Communicator, launched_rank, open_communicator
from .engine import Engine, open_engine
from .errors import UserError, end_well
from .loop import Loop
from .options import check_options
from .preemption import Preemption
from .save import open_saver
from .state import State
from .tracking import Tracker, open_log, show_table


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


def train(config: DictConfig, folder: Path) -> State:
    """Build the parts of a run, train, and leave its records in `folder`."""
    run = open_run(config, folder)
    return carry_on(run, lambda: begin(run))


def carry_on(run: Run, begin: Callable[[], None]) -> State:
    """Train from where the run had come to; a new one lets `begin` set its first weights."""
    with ExitStack() as closing:
        start = run.communicator.on_writer(lambda: take_folder(run, closing), "folder")
        state = run.communicator.together(lambda: plan(run, start), "plan")
        if start is not None:
            resume.restore(run.communicator, run.engine, start, state)
        else:
            begin()
        return fit(run, state, resumed=start is not None)


def begin(run: Run) -> None:
    """Take the weights of another run if the config names one."""
    if run.config.weights_from is not None:
        report = resume.load_weights(run.communicator, run.engine, run.store, str(run.config.weights_from))
        if run.communicator.writes:
            show_table("weights", report)


def open_run(config: DictConfig, folder: Path) -> Run:
    """Check the config, start Horovod, build the model and read the data."""
    OmegaConf.resolve(config)
    check_options(config)
    open_log(folder, launched_rank())
    communicator = open_communicator(config.engine, config.horovod)
    preemption = Preemption(communicator)
    preemption.listen()
    engine = open_engine(config, communicator)
    splits = communicator.together(lambda: open_data(config), "data")
    return Run(config, folder, communicator, preemption, splits, engine, open_store(config, folder))


def take_folder(run: Run, closing: ExitStack) -> Path | None:
    """Lock the run's folder, choose the checkpoint to go on from, and write down what runs there."""
    closing.enter_context(run.store.lock())
    start = resume.find_start(run.store, str(run.config.resume))
    if start is not None:
        resume.check_config(start, run.config)
    (run.folder / ".hydra").mkdir(exist_ok=True)
    OmegaConf.save(run.config, run.folder / ".hydra" / "config.yaml")
    OmegaConf.save(HydraConfig.get().overrides.task, run.folder / ".hydra" / "overrides.yaml")
    return start


def plan(run: Run, start: Path | None) -> State:
    """The state to start from: a checkpoint's, or a fresh one."""
    fresh = fresh_state(run.config, run.splits, run.communicator)
    return fresh if start is None else resume.plan_from(start, fresh, run.config.data.global_batch)


def fit(run: Run, state: State, resumed: bool) -> State:
    """Train from `state`, which a checkpoint may hold already, to the end and show what came of it."""
    config, communicator = run.config, run.communicator
    sampler = communicator.together(lambda: open_sampler(config, communicator, state), "sampler")
    schedule = communicator.together(lambda: open_schedule(config, state), "schedule")
    saver = communicator.together(lambda: open_saver(config, communicator, run.engine, run.store), "saver")
    if resumed:
        saver.has(state)
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


def summary(run: Run, state: State, seconds: float) -> dict[str, str]:
    """The rows of the table at the end."""
    return {
        "validation accuracy": f"{100 * state.metrics['val/accuracy']:.2f} %",
        "best validation accuracy": f"{100 * (state.best or 0):.2f} %",
        "epochs, steps": f"{state.position.epoch}, {state.step}",
        "ranks, global batch": f"{state.world_size}, {state.global_batch}",
        "time": f"{seconds:.1f} s",
        "run folder": os.path.relpath(run.folder),
        "curves": os.path.relpath(run.folder / "curves.png"),
    }


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    """Hydra's entry."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    end_well(lambda: train(config, folder), launched_rank)


if __name__ == "__main__":
    end_well(guarded(main), launched_rank)
