"""Whole models in Keras' and TensorFlow's own formats, for programs that do not have this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ..errors import UserError
from ..runtime import Predictor
from .models import load_model

TOLERANCE = 1e-4  # of the largest logit


def export(folder: Path, target: Path, kind: str) -> None:
    """Turn a model folder into `target`; it is loaded again and must answer as the model does.

    Args:
        folder: A model folder.
        target: The file (keras, h5) or folder (savedmodel) to write.
        kind: keras | h5 (of Keras 2 times) | savedmodel (for TensorFlow Serving).

    Raises:
        UserError: if the architecture comes from another package, or what was written answers otherwise.
    """
    model = load_model(folder, trusted=("keras",))
    inputs = np.random.default_rng(0).random((4, *model.input_shape[1:]), np.float32)
    _SAVERS[kind](model, target)
    wanted, got = np.asarray(model(inputs)), np.asarray(_LOADERS[kind](target)(inputs))
    if np.abs(wanted - got).max() > TOLERANCE * np.abs(wanted).max():
        raise UserError(f"{target} does not answer as the model does: choose another format")


def predictor(folder: Path, trusted: Sequence[str] = ()) -> Predictor:
    """The model in a folder, to be called as every artefact is."""
    model = load_model(folder, trusted)
    call = tf.function(lambda inputs: model(inputs, training=False), reduce_retracing=True)
    return lambda inputs: np.asarray(call(tf.constant(inputs)), np.float32)


def _load_saved_model(target: Path) -> Callable[[Any], Any]:
    loaded = tf.saved_model.load(str(target))
    return lambda inputs: loaded.serve(inputs)  # which alone would not keep the variables alive


_SAVERS: dict[str, Callable[[keras.Model, Path], object]] = {
    "keras": lambda model, target: model.save(target),
    "h5": lambda model, target: model.save(target),
    "savedmodel": lambda model, target: model.export(target, verbose=False),
}
_LOADERS: dict[str, Callable[[Path], Callable[[Any], Any]]] = {
    "keras": lambda target: keras.saving.load_model(target, compile=False),
    "h5": lambda target: keras.saving.load_model(target, compile=False),
    "savedmodel": _load_saved_model,
}
