"""The same weights, data and options give the same losses in both wings."""

import shutil
from pathlib import Path

import pytest
from jobs import compose_config, values
from safetensors.numpy import load_file, save_file

from << cookiecutter.package_name >>.checkpoints.manifest import MANIFEST, seal
from << cookiecutter.package_name >>.checkpoints.store import Store
from << cookiecutter.package_name >>.train import train

NAMES = {"1.weight": "dense_0/kernel", "1.bias": "dense_0/bias", "4.weight": "logits/kernel", "4.bias": "logits/bias"}


@pytest.mark.parametrize(
    ("both", "torch", "tensorflow"),
    [
        (["optimizer.weight_decay=0"], [], []),  # Keras decouples it in every optimizer, torch in AdamW only
        (["optimizer=adamw"], ["+optimizer.eps=1e-7"], ["+optimizer.epsilon=1e-7"]),
    ],
)
def test_losses_are_equal(tmp_path: Path, both: list[str], torch: list[str], tensorflow: list[str]) -> None:
    """With momentum, warm-up and cosine: each starts from the same weights."""
    options = ["model.hidden=[32]", "epochs=3", "tracking.tensorboard=false", *both]
    train(compose_config("engine=torch", *options, "optimizer.lr=1e-12"), tmp_path / "start")
    start = Store(tmp_path / "start" / "checkpoints").find("latest").folder
    train(compose_config("engine=torch", *options, *torch, f"weights_from={start}"), tmp_path / "torch")
    start = rename(start, tmp_path / "renamed")
    train(compose_config("engine=tensorflow", *options, *tensorflow, f"weights_from={start}"), tmp_path / "tensorflow")
    for name in ("train/loss", "val/loss"):
        first, second = values(tmp_path / "torch", name), values(tmp_path / "tensorflow", name)
        assert len(first) >= 3
        assert second == pytest.approx(first, rel=1e-4)


def rename(checkpoint: Path, folder: Path) -> Path:
    """The same weights under Keras' names: kernels are (inputs, outputs) there."""
    shutil.copytree(checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({NAMES[name]: array.T.copy() for name, array in weights.items()}, folder / "model.safetensors")
    (folder / MANIFEST).unlink()
    seal(folder)
    return folder
