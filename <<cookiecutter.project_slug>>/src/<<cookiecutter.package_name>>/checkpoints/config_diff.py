"""What differs between two configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import trust


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
