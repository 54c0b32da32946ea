"""Which weights of an artefact are zero, as its file has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..weights import FILE

Zeros = dict[str, npt.NDArray[np.bool_]]


def zeros_of(path: Path) -> Zeros:
    """Each weight of two or more dimensions, true where it is zero; int8 ones where they stand for zero.

    Args:
        path: A model folder, .onnx, .pt2 or .tflite.
    """
    return _READERS[path.suffix if path.is_file() else ""](path)


def share_of(zeros: Zeros) -> float:
    """The fraction of zeros of all weights together."""
    return sum(int(zero.sum()) for zero in zeros.values()) / max(1, sum(zero.size for zero in zeros.values()))


def _of_folder(path: Path) -> Zeros:
    return _equal_zero(import_module("safetensors.numpy").load_file(path / FILE))


def _of_onnx(path: Path) -> Zeros:
    onnx = import_module("onnx")
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    return _equal_zero(tensors)  # int8 weights are symmetric: their zero point is 0


def _of_torch_export(path: Path) -> Zeros:
    state = import_module("torch").export.load(path).state_dict
    return _equal_zero(
        {name: tensor.detach().float().numpy() for name, tensor in state.items()}
    )  # numpy has no bfloat16


def _of_litert(path: Path) -> Zeros:
    interpreter: Any = import_module("ai_edge_litert.interpreter").Interpreter(str(path))
    points, tensors = {}, {}
    for details in interpreter.get_tensor_details():
        try:
            tensors[details["name"]] = interpreter.get_tensor(details["index"])
        except ValueError:  # no constant: it has no values before a call
            continue
        points[details["name"]] = details["quantization_parameters"]["zero_points"][:1]  # all are alike
    return _equal_zero(tensors, {name: int(point[0]) for name, point in points.items() if len(point)})


def _equal_zero(
    tensors: Mapping[str, npt.NDArray[Any]], zero_points: Mapping[str, int] = MappingProxyType({})
) -> Zeros:
    """Of what is a weight: other integers are shapes and the like."""
    weights = {
        name: array
        for name, array in tensors.items()
        if array.ndim > 1 and (array.dtype.kind == "f" or array.dtype == np.int8)
    }
    return {name: array == zero_points.get(name, 0) for name, array in weights.items()}


_READERS: dict[str, Callable[[Path], Zeros]] = {
    "": _of_folder,
    ".onnx": _of_onnx,
    ".pt2": _of_torch_export,
    ".tflite": _of_litert,
}
