"""The parts of distillation in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...weights import hash_arrays
from ..distillation import Distillation


class TorchDistillation(Distillation):
    """With hooks at the layers of `features`."""

    places = slice(2, None)

    def __init__(self, teacher: nn.Module, student: nn.Module, options: Any) -> None:
        super().__init__(teacher.eval().requires_grad_(False), student, options)

    def fingerprint(self) -> str:
        """Of the teacher: one by _target_ may have got other weights on each rank."""
        return hash_arrays(tensor.detach().cpu().numpy() for tensor in self._teacher.state_dict().values())

    def _layers(self, model: nn.Module) -> Mapping[str, nn.Module]:
        return {name: layer for name, layer in model.named_modules() if name}

    def _outputs(self, layer: nn.Module) -> Callable[[], Tensor]:
        last: list[Tensor] = []

        def keep(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            last[:] = [output]

        layer.register_forward_hook(keep)
        return lambda: last[0].float()

    def _divergence(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        with torch.no_grad():
            answers = self._teacher(inputs)
        wanted = functional.log_softmax(answers.float() / self._temperature, dim=1)
        given = functional.log_softmax(outputs.float() / self._temperature, dim=1)
        return functional.kl_div(given, wanted, reduction="sum", log_target=True)

    def _value_difference(self, have: Tensor, want: Tensor) -> Tensor:
        return (have - want).square().flatten(1).mean(dim=1).sum()

    def _attention_difference(self, have: Tensor, want: Tensor) -> Tensor:
        return (_attention(have) - _attention(want)).square().sum()


def _attention(output: Tensor) -> Tensor:
    """(n, channels, ...) -> (n, places), each of length 1."""
    return functional.normalize(output.square().sum(dim=1).flatten(1), dim=1)
