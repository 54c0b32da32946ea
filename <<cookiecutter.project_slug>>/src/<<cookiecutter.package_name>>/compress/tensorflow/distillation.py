"""The parts of distillation in Keras; they run within the graph of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from ...tensorflow.variables import copies, leaves, named
from ...weights import hash_arrays
from ..distillation import Distillation


class TensorFlowDistillation(Distillation):
    """With other calls of the layers of `features`, since Keras has no hooks."""

    def fingerprint(self) -> str:
        """Of the teacher: one by _target_ may have got other weights on each rank."""
        return hash_arrays(copies(named(self._teacher)).values())

    def _layers(self, model: keras.Model) -> Mapping[str, Any]:
        return {layer.name: layer for layer in leaves(model)}

    def _outputs(self, layer: Any) -> Callable[[], tf.Tensor]:
        last: list[tf.Tensor] = []
        call = layer.call

        def keep(*arguments: Any, **options: Any) -> Any:
            last[:] = [call(*arguments, **options)]
            return last[0]

        layer.call = keep
        return lambda: tf.cast(last[0], tf.float32)

    def _divergence(self, inputs: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        answers = tf.stop_gradient(tf.cast(self._teacher(inputs, training=False), tf.float32))
        wanted = tf.nn.log_softmax(answers / self._temperature)
        given = tf.nn.log_softmax(outputs / self._temperature)
        return tf.reduce_sum(tf.exp(wanted) * (wanted - given))

    def _value_difference(self, have: tf.Tensor, want: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.reduce_mean(_flat(tf.square(have - tf.stop_gradient(want))), axis=1))

    def _attention_difference(self, have: tf.Tensor, want: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.square(_attention(have) - tf.stop_gradient(_attention(want))))


def _attention(output: tf.Tensor) -> tf.Tensor:
    """(n, ..., channels) -> (n, places), each of length 1."""
    return tf.math.l2_normalize(_flat(tf.reduce_sum(tf.square(output), axis=-1)), axis=1)


def _flat(values: tf.Tensor) -> tf.Tensor:
    return tf.reshape(values, (tf.shape(values)[0], -1))
