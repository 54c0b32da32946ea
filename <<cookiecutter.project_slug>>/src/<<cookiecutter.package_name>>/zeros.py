"""Which weights of an artefact are zero, as its file has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .weights import FILE

Zeros = dict[str, npt.NDArray[np.bool_]]


def zeros_of(path: Path) -> Zeros:
    """Each weight of two or more dimensions, true where it is zero; int8 ones where they stand for zero.

    Args:
        path: A model folder, .onnx, .pt2 or .tflite.
    """
    return {name: zero for name, zero in _READERS[path.suffix if path.is_file() else ""](path).items() if zero.ndim > 1}


def _of_folder(path: Path) -> Zeros:
    return _equal_zero(import_module("safetensors.numpy").load_file(path / FILE))


def _of_onnx(path: Path) -> Zeros:
    onnx = import_module("onnx")
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    return _equal_zero(tensors)  # int8 weights are symmetric: their zero point is 0


def _of_torch_export(path: Path) -> Zeros:
    state = import_module("torch").export.load(path).state_dict
    return {name: (tensor == 0).numpy() for name, tensor in state.items()}


def _of_litert(path: Path) -> Zeros:
    interpreter: Any = import_module("ai_edge_litert.interpreter").Interpreter(str(path))
    found = {}
    for details in interpreter.get_tensor_details():
        try:
            tensor = interpreter.get_tensor(details["index"])
        except ValueError:  # no constant: it has no values before a call
            continue
        points = details["quantization_parameters"]["zero_points"]
        found[details["name"]] = tensor == (points[0] if len(points) else 0)  # symmetric as well, so all are alike
    return found


def _equal_zero(tensors: Mapping[str, npt.NDArray[Any]]) -> Zeros:
    return {name: tensor == 0 for name, tensor in tensors.items()}


_READERS: dict[str, Callable[[Path], Zeros]] = {
    "": _of_folder,
    ".onnx": _of_onnx,
    ".pt2": _of_torch_export,
    ".tflite": _of_litert,
}
