"""Quantization of PyTorch models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import compose_config
from quantize_helpers import accuracy, trained_model
from torch import nn

from << cookiecutter.package_name >>.compress.quantization import post_training
from << cookiecutter.package_name >>.compress.torch.fake_quantize import (
    calibrating,
    merge_ranges,
    prepare,
    quantizers,
)
from << cookiecutter.package_name >>.compress.torch.quantization import convert
from << cookiecutter.package_name >>.data import digits
from << cookiecutter.package_name >>.errors import UserError
from << cookiecutter.package_name >>.export.artefacts import PROGRAMS, load_predictor, weigh
from << cookiecutter.package_name >>.export.command import validation_samples
from << cookiecutter.package_name >>.export.torch import channels_first, load_model
from << cookiecutter.package_name >>.ranks import Communicator, open_communicator
from << cookiecutter.package_name >>.torch.models import cnn, resnet18

SHAPE = (8, 8, 1)


@pytest.fixture(scope="module")
def communicator() -> Communicator:
    return open_communicator("torch")


@pytest.fixture(scope="module")
def folder(communicator: Communicator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model of digits."""
    return trained_model("torch", tmp_path_factory.mktemp("torch"), communicator)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "suffix", "smaller"),
    [
        ("static", ".onnx", 2),
        ("weight_only", ".onnx", 2),
        ("dynamic", ".onnx", 0.8),
        ("fp16", ".onnx", 1.4),
        ("fp16", ".pt2", 1),
        ("bf16", ".pt2", 1),
    ],
)
def test_methods(
    folder: Path, communicator: Communicator, tmp_path: Path, method: str, suffix: str, smaller: float
) -> None:
    target = tmp_path / f"model{suffix}"
    samples = validation_samples(compose_config("engine=torch"), 128)
    report = post_training(folder, target, method, [samples[:64], samples[64:]], communicator)
    assert report["calibration_samples"] == (128 if method == "static" else 0)
    assert report["quantized"]
    assert accuracy(target) >= accuracy(folder) - 0.02
    assert weigh(folder).size > smaller * weigh(target).size
    assert load_predictor(target, trusted=PROGRAMS)(samples[:1]).shape == (1, 10)


def test_layers_that_stay_in_float_are_named(folder: Path, communicator: Communicator, tmp_path: Path) -> None:
    samples = [validation_samples(compose_config("engine=torch"), 64)]
    report = post_training(folder, tmp_path / "a.onnx", "static", samples, communicator, skip=["0*"])
    assert report["fp32"] == {"0": "skipped as asked", "1": "BatchNorm2d is not quantized"}
    assert "3" in report["quantized"]
    with pytest.raises(UserError, match=r"compress\.skip=99 is no layer to quantize: there are 0, 3"):
        post_training(folder, tmp_path / "b.onnx", "static", samples, communicator, skip=["99"])


