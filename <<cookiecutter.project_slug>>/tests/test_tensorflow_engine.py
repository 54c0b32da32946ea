"""The TensorFlow engine on one rank: what one step does to the weights."""

import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from hydra.utils import instantiate
from jobs import choices, compose_config

from << cookiecutter.package_name >>.build import open_data
from << cookiecutter.package_name >>.data import Splits
from << cookiecutter.package_name >>.distributed import Communicator, open_communicator
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.sampler import Position, Sampler
from << cookiecutter.package_name >>.tensorflow.engine import TensorFlowEngine, build

RATE = 0.1
SMALL_CNN = ("model=cnn", "model.width=4")
MOBILE = (
    "model._target_=keras.applications.MobileNetV3Small",
    *("~model.width", "~model.shape", "+model.input_shape=[32,32,3]", "data=synthetic"),
    *("+model.weights=null", "+model.classifier_activation=null", "+model.include_preprocessing=false"),
)


@pytest.fixture(scope="session")
def communicator() -> Communicator:
    return open_communicator("tensorflow")


def make(communicator: Communicator, *overrides: str) -> tuple[TensorFlowEngine, Splits]:
    model = () if "model=mlp" in overrides else SMALL_CNN
    config = compose_config("engine=tensorflow", *model, *overrides)
    return build(config, communicator), open_data(config)


def train(engine: TensorFlowEngine, splits: Splits, steps: int = 3, *, batch: int = 64, passes: int = 1) -> None:
    sampler = Sampler(len(splits.train), global_batch=batch, accumulation=passes)
    batches = engine.train_batches(splits.train, sampler.shares(Position(), epochs=9))
    for _, (share, tensors) in zip(range(steps), batches, strict=False):
        engine.train_step(share, tensors, RATE)


def weights(engine: TensorFlowEngine) -> npt.NDArray[Any]:
    return np.concatenate([variable.numpy().ravel() for variable in engine.model.trainable_variables])


@pytest.mark.parametrize("choice", choices("model"))
def test_every_model_answers_for_every_class(choice: str) -> None:
    config = compose_config("engine=tensorflow", f"model={choice}", "data=synthetic")
    assert instantiate(config.model)(np.zeros((2, 32, 32, 3), np.float32)).shape == (2, 10)


def test_large_images_get_the_large_stem() -> None:
    config = compose_config("engine=tensorflow", "model=resnet18", "data=image_folder", "data.classes=5", "data.root=.")
    assert instantiate(config.model)(np.zeros((1, 224, 224, 3), np.float32)).shape == (1, 5)


@pytest.mark.parametrize("choice", choices("optimizer"))
def test_every_optimizer_builds(communicator: Communicator, choice: str) -> None:
    engine, _ = make(communicator, f"optimizer={choice}", "model=mlp")
    assert float(engine.optimizer.learning_rate) == pytest.approx(compose_config(f"optimizer={choice}").optimizer.lr)


@pytest.mark.slow
def test_a_model_of_keras_applications(communicator: Communicator) -> None:
    engine, splits = make(communicator, *MOBILE)
    before = weights(engine)
    train(engine, splits, steps=1)
    assert not np.array_equal(weights(engine), before)


def test_a_step_is_the_plain_optimizers_step(communicator: Communicator) -> None:
    engine, splits = make(communicator)
    plain, _ = make(communicator)
    optimizer = keras.optimizers.SGD(RATE, momentum=0.9, nesterov=True, weight_decay=1e-4)
    sampler = Sampler(len(splits.train), global_batch=64)
    for _, share in zip(range(3), sampler.shares(Position(), 1), strict=False):
        inputs, labels = splits.train.fetch(share.passes[0], 0)
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, plain.model(inputs, training=True))
            loss = tf.reduce_mean(losses)
        variables = plain.model.trainable_variables
        optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
    train(engine, splits)
    np.testing.assert_allclose(weights(engine), weights(plain), rtol=1e-4, atol=1e-6)


def test_a_change_of_rate_reaches_the_velocity(communicator: Communicator) -> None:
    """Goyal et al. 2017, equation 9: v = m v + g, w = w - rate v, whatever the rates before."""
    options = ("optimizer.nesterov=false", "optimizer.weight_decay=null", "model=mlp")
    engine, splits = make(communicator, *options)
    share = Sampler(len(splits.train), global_batch=4).share(Position())
    nothing = [(np.zeros((0, 8, 8, 1), np.float32), np.zeros(0, np.int64))]
    start = weights(engine)
    engine.train_step(share, batch_of(splits, share.passes[0]), 0.1)
    first = weights(engine)
    engine.train_step(share, [tuple(map(tf.convert_to_tensor, nothing[0]))], 0.01)  # the gradient is zero
    np.testing.assert_allclose(weights(engine) - first, (first - start) * 0.9 * 0.1, rtol=1e-3, atol=1e-7)


def batch_of(splits: Splits, indices: npt.NDArray[np.int64]) -> list[Any]:
    inputs, labels = splits.train.fetch(indices, 0)
    return [(tf.convert_to_tensor(inputs), tf.convert_to_tensor(labels))]


def test_accumulation_changes_only_where_the_work_is_cut(communicator: Communicator) -> None:
    once, splits = make(communicator, "model=mlp")
    thrice, _ = make(communicator, "model=mlp", "horovod.accumulation=3")
    train(once, splits)
    train(thrice, splits, passes=3)
    np.testing.assert_allclose(weights(once), weights(thrice), rtol=1e-4, atol=1e-6)


