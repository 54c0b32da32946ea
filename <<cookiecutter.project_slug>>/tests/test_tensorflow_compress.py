"""What the TensorFlow engine does of compression, and what it refuses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from compress_helpers import compress_config, make_source, report_of, run_compress
from hydra.utils import instantiate
from jobs import PACKAGE
from keras import layers
from omegaconf import OmegaConf

from << cookiecutter.package_name >>.compress.command import compress
from << cookiecutter.package_name >>.compress.tensorflow.distillation import TensorFlowDistillation
from << cookiecutter.package_name >>.compress.tensorflow.measure import count
from << cookiecutter.package_name >>.compress.tensorflow.shrink import (
    fewer_channels,
    low_rank,
    shrunk,
)
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.export.model_folder import export_model
from << cookiecutter.package_name >>.export.tensorflow import load_model
from << cookiecutter.package_name >>.tensorflow.variables import copies, named, write
from << cookiecutter.package_name >>.weights import FILE

OPTIONS = {"temperature": 2.0, "weight": 1.0, "features": [], "feature_weight": 1.0}
CHANNELS = OmegaConf.create({"sparsity": 0.5, "scope": "layer", "layers": ["*"], "skip": []})
RANK = OmegaConf.create({"rank": None, "energy": 0.5, "layers": ["*"], "skip": []})
SHAPE = (32, 32, 3)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESTED_ENGINE", "tensorflow")
        yield make_source(tmp_path_factory.mktemp("tensorflow") / "source")


def network() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


def test_the_loss_is_the_divergence_of_the_answers() -> None:
    teacher, student = network(), network()
    hooks, inputs = TensorFlowDistillation(teacher, student, OmegaConf.create(OPTIONS)), tf.random.normal((5, 4))
    answers = [keras.ops.log_softmax(model(inputs) / 2.0) for model in (teacher, student)]
    expected = 4 * float(tf.reduce_sum(tf.exp(answers[0]) * (answers[0] - answers[1])))
    assert float(hooks.loss(tf.constant(7.0), inputs, student(inputs))) == pytest.approx(expected, rel=1e-4)
    student.set_weights(teacher.get_weights())
    assert np.abs(hooks.loss(tf.constant(7.0), inputs, student(inputs))) < 1e-5


def convolutions(width: int) -> keras.Model:
    return keras.Sequential(
        [keras.Input((6, 6, 1)), layers.Conv2D(width, 3, name="first"), layers.Flatten(name="flat"), layers.Dense(2)]
    )


def test_features_of_other_widths_are_compared_by_attention() -> None:
    student, teacher, inputs = convolutions(4), convolutions(8), tf.random.uniform((5, 6, 6, 1))
    options = OmegaConf.create({**OPTIONS, "weight": 0.0, "features": ["first"]})
    hooks = TensorFlowDistillation(teacher, student, options)

    loss = tf.function(lambda: hooks.loss(tf.constant(0.0), inputs, student(inputs, training=True)))
    assert float(loss()) > 0.01
    for own, twice in zip(student.get_layer("first").weights, teacher.get_layer("first").weights, strict=True):
        twice.assign(tf.concat([own, own], -1))  # the same attention, since only its places' ratios count
    assert float(loss()) == pytest.approx(0, abs=1e-6)
    hooks = TensorFlowDistillation(teacher, student, OmegaConf.create({**options, "features": ["flat"]}))
    with pytest.raises(UserError, match=r"flat gives \(64,\) in the student and \(128,\) in the teacher: name layers"):
        hooks.loss(tf.constant(0.0), inputs, student(inputs))


@pytest.mark.slow
def test_a_taught_student_is_small_and_right(source: Path, tmp_path: Path) -> None:
    student = ("model@compress.student=mlp", "compress.student.hidden=[32]", "compress.finetune.epochs=6")
    result = run_compress(source, tmp_path, "compress=distill", *student)
    assert result.returncode == 0, result.stdout + result.stderr
    models = report_of(tmp_path)["models"]
    assert models["after"]["accuracy"] > 0.9
    assert models["after"]["parameters"] == 64 * 32 + 32 + 32 * 10 + 10
    assert models["after"]["macs"] == 64 * 32 + 32 * 10 < models["before"]["macs"]


def joined() -> keras.Model:
    """Channels that are added, convolved one by one, put side by side and flattened, with random weights."""
    inputs = keras.Input((6, 6, 3))
    stem = layers.Conv2D(8, 3, padding="same", activation="relu", name="stem")(inputs)
    inside = layers.Conv2D(6, 3, padding="same", name="inside")(stem)
    inside = layers.ReLU()(layers.BatchNormalization(name="norm")(inside))
    inside = layers.DepthwiseConv2D(3, padding="same", name="depthwise")(inside)
    outside = layers.Conv2D(8, 1, name="outside")(inside)
    both = layers.Concatenate()([layers.Add()([stem, outside]), inside])
    flat = layers.Flatten()(layers.MaxPooling2D()(both))
    hidden = layers.Dense(10, activation="relu", name="hidden")(flat)
    return random(keras.Model(inputs, layers.Dense(4, name="logits")(hidden)))


def random(model: keras.Model) -> keras.Model:
    generator = np.random.default_rng(0)
    for variable in model.weights:
        values = generator.normal(size=variable.shape)
        variable.assign(np.abs(values) if "variance" in variable.name else values)
    return model


def silence(model: keras.Model, small: keras.Model) -> None:
    """Set all weights of the channels to zero that the smaller one lacks, as its biases show."""
    for layer in model.layers:
        if layer.weights:
            gone = ~np.isin(layer.get_weights()[1], small.get_layer(layer.name).get_weights()[1])
            masks = [gone[:, None] if array.shape[-1] == 1 else gone for array in layer.get_weights()]
            layer.set_weights(
                [np.where(mask, 0, array) for mask, array in zip(masks, layer.get_weights(), strict=True)]
            )


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_channels_go_with_all_that_depends_on_them(scope: str) -> None:
    """The same answers as of the whole model with zeros in their place."""
    model, inputs = joined(), np.random.default_rng(1).normal(size=(5, 6, 6, 3)).astype(np.float32)
    small, changes, remarks = fewer_channels(model, OmegaConf.merge(CHANNELS, {"scope": scope}))
    silence(model, small)
    np.testing.assert_allclose(small(inputs), model(inputs), rtol=1e-3, atol=1e-3)
    assert remarks == []
    widths = changes[0]["layers"]
    assert widths["stem"] == widths["outside"]
    if scope == "layer":
        assert [[*one.values()] for one in widths.values()] == [[4], [3], [4], [5]]


class Subclassed(keras.Model):  # type: ignore[misc]
    """Without a graph, with a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = layers.DepthwiseConv2D(3, padding="same")
        self.thin = layers.SeparableConv2D(16, 3, padding="same")
        self.pool, self.twice = layers.GlobalAveragePooling2D(), layers.Dense(16)

    def call(self, inputs: Any) -> Any:
        return self.twice(self.twice(self.pool(self.thin(self.deep(inputs)))))


