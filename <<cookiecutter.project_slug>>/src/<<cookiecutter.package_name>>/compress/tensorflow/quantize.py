"""Smaller Keras models as LiteRT files: int8 and fp16; docs/export.md says what each is good for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ...errors import UserError
from ...export.artefacts import Floats
from ...export.model_folder import data_shape
from ...export.tensorflow import converter, load_model
from ...ranks import Communicator
from ..calibration import check_method, checked, count_samples

METHODS = {"static": (".tflite",), "dynamic": (".tflite",), "fp16": (".tflite",)}
NO_COMPUTATION = ("DELEGATE", "DEQUANTIZE", "QUANTIZE", "RESHAPE", "PACK", "SHAPE", "STRIDED_SLICE")


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
        target: The .tflite file to write.
        method: static (int8 weights and activations) | dynamic (int8 weights, activations by the range of each call) |
            fp16 (weights; the CPU computes in float32: smaller, not faster).
        calibration: This rank's batches for `static`, each (n, *data.shape), normalized; may be empty on some ranks.
            LiteRT's converter calibrates by itself, so one rank gets all samples: some 100s are enough.
        communicator: The ranks.
        skip: Must be empty: the converter knows no such choice.
        trusted: As for load_model().

    Returns:
        `quantized`: the operations with int8 inputs; `fp32`: the others that compute, with the reason;
        `calibration_samples`: how many there were.

    Raises:
        UserError: if the method is not there, `skip` is not empty, or the data cannot calibrate the model.
    """
    communicator.on_writer(lambda: check_method(method, target, METHODS), "target")
    if skip:
        raise UserError(
            f"compress.skip={skip[0]} is not possible for LiteRT, which decides by itself: leave it out", agreed=True
        )
    shape = data_shape(folder)
    samples, count = _gather(calibration, shape, communicator) if method == "static" else (np.zeros(0, np.float32), 0)
    report = communicator.on_writer(lambda: _convert(folder, target, method, samples, trusted), "convert")
    return {**report, "calibration_samples": count}


def _gather(calibration: Iterable[Floats], shape: Sequence[int], communicator: Communicator) -> tuple[Floats, int]:
    """The samples of all ranks, in rank order, on the writing rank; and how many there are."""
    batches = communicator.together(lambda: list(checked(calibration, shape)), "calibrate")
    mine = np.concatenate([np.zeros((0, *shape), np.float32), *batches])
    count = count_samples(len(mine), communicator)
    blocks = [np.zeros(0, np.uint8)]
    communicator.hand_over(mine.ravel().view(np.uint8), blocks.append, "calibration data")
    return np.concatenate(blocks).view(np.float32).reshape(-1, *shape), count


def _convert(folder: Path, target: Path, method: str, samples: Floats, trusted: Sequence[str]) -> dict[str, Any]:
    target.parent.mkdir(parents=True, exist_ok=True)
    model = load_model(folder, trusted)
    made = converter(model, half=method == "fp16")
    made.optimizations = [tf.lite.Optimize.DEFAULT]
    if method == "static":

        def representative() -> Iterator[list[Floats]]:
            for sample in samples:
                yield [sample[None]]

        made.representative_dataset = representative
    content = made.convert()
    if method == "fp16":
        report: dict[str, Any] = {"quantized": [layer.name for layer in model.layers if layer.weights], "fp32": {}}
    else:
        report = _operations(content)
    partial = target.with_name(f".{target.name}")
    partial.write_bytes(content)
    partial.rename(target)
    return report


def _operations(content: bytes) -> dict[str, Any]:
    """Which operations of a LiteRT model got int8 inputs, and which did not."""
    interpreter: Any = import_module("ai_edge_litert.interpreter").Interpreter(
        model_content=content, experimental_op_resolver_type=_no_delegates()
    )
    kinds = {tensor["index"]: tensor["dtype"] for tensor in interpreter.get_tensor_details()}
    names = {tensor["index"]: tensor["name"] for tensor in interpreter.get_tensor_details()}
    quantized, others = [], {}
    for operation in interpreter._get_ops_details():
        if operation["op_name"] in NO_COMPUTATION:
            continue
        name = f"{operation['op_name']} {names[operation['outputs'][0]].partition(';')[0]}"
        if any(kinds.get(index) is np.int8 for index in operation["inputs"]):
            quantized.append(name)
        else:
            others[name] = "LiteRT leaves it: it has no int8 form, or under 1024 weights"
    if not quantized:
        raise UserError("the model has no operation that LiteRT can quantize: choose the method fp16")
    return {"quantized": quantized, "fp32": others}


def _no_delegates() -> Any:
    """Shows the operations as they are in the file."""
    return import_module("ai_edge_litert.interpreter").OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
