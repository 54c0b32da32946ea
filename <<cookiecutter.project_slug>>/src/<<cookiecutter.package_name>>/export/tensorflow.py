"""Keras models in formats that need no code of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import keras
import tensorflow as tf

from ..errors import UserError
from ..tensorflow.variables import load, named
from ..weights import FILE
from .artefacts import Predictor, keras_predictor, writing
from .model_folder import build_model

FORMATS = ("keras", "h5", "savedmodel", "tflite")


def export(folder: Path, target: Path, kind: str, precision: str, trusted: Sequence[str] = ()) -> None:
    """Turn a model folder into `target`.

    Args:
        folder: A model folder.
        target: The file (keras, h5, tflite) or folder (savedmodel) to write.
        kind: keras | h5 (of Keras 2 times) | savedmodel (for TensorFlow Serving) | tflite (for LiteRT).
        precision: fp32, or fp16 for tflite: weights in fp16.
        trusted: As for load_model().

    Raises:
        UserError: if the format cannot hold the model, or lacks the precision.
    """
    if precision not in ("fp32", "fp16" if kind == "tflite" else "fp32"):
        raise UserError(f"--precision {precision} is not there for {kind}: of TensorFlow's, tflite alone has fp16")
    model = load_model(folder, trusted)
    with writing(kind):
        _SAVERS[kind](model, target, precision == "fp16")


def converter(model: keras.Model, *, half: bool = False) -> tf.lite.TFLiteConverter:
    """What makes a LiteRT file of a model, for batches of any length."""
    made = tf.lite.TFLiteConverter.from_keras_model(model)
    if half:
        made.optimizations = [tf.lite.Optimize.DEFAULT]
        made.target_spec.supported_types = [tf.float16]
    return made


_SAVERS: dict[str, Callable[[keras.Model, Path, bool], object]] = {
    "keras": lambda model, target, half: model.save(target),
    "h5": lambda model, target, half: model.save(target),
    "savedmodel": lambda model, target, half: model.export(target, verbose=False),
    "tflite": lambda model, target, half: target.write_bytes(converter(model, half=half).convert()),
}


def predictor(folder: Path, trusted: Sequence[str] = ()) -> Predictor:
    """The model in a folder, to be called as every artefact is."""
    return keras_predictor(load_model(folder, trusted))


def load_model(folder: str | Path, trusted: Sequence[str] = ()) -> keras.Model:
    """The model in a folder that `export` made, ready to answer; see model_folder.build_model().

    It takes (n, height, width, channels), or (n, features), already normalized as model.json says.
    """
    keras.utils.clear_session(free_memory=False)  # automatic names begin anew, as when it was trained
    model: keras.Model = build_model(Path(folder), trusted)
    load(named(model), Path(folder) / FILE)
    return model
