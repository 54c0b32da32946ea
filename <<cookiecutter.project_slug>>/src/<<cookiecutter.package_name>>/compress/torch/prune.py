"""Masks on the weights of convolutions and linear layers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ..masks import Masks, Weights
from ..pruning import select

PRUNABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


class Layers:
    """See pruning.Layers; the masks live beside the weights on their device.

    Args:
        model: Its convolutions and linear layers can be pruned.
        wanted: Patterns of the names of layers, such as "0" or "4.body.*".
        skip: Patterns of those to leave dense.
    """

    input_axis = 1  # of (outputs, inputs, ...)

    def __init__(self, model: nn.Module, wanted: list[str], skip: list[str]) -> None:
        layers = {name: module for name, module in model.named_modules() if isinstance(module, PRUNABLE)}
        self._weights: dict[str, Tensor] = {
            f"{name}.weight" if name else "weight": layers[name].weight for name in select([*layers], wanted, skip)
        }
        self._masks: dict[str, Tensor] = {}

    def weights(self) -> Weights:
        """Copies on the host."""
        return {name: weight.detach().float().cpu().numpy() for name, weight in self._weights.items()}

    def hold(self, chosen: Masks) -> None:
        """Take these masks."""
        self._masks = {
            name: torch.from_numpy(np.ascontiguousarray(mask)).to(self._weights[name]) for name, mask in chosen.items()
        }
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Set what the masks switch off to zero."""
        for name, mask in self._masks.items():
            self._weights[name].mul_(mask)