def test_every_call_of_every_layer_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{PACKAGE}.compress.tensorflow.measure.load_model", lambda *_: Subclassed())
    depthwise, separable, dense = 8 * 8 * 3 * 9, 8 * 8 * (9 * 3 + 3 * 16), 2 * 16 * 16
    assert count(Path(), (8, 8, 3), ())["macs"] == depthwise + separable + dense


def test_what_is_not_known_stays_whole() -> None:
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, name="first")(inputs)
    x = keras.Sequential([layers.Conv2D(8, 3)], name="inner")(x)
    x = layers.Conv2D(8, 3, name="second")(layers.ReLU()(x))
    x = layers.Conv2D(8, 1, name="third")(x)
    model = keras.Model(inputs, layers.Dense(4)(layers.Flatten()(x)))
    small, changes, remarks = fewer_channels(model, OmegaConf.merge(CHANNELS, {"skip": ["third"]}))
    assert changes == [{"kind": "widths", "layers": {"second": {"filters": 4}}}]
    assert remarks == ["channels stay that reach layers of kinds that are not known: Sequential (inner)"]
    assert small.output_shape == (None, 4)
    with pytest.raises(UserError, match=r"compress\.sparsity=0\.5 removes no channel"):
        fewer_channels(model, OmegaConf.merge(CHANNELS, {"skip": ["second", "third"]}))
    with pytest.raises(UserError, match="need a functional model"):
        shrunk(keras.Sequential([layers.Dense(3)]), changes)


