"""What differs between two checkpoints: their configs, and their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import trust
from .checkpoint import META, Checkpoint
from .manifest import read_manifest


def read_flat(file: Path) -> dict[str, Any]:
    """The options of a config.yaml under dotted keys; empty if there is no such file.

    Raises:
        UserError: if it is no config.
    """
    return dict(flat(trust.read_config(file))) if file.exists() else {}


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries under dotted keys."""
    if not isinstance(value, dict):
        yield prefix, value
        return
    for key, item in value.items():
        yield from flat(item, f"{prefix}.{key}" if prefix else str(key))


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Both values of each key that differs; None where one side has none."""
    keys = [*old, *(key for key in new if key not in old)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def weight_changes(old: Checkpoint, new: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """Per tensor the two shapes, or the largest absolute difference; files of another kind by their hashes."""
    files, others = read_manifest(old.folder), read_manifest(new.folder)
    found: dict[str, tuple[Any, Any]] = {}
    for name in sorted(files.keys() | others.keys()):
        if files.get(name) == others.get(name) or name in (META, "config.yaml"):
            continue
        tensors = _tensor_changes(old.folder / name, new.folder / name) if name.endswith(".safetensors") else None
        found.update({name: (_hash(files, name), _hash(others, name))} if tensors is None else tensors)
    return found


def _hash(files: dict[str, tuple[int, str]], name: str) -> str | None:
    return f"SHA-256 {files[name][1][:12]}" if name in files else None


def _tensor_changes(old: Path, new: Path) -> dict[str, tuple[Any, Any]] | None:
    """The changes between two files of tensors; None if one is missing or is something else."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[Any, Any]] = {}
    try:
        with safe_open(old, "numpy") as left, safe_open(new, "numpy") as right:
            for key in sorted({*left.keys(), *right.keys()}):
                shapes = _shape(left, key), _shape(right, key)
                if shapes[0] != shapes[1]:
                    found[f"{old.name}:{key}"] = shapes
                elif difference := _difference(left, right, key):
                    found[f"{old.name}:{key}"] = (shapes[0], difference)
    except (SafetensorError, OSError):
        return None
    return found


def _shape(tensors: Any, key: str) -> str | None:
    return str(tensors.get_slice(key).get_shape()) if key in tensors.keys() else None  # noqa: SIM118


def _difference(left: Any, right: Any, key: str) -> str:
    import numpy as np

    try:
        a, b = left.get_tensor(key), right.get_tensor(key)
    except TypeError:
        return "not compared: numpy has no such type"
    largest = np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0)
    return f"differs by up to {largest:.3g}" if largest != 0 else ""
