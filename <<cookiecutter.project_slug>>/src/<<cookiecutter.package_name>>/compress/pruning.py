"""Pruning: masks say which weights a model keeps; one rank chooses them, all hold them while the engine trains.

A mask is true where a weight stays. The arrays have the frameworks' own layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine import Hooks
from ..errors import UserError
from ..ranks import Communicator
from ..sampler import Share
from ..weights import hash_arrays

NOTABLE = 0.01  # of weights are zero: training alone hardly ever makes one exactly zero
STEPS = "/steps"  # no weight is called so

Weights = Mapping[str, npt.NDArray[np.floating]]
Masks = dict[str, npt.NDArray[np.bool_]]


class PrunableWeights:
    """The weights of an engine's model that may be pruned; masks lie beside them on their device.

    Args:
        weights: The framework's own, by their names in the weights' file.
    """

    input_axis: int  # where the inputs of a layer are

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._weights = weights
        self._masks: dict[str, Any] = {}

    def copies(self) -> Weights:
        """As they are now, on the host."""
        return {name: self._copy(weight) for name, weight in self._weights.items()}

    def hold(self, chosen: Masks) -> None:
        """Take these masks and set what they switch off to zero."""
        self._masks = {name: self._factors(mask, self._weights[name]) for name, mask in chosen.items()}
        self.apply()

    def apply(self) -> None:
        """Set it to zero again."""
        for name, factors in self._masks.items():
            self._multiply(self._weights[name], factors)

    # What a wing adds

    def _copy(self, weight: Any) -> npt.NDArray[np.floating]:
        raise NotImplementedError

    def _factors(self, mask: npt.NDArray[np.bool_], weight: Any) -> Any:
        """0 and 1, of the weight's type and on its device."""
        raise NotImplementedError

    def _multiply(self, weight: Any, factors: Any) -> None:
        raise NotImplementedError


