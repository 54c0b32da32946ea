"""How a run is saved: gathered from all ranks, then written by one of them, beside the training."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import SpooledTemporaryFile
from threading import Thread
from typing import Any

from omegaconf import DictConfig, OmegaConf
from safetensors.numpy import save_file

from .checkpoints.checkpoint import Checkpoint
from .checkpoints.disk_errors import StoreError
from .checkpoints.mirror import Mirror
from .checkpoints.provenance import describe
from .checkpoints.store import Store, Writer
from .engine import HOOKS, Engine, rank_file
from .ranks import BLOCK, Bytes, Communicator
from .train_state import TrainState

log = logging.getLogger(__name__)


class Saver:
    """Saves a run's state; all ranks call it together, the writing one's publisher writes.

    Args:
        config: Kept beside the weights; it says how to save, and to which mirror.
        communicator: The ranks.
        engine: What is saved beside the state.
        store: Where to.
        saved: What is in a checkpoint already.
    """

    def __init__(
        self, config: DictConfig, communicator: Communicator, engine: Engine, store: Store, saved: TrainState | None
    ) -> None:
        self._config = OmegaConf.to_yaml(config)
        self._communicator = communicator
        self._engine = engine
        self._saved = saved
        self._mirror = open_mirror(config, store) if communicator.writes else None
        self._publisher = Publisher(
            store,
            asynchronous=config.checkpoint.asynchronous,
            max_failures=config.checkpoint.max_failures,
            published=self._mirror.upload if self._mirror else None,
        )
        self._described = describe(self._config) if communicator.writes else {}

    def __call__(self, state: TrainState) -> None:
        """Save, unless nothing has happened since the last save; returns as soon as training may go on."""
        if self._saved and (self._saved.step, self._saved.ended) == (state.step, state.ended):
            return
        statistics = self._engine.statistics()
        ranks = RankStates(self._communicator, self._engine.rank_state(), self._publisher.folder)
        meta = self._described | _measured(state)
        self._communicator.on_writer(
            lambda: self._publisher.save(state.step, lambda: self._copy(statistics, ranks, state), meta), "save"
        )
        self._saved = state

    def _copy(self, statistics: dict[str, Any], ranks: RankStates, state: TrainState) -> Writer:
        write_shared, hooks = self._engine.shared_state(statistics), self._engine.hooks.state()

        def write(folder: Path) -> None:
            write_shared(folder)
            if hooks:
                save_file(hooks, folder / HOOKS)
            ranks.write(folder)
            state.write(folder)
            (folder / "config.yaml").write_text(self._config, encoding="utf-8")

        return write

    def close(self, mirror_timeout: float = 600.0) -> None:
        """Wait until the last checkpoint is durable; fails on all ranks if it is not.

        Args:
            mirror_timeout: Seconds to wait for uploads; what is not up by then is not visible at the mirror.
        """
        self._communicator.on_writer(self._publisher.close, "last save")
        if self._mirror:
            self._mirror.close(mirror_timeout)


def open_mirror(config: DictConfig, store: Store) -> Mirror | None:
    """The mirror that the config names."""
    return None if config.checkpoint.mirror is None else Mirror(config.checkpoint.mirror, store)


def upload_newest(config: DictConfig, store: Store) -> None:
    """Give the mirror, if there is one, what it lacks of a finished run: its newest checkpoint and those pointed to."""
    names, mirror = store.names(), open_mirror(config, store)
    if mirror and names:
        mirror.upload(store.find(names[-1]))
        mirror.close()


def _measured(state: TrainState) -> dict[str, Any]:
    return {
        "epoch": state.position.epoch,
        "metrics": state.metrics if state.measured == state.step else {},
        "world_size": state.world_size,
        "global_batch": state.global_batch,
    }


class RankStates:
    """What each rank has of its own, collected on the writing rank; all ranks make one together.

    The writing rank holds small states in memory and large ones in a file without a name, never those of all ranks.

    Args:
        communicator: The ranks.
        own: This rank's.
        folder: Where that file may lie.
    """

    def __init__(self, communicator: Communicator, own: Bytes, folder: Path) -> None:
        self._error: OSError | None = None
        self._file = SpooledTemporaryFile(BLOCK, dir=str(folder))  # noqa: SIM115, it lives as long as this
        weakref.finalize(self, self._file.close)
        self._sizes = communicator.hand_over(own, self._take, "rank_state")

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


class Publisher:
    """Publishes checkpoints in a thread, one at a time. A full disk does not end the training, unless it stays full.

    Args:
        store: Where to.
        asynchronous: Whether training goes on while the copy is written.
        max_failures: How many saves in a row may fail for the disk's sake; the last of them is raised.
        published: Called with each checkpoint as soon as it is durable, in the thread that wrote it.
    """

    def __init__(
        self,
        store: Store,
        *,
        asynchronous: bool = True,
        max_failures: int = 3,
        published: Callable[[Checkpoint], None] | None = None,
    ) -> None:
        self.folder = store.folder
        self._store = store
        self._asynchronous = asynchronous
        self._max_failures = max_failures
        self._published = published
        self._failures = 0
        self._error: Exception | None = None
        self._failed: tuple[int, Writer, Mapping[str, object]] | None = None
        self._thread: Thread | None = None

    def save(self, step: int, copy: Callable[[], Writer], meta: Mapping[str, object]) -> None:
        """Save the state of now; returns as soon as training may change it.

        Args:
            step: Optimizer steps done.
            copy: Copies the state and returns what writes the copy; called when the save before is done, so that at
                most one copy is in memory.
            meta: For meta.json.

        Raises:
            Exception: what wait() raises.
        """
        began = time.perf_counter()
        self.wait()
        write = copy()
        self._thread = Thread(target=self._publish, args=(step, write, dict(meta)), name="checkpoint")
        self._thread.start()
        if not self._asynchronous:
            self.wait()
        log.info("step %d: training stood still for %.3f s to save", step, time.perf_counter() - began)

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            StoreError: if too many saves in a row failed.
            Exception: what the save raised if it was no fault of the disk.
        """
        if self._thread:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error:
            raise error

    def close(self) -> None:
        """Wait for the save in flight; if the last one failed for the disk's sake, try it once more.

        Raises:
            StoreError: if the last save failed, so that nobody takes the run for saved.
            Exception: what wait() raises.
        """
        self.wait()
        if self._failed:
            self._max_failures = 1
            self._publish(*self._failed)
            self.wait()

    def _publish(self, step: int, write: Writer, meta: Mapping[str, object]) -> None:
        began = time.perf_counter()
        try:
            checkpoint = self._store.publish(step, write, meta)
            self._failures, self._failed = 0, None
            seconds = time.perf_counter() - began
            megabytes = checkpoint.size / 1e6
            log.info("%s: %.1f MB in %.2f s, %.0f MB/s", checkpoint.name, megabytes, seconds, megabytes / seconds)
            if self._published:
                self._published(checkpoint)
        except StoreError as error:
            self._failures += 1
            self._failed = (step, write, meta)
            log.warning("%s (failure %d of %d in a row)", error, self._failures, self._max_failures)
            if self._failures >= self._max_failures:
                self._error = error
        except Exception as error:
            self._error = error
