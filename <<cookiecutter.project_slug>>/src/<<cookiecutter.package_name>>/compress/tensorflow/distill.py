"""The parts of distillation in Keras; they run within the graph of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from ...tensorflow.variables import copies, leaves, named
from ...weights import hash_arrays
from .. import distillation


class Distillation(distillation.Distillation):
    """See distillation.Distillation."""

    def fingerprint(self) -> str:
        """See Hooks; a teacher by _target_ may have got other weights on each rank."""
        return hash_arrays(copies(named(self._teacher)).values())

    def layers(self, model: keras.Model) -> Mapping[str, Any]:
        """See distillation.Distillation, as the rest."""
        return {layer.name: layer for layer in leaves(model)}

    def listen(self, layer: Any) -> Callable[[], tf.Tensor]:
        """By another call(), since Keras has no hooks."""
        last: list[tf.Tensor] = []
        call = layer.call

        def keep(*arguments: Any, **options: Any) -> Any:
            last[:] = [call(*arguments, **options)]
            return last[0]

        layer.call = keep
        return lambda: tf.cast(last[0], tf.float32)

    def divergence(self, inputs: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Of logits (n, classes)."""
        answers = tf.stop_gradient(tf.cast(self._teacher(inputs, training=False), tf.float32))
        wanted = tf.nn.log_softmax(answers / self._temperature)
        given = tf.nn.log_softmax(outputs / self._temperature)
        return tf.reduce_sum(tf.exp(wanted) * (wanted - given))

    def value_difference(self, have: tf.Tensor, want: tf.Tensor) -> tf.Tensor:
        """Of (n, ...)."""
        return tf.reduce_sum(tf.reduce_mean(_flat(tf.square(have - tf.stop_gradient(want))), axis=1))

    def attention_difference(self, have: tf.Tensor, want: tf.Tensor) -> tf.Tensor:
        """Of (n, ..., channels)."""
        return tf.reduce_sum(tf.square(_attention(have) - tf.stop_gradient(_attention(want))))


def _attention(output: tf.Tensor) -> tf.Tensor:
    """(n, ..., channels) -> (n, places), each of length 1."""
    return tf.math.l2_normalize(_flat(tf.reduce_sum(tf.square(output), axis=-1)), axis=1)


def _flat(values: tf.Tensor) -> tf.Tensor:
    return tf.reshape(values, (tf.shape(values)[0], -1))
