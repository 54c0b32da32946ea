"""What plain model.fit refuses to train, and what comes of optimizers; ranks/test_tensorflow_model_fit.py trains."""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from << cookiecutter.package_name >>.checkpoints.store import Store
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.ranks import Communicator, open_communicator
from << cookiecutter.package_name >>.tensorflow.callbacks import Synchronize, restore
from << cookiecutter.package_name >>.tensorflow.models import mlp
from << cookiecutter.package_name >>.tensorflow.optimizer import distribute


@pytest.fixture(scope="module")
def communicator() -> Communicator:
    return open_communicator("tensorflow")


def make_model(optimizer: keras.optimizers.Optimizer, jit: bool = False) -> keras.Model:
    model = mlp([4], 2, hidden=[3])
    model.compile(optimizer, "mse", jit_compile=jit)
    return model


def test_a_loss_scaled_optimizer_is_wrapped_as_a_whole(communicator: Communicator, tmp_path: Path) -> None:
    optimizer = distribute(keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(1e-3)))
    model = make_model(optimizer)
    model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0, callbacks=[Synchronize()])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.LossScaleOptimizer
    assert type(loaded.optimizer.inner_optimizer) is keras.optimizers.AdamW


def test_one_that_compile_has_wrapped_is_refused(communicator: Communicator) -> None:
    """Its scale would be each rank's own."""
    keras.config.set_dtype_policy("mixed_float16")
    model = make_model(distribute(keras.optimizers.SGD(0.1)))
    with pytest.raises(UserError, match=r"pass distribute\(keras\.optimizers\.LossScaleOptimizer\(optimizer\)\) to"):
        model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0, callbacks=[Synchronize()])


def test_an_optimizer_of_your_own_keeps_its_name(communicator: Communicator) -> None:
    class Mine(keras.optimizers.SGD):  # type: ignore[misc]
        pass

    optimizer = distribute(Mine(0.1))
    assert (type(optimizer).__module__, type(optimizer).__name__) == (Mine.__module__, "Mine")
    assert isinstance(optimizer, Mine)


@pytest.mark.parametrize(
    ("distributed", "jit", "sentence"),
    [
        (False, False, "the optimizer SGD is not distributed, so each rank would train a model of its own"),
        (True, True, "jit_compile=True cannot be: XLA has no Horovod operations; pass jit_compile=False"),
    ],
)
def test_what_would_train_wrongly_is_refused(
    communicator: Communicator, distributed: bool, jit: bool, sentence: str
) -> None:
    plain = keras.optimizers.SGD(0.1)
    model = make_model(distribute(plain) if distributed else plain, jit)
    with pytest.raises(UserError, match=sentence):
        model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0, callbacks=[Synchronize()])


def test_what_cannot_be_distributed_or_restored(communicator: Communicator, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="SGD is distributed already"):
        distribute(distribute(keras.optimizers.SGD()))
    with pytest.raises(UserError, match="str is no Keras 3 optimizer"):
        distribute("sgd")
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(UserError, match=r"not ready to be restored: call model\.build"):
        restore(unbuilt, Store(tmp_path), communicator)
    assert sys.modules["horovod.tensorflow"].is_initialized()
