"""Going on from a checkpoint: one rank chooses, all restore, and the result is proved equal on every rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from safetensors.numpy import load_file

from .addresses import is_url
from .checkpoints.checkpoint import Checkpoint
from .checkpoints.diff import changes, flat, read_flat
from .checkpoints.mirror import download
from .checkpoints.store import Store
from .engine import HOOKS, Engine, rank_file, rank_files
from .errors import UserError
from .loop import Cadence
from .ranks import Communicator
from .train_state import TrainState, read_train_state

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


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run goes on from."""

    folder: Path
    saved: TrainState  # with the ranks that made it
    state: TrainState  # with the ranks and the global batch of now
    finished: bool  # nothing is left to train
    remarks: list[str]  # what is not as it was, a sentence each

    @property
    def same_world(self) -> bool:
        """Whether there are as many ranks as before, so that each finds a state of its own."""
        return self.saved.world_size == self.state.world_size


def find_start(store: Store, which: str) -> Path | None:
    """The checkpoint that `resume` names: the newest good one for auto, none for a new run; a URL is downloaded first.

    Raises:
        UserError: if resume=never and there are checkpoints, or the one that is named is damaged or missing.
    """
    if which == "never":
        if store.checkpoints():
            raise UserError(
                f"resume=never, but {store.folder} already has checkpoints: choose another name=..., or resume=auto"
            )
        return None
    found = store.newest_good() if which == "auto" else _named(store, which)
    if found is None:
        return None
    store.resumed_from(found)
    return found.folder


def _named(store: Store, which: str) -> Checkpoint:
    return download(which, store.folder) if is_url(which) else store.find_good(which)


def read_start(folder: Path, fresh: TrainState, config: DictConfig, cadence: Cadence) -> Start:
    """Compare a checkpoint's state and options with those of now.

    A run keeps its global batch, whatever the number of ranks, until an option that sets it is changed.

    Raises:
        UserError: if it belongs to other training data, an option may not change within a run, or nothing is left to
            train.
    """
    saved, before = read_train_state(folder), read_flat(folder / "config.yaml")
    finished = cadence.is_finished(saved)
    remarks = [*_changed(folder, before, config, finished)]
    if saved.samples != fresh.samples:
        raise UserError(
            f"{folder} was made with {saved.samples} training samples and there are {fresh.samples} now:"
            " use the same data, or another name=... for a new run"
        )
    batch = fresh.global_batch if _sets_batch(before, config) else saved.global_batch
    if saved.world_size != fresh.world_size:
        remarks.append(f"going on with {fresh.world_size} ranks instead of {saved.world_size}: global batch {batch}")
    state = replace(saved, world_size=fresh.world_size, global_batch=batch)
    return Start(folder, saved, state, finished, remarks)


def _sets_batch(before: Mapping[str, Any], config: DictConfig) -> bool:
    """Whether the options ask for a global batch, or for another one than those of the checkpoint did."""
    parts = ("data.batch_size", "horovod.accumulation")
    return bool(config.data.global_batch) or any(before.get(key) != OmegaConf.select(config, key) for key in parts)


def _changed(folder: Path, before: Mapping[str, Any], config: DictConfig, finished: bool) -> Iterator[str]:
    """A sentence for each option that is another one than before; refuses those that may not change."""
    now = dict(flat(OmegaConf.to_container(config)))
    for key, (old, new) in changes(before, now).items():
        if key == "data.global_batch" and new is None:  # it stays, see read_start()
            continue
        change = f"{key} was {old} and is {new} now"
        if _under(key, FIXED):
            raise UserError(f"{change}, which {folder} cannot go on with: set it back, or use another name=...")
        if finished and key in before and not _under(key, FREE):  # older versions had fewer options
            raise UserError(
                f"{change}, but {folder} is the end of its run: set it back to see the result, train on with a"
                " higher epochs=... (or patience=...), or use another name=... for a new run"
            )
        if not _under(key, FREE):
            yield f"going on with another option than before: {change}"


def _under(key: str, options: tuple[str, ...]) -> bool:
    return any(key == option or key.startswith(f"{option}.") for option in options)


def restore(communicator: Communicator, engine: Engine, start: Start) -> None:
    """Load a checkpoint on every rank and prove that all hold the same weights."""
    for remark in start.remarks if communicator.writes else ():
        log.warning(remark)
    communicator.together(lambda: _load(communicator, engine, start), "restore")
    communicator.check_equal(engine.fingerprint(), "the restored weights")
    log.info(f"resumed from {start.folder} at step {start.state.step}, epoch {start.state.position.epoch}")


def _load(communicator: Communicator, engine: Engine, start: Start) -> None:
    """What all ranks share; then each one's own, of which only the running loss fits another number of ranks."""
    engine.load_shared_state(start.folder)
    engine.hooks.load_state(_read_hooks(start.folder / HOOKS))
    if start.same_world:
        engine.load_rank_state(rank_file(start.folder, communicator.rank))
    elif communicator.writes:
        engine.load_sums(rank_files(start.folder))


def _read_hooks(file: Path) -> dict[str, Any]:
    try:
        return load_file(file) if file.exists() else {}
    except SafetensorError as error:
        raise UserError(f"{file} is no safetensors file ({error}): use another checkpoint") from error


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
