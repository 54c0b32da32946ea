"""Quantization of Keras models, as LiteRT files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import compose_config
from quantize_helpers import accuracy, trained_model

from << cookiecutter.package_name >>.compress.quantization import post_training
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.export.artefacts import load_predictor, weigh
from << cookiecutter.package_name >>.export.command import validation_samples
from << cookiecutter.package_name >>.ranks import Communicator, open_communicator


@pytest.fixture(scope="module")
def communicator() -> Communicator:
    return open_communicator("tensorflow")


@pytest.fixture(scope="module")
def folder(communicator: Communicator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model of digits."""
    return trained_model("tensorflow", tmp_path_factory.mktemp("tensorflow"), communicator)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "smaller"), [("static", 2.5), ("dynamic", 2.5), ("fp16", 1.7)])
def test_methods(folder: Path, communicator: Communicator, tmp_path: Path, method: str, smaller: float) -> None:
    target = tmp_path / "model.tflite"
    samples = validation_samples(compose_config("engine=tensorflow"), 128)
    report = post_training(folder, target, method, [samples[:64], samples[64:]], communicator)
    assert report["calibration_samples"] == (128 if method == "static" else 0)
    assert len(report["quantized"]) >= (2 if method == "dynamic" else 4)
    if method == "dynamic":
        assert any(name.startswith("FULLY_CONNECTED") for name in report["fp32"])
    assert accuracy(target) >= accuracy(folder) - 0.02
    assert weigh(folder).size > smaller * weigh(target).size
    assert load_predictor(target)(samples[:1]).shape == (1, 10)


NAN = np.full((2, 8, 8, 1), np.nan, np.float32)


@pytest.mark.parametrize(
    ("name", "method", "data", "skip", "sentence"),
    [
        ("a.keras", "static", [], (), r"cannot hold a static model: its name must end in \.tflite"),
        (
            "a.tflite",
            "weight_only",
            [],
            (),
            "the method weight_only is not there for this engine: choose static, dynamic",
        ),
        ("a.tflite", "static", [], (), "0 calibration samples for 1 ranks"),
        ("a.tflite", "static", [NAN], (), "hold NaN or infinite values"),
        ("a.tflite", "static", [NAN[:, :4]], (), r"have shape \(4, 8, 1\), the model takes \(8, 8, 1\)"),
        ("a.tflite", "dynamic", [], ("logits",), "skip=logits is not possible"),
    ],
)
def test_bad_input(
    folder: Path,
    communicator: Communicator,
    tmp_path: Path,
    name: str,
    method: str,
    data: list[Any],
    skip: tuple[str, ...],
    sentence: str,
) -> None:
    with pytest.raises(UserError, match=sentence):
        post_training(folder, tmp_path / name, method, data, communicator, skip)
    assert not list(tmp_path.iterdir())
