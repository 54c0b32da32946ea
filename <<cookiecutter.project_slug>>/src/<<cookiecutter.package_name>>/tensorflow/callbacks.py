"""What plain model.fit needs beside distribute(): start alike, measure together, warm up, keep checkpoints.

    communicator = open_communicator("tensorflow")
    model.compile(distribute(keras.optimizers.SGD(0.1)), loss=..., jit_compile=False)
    store = Store("runs/first/checkpoints")
    epoch = restore(model, store, communicator)
    model.fit(..., initial_epoch=epoch, callbacks=[
        Synchronize(), AverageMetrics(), ScheduledRate(schedule, steps), StoreCheckpoint(store, communicator)])

Give each rank its own part of the data and the same number of batches. Exact resume within an epoch, preemption and
uneven batches are for the project's own loop: python -m <package>.train.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ..checkpoints.store import Store
from ..errors import UserError
from ..ranks import Communicator
from ..weights import FILE
from .optimizer import keep_momentum
from .reducer import averaged, broadcast_variables
from .variables import OPTIMIZER, copies, load, named, optimizer_variables, statistics, write

STATE = "fit_state.json"


class Synchronize(keras.callbacks.Callback):  # type: ignore[misc]
    """Gives every rank rank 0's weights and optimizer before training, once the model can train data-parallel at all.

    Raises:
        UserError: if the optimizer is not distributed, or XLA is to compile the step.
    """

    def set_model(self, model: keras.Model) -> None:
        """Keras calls this before it compiles the step."""
        super().set_model(model)
        if not hasattr(model.optimizer, "distributed"):
            scaled = hasattr(
                getattr(model.optimizer, "inner_optimizer", None), "distributed"
            )  # by compile, for float16
            whole = "distribute(keras.optimizers.LossScaleOptimizer(optimizer))" if scaled else "distribute(optimizer)"
            raise UserError(
                f"the optimizer {type(model.optimizer).__name__} is not distributed, so each rank would train a model"
                f" of its own: pass {whole} to model.compile"
            )
        if model.jit_compile:
            raise UserError("jit_compile=True cannot be: XLA has no Horovod operations; pass jit_compile=False")

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast; Keras has built the model by now, but not always the optimizer."""
        self.model.optimizer.build(self.model.trainable_variables)
        broadcast_variables([*self.model.weights, *self.model.optimizer.variables])


class AverageMetrics(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces an epoch's metrics by their means over ranks; to be named before those that look at them."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """One collective for all metrics."""
        names = sorted(logs or {})
        if logs and names:
            (means,) = averaged([tf.constant([float(logs[name]) for name in names], tf.float64)], "metrics")
            logs.update(zip(names, means.numpy().tolist(), strict=True))


class ScheduledRate(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate before every batch.

    Args:
        schedule: The rate after so many epochs, as schedule.Schedule with its scaling and warm-up.
        steps_per_epoch: Batches per epoch.
    """

    def __init__(self, schedule: Callable[[float], float], steps_per_epoch: int) -> None:
        super().__init__()
        self._schedule = schedule
        self._steps = steps_per_epoch
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count epochs."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate; the velocity of SGD follows."""
        rate = self._schedule(self._epoch + batch / self._steps)
        keep_momentum(self.model.optimizer, tf.constant(rate, tf.float32))


class StoreCheckpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Publishes a checkpoint after each epoch, with its metrics; the store's retention and commands work on it."""

    def __init__(self, store: Store, communicator: Communicator) -> None:
        super().__init__()
        self._store = store
        self._communicator = communicator

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """All ranks take part, since batch-norm statistics are averaged; one writes."""
        local = statistics(self.model)
        means = averaged([variable.value for variable in local.values()], "statistics")
        weights = copies(named(self.model)) | {name: mean.numpy() for name, mean in zip(local, means, strict=True)}
        optimizer = self.model.optimizer

        def save(folder: Path) -> None:
            write(weights, folder / FILE)
            write(copies(optimizer_variables(optimizer)), folder / OPTIMIZER)
            (folder / STATE).write_text(json.dumps({"epochs": epoch + 1}), encoding="utf-8")

        meta = {"epoch": epoch + 1, "metrics": {name: float(value) for name, value in (logs or {}).items()}}
        step = int(optimizer.iterations.numpy())
        self._communicator.on_writer(lambda: self._store.publish(step, save, meta).name, "checkpoint")


def restore(model: keras.Model, store: Store, communicator: Communicator) -> int:
    """Take the newest good checkpoint on every rank; the epochs that it has done, 0 if there is none.

    Raises:
        UserError: if the model has no weights or no optimizer yet, or the checkpoint is of another one.
    """
    if not model.built or getattr(model, "optimizer", None) is None:
        raise UserError("the model is not ready to be restored: call model.build(input_shape) and model.compile first")
    folder = communicator.on_writer(lambda: _newest(store), "resume")
    if folder is None:
        return 0
    model.optimizer.build(model.trainable_variables)
    communicator.together(lambda: _load(model, folder), "restore")
    return int(json.loads((folder / STATE).read_text(encoding="utf-8"))["epochs"])


def _newest(store: Store) -> Path | None:
    found = store.newest_good()
    return found.folder if found else None


def _load(model: keras.Model, folder: Path) -> None:
    load(named(model), folder / FILE)
    load(optimizer_variables(model.optimizer), folder / OPTIMIZER)
