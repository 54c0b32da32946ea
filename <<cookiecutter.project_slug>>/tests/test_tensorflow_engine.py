"""The TensorFlow engine on one rank, as far as it differs from others."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from engine_helpers import GOOD, RATE, check_states, check_training, make, step, train, weights
from hydra.utils import instantiate
from jobs import choices, compose_config

from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.ranks import Communicator, open_communicator
from << cookiecutter.package_name >>.sampler import Position, Sampler

MOBILE = (
    "model._target_=keras.applications.MobileNetV3Small",
    *("~model.width", "~model.shape", "+model.input_shape=[32,32,3]", "data=synthetic"),
    *("+model.weights=null", "+model.classifier_activation=null", "+model.include_preprocessing=false"),
)


@pytest.fixture
def communicator(monkeypatch: pytest.MonkeyPatch) -> Communicator:
    monkeypatch.setenv("TESTED_ENGINE", "tensorflow")
    return open_communicator("tensorflow")


@pytest.mark.parametrize("choice", choices("model"))
def test_every_model_answers_for_every_class(choice: str) -> None:
    config = compose_config("engine=tensorflow", f"model={choice}", "data=synthetic")
    assert instantiate(config.model)(np.zeros((2, 32, 32, 3), np.float32)).shape == (2, 10)


def test_large_images_get_the_large_stem() -> None:
    config = compose_config("engine=tensorflow", "model=resnet18", "data=image_folder", "data.classes=5", "data.root=.")
    assert instantiate(config.model)(np.zeros((1, 224, 224, 3), np.float32)).shape == (1, 5)


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
    engine, _ = make(communicator, "optimizer.nesterov=false", "optimizer.weight_decay=null", "model=mlp")
    start = weights(engine)
    step(engine, GOOD, range(4), rate=0.1)
    first = weights(engine)
    step(engine, GOOD, range(0), rate=0.01)  # the gradient is zero
    np.testing.assert_allclose(weights(engine) - first, (first - start) * 0.9 * 0.1, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("overrides", [["precision=fp16"], ["data.workers=2"]])
def test_variants_train(communicator: Communicator, overrides: list[str]) -> None:
    check_training(communicator, *overrides)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_states_are_of_their_own_moment_and_hold_everything(
    communicator: Communicator, tmp_path: Path, precision: str
) -> None:
    def draw() -> tf.Tensor:
        return tf.random.get_global_generator().uniform((3,))

    check_states(communicator, tmp_path, draw, f"precision={precision}")


def test_a_gpu_is_missed(communicator: Communicator) -> None:
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="device=cuda but TensorFlow sees no GPU"):
        make(communicator, "device=cuda")
