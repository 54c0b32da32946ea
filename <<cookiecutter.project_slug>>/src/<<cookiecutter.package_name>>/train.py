"""Train a model: python -m <package>.train [option=value ...], alone or under horovodrun, mpirun or srun."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from . import resume
from .checkpoint import Store, describe
from .data import Splits, check_samples
from .distributed import Communicator, launched_rank, open_communicator
from .engine import Engine, open_engine
from .errors import end_well
from .loop import Cadence, Loop
from .options import check_options
from .sampler import Sampler
from .saver import Saver
from .schedule import Schedule, scaling_factor
from .state import State
from .tracking import Tracker, open_log


def train(config: DictConfig, folder: Path) -> None:
    """Build the parts of a run, train, and leave its records in `folder`."""
    OmegaConf.resolve(config)
    check_options(config)
    open_log(folder, launched_rank())
    communicator = open_communicator(config.engine, config.horovod)
    splits = communicator.together(lambda: open_data(config), "data")
    engine = open_engine(config, communicator)
    store = open_store(config, folder)
    with ExitStack() as closing:
        communicator.on_writer(lambda: take_folder(config, folder, store, closing), "folder")
        start = resume.find_start(communicator, store, config.resume)
        fresh = fresh_state(config, splits, communicator)
        state = communicator.together(lambda: resume.plan_from(start, fresh, config.data.global_batch), "plan")
        if start is not None:
            resume.restore(communicator, engine, start, state)
        run(config, folder, communicator, engine, splits, store, state)


def run(
    config: DictConfig,
    folder: Path,
    communicator: Communicator,
    engine: Engine,
    splits: Splits,
    store: Store,
    state: State,
) -> None:
    """Train from `state` to the end and show what came of it."""
    sampler = communicator.together(lambda: open_sampler(config, splits, communicator, state), "sampler")
    saver = open_saver(config, store)
    tracker = Tracker(
        folder,
        writes=communicator.writes,
        epochs=config.epochs,
        start=sampler.progress(state.position),
        step=state.step,
        tensorboard=config.tracking.tensorboard,
    )
    loop = Loop(
        communicator=communicator,
        engine=engine,
        splits=splits,
        sampler=sampler,
        schedule=open_schedule(config, state),
        tracker=tracker,
        save=partial(save, config, communicator, engine, saver),
        cadence=Cadence(config.tracking.log_every, config.evaluate_every, config.checkpoint.every_epochs),
        epochs=config.epochs,
        evaluation_batch=config.data.evaluation_batch,
    )
    began = time.monotonic()
    state = loop.fit(state)
    communicator.on_writer(saver.close, "last save")
    tracker.close(summary(folder, state, communicator.size, time.monotonic() - began))


def open_data(config: DictConfig) -> Splits:
    """The data sets that config.data.source names, checked against data.shape and data.classes."""
    splits: Splits = instantiate(config.data.source)
    for name, part in (("training", splits.train), ("validation", splits.validation)):
        check_samples(part, config.data.shape, config.data.classes, name)
    return splits


def open_store(config: DictConfig, folder: Path) -> Store:
    """The run's checkpoints; accuracy decides which is best."""
    keep = config.checkpoint
    return Store(
        folder / "checkpoints",
        keep_last=keep.keep_last,
        keep_best=keep.keep_best,
        keep_every=keep.keep_every,
        metric="val/accuracy",
        mode="max",
    )


def open_saver(config: DictConfig, store: Store) -> Saver:
    """What hands snapshots to the store, on the writing rank."""
    return Saver(store, asynchronous=config.checkpoint.asynchronous, max_failures=config.checkpoint.max_failures)


def fresh_state(config: DictConfig, splits: Splits, communicator: Communicator) -> State:
    """The state before the first step."""
    per_rank = config.data.batch_size * config.horovod.accumulation
    return State(
        samples=len(splits.train),
        global_batch=config.data.global_batch or per_rank * communicator.size,
        world_size=communicator.size,
    )


def open_sampler(config: DictConfig, splits: Splits, communicator: Communicator, state: State) -> Sampler:
    """The plan of the whole run for this rank."""
    return Sampler(
        samples=len(splits.train),
        global_batch=state.global_batch,
        rank=communicator.rank,
        size=communicator.size,
        accumulation=config.horovod.accumulation,
        seed=config.seed,
        distribution=config.data.distribution,
    )


def open_schedule(config: DictConfig, state: State) -> Schedule:
    """The learning rate's schedule, scaled from data.batch_size to the global batch."""
    options = {key: value for key, value in config.schedule.items() if key != "scaling"}
    batches = state.global_batch / config.data.batch_size
    factor = scaling_factor(config.schedule.scaling, batches, batches / state.world_size)
    base = config.optimizer.lr
    return Schedule(base=base, peak=base * factor, epochs=config.epochs, **options)


def save(config: DictConfig, communicator: Communicator, engine: Engine, saver: Saver, state: State) -> None:
    """One checkpoint of all ranks; the writing rank's saver decides when the bytes reach the disk."""
    ranks = communicator.gather(engine.rank_state(), "rank_state")
    text = OmegaConf.to_yaml(config)

    def snapshot() -> Callable[[Path], None]:
        write_engine = engine.snapshot(ranks)

        def write(folder: Path) -> None:
            write_engine(folder)
            state.write(folder)
            (folder / "config.yaml").write_text(text, encoding="utf-8")

        return write

    communicator.on_writer(lambda: saver.save(state.step, snapshot, _meta(text, state)), "save")


@lru_cache(maxsize=1)
def _describe(config_text: str) -> dict[str, Any]:
    described: dict[str, Any] = describe(config_text)  # runs git, so once
    return described


def _meta(config_text: str, state: State) -> dict[str, Any]:
    return {
        **_describe(config_text),
        "epoch": state.position.epoch,
        "metrics": state.metrics,
        "world_size": state.world_size,
        "global_batch": state.global_batch,
    }


def take_folder(config: DictConfig, folder: Path, store: Store, closing: ExitStack) -> None:
    """Lock the run's folder and write down what runs in it."""
    closing.enter_context(store.lock())
    resume.choose(store, config.resume)  # may refuse, before anything in the folder is changed
    (folder / ".hydra").mkdir(exist_ok=True)
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    OmegaConf.save(HydraConfig.get().overrides.task, folder / ".hydra" / "overrides.yaml")


def summary(folder: Path, state: State, size: int, seconds: float) -> dict[str, str]:
    """The rows of the table at the end."""
    return {
        "validation accuracy": f"{100 * state.metrics['val/accuracy']:.2f} %",
        "best validation accuracy": f"{100 * (state.best or 0):.2f} %",
        "epochs, steps": f"{state.position.epoch}, {state.step}",
        "ranks, global batch": f"{size}, {state.global_batch}",
        "time": f"{seconds:.1f} s",
        "run folder": str(folder),
        "curves": str(folder / "curves.png"),
    }


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    """Hydra's entry."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    end_well(lambda: train(config, folder), launched_rank)


if __name__ == "__main__":
    end_well(main, launched_rank)
