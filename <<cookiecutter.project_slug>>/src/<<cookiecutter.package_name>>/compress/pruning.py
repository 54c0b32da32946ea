"""Pruning while the engine trains: masks chosen on one rank, held on all of them after each step."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..engine import Hooks
from ..errors import UserError
from ..ranks import Communicator
from ..sampler import Share
from . import masks
from .masks import Masks, Weights

NOTABLE = 0.01  # of weights are zero: training alone hardly ever makes one exactly zero
STEPS = "/steps"  # no weight is called so


class Layers(Protocol):
    """The weights of one engine's model that may be pruned, by their names in the weights' file."""

    input_axis: int

    def weights(self) -> Weights:
        """Copies as they are now."""

    def hold(self, chosen: Masks) -> None:
        """Take these masks and set what they switch off to zero."""

    def apply(self) -> None:
        """Set it to zero again."""


class Pruning(Hooks):
    """Keeps pruned weights at zero, and chooses which these are.

    Args:
        layers: What is pruned.
        communicator: The ranks.
        options: compress: pattern, sparsity, scope, schedule, every.
        samples: Training samples of one epoch.
        epochs: How many there are to be; a gradual rise ends after `rise` of them.
    """

    def __init__(self, layers: Layers, communicator: Communicator, options: Any, samples: int, epochs: float) -> None:
        self._layers = layers
        self._communicator = communicator
        self._options = options
        self._samples = samples
        self._epochs = epochs
        self._gradual = options.pattern == "free" and options.schedule == "gradual"
        self._rise = options.rise * epochs if self._gradual else 0.0
        self._steps = 0
        self.masks: Masks = {}

    def begin(self) -> None:
        """Choose the first masks."""
        self._choose(0.0 if self._gradual else 1.0)

    def check(self) -> None:
        """Prove that all ranks hold the same masks."""
        masks.check(self.masks, self._communicator)

    def after_step(self, share: Share) -> None:
        """Hold the masks; while sparsity rises, choose them anew now and then."""
        self._steps += 1
        before, now = (place.epoch + place.offset / self._samples for place in (share.start, share.end))
        if before < self._rise and (self._steps % self._options.every == 0 or now >= self._rise):
            self._choose(now / self._rise)
        else:
            self._layers.apply()

    def _choose(self, progress: float) -> None:
        weights = self._layers.weights()
        bits = self._communicator.on_writer(lambda: masks.pack(self._chosen(weights, progress)), "masks")
        self.hold(masks.unpack(bits, {name: array.shape for name, array in weights.items()}))

    def _chosen(self, weights: Weights, progress: float) -> Masks:
        if self._options.pattern == "2:4":
            return masks.two_of_four(weights, self._layers.input_axis)
        return masks.smallest_off(weights, masks.cubic(progress, self._options.sparsity), self._options.scope)

    def hold(self, chosen: Masks) -> None:
        """Take masks, the same on all ranks."""
        self.masks = chosen
        self._layers.hold(chosen)
        self.check()

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """The masks, one bit a weight, and how many steps were made, which says when to choose again."""
        return {**masks.pack(self.masks), STEPS: np.array([self._steps])}

    def restore(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Take what a checkpoint has."""
        shapes = {name: array.shape for name, array in self._layers.weights().items()}
        self._steps = int(state[STEPS][0])
        self.masks = masks.unpack({name: bits for name, bits in state.items() if name != STEPS}, shapes)
        self._layers.hold(self.masks)


class KeptZeros(Hooks):
    """Keeps at zero what is zero when the training begins: what an earlier pruning has left."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def begin(self) -> None:
        """Hold the zeros of layers that have a notable part of them, the same on all ranks as the weights are."""
        kept = {name: array != 0 for name, array in self._layers.weights().items()}
        self._layers.hold({name: mask for name, mask in kept.items() if 0 < mask.mean() <= 1 - NOTABLE})

    def after_step(self, share: Share) -> None:
        """Hold them."""
        self._layers.apply()

    def restore(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """The weights of the checkpoint have them."""
        self.begin()


def matched(names: Sequence[str], patterns: Sequence[str], fault: str = "no layer is called {}") -> list[str]:
    """The layers that one of the patterns matches.

    Raises:
        UserError: if a pattern matches none; it begins with `fault`.
    """
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise UserError(f"{fault.format(pattern)}: there are {', '.join(names)}")
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def select(names: list[str], wanted: list[str], skip: list[str]) -> list[str]:
    """The layers that a pattern of `wanted` matches and none of `skip`.

    Raises:
        UserError: if a pattern matches no layer, or nothing is left.
    """
    found, left_out = matched(names, wanted), matched(names, skip)
    chosen = [name for name in found if name not in left_out]
    if not chosen:
        raise UserError(f"compress.skip={skip} leaves no layer: there are {', '.join(names)}")
    return chosen
