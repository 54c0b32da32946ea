"""Gradients that travel smaller: what a compression of gradients has to do, and which one a config names."""

from __future__ import annotations

from typing import Any, Protocol

from hydra.utils import instantiate
from torch import nn

from ..ranks import Communicator
from .powersgd import PowerSGD

ON_THE_WAY = ("none", "fp16")  # Horovod's own, which need nothing of what follows


class Compressor(Protocol):
    """Sums the gradients over the ranks in a way of its own, after backward; see powersgd.py for one.

    It is built on every rank with the parameters, in the same order on all, and the ranks; options of its own come from
    the config. What it sends must be sums, so that it fits an allreduce: all ranks start the same collectives, with the
    same shapes, in the same order.
    """

    def reduce(self) -> None:
        """Replace each parameter's .grad, in place, by its sum over the ranks, or what is close to it.

        A gradient that is not finite must reach all ranks as such, so that they skip the step or stop, and leave no
        trace in what is kept for later steps.
        """

    def state(self) -> dict[str, Any]:
        """What this rank needs to go on exactly after a resume, as tensors and plain values."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what state() of the same compression gave; its tensors come on the CPU."""


def open_compressor(
    compression: Any, parameters: list[nn.Parameter], communicator: Communicator, rank: int
) -> Compressor | None:
    """The compressor of a config, or None if gradients travel as backward makes them.

    Args:
        compression: none | fp16 | powersgd, or a class by _target_ with its options.
        parameters: Whose gradients are summed.
        communicator: The ranks.
        rank: Of powersgd's matrices.
    """
    if compression in ON_THE_WAY:
        return None
    if compression == "powersgd":
        return PowerSGD(parameters, communicator, rank)
    compressor: Compressor = instantiate(compression, parameters, communicator)
    return compressor
