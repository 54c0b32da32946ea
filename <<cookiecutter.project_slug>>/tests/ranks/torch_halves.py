"""A compression of gradients as a user would write it; docs/torch-gradients.md shows it."""

from typing import Any

import torch
from torch import nn

from << cookiecutter.package_name >>.ranks import Communicator


class Halves:
    """fp16 whose rounding errors are added in the next step."""

    def __init__(self, parameters: list[nn.Parameter], communicator: Communicator) -> None:
        self._parameters, self._hvd = parameters, communicator.hvd
        self._lost = [torch.zeros_like(p) for p in parameters]

    def reduce(self) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        wanted = [gradient + lost for gradient, lost in zip(gradients, self._lost, strict=True)]
        sent = [one.half() for one in wanted]
        lost = [one - half.float() for one, half in zip(wanted, sent, strict=True)]
        self._lost = [torch.nan_to_num(one, 0.0, 0.0, 0.0) for one in lost]  # an overflow is for this step only
        self._hvd.grouped_allreduce_(sent, op=self._hvd.Sum, name="halves")
        for gradient, total in zip(gradients, sent, strict=True):
            gradient.copy_(total)

    def state(self) -> dict[str, Any]:
        return {"lost": self._lost}

    def load_state(self, state: dict[str, Any]) -> None:
        self._lost = [lost.to(p) for lost, p in zip(state["lost"], self._parameters, strict=True)]
