"""The parts of distillation in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...weights import hash_arrays
from .. import distillation


class Distillation(distillation.Distillation):
    """See distillation.Distillation."""

    places = slice(2, None)

    def __init__(self, teacher: nn.Module, student: nn.Module, options: Any) -> None:
        super().__init__(teacher.eval().requires_grad_(False), student, options)

    def fingerprint(self) -> str:
        """See Hooks; a teacher by _target_ may have got other weights on each rank."""
        return hash_arrays(tensor.detach().cpu().numpy() for tensor in self._teacher.state_dict().values())

    def layers(self, model: nn.Module) -> Mapping[str, nn.Module]:
        """See distillation.Distillation, as the rest."""
        return {name: layer for name, layer in model.named_modules() if name}

    def listen(self, layer: nn.Module) -> Callable[[], Tensor]:
        """By a hook."""
        last: list[Tensor] = []

        def keep(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            last[:] = [output]

        layer.register_forward_hook(keep)
        return lambda: last[0].float()

    def divergence(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Of logits (n, classes)."""
        with torch.no_grad():
            answers = self._teacher(inputs)
        wanted = functional.log_softmax(answers.float() / self._temperature, dim=1)
        given = functional.log_softmax(outputs.float() / self._temperature, dim=1)
        return functional.kl_div(given, wanted, reduction="sum", log_target=True)

    def value_difference(self, have: Tensor, want: Tensor) -> Tensor:
        """Of (n, ...)."""
        return (have - want).square().flatten(1).mean(dim=1).sum()

    def attention_difference(self, have: Tensor, want: Tensor) -> Tensor:
        """Of (n, channels, ...)."""
        return (_attention(have) - _attention(want)).square().sum()


def _attention(output: Tensor) -> Tensor:
    """(n, channels, ...) -> (n, places), each of length 1."""
    return functional.normalize(output.square().sum(dim=1).flatten(1), dim=1)
