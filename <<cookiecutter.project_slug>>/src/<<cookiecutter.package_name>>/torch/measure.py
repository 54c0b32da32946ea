"""What a model costs to run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .export import Deployed
from .models import load_model
from .prune import PRUNABLE


def count(folder: Path, shape: Sequence[int], trusted: Sequence[str]) -> dict[str, int]:
    """Parameters, and multiply-accumulates of convolutions and linear layers for one sample.

    They are counted as a dense runtime does them: a weight of zero is multiplied too.

    Args:
        folder: A model folder.
        shape: Of one sample, channels last.
        trusted: Packages besides this one that the architecture may come from.
    """
    model = load_model(folder, trusted)
    macs: list[int] = []

    def add(layer: torch.nn.Module, inputs: Any, output: Tensor) -> None:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        macs.append(output.numel() // output.shape[0] * math.prod(weight.shape[1:]))

    for layer in model.modules():
        if isinstance(layer, PRUNABLE):
            layer.register_forward_hook(add)
    with torch.inference_mode():
        Deployed(model)(torch.zeros((1, *shape)))
    return {"parameters": sum(parameter.numel() for parameter in model.parameters()), "macs": sum(macs)}