class Pruning(Hooks):
    """Keeps pruned weights at zero, and chooses which these are.

    Args:
        prunable: What is pruned.
        communicator: The ranks.
        options: compress: pattern, sparsity, scope, schedule, every.
        samples: Training samples of one epoch.
        epochs: How many there are to be; a gradual rise ends after `rise` of them.
    """

    def __init__(
        self, prunable: PrunableWeights, communicator: Communicator, options: Any, samples: int, epochs: float
    ) -> None:
        self._prunable = prunable
        self._communicator = communicator
        self._options = options
        self._samples = samples
        self._gradual = options.pattern == "free" and options.schedule == "gradual"
        self._rise = options.rise * epochs if self._gradual else 0.0
        self._steps = 0
        self.masks: Masks = {}

    def begin(self) -> None:
        """Choose the first masks."""
        self._choose(0.0 if self._gradual else 1.0)

    def after_step(self, share: Share) -> None:
        """Hold the masks; while sparsity rises, choose them anew now and then."""
        self._steps += 1
        before, now = (place.epoch + place.offset / self._samples for place in (share.start, share.end))
        if before < self._rise and (self._steps % self._options.every == 0 or now >= self._rise):
            self._choose(now / self._rise)
        else:
            self._prunable.apply()

    def _choose(self, progress: float) -> None:
        weights = self._prunable.copies()
        bits = self._communicator.on_writer(lambda: pack(self._chosen(weights, progress)), "masks")
        self.hold(unpack(bits, {name: array.shape for name, array in weights.items()}))

    def _chosen(self, weights: Weights, progress: float) -> Masks:
        if self._options.pattern == "2:4":
            return two_of_four(weights, self._prunable.input_axis)
        return smallest_off(weights, cubic(progress, self._options.sparsity), self._options.scope)

    def hold(self, chosen: Masks) -> None:
        """Take masks, and prove that they are the same on all ranks."""
        self.masks = chosen
        self._prunable.hold(chosen)
        self._communicator.check_equal(hash_arrays(chosen[name] for name in sorted(chosen)), "the masks")

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """The masks, one bit a weight, and how many steps were made, which says when to choose again."""
        return {**pack(self.masks), STEPS: np.array([self._steps])}

    def load_state(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Take what a checkpoint has."""
        shapes = {name: array.shape for name, array in self._prunable.copies().items()}
        self._steps = int(state[STEPS][0])
        self.masks = unpack({name: bits for name, bits in state.items() if name != STEPS}, shapes)
        self._prunable.hold(self.masks)


class KeptZeros(Hooks):
    """Keeps at zero what is zero when the training begins: what an earlier pruning has left."""

    def __init__(self, prunable: PrunableWeights) -> None:
        self._prunable = prunable

    def begin(self) -> None:
        """Hold the zeros of layers that have a notable part of them, the same on all ranks as the weights are."""
        kept = {name: array != 0 for name, array in self._prunable.copies().items()}
        self._prunable.hold({name: mask for name, mask in kept.items() if 0 < mask.mean() <= 1 - NOTABLE})

    def after_step(self, share: Share) -> None:
        """Hold them."""
        self._prunable.apply()

    def load_state(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """The weights of the checkpoint have them."""
        self.begin()


def smallest_off(weights: Weights, sparsity: float, scope: str) -> Masks:
    """Switch off the fraction `sparsity` of smallest magnitude (Han et al. 2015, arXiv:1506.02626).

    Args:
        weights: By name; zeros go first, so that what was pruned stays so.
        sparsity: From 0 to below 1.
        scope: global compares the weights of all layers, layer those of each layer by itself.
    """
    if scope == "layer":
        return {name: _smallest_off(array.ravel(), sparsity).reshape(array.shape) for name, array in weights.items()}
    flat = _smallest_off(np.concatenate([array.ravel() for array in weights.values()]), sparsity)
    parts = np.split(flat, np.cumsum([array.size for array in weights.values()])[:-1])
    masks = {name: part.reshape(weights[name].shape) for name, part in zip(weights, parts, strict=True)}
    empty = [name for name, mask in masks.items() if not mask.any()]
    if empty:
        raise UserError(
            f"compress.sparsity={sparsity} over all layers leaves nothing of {empty[0]}: choose less,"
            " compress.scope=layer, or skip that layer"
        )
    return masks


def _smallest_off(flat: npt.NDArray[np.floating], sparsity: float) -> npt.NDArray[np.bool_]:
    mask = np.ones(flat.size, np.bool_)
    # Stable, so that equal magnitudes are chosen alike everywhere.
    mask[np.argsort(np.abs(flat), kind="stable")[: round(sparsity * flat.size)]] = False
    return mask


def two_of_four(weights: Weights, axis: int) -> Masks:
    """Keep the two largest of each four weights along the inputs (Mishra et al. 2021, arXiv:2104.08378).

    Args:
        weights: By name; those whose number of inputs is no multiple of 4 get no mask.
        axis: Where the inputs are.
    """
    return {name: _two_of_four(array, axis) for name, array in weights.items() if array.shape[axis] % 4 == 0}


def _two_of_four(array: npt.NDArray[np.floating], axis: int) -> npt.NDArray[np.bool_]:
    moved = np.moveaxis(np.abs(array), axis, -1)
    fours = moved.reshape(-1, 4)
    mask = np.zeros(fours.shape, np.bool_)
    np.put_along_axis(mask, np.argsort(-fours, axis=1, kind="stable")[:, :2], True, axis=1)
    return np.ascontiguousarray(np.moveaxis(mask.reshape(moved.shape), -1, axis))


def cubic(progress: float, final: float) -> float:
    """The sparsity at `progress` from 0 to 1 of its rise: fast first (Zhu & Gupta 2017, arXiv:1710.01878)."""
    return final * (1 - (1 - min(progress, 1.0)) ** 3)


def pack(masks: Masks) -> dict[str, npt.NDArray[np.uint8]]:
    """One bit for each weight."""
    return {name: np.packbits(mask) for name, mask in masks.items()}


def unpack(bits: Mapping[str, npt.NDArray[np.uint8]], shapes: Mapping[str, tuple[int, ...]]) -> Masks:
    """What pack() was given."""
    masks = {}
    for name, array in bits.items():
        size = int(np.prod(shapes[name]))
        masks[name] = np.unpackbits(array, count=size).astype(np.bool_).reshape(shapes[name])
    return masks
