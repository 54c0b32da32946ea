"""What a model costs to run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
from keras import layers

from ...export.tensorflow import load_model
from ...tensorflow.variables import leaves
from .pruning import PRUNABLE

DEPTHWISE = (layers.DepthwiseConv1D, layers.DepthwiseConv2D)
SEPARABLE = (layers.SeparableConv1D, layers.SeparableConv2D)


def count(folder: Path, shape: Sequence[int], trusted: Sequence[str]) -> dict[str, int]:
    """Parameters, and multiply-accumulates of convolutions and dense layers for one sample of `shape`.

    They are counted as a dense runtime does them: a weight of zero is multiplied too.
    """
    model = load_model(folder, trusted)
    macs: list[int] = []
    sample = keras.ops.zeros((1, *shape))
    model(sample, training=False)  # one without a graph calls its layers once more to build them
    for layer in leaves(model):
        if isinstance(layer, (*PRUNABLE, *DEPTHWISE, *SEPARABLE)):
            layer.call = _counting(layer, layer.call, macs)
    model(sample, training=False)
    parameters = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    return {"parameters": parameters, "macs": sum(macs)}


def _counting(layer: Any, call: Callable[..., Any], macs: list[int]) -> Callable[..., Any]:
    """The same call, noting its multiply-accumulates."""

    def noting(*arguments: Any, **options: Any) -> Any:
        output = call(*arguments, **options)
        macs.append(_of_call(layer, output.shape))
        return output

    return noting


def _of_call(layer: Any, shape: Sequence[int]) -> int:
    """Of a call with an output of (1, ..., channels), channels last."""
    if isinstance(layer, SEPARABLE):
        depthwise, pointwise = layer.depthwise_kernel.shape, layer.pointwise_kernel.shape
        return int(math.prod(shape[1:-1]) * (math.prod(depthwise) + math.prod(pointwise)))
    kernel = layer.kernel.shape
    return int(math.prod(shape[1:]) * math.prod(kernel[:-2] if isinstance(layer, DEPTHWISE) else kernel[:-1]))
