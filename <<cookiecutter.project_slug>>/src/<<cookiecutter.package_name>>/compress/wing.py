"""The protocol of what a framework brings to make a model smaller: its folder here has it in wing.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from ..engine import Engine, Hooks
from ..export.artefacts import Floats
from ..ranks import Communicator
from .pruning import PrunableWeights

Change = dict[str, Any]  # of layers, in plain values: what `shrunk` is given
Choice = tuple[Any, list[Change], list[str]]  # the model with its weights, what changed, remarks


class Quantizer(Protocol):
    """A trained model on its way to fewer bits; for `qat` it was trained with rounding."""

    def observe(self, batches: Iterable[Floats]) -> int:
        """Take this rank's calibration samples, (n, *data.shape); returns how many there were."""

    def merge(self, communicator: Communicator) -> None:
        """Share what all ranks have observed."""

    def convert(self, target: Path) -> dict[str, Any]:
        """Write the file, on one rank; returns `quantized` and `fp32` of quantization.post_training()."""


class Wing(Protocol):
    """A module; `engine` is the one of its framework."""

    METHODS: Mapping[str, Sequence[str]]  # of quantization, with the endings of the files that can hold the result
    Quantizer: Callable[[Path, str, Sequence[str], Sequence[str]], Quantizer]  # model folder, method, skip, trusted
    PrunableWeights: Callable[[Any, list[str], list[str]], PrunableWeights]  # model, layers, layers to skip
    Distillation: Callable[[Any, Any, Any], Hooks]
    shrunk: Callable[[Any, Sequence[Change]], Any]

    def load_model(self, folder: Path, trusted: Sequence[str]) -> Any:
        """The model in a folder."""

    def copy_model(self, engine: Engine, base: dict[str, Any]) -> Any:
        """A model of the config `base` with the weights of the engine's, which stays as it is."""

    def save_weights(self, model: Any, file: Path) -> None:
        """Write them as checkpoints have them."""

    def shrink(self, model: Any, options: Any, data: Any) -> Choice:
        """Choose fewer channels or low ranks, as options.method says; `data` has shape and classes."""

    def prepare(self, model: Any, skip: list[str]) -> Any:
        """The model, to be trained with rounding but for the layers `skip`.

        Raises:
            UserError: if the framework has no such training.
        """

    def classes_of(self, model: Any, engine: Engine, shape: Sequence[int]) -> int:
        """How many a model answers with, for samples of `shape`; the model is then on the engine's device."""


def wing_of(engine: str) -> Wing:
    """What the framework of an engine brings."""
    return cast(Wing, import_module(f".{engine}.wing", __package__))
