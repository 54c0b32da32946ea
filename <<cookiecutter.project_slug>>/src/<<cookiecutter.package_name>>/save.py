"""What goes into a checkpoint, gathered from all ranks; the store and its saver decide how it reaches the disk."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

from omegaconf import DictConfig, OmegaConf

from .checkpoints.mirror import Mirror
from .checkpoints.provenance import describe
from .checkpoints.store import Store
from .engine import Engine, rank_file
from .progress import State
from .ranks import BLOCK, Bytes, Communicator
from .saver import Saver


class RunSaver:
    """Saves a run's state; all ranks call it together, the writing one's saver writes.

    Args:
        communicator: The ranks.
        engine: Whose weights, optimizer and random generators are saved.
        saver: Writes, on the writing rank.
        mirror: Where to each checkpoint is uploaded, or None; only on the writing rank.
        config: The config as YAML, kept beside the weights.
        spool: The store's folder, for what does not fit into memory.
    """

    def __init__(
        self, communicator: Communicator, engine: Engine, saver: Saver, mirror: Mirror | None, config: str, spool: Path
    ) -> None:
        self._spool = spool
        self._communicator = communicator
        self._engine = engine
        self._saver = saver
        self._mirror = mirror
        self._config = config
        self._saved: tuple[int, int] | None = None
        self._described = describe(config) if communicator.writes else {}

    def __call__(self, state: State) -> None:
        """Save, unless nothing has happened since the last save; returns as soon as training may go on."""
        if self._saved == (state.step, state.ended):
            return
        statistics = self._engine.statistics()
        parts = Parts(self._communicator, self._engine.rank_state(), self._spool)
        meta = self._described | _measured(state)
        self._communicator.on_writer(
            lambda: self._saver.save(state.step, lambda: self._snapshot(statistics, parts, state), meta), "save"
        )
        self.has(state)

    def has(self, state: State) -> None:
        """Take note that there is a checkpoint of this state."""
        self._saved = (state.step, state.ended)

    def close(self, mirror_timeout: float = 600.0) -> None:
        """Wait until the last checkpoint is durable; fails on all ranks if it is not.

        Args:
            mirror_timeout: Seconds to wait for uploads; what is not up by then is not visible at the mirror.
        """
        self._communicator.on_writer(self._saver.close, "last save")
        if self._mirror:
            self._mirror.close(mirror_timeout)

    def _snapshot(self, statistics: dict[str, Any], parts: Parts, state: State) -> Callable[[Path], None]:
        write_engine = self._engine.snapshot(statistics)

        def write(folder: Path) -> None:
            write_engine(folder)
            parts.write(folder)
            state.write(folder)
            (folder / "config.yaml").write_text(self._config, encoding="utf-8")

        return write


def open_saver(config: DictConfig, communicator: Communicator, engine: Engine, store: Store) -> RunSaver:
    """The run's saver as the config wants it."""
    wanted = config.checkpoint
    mirror = Mirror(wanted.mirror, store) if wanted.mirror is not None and communicator.writes else None
    saver = Saver(
        store,
        asynchronous=wanted.asynchronous,
        max_failures=wanted.max_failures,
        published=mirror.upload if mirror else None,
    )
    return RunSaver(communicator, engine, saver, mirror, OmegaConf.to_yaml(config), store.folder)


class Parts:
    """What each rank has of its own, collected on the writing rank; all ranks make one together.

    The writing rank holds small parts in memory and large ones in a file without a name, never those of all ranks.

    Args:
        communicator: The ranks.
        part: This rank's.
        folder: Where that file may lie.
    """

    def __init__(self, communicator: Communicator, part: Bytes, folder: Path) -> None:
        self._error: OSError | None = None
        self._file = SpooledTemporaryFile(BLOCK, dir=str(folder))  # noqa: SIM115, it lives as long as this
        weakref.finalize(self, self._file.close)
        self._sizes = communicator.hand_over(part, self._take, "rank_state")

    def _take(self, block: Bytes) -> None:
        if self._error is None:
            try:
                self._file.write(block.data)
            except OSError as error:  # the other ranks go on handing over; the save fails when it is written
                self._error = error.with_traceback(None)
                self._file.close()  # the disk gets its space back

    def write(self, folder: Path) -> None:
        """One file for each rank, which then need read no other."""
        if self._error is not None:
            raise self._error
        self._file.seek(0)
        for rank, size in enumerate(self._sizes):
            with rank_file(folder, rank).open("wb") as file:
                for start in range(0, size, BLOCK):
                    file.write(self._file.read(min(BLOCK, size - start)))


def _measured(state: State) -> dict[str, Any]:
    return {
        "epoch": state.position.epoch,
        "metrics": state.metrics if state.measured == state.step else {},
        "world_size": state.world_size,
        "global_batch": state.global_batch,
    }
