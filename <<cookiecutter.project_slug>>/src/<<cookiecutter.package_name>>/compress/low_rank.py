"""Two thin matrices in place of a thick one, in no framework's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from .layer_names import select
from .wing import Change

Matrix = npt.NDArray[np.floating]
Pair = tuple[Matrix, Matrix]


def factorize(layers: Mapping[str, Matrix | None], options: Any) -> tuple[dict[str, Pair], list[Change], list[str]]:
    """Factor layers by the singular values of their weights (Denton et al. 2014, arXiv:1404.0736).

    Args:
        layers: The weights of each, (outputs, inputs); None if they are no such matrix.
        options: compress: rank, or energy (the part of the squared singular values to keep); layers, skip.

    Returns:
        (rank, inputs) and (outputs, rank) for each layer that gets smaller; what changes; remarks on those that stay.

    Raises:
        UserError: if none gets smaller.
    """
    chosen = select([*layers], list(options.layers), list(options.skip))
    found = {name: _factors(layers[name], options) for name in chosen}
    pairs = {name: pair for name, pair in found.items() if pair is not None}
    if not pairs:
        raise UserError("no layer gets smaller by compress=low_rank: choose a smaller compress.rank or compress.energy")
    whole = [name for name in chosen if name not in pairs]
    changes = [{"kind": "factors", "layers": {name: {"rank": len(first)} for name, (first, _) in pairs.items()}}]
    return pairs, changes, [f"left whole, since two factors would be larger: {', '.join(whole)}"] if whole else []


def _factors(matrix: Matrix | None, options: Any) -> Pair | None:
    """The two factors, or None where they would not be smaller than the layer."""
    if matrix is None:
        return None
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    energy = np.cumsum(np.square(values))
    rank = int((energy < float(options.energy) * energy[-1]).sum()) + 1 if options.rank is None else int(options.rank)
    if rank * sum(matrix.shape) >= matrix.size:
        return None
    root = np.sqrt(values[:rank])
    return root[:, None] * right[:rank], left[:, :rank] * root