class Odd(nn.Module):
    """One layer twice, one of a kind without an int8 form, and a block with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.up, self.down = nn.Conv2d(2, 2, 1), nn.ConvTranspose2d(2, 2, 2, 2), nn.Conv2d(2, 2, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.twice(x))
        return torch.flatten(x + self.down(self.up(x)), 1)


def test_operators_without_an_int8_form(tmp_path: Path) -> None:
    model, inputs = Odd().eval(), torch.randn(8, 4, 4, 2)
    prepared = prepare(model)
    with calibrating(prepared), torch.no_grad():
        prepared(channels_first(inputs))
    report = convert(prepared, tmp_path / "odd.onnx", (4, 4, 2))
    assert report["quantized"] == ["down"]
    assert report["fp32"] == {"twice": "used more than once", "up": "ConvTranspose2d is not quantized"}
    with torch.no_grad():
        wanted = model(channels_first(inputs)).numpy()
    assert np.abs(load_predictor(tmp_path / "odd.onnx")(inputs.numpy()) - wanted).max() < 0.1 * np.abs(wanted).max()


def test_a_residual_network_is_int8_throughout(tmp_path: Path) -> None:
    """Every convolution, dense layer and addition becomes one int8 operator of ONNX Runtime."""
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    prepared = prepare(resnet18((16, 16, 3), 10).eval())
    with calibrating(prepared), torch.no_grad():
        prepared(torch.rand(4, 3, 16, 16))
    convert(prepared, tmp_path / "model.onnx", (16, 16, 3))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(tmp_path / "model.onnx", options)
    names = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert (names.count("QLinearConv"), names.count("QLinearAdd"), names.count("QGemm")) == (20, 8, 1)
    assert names.count("Conv") == names.count("Add") == names.count("Gemm") == 0


def test_ranges_and_rounded_weights(tmp_path: Path) -> None:
    """Batch-norm folded at export gives what the network computed with it unfolded."""
    torch.manual_seed(0)
    model = cnn(SHAPE, 10, width=8)
    inputs = torch.rand(64, *SHAPE)
    with torch.no_grad():
        for _ in range(30):
            model.train()(channels_first(inputs))
    prepared = prepare(model.eval())
    assert prepared.state_dict().keys() - model.state_dict().keys() == {
        f"{name}.{end}" for name in quantizers(prepared) for end in ("lowest", "highest")
    }
    with calibrating(prepared), torch.no_grad():
        prepared(channels_first(inputs))
    assert all(place.lowest <= 0 < place.highest for place in quantizers(prepared).values())
    with torch.no_grad():
        rounded, wanted = (net(channels_first(inputs)).numpy() for net in (prepared, model))
    assert 0 < np.abs(rounded - wanted).max() < 0.1 * np.abs(wanted).max()


@pytest.mark.slow
def test_training_with_rounding(folder: Path, communicator: Communicator, tmp_path: Path) -> None:
    part = digits().train
    inputs, labels = part.fetch(np.arange(len(part)), 0)
    prepared: Any = prepare(load_model(folder)).train()
    before = copy.deepcopy(prepared.state_dict())
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for first in range(0, 1024, 64):
        batch = slice(first, first + 64)
        logits = prepared(channels_first(torch.from_numpy(inputs[batch])))
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, torch.from_numpy(labels[batch])).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = prepared.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name, _ in prepared.named_parameters())
    merge_ranges(prepared, communicator)
    convert(prepared, tmp_path / "model.onnx", SHAPE)
    assert accuracy(tmp_path / "model.onnx") >= accuracy(folder) - 0.02


NAN = np.full((2, *SHAPE), np.nan, np.float32)


@pytest.mark.parametrize(
    ("name", "method", "data", "sentence"),
    [
        ("a.pt2", "static", [], r"cannot hold a static model: its name must end in \.onnx"),
        ("a.onnx", "bf16", [], r"cannot hold a bf16 model: its name must end in \.pt2"),
        ("a.onnx", "int4", [], "the method int4 is not there for this engine: choose static, dynamic"),
        ("a.onnx", "static", [], "0 calibration samples for 1 ranks"),
        ("a.onnx", "static", [NAN], "hold NaN or infinite values"),
        (
            "a.onnx",
            "static",
            [NAN[:, :4]],
            r"have shape \(4, 8, 1\), the model takes \(8, 8, 1\)",
        ),
    ],
)
def test_bad_input(
    folder: Path, communicator: Communicator, tmp_path: Path, name: str, method: str, data: list[Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        post_training(folder, tmp_path / name, method, data, communicator)
    assert not list(tmp_path.iterdir())


def test_without_calibration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the model has seen no data: calibrate or train it"):
        convert(prepare(cnn(SHAPE, 10, width=4)), tmp_path / "model.onnx", SHAPE)


def test_channels_that_are_always_zero(tmp_path: Path) -> None:
    """As pruning leaves them: only their bias counts."""
    torch.manual_seed(0)
    last, inputs = nn.Linear(8, 10), torch.rand(16, *SHAPE)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), last)
    with torch.no_grad():
        last.weight[:5] = 0
        prepared = prepare(model.eval())
        with calibrating(prepared):
            prepared(channels_first(inputs))
        convert(prepared, tmp_path / "model.onnx", SHAPE)
        wanted = model(channels_first(inputs)).numpy()
    assert np.abs(load_predictor(tmp_path / "model.onnx")(inputs.numpy()) - wanted).max() < 0.05


def test_a_model_that_cannot_be_traced() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(UserError, match="Branches cannot be traced"):
        prepare(Branches())