def test_a_layer_of_low_rank_is_factored_without_loss() -> None:
    convolution = layers.Conv2D(32, 3, strides=2, padding="same", activation="relu")
    model = random(keras.Sequential([keras.Input((6, 6, 8)), convolution, layers.Flatten(), layers.Dense(3)]))
    generator, inputs = np.random.default_rng(1), np.random.default_rng(2).random((2, 6, 6, 8), np.float32)
    convolution.kernel.assign((generator.random((72, 4)) @ generator.random((4, 32))).reshape(3, 3, 8, 32))
    with pytest.raises(UserError, match="no layer gets smaller by compress=low_rank"):
        low_rank(model, OmegaConf.merge(RANK, {"rank": 32}))
    factored, changes, remarks = low_rank(model, OmegaConf.merge(RANK, {"energy": 0.9999999}))
    assert [one["rank"] <= 4 for one in changes[0]["layers"].values()] == [True]
    assert "left whole" in remarks[0]
    np.testing.assert_allclose(factored(inputs), model(inputs), rtol=1e-3, atol=1e-3)


def as_folder(model: keras.Model, config: dict[str, Any], folder: Path) -> Path:
    """A model folder, as a checkpoint of the model gives it."""
    (folder / "checkpoint").mkdir(parents=True)
    data = {"shape": SHAPE, "classes": 10, "normalize": None}
    OmegaConf.save({"engine": "tensorflow", "model": config, "data": data}, folder / "checkpoint" / "config.yaml")
    write(copies(named(model)), folder / "checkpoint" / FILE)
    export_model(folder / "checkpoint", folder / "model")
    return folder / "model"


@pytest.mark.parametrize(
    ("name", "steps", "part"),
    [("resnet18", [(fewer_channels, CHANNELS)], 0.35), ("cnn", [(fewer_channels, CHANNELS), (low_rank, RANK)], 0.2)],
)
def test_a_smaller_network_is_built_again(name: str, steps: list[Any], part: float, tmp_path: Path) -> None:
    """The description alone, plain values, gives the architecture whose weights fit."""
    config = {"_target_": f"{PACKAGE}.tensorflow.models.{name}", "shape": list(SHAPE), "classes": 10}
    model = instantiate(config)
    whole = as_folder(model, config, tmp_path / "whole")
    for choose, options in steps:
        model, changes, _ = choose(model, options)
        config = {"_target_": f"{PACKAGE}.compress.tensorflow.shrink.shrunk", "base": config, "changes": changes}
    small = as_folder(model, config, tmp_path / "small")
    inputs = np.random.default_rng(0).random((2, *SHAPE), np.float32)
    np.testing.assert_allclose(load_model(small)(inputs), model(inputs), rtol=1e-4, atol=1e-5)
    assert {*named(instantiate(config))} == {*named(model)}
    assert count(small, SHAPE, ())["macs"] <= part * count(whole, SHAPE, ())["macs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "overrides"), [(2, ["compress=channels"]), (1, ["compress=low_rank", "compress.rank=8"])]
)
def test_a_smaller_network_is_right(source: Path, tmp_path: Path, ranks: int, overrides: list[str]) -> None:
    result = run_compress(source, tmp_path, *overrides, "compress.finetune.epochs=4", ranks=ranks)
    assert result.returncode == 0, result.stdout + result.stderr
    models = report_of(tmp_path)["models"]
    assert models["after"]["accuracy"] >= 0.95
    assert models["after"]["macs"] <= 0.35 * models["before"]["macs"]
    assert models["after"]["parameters"] < 0.35 * models["before"]["parameters"]


@pytest.mark.slow  # each starts a run, once the source is trained
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["compress=qat"], "compress=qat is not there for tensorflow models, .* use compress=int8"),
        (["compress=distill", "compress.student.classes=7"], "answers with 7 classes and its teacher with 10"),
        (["compress=distill", "compress.features=[nine]"], "the teacher has no layer nine: there are "),
    ],
)
def test_what_is_not_there_is_refused(source: Path, tmp_path: Path, overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        compress(compress_config(source, *overrides), tmp_path)
