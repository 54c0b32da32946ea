"""What both wings say about named weights: whether they fit a model, and a hash of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import UserError

FILE = "model.safetensors"

Shapes = Mapping[str, tuple[int, ...]]


def check_shapes(own: Shapes, saved: Shapes) -> None:
    """Refuse weights of another model.

    Raises:
        UserError: if a name or a shape differs.
    """
    wrong = [name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name)]
    if wrong:
        name = min(wrong)
        raise UserError(
            f"the checkpoint is of another model: {len(wrong)} tensors differ, such as {name} with"
            f" {saved.get(name)} in the file and {own.get(name)} here; choose the model it was made with"
        )


def report_shapes(own: Shapes, saved: Shapes) -> dict[str, str]:
    """For each name "loaded" if its shape is the same on both sides, else why it is not."""
    return {
        name: "loaded"
        if own.get(name) == saved.get(name)
        else f"not loaded: {saved.get(name)} in the file, {own.get(name)} in the model"
        for name in sorted(own.keys() | saved.keys())
    }


def hash_arrays(arrays: Iterable[Any]) -> str:
    """SHA-256 over the bytes of numpy arrays, in their order."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()
