"""Plain model.fit on two ranks: with our optimizer it is one training, with Horovod's own it is two."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import pytest

from << cookiecutter.package_name >>.checkpoints.store import Store
from << cookiecutter.package_name >>.data import digits
from << cookiecutter.package_name >>.ranks import Communicator
from << cookiecutter.package_name >>.schedule import Schedule
from << cookiecutter.package_name >>.tensorflow.callbacks import (
    AverageMetrics,
    ScheduledRate,
    StoreCheckpoint,
    Synchronize,
    restore,
)
from << cookiecutter.package_name >>.tensorflow.optimizer import distribute
from << cookiecutter.package_name >>.weights import hash_arrays

BATCH, BATCHES, EPOCHS = 64, 20, 4


@pytest.fixture(autouse=True)
def full_precision() -> None:
    """Whatever an engine of an earlier test has set."""
    keras.config.set_dtype_policy("float32")


def plain() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=1.0, name="plain")


def open_model(seed: int, optimizer: keras.optimizers.Optimizer) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((64,)), keras.layers.Dense(32, "relu", name="hidden"), keras.layers.Dense(10, name="logits")]
    model = keras.Sequential(layers, name="net")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model


def part(rank: int, size: int) -> tuple[Any, Any]:
    """A rank's slice of every global batch, in the order of the batches."""
    inputs, labels = digits().train.fetch(np.arange(BATCH * BATCHES), 0)
    slices = np.arange(len(labels)).reshape(BATCHES, size, -1)[:, rank].ravel()
    return inputs.reshape(-1, 64)[slices], labels[slices]


def rate() -> ScheduledRate:
    return ScheduledRate(Schedule(base=0.05, peak=0.1, epochs=EPOCHS, decay="cosine", warmup_epochs=1), BATCHES)


def fit(model: keras.Model, ranks: Communicator, callbacks: list[Any], start: int = 0, end: int = EPOCHS) -> float:
    """The last epoch's loss."""
    options = {"batch_size": BATCH // ranks.size, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    history = model.fit(*part(ranks.rank, ranks.size), initial_epoch=start, epochs=end, **options)
    return float(history.history["loss"][-1])


def fit_together(ranks: Communicator, folder: Path, start: int = 0, end: int = EPOCHS) -> tuple[keras.Model, float]:
    """From weights of each rank's own, or from the checkpoint of an epoch; the model and the last loss."""
    model, store = open_model(ranks.rank, distribute(plain())), Store(folder / "checkpoints")
    assert restore(model, store, ranks) == start
    callbacks = [Synchronize(), AverageMetrics(), rate(), StoreCheckpoint(store, ranks)]
    loss = fit(model, ranks, callbacks, start, end)
    assert len(hashes(ranks, model)) == 1
    return model, loss


def hashes(ranks: Communicator, model: keras.Model) -> set[str]:
    """The ranks' different weights."""
    return set(ranks.gather(hash_arrays(variable.numpy() for variable in model.weights), "hashes"))


def test_two_ranks_are_one_training(ranks: Communicator, tmp_path: Path) -> None:
    """Also when it is stopped between epochs; the saved file has the plain optimizer in it."""
    pair, loss = fit_together(ranks, tmp_path / "pair")
    one = open_model(0, plain())
    one.optimizer.build(one.trainable_variables)
    assert fit(one, replace(ranks, rank=0, size=1), [rate()]) == pytest.approx(loss, rel=1e-4)
    fit_together(ranks, tmp_path / "parts", end=EPOCHS // 2)
    parts, _ = fit_together(ranks, tmp_path / "parts", start=EPOCHS // 2)
    for other in (one, parts):
        for mine, wanted in zip(pair.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-5)
    if ranks.writes:
        pair.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert type(loaded.optimizer) is keras.optimizers.SGD
        assert int(loaded.optimizer.iterations) == BATCHES * EPOCHS
    newest = Store(tmp_path / "parts" / "checkpoints").newest_good()
    assert newest
    assert newest.step == BATCHES * EPOCHS
    assert newest.meta["metrics"]["accuracy"] > 0.8


def test_horovods_own_optimizer_trains_two_models(ranks: Communicator) -> None:
    """The reason for ours; when this fails, Horovod works with Keras 3."""
    model = open_model(ranks.rank, hvd.DistributedOptimizer(plain()))
    fit(model, ranks, [])
    assert len(hashes(ranks, model)) == 2
