"""The parts of a run, each built from its part of the config."""

from __future__ import annotations

from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from .checkpoints.store import Store
from .data import Splits, check_samples
from .errors import UserError
from .loop import Cadence
from .ranks import Communicator
from .sampler import Sampler
from .schedule import Schedule, scaling_factor
from .train_state import TrainState


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


def fresh_state(config: DictConfig, splits: Splits, communicator: Communicator) -> TrainState:
    """The state before the first step."""
    per_rank = config.data.batch_size * config.horovod.accumulation
    return TrainState(
        samples=len(splits.train),
        global_batch=config.data.global_batch or per_rank * communicator.size,
        world_size=communicator.size,
    )


def open_sampler(config: DictConfig, communicator: Communicator, state: TrainState) -> Sampler:
    """The plan of the whole run for this rank.

    Raises:
        UserError: if a rank would have no work, or none in a pass in which batch-norm waits for it.
    """
    sampler = Sampler(
        samples=state.samples,
        global_batch=state.global_batch,
        rank=communicator.rank,
        size=communicator.size,
        accumulation=config.horovod.accumulation,
        seed=config.seed,
        distribution=config.data.distribution,
    )
    if config.sync_batch_norm and (sampler.shortest_pass == 0 or config.data.get("on_error") == "skip"):
        raise UserError(
            "sync_batch_norm=true needs a sample on every rank in every pass: choose data.global_batch so that the"
            " last batch of an epoch is long enough, and data.on_error=fail"
        )
    return sampler


def open_schedule(config: DictConfig, state: TrainState) -> Schedule:
    """The learning rate's schedule, scaled from data.batch_size to the global batch."""
    options = {key: value for key, value in config.schedule.items() if key != "scaling"}
    batches = state.global_batch / config.data.batch_size
    factor = scaling_factor(config.schedule.scaling, batches, batches / state.world_size)
    base = config.optimizer.lr
    return Schedule(base=base, peak=base * factor, epochs=config.epochs, **options)


def open_cadence(config: DictConfig) -> Cadence:
    """When the loop logs, evaluates, saves and ends."""
    return Cadence(
        epochs=config.epochs,
        log_every=config.tracking.log_every,
        evaluate_every=config.evaluate_every,
        save_every=config.checkpoint.every_epochs,
        save_every_steps=config.checkpoint.every_steps,
        patience=config.patience,
    )
