"""What the tests of the engines share: small engines, their steps and their weights as numpy arrays."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jobs import compose_config

from << cookiecutter.package_name >>.assemble import open_data
from << cookiecutter.package_name >>.data import ArrayDataset, Splits
from << cookiecutter.package_name >>.engine import open_engine, rank_file
from << cookiecutter.package_name >>.ranks import Communicator
from << cookiecutter.package_name >>.sampler import Position, Sampler, Share

RATE = 0.1
SMALL_CNN = ("model=cnn", "model.width=4")
GOOD = ArrayDataset(np.random.default_rng(0).random((4, 8, 8, 1), np.float32), np.arange(4))
POISON = ArrayDataset(np.full((4, 8, 8, 1), math.nan, np.float32), np.arange(4))
MIXED = ArrayDataset(np.concatenate([POISON.inputs, GOOD.inputs]), np.arange(8))

Arrays = list[npt.NDArray[Any]]


def make(communicator: Communicator, *overrides: str) -> tuple[Any, Splits]:
    """The current engine as it is, since the tests look into its model."""
    config = compose_config(*(overrides if "model=mlp" in overrides else (*SMALL_CNN, *overrides)))
    return open_engine(config, communicator), open_data(config)


def train(engine: Any, splits: Splits, steps: int = 3, *, batch: int = 64, passes: int = 1) -> None:
    sampler = Sampler(len(splits.train), global_batch=batch, accumulation=passes)
    batches = engine.train_batches(splits.train, sampler.shares(Position(), epochs=9))
    for _, (share, tensors) in zip(range(steps), batches, strict=False):
        engine.train_step(share, tensors, RATE)


def step(engine: Any, data: ArrayDataset, *passes: range, rate: float = RATE) -> None:
    """One step on these rows of the data."""
    indices = tuple(np.array([*one], np.int64) for one in passes)
    share = Share(Position(), Position(1), indices, global_count=max(1, sum(map(len, indices))))
    for planned, tensors in engine.train_batches(data, iter([share])):
        engine.train_step(planned, tensors, rate)


def arrays(variables: Any) -> Arrays:
    """Copies of torch's tensors or of Keras' variables."""
    return [(one.detach() if hasattr(one, "detach") else one).numpy().copy() for one in variables]


def weights(engine: Any) -> npt.NDArray[Any]:
    """What the optimizer changes, in one row."""
    model = engine.model
    variables = model.parameters() if hasattr(model, "parameters") else model.trainable_variables
    return np.concatenate([array.ravel() for array in arrays(variables)])


def buffers(engine: Any) -> Arrays:
    """The other variables, such as batch-norm statistics."""
    model = engine.model
    return arrays(model.buffers() if hasattr(model, "buffers") else model.non_trainable_variables)


def same(first: Arrays, second: Arrays) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def check_training(communicator: Communicator, *overrides: str) -> None:
    """60 steps teach it the digits."""
    engine, splits = make(communicator, *overrides)
    plan = [np.arange(359)]
    train(engine, splits, steps=1)
    first = engine.evaluate(splits.validation, plan).loss
    train(engine, splits, steps=60)
    after = engine.evaluate(splits.validation, plan)
    assert after.loss < 0.5 * first
    assert after.count == 359
    assert after.correct > 250


def check_states(communicator: Communicator, folder: Path, draw: Callable[[], Any], *overrides: str) -> None:
    """The states are of their own moment and hold everything; `draw` takes random numbers of the framework."""
    engine, splits = make(communicator, "optimizer=adamw", *overrides)
    train(engine, splits)
    own = engine.rank_state().copy()
    write = engine.shared_state(engine.statistics())
    saved, numbers = engine.fingerprint(), (np.random.rand(3), np.array(draw()))
    train(engine, splits)
    write(folder)
    own.tofile(rank_file(folder, 0))
    later = engine.fingerprint()
    other, _ = make(communicator, "optimizer=adamw", "seed=5", *overrides)
    other.load_shared_state(folder)
    other.load_rank_state(rank_file(folder, 0))
    assert other.fingerprint() == saved != later
    assert np.array_equal(np.random.rand(3), numbers[0])
    assert np.array_equal(draw(), numbers[1])
    train(other, splits)
    assert other.fingerprint() == later
    assert same(buffers(engine), buffers(other))
