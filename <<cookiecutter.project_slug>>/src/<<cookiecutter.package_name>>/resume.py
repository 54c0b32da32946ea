"""Going on from a checkpoint: one rank chooses, all restore, and the result is proved equal on every rank."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from .addresses import is_url
from .checkpoints.config_diff import changes, flat, read_flat
from .checkpoints.mirror import fetch
from .checkpoints.store import Checkpoint, Store
from .engine import Engine
from .errors import UserError
from .progress import State, read_state
from .ranks import Communicator

log = logging.getLogger(__name__)

# A run that changed these would no longer be the same training; another name=... starts a new one.
FIXED = (
    "engine",
    "model",
    "seed",
    "data.distribution",
    "data.source._target_",
    "data.source.seed",
    "data.source.validation_fraction",
    "optimizer._target_",
)
FREE = ("name", "resume", "hydra")  # say nothing about the training


def choose(store: Store, which: str) -> Checkpoint | None:
    """The checkpoint that `resume` names: the newest good one for auto, none for a new run.

    Raises:
        UserError: if resume=never and there are checkpoints, or the one that is named is damaged or missing.
    """
    if which == "auto":
        return store.newest_good()
    if which != "never":
        return store.find_good(which)
    if store.checkpoints():
        raise UserError(
            f"resume=never, but {store.folder} already has checkpoints: choose another name=..., or resume=auto"
        )
    return None


def find_start(store: Store, which: str) -> Path | None:
    """The folder to go on from, or None to start anew; a URL is fetched into the run's own store first."""
    found = fetch(which, store.folder) if is_url(which) else choose(store, which)
    if found is None:
        return None
    store.resumed_from(found)
    return found.folder


def plan_from(folder: Path, fresh: State, config: DictConfig) -> State:
    """The state to start from.

    A run keeps its global batch, whatever the number of ranks, until an option that sets it is changed.

    Raises:
        UserError: if the checkpoint belongs to other training data.
    """
    saved = read_state(folder)
    if saved.samples != fresh.samples:
        raise UserError(
            f"{folder} was made with {saved.samples} training samples and there are {fresh.samples} now:"
            " use the same data, or another name=... for a new run"
        )
    batch = fresh.global_batch if _sets_batch(folder, config) else saved.global_batch
    if saved.world_size != fresh.world_size:
        log.warning(f"going on with {fresh.world_size} ranks instead of {saved.world_size}: global batch {batch}")
    return replace(saved, world_size=fresh.world_size, global_batch=batch)


def _sets_batch(folder: Path, config: DictConfig) -> bool:
    """Whether the options ask for a global batch, or for another one than those of the checkpoint did."""
    before = read_flat(folder / "config.yaml")
    parts = ("data.batch_size", "horovod.accumulation")
    return bool(config.data.global_batch) or any(before.get(key) != OmegaConf.select(config, key) for key in parts)


def check_config(folder: Path, config: DictConfig, finished: bool) -> None:
    """Name every option that has changed since the checkpoint was made.

    Raises:
        UserError: if one of them may not change within a run, or nothing is left to train.
    """
    now = dict(flat(OmegaConf.to_container(config)))
    for key, (before, after) in changes(read_flat(folder / "config.yaml"), now).items():
        if key == "data.global_batch" and after is None:  # it stays, see plan_from()
            continue
        change = f"{key} was {before} and is {after} now"
        if _under(key, FIXED):
            raise UserError(f"{change}, which {folder} cannot go on with: set it back, or use another name=...")
        if finished and not _under(key, FREE):
            raise UserError(
                f"{change}, but {folder} is the end of its run: set it back to see the result, train on with a"
                " higher epochs=... (or patience=...), or use another name=... for a new run"
            )
        if not _under(key, FREE):
            log.warning(f"going on with another option than before: {change}")


def _under(key: str, options: tuple[str, ...]) -> bool:
    return any(key == option or key.startswith(f"{option}.") for option in options)


def restore(communicator: Communicator, engine: Engine, folder: Path, saved: State) -> None:
    """Load a checkpoint on every rank and prove that all hold the same weights."""
    same_world = read_state(folder).world_size == communicator.size
    rank = communicator.rank if same_world else None
    communicator.together(lambda: engine.restore(folder, rank), "restore")
    communicator.check_equal(engine.fingerprint(), "the restored weights")
    log.info(f"resumed from {folder} at step {saved.step}, epoch {saved.position.epoch}")


def load_weights(communicator: Communicator, engine: Engine, store: Store, which: str) -> dict[str, str]:
    """Start from the weights of a checkpoint or run folder; what became of each, by name.

    Raises:
        UserError: if there is no such folder, it is damaged, or not one tensor fits.
    """
    folder = communicator.on_writer(lambda: store.find_good(which).folder, "weights")
    report = communicator.together(lambda: engine.load_weights(folder), "load weights")
    if "loaded" not in report.values():
        raise UserError(f"not one tensor of {folder} fits the model: name a checkpoint of a similar one", agreed=True)
    return report
