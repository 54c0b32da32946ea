"""Batch normalization over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from ..errors import UserError


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Mean and variance of a training batch are those of all ranks' samples together, weighted by their number."""

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        if mask is not None:
            raise UserError("sync_batch_norm=true knows no masks: leave it false for models that mask their inputs")
        count = tf.cast(tf.size(inputs) / inputs.shape[-1], inputs.dtype)
        sums = [tf.reduce_sum(power, self._reduction_axes) for power in (inputs, tf.square(inputs))]
        total = tf.concat([*sums, [count]], axis=0)
        # Keras traces a model once or more on each rank; the layer's name is the same everywhere.
        total = hvd.allreduce(total, op=hvd.Sum, name=f"batch_norm.{self.name}", ignore_name_scope=True)
        mean, square = tf.split(total[:-1] / total[-1], 2)
        return mean, tf.maximum(square - tf.square(mean), 0)


def synchronize(model: keras.Model) -> keras.Model:
    """A copy of a Sequential or functional model whose batch-norm layers span all ranks.

    Raises:
        UserError: if the model is of another kind and cannot be copied.
    """

    def clone(layer: Any) -> Any:
        plain = type(layer) is keras.layers.BatchNormalization
        return (SyncBatchNormalization if plain else type(layer)).from_config(layer.get_config())

    try:
        copy = keras.models.clone_model(model, clone_function=clone)
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            f"sync_batch_norm=true needs a Sequential or functional model ({error}): leave it false"
        ) from error
    copy.set_weights(model.get_weights())
    return copy
