"""When the writing of a checkpoint happens: in a thread beside the training, or at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from threading import Thread

from .checkpoints.store import Checkpoint, Store, StoreError, Writer

log = logging.getLogger(__name__)


class Saver:
    """Saves checkpoints, at most one at a time. A full disk does not end the training, unless it stays full.

    Args:
        store: Where to.
        asynchronous: Whether training goes on while the snapshot is written.
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
        self._store = store
        self._asynchronous = asynchronous
        self._max_failures = max_failures
        self._published = published
        self._failures = 0
        self._error: Exception | None = None
        self._failed: tuple[int, Writer, Mapping[str, object]] | None = None
        self._thread: Thread | None = None

    def save(self, step: int, snapshot: Callable[[], Writer], meta: Mapping[str, object]) -> None:
        """Save the state of now; returns as soon as training may change it.

        Args:
            step: Optimizer steps done.
            snapshot: Copies the state and returns what writes the copy; called when the save before is done, so
                that at most one copy is in memory.
            meta: For meta.json.

        Raises:
            Exception: what wait() raises.
        """
        began = time.perf_counter()
        self.wait()
        write = snapshot()
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
