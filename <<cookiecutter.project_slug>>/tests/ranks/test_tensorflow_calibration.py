"""Each rank brings its part of the samples, and one file comes out."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from jobs import compose_config
from quantize_helpers import trained_model

from << cookiecutter.package_name >>.compress.quantization import post_training
from << cookiecutter.package_name >>.export.artefacts import load_predictor
from << cookiecutter.package_name >>.export.command import validation_samples
from << cookiecutter.package_name >>.ranks import Communicator


def test_two_ranks_calibrate_together(ranks: Communicator, tmp_path: Path) -> None:
    folder = trained_model("tensorflow", tmp_path, ranks)
    samples = validation_samples(compose_config(), 64)
    half = 32 * ranks.rank
    report = post_training(folder, tmp_path / "two.tflite", "static", [samples[half : half + 32]], ranks)
    assert report["calibration_samples"] == 64
    if ranks.writes:
        post_training(folder, tmp_path / "one.tflite", "static", [samples], replace(ranks, size=1))
        one, two = (load_predictor(tmp_path / name)(samples) for name in ("one.tflite", "two.tflite"))
        assert np.array_equal(one, two)
