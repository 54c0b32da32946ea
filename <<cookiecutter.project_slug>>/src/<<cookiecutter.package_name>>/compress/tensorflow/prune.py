"""Masks on the kernels of convolutions and dense layers."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from ...tensorflow.variables import leaves
from ..masks import Masks, Weights
from ..pruning import select

PRUNABLE = (layers.Conv1D, layers.Conv2D, layers.Conv3D, layers.Dense)


class Layers:
    """See pruning.Layers; the masks lie beside the kernels on their device.

    Args:
        model: Its convolutions and dense layers can be pruned.
        wanted: Patterns of the names of layers, such as "dense_*".
        skip: Patterns of those to leave dense.
    """

    input_axis = -2  # of (..., inputs, outputs)

    def __init__(self, model: keras.Model, wanted: list[str], skip: list[str]) -> None:
        found = {layer.name: layer for layer in leaves(model) if isinstance(layer, PRUNABLE)}
        kernels = [found[name].kernel for name in select([*found], wanted, skip)]
        self._kernels = {kernel.path: kernel for kernel in kernels}
        self._masks: dict[str, tf.Tensor] = {}

    def weights(self) -> Weights:
        """Copies on the host."""
        return {name: np.array(kernel.numpy()) for name, kernel in self._kernels.items()}

    def hold(self, chosen: Masks) -> None:
        """Take these masks."""
        self._masks = {name: tf.constant(mask, self._kernels[name].dtype) for name, mask in chosen.items()}
        self.apply()

    def apply(self) -> None:
        """Set what the masks switch off to zero."""
        for name, mask in self._masks.items():
            self._kernels[name].assign(self._kernels[name].value * mask)
