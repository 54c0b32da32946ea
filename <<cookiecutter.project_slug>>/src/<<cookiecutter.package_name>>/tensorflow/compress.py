"""What this wing does to compress a model: see compress.py. It prunes and distills; architectures stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..pruning import Layers
from ..report import trusted_packages
from ..weights import check_classes
from . import prune
from .distill import Distillation
from .engine import TensorFlowEngine
from .models import load_model

REBUILT: tuple[str, ...] = ()  # methods that train another architecture


def layers(engine: TensorFlowEngine, wanted: list[str], skip: list[str]) -> Layers:
    """The layers to prune."""
    return prune.Layers(engine.model, wanted, skip)


def distillation(engine: TensorFlowEngine, teacher: Any, weights: Path, options: Any, data: Any) -> Distillation:
    """The loss of a student.

    Args:
        engine: Its model is the student.
        teacher: The config of the teacher's model.
        weights: The teacher's model folder.
        options: See Distillation.
        data: Not looked at.

    Raises:
        UserError: if the two answer with different numbers of classes.
    """
    model = load_model(weights, trusted_packages(teacher))
    check_classes(engine.model.output_shape[-1], model.output_shape[-1])
    return Distillation(model, engine.model, options)
