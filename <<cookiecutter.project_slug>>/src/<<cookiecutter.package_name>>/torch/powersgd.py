"""PowerSGD: gradients travel as two thin matrices (Vogels et al. 2019, arXiv:1905.13727, algorithm 1 and 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ranks import Communicator


class PowerSGD:
    """Sums gradients over the ranks approximately; what is lost in one step is added in the next.

    A gradient of n x m (the outputs, and all else) travels as n x rank and m x rank numbers; those that would not get
    smaller, such as biases, travel whole. Each is a collective of all gradients together, three in a step.

    Args:
        parameters: Whose gradients are summed, the same order on every rank.
        communicator: The ranks.
        rank: Columns of the thin matrices.
    """

    def __init__(self, parameters: list[nn.Parameter], communicator: Communicator, rank: int) -> None:
        self._communicator = communicator
        thin = [p for p in parameters if p.dim() > 1 and rank * (p.shape[0] + p[0].numel()) < p.numel()]
        ids = {id(p) for p in thin}
        self._thin = thin
        self._whole = [p for p in parameters if id(p) not in ids]
        generator = torch.Generator().manual_seed(0)  # the same numbers on every rank
        self._right = [torch.randn((p[0].numel(), rank), generator=generator).to(p) for p in thin]
        self._errors = [torch.zeros(_matrix(p).shape).to(p) for p in thin]

    @property
    def numbers(self) -> int:
        """How many numbers a rank sends in a step."""
        columns = zip(self._thin, self._right, strict=True)
        thin = sum((len(parameter) + len(right)) * right.shape[1] for parameter, right in columns)
        return thin + sum(p.numel() for p in self._whole)

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace each gradient by the sum over ranks, or what two thin matrices can say of it."""
        self._sum_whole()
        wanted = [_matrix(_grad(p)) + error for p, error in zip(self._thin, self._errors, strict=True)]
        left = [matrix @ right for matrix, right in zip(wanted, self._right, strict=True)]
        self._sum(left, "left")
        left = [torch.linalg.qr(one.float()).Q.to(one.dtype) for one in left]
        self._right = [matrix.T @ one for matrix, one in zip(wanted, left, strict=True)]
        self._sum(self._right, "right")
        for index, parameter in enumerate(self._thin):
            total = left[index] @ self._right[index].T
            self._errors[index] = torch.nan_to_num(wanted[index] - total / self._communicator.size, 0.0, 0.0, 0.0)
            _grad(parameter).copy_(total.reshape(parameter.shape))
        # A step that is skipped for a gradient that is not finite leaves no trace.
        self._right = [torch.nan_to_num(one, 0.0, 0.0, 0.0) for one in self._right]

    def _sum_whole(self) -> None:
        if self._whole:
            flat = torch.cat([_grad(p).flatten() for p in self._whole])
            self._sum([flat], "whole")
            parts = torch.split(flat, [p.numel() for p in self._whole])
            for parameter, part in zip(self._whole, parts, strict=True):
                _grad(parameter).copy_(part.reshape(parameter.shape))

    def _sum(self, tensors: list[Tensor], name: str) -> None:
        if tensors:
            hvd = self._communicator.hvd
            hvd.grouped_allreduce_(tensors, op=hvd.Sum, name=f"powersgd.{name}")

    def state(self) -> dict[str, Any]:
        """What this rank has to add, and the right matrices that all begin with."""
        return {"errors": [one.cpu() for one in self._errors], "right": [one.cpu() for one in self._right]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what state() gave."""
        for own, saved in ((self._errors, state["errors"]), (self._right, state["right"])):
            for index, tensor in enumerate(saved):
                own[index] = tensor.to(own[index])


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), -1)
