"""What ranks send each other, as bytes that can only become data: JSON, and arrays beside it. No pickle.

A message is an .npz: the value as JSON, in which an object says by its one key what JSON does not know, and each array.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LARGEST = 2**31 - 1  # bytes: transports count with 32 bits


def encode(value: Any) -> Array:
    """The bytes of a value, as an array of uint8.

    Args:
        value: None, numbers, text, bytes, paths, numpy arrays, and lists, tuples and dicts (by text) of such.

    Raises:
        TypeError: for anything else; make it one of these first.
        ValueError: if the message would be too large.
    """
    arrays: list[Array] = []
    text = json.dumps(_plain(value, arrays))
    file = io.BytesIO()
    np.savez(file, np.frombuffer(text.encode(), np.uint8), *arrays)  # arr_0, arr_1, ...
    if file.tell() > LARGEST:
        raise ValueError(f"a message of {file.tell()} bytes is too large: send it in parts")
    return np.frombuffer(file.getbuffer(), np.uint8)


def decode(message: Array) -> Any:
    """The value that encode() was given, to the bit.

    Raises:
        ValueError: if it is no such message.
    """
    try:
        with np.load(io.BytesIO(message.data), allow_pickle=False) as arrays:
            return _value(json.loads(arrays["arr_0"].tobytes()), arrays)
    except Exception as error:  # what a zip file, an array or JSON can have wrong is not to be counted
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _plain(value: Any, arrays: list[Array]) -> Any:
    """The value in JSON's terms; its arrays are put beside."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_plain(one, arrays) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(one, arrays) for one in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _plain(one, arrays) for key, one in value.items()}}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, bytes):
        return {"bytes": _beside(np.frombuffer(value, np.uint8), arrays)}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {"array": _beside(value, arrays)}
    raise TypeError(f"{type(value).__name__} cannot travel between ranks: make it plain values or numpy arrays first")


def _beside(array: Array, arrays: list[Array]) -> str:
    arrays.append(array)
    return f"arr_{len(arrays)}"


def _value(plain: Any, arrays: Mapping[str, Array]) -> Any:
    if isinstance(plain, list):
        return [_value(one, arrays) for one in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    kinds: dict[str, Callable[[], Any]] = {
        "tuple": lambda: tuple(_value(content, arrays)),
        "dict": lambda: {key: _value(one, arrays) for key, one in content.items()},
        "path": lambda: Path(content),
        "bytes": lambda: arrays[content].tobytes(),
        "array": lambda: arrays[content],
    }
    return kinds[kind]()
