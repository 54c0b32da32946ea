"""What PyTorch brings to make a model smaller: see ../wing.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from safetensors.torch import save_file
from torch import Tensor, nn

from ...export.torch import channels_first, load_model
from ...torch.engine import TorchEngine
from ..wing import Choice
from .distillation import TorchDistillation as Distillation
from .fake_quantize import prepare
from .pruning import TorchWeights as PrunableWeights
from .quantization import METHODS
from .quantization import TorchQuantizer as Quantizer
from .shrink import fewer_channels, low_rank, shrunk

__all__ = ["METHODS", "Distillation", "PrunableWeights", "Quantizer", "load_model", "prepare", "shrunk"]


def copy_model(engine: TorchEngine, base: dict[str, Any]) -> nn.Module:
    """On the CPU, where the engine's layers may be of its device."""
    model: nn.Module = instantiate(base)
    model.load_state_dict(engine.model.state_dict())
    return model


def save_weights(model: nn.Module, file: Path) -> None:
    """With the buffers."""
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, file)


def shrink(model: nn.Module, options: Any, data: Any) -> Choice:
    """Changes the model itself."""
    if options.method == "low_rank":
        return low_rank(model, options)
    return fewer_channels(model, options, _inputs(data.shape), data.classes)


@torch.no_grad()
def classes_of(model: nn.Module, engine: TorchEngine, shape: Sequence[int]) -> int:
    """By a call with zeros."""
    return int(model.to(engine.device).eval()(_inputs(shape).to(engine.device)).shape[1])


def _inputs(shape: Sequence[int]) -> Tensor:
    """Two samples of zeros as the models take them."""
    return channels_first(torch.zeros((2, *shape)))
