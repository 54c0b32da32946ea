"""The parts of pruning in Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from keras import layers

from ...tensorflow.variables import leaves
from ..layer_names import select
from ..pruning import PrunableWeights

PRUNABLE = (layers.Conv1D, layers.Conv2D, layers.Conv3D, layers.Dense)


class TensorFlowWeights(PrunableWeights):
    """The kernels of convolutions and dense layers.

    Args:
        model: It has them.
        wanted: Patterns of the names of layers, such as "dense_*".
        skip: Patterns of those to leave dense.
    """

    input_axis = -2  # of (..., inputs, outputs)

    def __init__(self, model: keras.Model, wanted: list[str], skip: list[str]) -> None:
        found = {layer.name: layer for layer in leaves(model) if isinstance(layer, PRUNABLE)}
        kernels = [found[name].kernel for name in select([*found], wanted, skip)]
        super().__init__({kernel.path: kernel for kernel in kernels})

    def _copy(self, weight: Any) -> npt.NDArray[np.floating]:
        return np.array(weight.numpy())

    def _factors(self, mask: npt.NDArray[np.bool_], weight: Any) -> tf.Tensor:
        return tf.constant(mask, weight.dtype)

    def _multiply(self, weight: Any, factors: tf.Tensor) -> None:
        weight.assign(weight.value * factors)
