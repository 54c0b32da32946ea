"""Fewer bits without training; docs/compress.md says which methods there are and what each is good for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..export.artefacts import Floats
from ..export.model_folder import data_shape, engine_of
from ..ranks import Communicator
from .wing import wing_of


def post_training(
    folder: Path,
    target: Path,
    method: str,
    calibration: Iterable[Floats],
    communicator: Communicator,
    skip: Sequence[str] = (),
    trusted: Sequence[str] = (),
) -> dict[str, Any]:
    """Quantize a trained model without training; all ranks call it, rank 0 writes.

    Args:
        folder: A model folder.
        target: The artefact to write: .onnx, or .pt2 for fp16 and bf16; of a Keras model .tflite.
        method: static | dynamic | weight_only | fp16 | bf16, as far as the model's engine has it.
        calibration: This rank's batches for `static`, each (n, *data.shape), normalized; may be empty on some ranks.
        communicator: The ranks.
        skip: Layers, or patterns of their names, that stay in float32; LiteRT knows no such choice.
        trusted: As for load_model().

    Returns:
        `quantized`: the names of what is in fewer bits; `fp32`: of the rest that computes, each with the reason;
        `calibration_samples`: how many all ranks saw.

    Raises:
        UserError: if the method does not exist for the target, or the data cannot calibrate the model.
    """
    wing = wing_of(communicator.together(lambda: engine_of(folder), "engine"))
    communicator.on_writer(lambda: check_method(method, target, wing.METHODS), "target")
    quantizer = communicator.together(lambda: wing.Quantizer(folder, method, skip, trusted), "model")
    samples = 0
    if method == "static":
        batches = _checked(calibration, data_shape(folder))
        mine = communicator.together(lambda: quantizer.observe(batches), "calibrate")
        samples = _count_samples(mine, communicator)
        quantizer.merge(communicator)
    report = communicator.on_writer(lambda: quantizer.convert(target), "convert")
    return {**report, "calibration_samples": samples}


def check_method(method: str, target: Path, methods: Mapping[str, Sequence[str]]) -> None:
    """Refuse a method, or a file that cannot hold its result; `methods` lists the suffixes of each.

    Raises:
        UserError: if the method is unknown, the target's suffix is none of its own, or the target exists.
    """
    if method not in methods:
        raise UserError(f"the method {method} is not there for this engine: choose {', '.join(methods)}", agreed=True)
    if target.suffix not in methods[method]:
        raise UserError(
            f"{target} cannot hold a {method} model: its name must end in {' or '.join(methods[method])}", agreed=True
        )
    if target.exists():
        raise UserError(f"{target} exists: name a new one for the model", agreed=True)


def _checked(batches: Iterable[Floats], shape: Sequence[int]) -> Iterator[Floats]:
    """The calibration batches, float32 of shape (n, *shape).

    Raises:
        UserError: if one has another shape, or values that are no numbers.
    """
    for batch in batches:
        if batch.shape[1:] != tuple(shape):
            raise UserError(f"calibration samples have shape {batch.shape[1:]}, the model takes {tuple(shape)}")
        if not np.isfinite(batch).all():
            raise UserError("calibration samples hold NaN or infinite values: leave those samples out")
        if len(batch):
            yield np.asarray(batch, np.float32)


def _count_samples(mine: int, communicator: Communicator) -> int:
    """How many calibration samples all ranks have together.

    Raises:
        UserError: agreed by all ranks, if there are fewer than ranks.
    """
    samples = sum(communicator.gather(mine, "calibration samples"))
    if samples < communicator.size:
        raise UserError(
            f"{samples} calibration samples for {communicator.size} ranks: give at least one for each, and some 100s"
            " for good ranges",
            agreed=True,
        )
    return samples
