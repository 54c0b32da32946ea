"""Smaller Keras models as LiteRT files: int8 and fp16; docs/compress.md says what each is good for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

METHODS = {"static": (".tflite",), "dynamic": (".tflite",), "fp16": (".tflite",)}
NO_COMPUTATION = ("DELEGATE", "DEQUANTIZE", "QUANTIZE", "RESHAPE", "PACK", "SHAPE", "STRIDED_SLICE")


class TensorFlowQuantizer:
    """See wing.Quantizer. LiteRT's converter calibrates by itself, so one rank gets all samples.

    The methods: static (int8 weights and activations) | dynamic (int8 weights, activations by the range of each call) |
    fp16 (weights; the CPU computes in float32: smaller, not faster). `skip` must be empty.
    """

    def __init__(self, folder: Path, method: str, skip: Sequence[str] = (), trusted: Sequence[str] = ()) -> None:
        if skip:
            raise UserError(f"compress.skip={skip[0]} is not possible: LiteRT decides by itself, leave it out")
        self._folder, self._method, self._trusted = folder, method, trusted
        self._shape = data_shape(folder)
        self._samples = np.zeros((0, *self._shape), np.float32)

    def observe(self, batches: Iterable[Floats]) -> int:
        """Keep the samples."""
        self._samples = np.concatenate([self._samples, *batches])
        return len(self._samples)

    def merge(self, communicator: Communicator) -> None:
        """Give the writing rank the samples of all ranks, in rank order."""
        blocks = [np.zeros(0, np.uint8)]
        communicator.hand_over(self._samples.ravel().view(np.uint8), blocks.append, "calibration data")
        self._samples = np.concatenate(blocks).view(np.float32).reshape(-1, *self._shape)

    def convert(self, target: Path) -> dict[str, Any]:
        """As .tflite: `quantized` are operations with int8 inputs, or for fp16 layers."""
        target.parent.mkdir(parents=True, exist_ok=True)
        model = load_model(self._folder, self._trusted)
        made = converter(model, half=self._method == "fp16")
        made.optimizations = [tf.lite.Optimize.DEFAULT]
        if self._method == "static":
            made.representative_dataset = lambda: ([sample[None]] for sample in self._samples)
        content = made.convert()
        if self._method == "fp16":
            report: dict[str, Any] = {"quantized": [layer.name for layer in model.layers if layer.weights], "fp32": {}}
        else:
            report = _operations(content)
        partial = target.with_name(f".{target.name}")
        partial.write_bytes(content)
        partial.rename(target)
        return report


def _operations(content: bytes) -> dict[str, Any]:
    """Which operations of a LiteRT model got int8 inputs, and which did not."""
    litert: Any = import_module("ai_edge_litert.interpreter")
    as_in_the_file = litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = litert.Interpreter(model_content=content, experimental_op_resolver_type=as_in_the_file)
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
