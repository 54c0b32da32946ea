"""What the TensorFlow engine does of compression, and what it refuses."""

from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from compress_helpers import compress_config, make_source, report_of, run_compress
from omegaconf import OmegaConf

from << cookiecutter.package_name >>.compress import compress
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.tensorflow.distill import Distillation

OPTIONS = {"temperature": 2.0, "weight": 1.0, "features": [], "feature_weight": 1.0}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESTED_ENGINE", "tensorflow")
        yield make_source(tmp_path_factory.mktemp("tensorflow") / "source")


def network() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


def test_the_loss_is_the_divergence_of_the_answers() -> None:
    teacher, student = network(), network()
    hooks, inputs = Distillation(teacher, student, OmegaConf.create(OPTIONS)), tf.random.normal((5, 4))
    answers = [keras.ops.log_softmax(model(inputs) / 2.0) for model in (teacher, student)]
    expected = 4 * float(tf.reduce_sum(tf.exp(answers[0]) * (answers[0] - answers[1])))
    assert float(hooks.loss(tf.constant(7.0), inputs, student(inputs))) == pytest.approx(expected, rel=1e-4)
    student.set_weights(teacher.get_weights())
    assert np.abs(hooks.loss(tf.constant(7.0), inputs, student(inputs))) < 1e-5


def convolutions(width: int) -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((6, 6, 1)), layers.Conv2D(width, 3, name="first"), layers.Flatten(name="flat"), layers.Dense(2)]
    )


def test_features_of_other_widths_are_compared_by_attention() -> None:
    student, teacher, inputs = convolutions(4), convolutions(8), tf.random.uniform((5, 6, 6, 1))
    options = OmegaConf.create({**OPTIONS, "weight": 0.0, "features": ["first"]})
    hooks = Distillation(teacher, student, options)

    loss = tf.function(lambda: hooks.loss(tf.constant(0.0), inputs, student(inputs, training=True)))
    assert float(loss()) > 0.01
    for own, twice in zip(student.get_layer("first").weights, teacher.get_layer("first").weights, strict=True):
        twice.assign(tf.concat([own, own], -1))  # the same attention, since only its places' ratios count
    assert float(loss()) == pytest.approx(0, abs=1e-6)
    hooks = Distillation(teacher, student, OmegaConf.create({**options, "features": ["flat"]}))
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


@pytest.mark.slow  # each starts a run, once the source is trained
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["compress=channels"], "compress=channels is not there for tensorflow models"),
        (["compress=low_rank"], "compress=low_rank is not there for tensorflow models"),
        (["compress=distill", "compress.student.classes=7"], "answers with 7 classes and its teacher with 10"),
        (["compress=distill", "compress.features=[nine]"], "the teacher has no layer nine: there are "),
    ],
)
def test_what_is_not_there_is_refused(source: Path, tmp_path: Path, overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        compress(compress_config(source, *overrides), tmp_path)
