"""What a model costs to run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from .models import load_model
from .prune import PRUNABLE
from .variables import leaves


def count(folder: Path, shape: Sequence[int], trusted: Sequence[str]) -> dict[str, int]:
    """Parameters, and multiply-accumulates of convolutions and dense layers for one sample.

    They are counted as a dense runtime does them: a weight of zero is multiplied too.

    Args:
        folder: A model folder.
        shape: Of one sample; the model knows it.
        trusted: Packages besides this one that the architecture may come from.
    """
    model = load_model(folder, trusted)
    macs = [
        math.prod(layer.output.shape[1:]) * math.prod(layer.kernel.shape[:-1])
        for layer in leaves(model)
        if isinstance(layer, PRUNABLE)
    ]
    parameters = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    return {"parameters": parameters, "macs": sum(macs)}
