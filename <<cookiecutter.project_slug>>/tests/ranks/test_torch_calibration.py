"""Each rank shows the model its part of the samples, and one file comes out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs import compose_config
from quantize_helpers import trained_model

from << cookiecutter.package_name >>.compress.quantization import post_training
from << cookiecutter.package_name >>.compress.torch.fake_quantize import (
    calibrating,
    merge_ranges,
    prepare,
    quantizers,
)
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.export.artefacts import weigh
from << cookiecutter.package_name >>.export.command import validation_samples
from << cookiecutter.package_name >>.export.torch import load_model
from << cookiecutter.package_name >>.ranks import Communicator


def test_two_ranks_calibrate_together(ranks: Communicator, tmp_path: Path) -> None:
    folder = trained_model("torch", tmp_path, ranks)
    samples = validation_samples(compose_config(), 96)
    report = post_training(folder, tmp_path / "two.onnx", "static", [samples[ranks.rank :: 2]], ranks)
    assert report["calibration_samples"] == 96
    if ranks.writes:
        post_training(folder, tmp_path / "one.onnx", "static", [samples], replace(ranks, size=1))
        assert weigh(tmp_path / "two.onnx").sha256 == weigh(tmp_path / "one.onnx").sha256

    alone = prepare(load_model(folder))
    with calibrating(alone), torch.no_grad():  # rank 1 sees what is twice as large
        alone(torch.from_numpy(samples).permute(0, 3, 1, 2) * (1 + ranks.rank))
    mine = [float(place.highest) for place in quantizers(alone).values()]
    merge_ranges(alone, ranks)
    merged = [float(place.highest) for place in quantizers(alone).values()]
    assert merged == [max(pair) for pair in zip(*ranks.gather(mine, "mine"), strict=True)]
    assert (merged != mine) == (ranks.rank == 0)

    with pytest.raises(UserError, match="1 calibration samples for 2 ranks"):
        post_training(folder, tmp_path / "few.onnx", "static", [samples[: 1 - ranks.rank]], ranks)
