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

OPTIONS = {"temperature": 2.0, "weight": 1.0, "features": []}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESTED_ENGINE", "tensorflow")
        yield make_source(tmp_path_factory.mktemp("tensorflow") / "source")


def network() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


def test_the_loss_is_the_divergence_of_the_answers() -> None:
    teacher, student = network(), network()
    hooks, inputs = Distillation(teacher, OmegaConf.create(OPTIONS)), tf.random.normal((5, 4))
    answers = [keras.ops.log_softmax(model(inputs) / 2.0) for model in (teacher, student)]
    expected = 4 * float(tf.reduce_sum(tf.exp(answers[0]) * (answers[0] - answers[1])))
    assert float(hooks.loss(tf.constant(7.0), inputs, student(inputs))) == pytest.approx(expected, rel=1e-4)
    student.set_weights(teacher.get_weights())
    assert np.abs(hooks.loss(tf.constant(7.0), inputs, student(inputs))) < 1e-5


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
        (["compress=distill", "compress.features=[pool]"], r"compress\.features is not there for tensorflow models"),
    ],
)
def test_what_is_not_there_is_refused(source: Path, tmp_path: Path, overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        compress(compress_config(source, *overrides), tmp_path)
