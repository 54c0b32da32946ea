"""Distillation: a student learns from the answers of a trained teacher besides the labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..engine import Hooks
from ..features import check_layers, same_shape
from ..weights import hash_arrays


class Distillation(Hooks):
    """weight x T^2 x KL(teacher || student) + (1 - weight) x cross-entropy (Hinton et al. 2015, arXiv:1503.02531).

    With `features` the mean squared difference of the named layers' outputs is added (Romero et al. 2014,
    arXiv:1412.6550); where the student's has other channels, that of the normalized sums of squares over channels
    (attention: Zagoruyko & Komodakis 2017, arXiv:1612.03928, without its root).

    Args:
        teacher: On every rank, on the student's device; not trained.
        student: The engine's model.
        options: compress: temperature, weight, features, feature_weight.
    """

    def __init__(self, teacher: nn.Module, student: nn.Module, options: Any) -> None:
        self._teacher = teacher.eval().requires_grad_(False)
        self._temperature = float(options.temperature)
        self._weight = float(options.weight)
        self._feature_weight = float(options.feature_weight)
        self._taught = {name: _Ear(teacher, name, "teacher") for name in options.features}
        self._learned = {name: _Ear(student, name, "student") for name in options.features}

    def loss(self, plain: Tensor, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Summed over the batch, as the cross-entropy is."""
        with torch.no_grad():
            answers = self._teacher(inputs)
        temperature = self._temperature
        wanted = functional.log_softmax(answers.float() / temperature, dim=1)
        given = functional.log_softmax(outputs.float() / temperature, dim=1)
        soft = functional.kl_div(given, wanted, reduction="sum", log_target=True) * temperature**2
        return self._weight * soft + (1 - self._weight) * plain + self._feature_weight * self._difference()

    def fingerprint(self) -> str:
        """See Hooks; a teacher by _target_ may have got other weights on each rank."""
        return hash_arrays(tensor.detach().cpu().numpy() for tensor in self._teacher.state_dict().values())

    def _difference(self) -> Tensor | float:
        """Summed over samples and layers."""
        total: Tensor | float = 0.0
        for name, learned in self._learned.items():
            have, want = learned.heard().float(), self._taught[name].heard().float()
            if same_shape(name, have.shape, want.shape, channels=1):
                each = (have - want).square().flatten(1).mean(dim=1)
            else:
                each = (_attention(have) - _attention(want)).square().sum(dim=1)
            total = total + each.sum()
        return total


def _attention(output: Tensor) -> Tensor:
    """(n, channels, ...) -> (n, places), each of length 1."""
    return functional.normalize(output.square().sum(dim=1).flatten(1), dim=1)


class _Ear:
    """Keeps what a layer last gave."""

    def __init__(self, model: nn.Module, name: str, whose: str) -> None:
        layers = dict(model.named_modules())
        check_layers([name], layers, whose)
        self._last: Tensor | None = None
        layers[name].register_forward_hook(self._keep)

    def _keep(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self._last = output

    def heard(self) -> Tensor:
        assert self._last is not None
        return self._last
