"""The parts of pruning in PyTorch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..layer_names import select
from ..pruning import PrunableWeights

PRUNABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


class TorchWeights(PrunableWeights):
    """Those of convolutions and linear layers.

    Args:
        model: It has them.
        wanted: Patterns of the names of layers, such as "0" or "4.body.*".
        skip: Patterns of those to leave dense.
    """

    input_axis = 1  # of (outputs, inputs, ...)

    def __init__(self, model: nn.Module, wanted: list[str], skip: list[str]) -> None:
        layers = {name: module for name, module in model.named_modules() if isinstance(module, PRUNABLE)}
        chosen = select([*layers], wanted, skip)
        super().__init__({f"{name}.weight" if name else "weight": layers[name].weight for name in chosen})

    def _copy(self, weight: Tensor) -> npt.NDArray[np.floating]:
        return weight.detach().float().cpu().numpy()

    def _factors(self, mask: npt.NDArray[np.bool_], weight: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(mask)).to(weight)

    @torch.no_grad()
    def _multiply(self, weight: Tensor, factors: Tensor) -> None:
        weight.mul_(factors)
