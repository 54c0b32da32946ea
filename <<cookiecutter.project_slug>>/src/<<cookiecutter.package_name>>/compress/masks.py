"""Which weights a pruned model keeps: chosen on one rank, the same on all, in no framework's terms.

A mask is true where a weight stays. The arrays have the frameworks' own layouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..ranks import Communicator

Weights = Mapping[str, npt.NDArray[np.floating]]
Masks = dict[str, npt.NDArray[np.bool_]]


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


def check(masks: Masks, communicator: Communicator) -> None:
    """Prove that all ranks hold the same masks.

    Raises:
        RuntimeError: on all ranks, naming those whose masks differ.
    """
    digest = hashlib.sha256()
    for name, mask in sorted(masks.items()):
        digest.update(f"{name}{mask.shape}".encode())
        digest.update(mask.tobytes())
    communicator.check_equal(digest.hexdigest(), "the masks")
