"""Distillation: a student learns from the answers of a trained teacher besides the labels."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ..engine import Hooks
from ..features import check_layers, same_shape
from ..weights import hash_arrays
from .variables import copies, leaves, named


class Distillation(Hooks):
    """weight x T^2 x KL(teacher || student) + (1 - weight) x cross-entropy (Hinton et al. 2015, arXiv:1503.02531).

    With `features` the mean squared difference of the named layers' outputs is added (Romero et al. 2014,
    arXiv:1412.6550); where the student's has other channels, that of the normalized sums of squares over channels
    (attention: Zagoruyko & Komodakis 2017, arXiv:1612.03928, without its root).

    Args:
        teacher: On every rank; not trained.
        student: The engine's model.
        options: compress: temperature, weight, features, feature_weight.
    """

    def __init__(self, teacher: keras.Model, student: keras.Model, options: Any) -> None:
        self._teacher = teacher
        self._temperature = float(options.temperature)
        self._weight = float(options.weight)
        self._feature_weight = float(options.feature_weight)
        self._taught = {name: _Ear(teacher, name, "teacher") for name in options.features}
        self._learned = {name: _Ear(student, name, "student") for name in options.features}

    def loss(self, plain: tf.Tensor, inputs: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Summed over the batch, as the cross-entropy is; runs within the step's graph."""
        answers = tf.stop_gradient(tf.cast(self._teacher(inputs, training=False), tf.float32))
        wanted = tf.nn.log_softmax(answers / self._temperature)
        given = tf.nn.log_softmax(outputs / self._temperature)
        soft = tf.reduce_sum(tf.exp(wanted) * (wanted - given)) * self._temperature**2
        return self._weight * soft + (1 - self._weight) * plain + self._feature_weight * self._difference()

    def fingerprint(self) -> str:
        """See Hooks; a teacher by _target_ may have got other weights on each rank."""
        return hash_arrays(copies(named(self._teacher)).values())

    def _difference(self) -> tf.Tensor | float:
        """Summed over samples and layers."""
        total: tf.Tensor | float = 0.0
        for name, learned in self._learned.items():
            have = tf.cast(learned.heard(), tf.float32)
            want = tf.stop_gradient(tf.cast(self._taught[name].heard(), tf.float32))
            if same_shape(name, have.shape, want.shape, channels=have.shape.rank - 1):
                each = tf.reduce_mean(_flat(tf.square(have - want)), axis=1)
            else:
                each = tf.reduce_sum(tf.square(_attention(have) - _attention(want)), axis=1)
            total += tf.reduce_sum(each)
        return total


def _attention(output: tf.Tensor) -> tf.Tensor:
    """(n, ..., channels) -> (n, places), each of length 1."""
    return tf.math.l2_normalize(_flat(tf.reduce_sum(tf.square(output), axis=-1)), axis=1)


def _flat(values: tf.Tensor) -> tf.Tensor:
    return tf.reshape(values, (tf.shape(values)[0], -1))


class _Ear:
    """Keeps what a layer last gave, within the graph of a step."""

    def __init__(self, model: keras.Model, name: str, whose: str) -> None:
        layers = {layer.name: layer for layer in leaves(model)}
        check_layers([name], layers, whose)
        self._last: tf.Tensor | None = None
        call = layers[name].call

        def keep(*arguments: Any, **options: Any) -> Any:
            self._last = call(*arguments, **options)
            return self._last

        layers[name].call = keep  # Keras has no hooks

    def heard(self) -> tf.Tensor:
        assert self._last is not None
        return self._last
