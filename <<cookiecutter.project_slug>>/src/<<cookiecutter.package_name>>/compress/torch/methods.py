"""What this wing does to compress a model: see ../command.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from safetensors.torch import save_file
from torch import Tensor, fx, nn

from ...export.torch import channels_first, load_model
from ...torch.engine import TorchEngine
from ...weights import FILE, check_classes
from ..pruning import Layers
from . import prune, shrink
from .distill import Distillation
from .fake_quantize import prepare
from .quantize import convert

SHRINKERS: dict[str, Callable[..., shrink.Choice]] = {
    "channels": shrink.fewer_channels,
    "low_rank": shrink.low_rank,
}
SHRUNK = f"{shrink.__name__}.{shrink.shrunk.__name__}"
PREPARED = f"{prepare.__module__}.{prepare.__name__}"


def new_model(
    engine: TorchEngine, base: dict[str, Any], options: Any, data: Any, folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """Choose another architecture and write the weights to begin with; returns its config, and remarks.

    Args:
        engine: Its model has the weights of the source and stays as it is.
        base: The config of that model.
        options: compress: method and what the method takes.
        data: data: shape and classes.
        folder: Where model.safetensors goes.
    """
    model: nn.Module = instantiate(base)  # not the engine's, whose layers may be of its device
    model.load_state_dict(engine.model.state_dict())
    if options.method == "qat":
        prepared = prepare(model, list(options.skip))
        _write(prepared, folder)
        return {"_target_": PREPARED, "model": base, "skip": list(options.skip)}, []
    chosen, changes, remarks = SHRINKERS[options.method](model, options, _inputs(data.shape), data.classes)
    _write(chosen, folder)
    return {"_target_": SHRUNK, "base": base, "changes": changes}, remarks


def _write(model: nn.Module, folder: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / FILE)


def convert_trained(folder: Path, target: Path, shape: Sequence[int], options: Any, trusted: Sequence[str]) -> None:
    """Write the int8 file of a model that was trained with rounding."""
    model = load_model(folder, trusted)
    assert isinstance(model, fx.GraphModule)
    convert(model, target, shape, list(options.skip))


def _inputs(shape: Sequence[int]) -> Tensor:
    """Two samples of zeros as the models take them."""
    return channels_first(torch.zeros((2, *shape)))


def layers(engine: TorchEngine, wanted: list[str], skip: list[str]) -> Layers:
    """The layers to prune."""
    return prune.Layers(engine.model, wanted, skip)


def distillation(engine: TorchEngine, weights: Path, options: Any, data: Any, trusted: Sequence[str]) -> Distillation:
    """The loss of a student.

    Args:
        engine: Its model is the student.
        weights: The teacher's model folder.
        options: See Distillation; and teacher, a model by _target_ instead of that one.
        data: data: shape.
        trusted: As for load_model().

    Raises:
        UserError: if the two answer with different numbers of classes.
    """
    model = instantiate(options.teacher) if options.get("teacher") else load_model(weights, trusted)
    inputs = _inputs(data.shape).to(engine.device)
    with torch.no_grad():
        check_classes(*(one.to(engine.device).eval()(inputs).shape[1] for one in (engine.model, model)))
    return Distillation(model, engine.model, options)