def test_clipping_bounds_the_gradient(communicator: Communicator) -> None:
    engine, splits = make(communicator, "clip_norm=1e-3", "optimizer.momentum=0.0", "optimizer.nesterov=false")
    before = weights(engine)
    train(engine, splits, steps=1)
    decay = 1e-4 * np.linalg.norm(before)
    assert np.linalg.norm(weights(engine) - before) <= RATE * (1e-3 + decay) * 1.01


def test_a_rank_without_samples_takes_the_step_too(communicator: Communicator) -> None:
    engine, splits = make(communicator, "horovod.accumulation=2")
    before = weights(engine)
    train(engine, splits, steps=1, batch=2, passes=2)
    share = Sampler(len(splits.train), global_batch=2).share(Position())
    empty = (tf.zeros((0, 8, 8, 1)), tf.zeros(0, tf.int64))
    engine.train_step(share, [empty, empty], RATE)
    assert np.isfinite(weights(engine)).all()
    assert not np.array_equal(weights(engine), before)


@pytest.mark.parametrize("overrides", [[], ["precision=bf16"], ["precision=fp16"], ["data.workers=2"]])
def test_variants_train(communicator: Communicator, overrides: list[str]) -> None:
    engine, splits = make(communicator, *overrides)
    plan = [np.arange(359)]
    train(engine, splits, steps=1)
    first = engine.evaluate(splits.validation, plan).loss
    train(engine, splits, steps=60)
    after = engine.evaluate(splits.validation, plan)
    assert after.loss < 0.5 * first
    assert after.count == 359
    assert after.correct > 250


def test_label_smoothing_raises_the_training_loss_only(communicator: Communicator) -> None:
    smooth, splits = make(communicator, "label_smoothing=0.2")
    train(smooth, splits, steps=80)
    evaluation = smooth.evaluate(splits.train, [np.arange(1000)])
    smooth.train_sums()
    train(smooth, splits, steps=5)
    sums = smooth.train_sums()
    assert sums.loss / sums.count > evaluation.loss / evaluation.count + 0.3


POISON = [(tf.fill((4, 8, 8, 1), math.nan), tf.range(4, dtype=tf.int64))]


def test_a_bad_step_is_skipped_or_seen(communicator: Communicator) -> None:
    engine, splits = make(communicator, "on_nan=skip")
    share = Sampler(len(splits.train), global_batch=4).share(Position())
    before, statistics = weights(engine), [v.numpy() for v in engine.model.non_trainable_variables]
    engine.train_step(share, POISON, RATE)
    assert np.array_equal(weights(engine), before)
    now = [v.numpy() for v in engine.model.non_trainable_variables]
    assert all(np.array_equal(one, other) for one, other in zip(now, statistics, strict=True))
    assert engine.train_sums().count == 0
    engine.train_step(share, batch_of(splits, share.passes[0]), RATE)
    assert np.isfinite(weights(engine)).all()
    assert not np.array_equal(weights(engine), before)
    assert engine.train_sums().count == 4


def test_a_bad_first_pass_is_skipped_too(communicator: Communicator) -> None:
    engine, splits = make(communicator, "on_nan=skip", "horovod.accumulation=2")
    share = Sampler(len(splits.train), global_batch=4).share(Position())
    before = [variable.numpy() for variable in engine.model.variables]
    good = batch_of(splits, share.passes[0])
    engine.train_step(share, [*POISON, *good], RATE)
    assert all(np.array_equal(one, other) for one, other in zip(engine.model.variables, before, strict=True))
    engine.train_step(share, [*good, *good], RATE)
    sums = engine.train_sums()
    assert (math.isfinite(sums.loss), sums.count) == (True, 8)


def test_a_poisoned_model_is_never_saved(communicator: Communicator) -> None:
    engine, splits = make(communicator)
    share = Sampler(len(splits.train), global_batch=4).share(Position())
    engine.train_step(share, POISON, RATE)
    assert math.isnan(engine.train_sums().loss)
    with pytest.raises(UserError, match="not finite and were not saved"):
        engine.snapshot([engine.rank_state()])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_snapshot_is_of_its_own_moment_and_restores_everything(
    communicator: Communicator, tmp_path: Path, precision: str
) -> None:
    options = ("optimizer=adamw", f"precision={precision}")
    engine, splits = make(communicator, *options)
    train(engine, splits)
    write = engine.snapshot([engine.rank_state()])
    saved = engine.fingerprint()
    numbers = np.random.rand(3), tf.random.get_global_generator().uniform((3,)).numpy()
    train(engine, splits)
    write(tmp_path)
    later = engine.fingerprint()
    other, _ = make(communicator, *options, "seed=5")
    other.restore(tmp_path, rank=0)
    assert other.fingerprint() == saved != later
    assert np.array_equal(np.random.rand(3), numbers[0])
    assert np.array_equal(tf.random.get_global_generator().uniform((3,)), numbers[1])
    train(other, splits)
    assert other.fingerprint() == later
    for mine, theirs in zip(engine.model.variables, other.model.variables, strict=True):
        assert np.array_equal(mine, theirs)


def test_a_checkpoint_of_another_model_is_refused(communicator: Communicator, tmp_path: Path) -> None:
    engine, _ = make(communicator)
    engine.snapshot([engine.rank_state()])(tmp_path)
    other, _ = make(communicator, "model.width=8")
    before = other.fingerprint()
    with pytest.raises(UserError, match=r"another model: .* block_0_conv/kernel with \(3, 3, 1, 4\) .* \(3, 3, 1, 8\)"):
        other.restore(tmp_path, rank=0)
    assert other.fingerprint() == before


def test_a_gpu_is_missed(communicator: Communicator) -> None:
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="device=cuda but TensorFlow sees no GPU"):
        make(communicator, "device=cuda")
