"""Distillation: a student learns from the answers of a trained teacher besides the labels."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ..engine import Hooks
from ..errors import UserError


class Distillation(Hooks):
    """weight x T^2 x KL(teacher || student) + (1 - weight) x cross-entropy (Hinton et al. 2015, arXiv:1503.02531).

    Args:
        teacher: On every rank; not trained.
        options: compress: temperature, weight.

    Raises:
        UserError: if features of layers are to be compared, which is not there in Keras.
    """

    def __init__(self, teacher: keras.Model, options: Any) -> None:
        if options.features:
            raise UserError("compress.features is not there for tensorflow models: leave it empty")
        self._teacher = teacher
        self._temperature = float(options.temperature)
        self._weight = float(options.weight)

    def loss(self, plain: tf.Tensor, inputs: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Summed over the batch, as the cross-entropy is; runs within the step's graph."""
        answers = tf.stop_gradient(tf.cast(self._teacher(inputs, training=False), tf.float32))
        wanted = tf.nn.log_softmax(answers / self._temperature)
        given = tf.nn.log_softmax(outputs / self._temperature)
        soft = tf.reduce_sum(tf.exp(wanted) * (wanted - given)) * self._temperature**2
        return self._weight * soft + (1 - self._weight) * plain
