"""What this wing does to compress a model: see ../command.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
from hydra.utils import instantiate

from ...errors import UserError
from ...export.tensorflow import load_model
from ...tensorflow.engine import TensorFlowEngine
from ...tensorflow.variables import copies, named, write
from ...weights import FILE, check_classes
from ..pruning import Layers
from . import prune, shrink
from .distill import Distillation

SHRINKERS: dict[str, Callable[..., shrink.Choice]] = {
    "channels": shrink.fewer_channels,
    "low_rank": shrink.low_rank,
}
SHRUNK = f"{shrink.__name__}.{shrink.shrunk.__name__}"


def new_model(
    engine: TensorFlowEngine, base: dict[str, Any], options: Any, data: Any, folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """Choose another architecture and write the weights to begin with; returns its config, and remarks.

    Args:
        engine: Its model has the weights of the source and stays as it is.
        base: The config of that model.
        options: compress: method and what the method takes.
        data: Not looked at.
        folder: Where model.safetensors goes.

    Raises:
        UserError: for qat.
    """
    if options.method not in SHRINKERS:
        raise UserError(
            "compress=qat is not there for tensorflow models, since tensorflow-model-optimization, which trains with"
            " rounding, needs Keras 2: use compress=int8, where LiteRT calibrates after training"
        )
    keras.utils.clear_session(free_memory=False)  # automatic names begin anew, as whenever the config is built
    model: keras.Model = instantiate(base)  # not the engine's, whose batch-norm may span all ranks
    model.set_weights(engine.model.get_weights())
    chosen, changes, remarks = SHRINKERS[options.method](model, options)
    write(copies(named(chosen)), folder / FILE)
    return {"_target_": SHRUNK, "base": base, "changes": changes}, remarks


def layers(engine: TensorFlowEngine, wanted: list[str], skip: list[str]) -> Layers:
    """The layers to prune."""
    return prune.Layers(engine.model, wanted, skip)


def distillation(
    engine: TensorFlowEngine, weights: Path, options: Any, data: Any, trusted: Sequence[str]
) -> Distillation:
    """The loss of a student.

    Args:
        engine: Its model is the student.
        weights: The teacher's model folder.
        options: See Distillation; and teacher, a model by _target_ instead of that one.
        data: Not looked at.
        trusted: As for load_model().

    Raises:
        UserError: if the two answer with different numbers of classes.
    """
    model = instantiate(options.teacher) if options.get("teacher") else load_model(weights, trusted)
    check_classes(engine.model.output_shape[-1], model.output_shape[-1])
    return Distillation(model, engine.model, options)
