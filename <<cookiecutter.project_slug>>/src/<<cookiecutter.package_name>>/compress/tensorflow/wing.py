"""What TensorFlow (Keras 3) brings to make a model smaller: see ../wing.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
from hydra.utils import instantiate

from ...errors import UserError
from ...export.tensorflow import load_model
from ...tensorflow.engine import TensorFlowEngine
from ...tensorflow.variables import copies, named, write
from ..wing import Choice
from .distillation import TensorFlowDistillation as Distillation
from .pruning import TensorFlowWeights as PrunableWeights
from .quantization import METHODS
from .quantization import TensorFlowQuantizer as Quantizer
from .shrink import fewer_channels, low_rank, shrunk

__all__ = ["METHODS", "Distillation", "PrunableWeights", "Quantizer", "load_model", "shrunk"]


def copy_model(engine: TensorFlowEngine, base: dict[str, Any]) -> keras.Model:
    """For this rank alone, where the engine's batch-norm may span all."""
    keras.utils.clear_session(free_memory=False)  # automatic names begin anew, as whenever the config is built
    model: keras.Model = instantiate(base)
    model.set_weights(engine.model.get_weights())
    return model


def save_weights(model: keras.Model, file: Path) -> None:
    """With batch-norm statistics."""
    write(copies(named(model)), file)


def shrink(model: keras.Model, options: Any, data: Any) -> Choice:
    """Of a functional model."""
    return (low_rank if options.method == "low_rank" else fewer_channels)(model, options)


def prepare(model: keras.Model, skip: list[str]) -> keras.Model:
    """Always refused."""
    raise UserError(
        "compress=qat is not there for tensorflow models, since tensorflow-model-optimization, which trains with"
        " rounding, needs Keras 2: use compress=int8, where LiteRT calibrates after training"
    )


def classes_of(model: keras.Model, engine: TensorFlowEngine, shape: Sequence[int]) -> int:
    """As its output says."""
    return int(model.output_shape[-1])
