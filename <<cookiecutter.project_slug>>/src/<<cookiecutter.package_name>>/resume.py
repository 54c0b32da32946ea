"""Going on from a checkpoint: one rank chooses, all restore, and the result is proved equal on every rank."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from .checkpoint import Checkpoint, Store
from .distributed import Communicator
from .engine import Engine
from .errors import UserError
from .state import State, read_state

log = logging.getLogger(__name__)


def choose(store: Store, which: str) -> Checkpoint | None:
    """The checkpoint that `resume` names: the newest good one for auto, none for a new run.

    Raises:
        UserError: if resume=never and there are checkpoints, or the one that is named is damaged or missing.
    """
    if which == "auto":
        return store.newest_good()
    if which != "never":
        named = store.find(which)
        store.check(named)
        return named
    if store.checkpoints():
        raise UserError(
            f"resume=never, but {store.folder} already has checkpoints: choose another name=..., or resume=auto"
        )
    return None


def find_start(communicator: Communicator, store: Store, which: str) -> Path | None:
    """The folder to go on from, chosen by the writing rank for all; None to start anew."""

    def decide() -> Path | None:
        found = choose(store, which)
        if found is None:
            return None
        store.resumed_from(found)
        return found.folder

    return communicator.on_writer(decide, "resume")


def plan_from(folder: Path | None, fresh: State, wanted_batch: int | None) -> State:
    """The state to start from; `wanted_batch` is the config's global batch, if it names one.

    A run that names none keeps its global batch when the number of ranks changes.

    Raises:
        UserError: if the checkpoint belongs to other training data.
    """
    if folder is None:
        return fresh
    saved = read_state(folder)
    if saved.samples != fresh.samples:
        raise UserError(
            f"{folder} was made with {saved.samples} training samples and there are {fresh.samples} now:"
            " use the same data, or another name=... for a new run"
        )
    same_world = saved.world_size == fresh.world_size
    batch = fresh.global_batch if wanted_batch or same_world else saved.global_batch
    if not same_world:
        log.warning(f"going on with {fresh.world_size} ranks instead of {saved.world_size}: global batch {batch}")
    return replace(saved, world_size=fresh.world_size, global_batch=batch)


def restore(communicator: Communicator, engine: Engine, folder: Path, saved: State) -> None:
    """Load a checkpoint on every rank and prove that all hold the same weights."""
    same_world = read_state(folder).world_size == communicator.size
    rank = communicator.rank if same_world else None
    communicator.together(lambda: engine.restore(folder, rank), "restore")
    communicator.check_equal(engine.fingerprint(), "the restored weights")
    log.info(f"resumed from {folder} at step {saved.step}, epoch {saved.position.epoch}")
