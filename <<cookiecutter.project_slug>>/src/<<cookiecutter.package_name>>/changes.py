"""What differs between two configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import UserError


def read_config(file: Path) -> dict[str, Any]:
    """The options of a config.yaml under dotted keys; empty if there is no such file.

    Raises:
        UserError: if it is not YAML.
    """
    from omegaconf import OmegaConf  # takes a moment, which `checkpoints list` need not wait
    from yaml import YAMLError

    try:
        return dict(flat(OmegaConf.to_container(OmegaConf.load(file)))) if file.exists() else {}
    except (OSError, ValueError, YAMLError) as error:
        raise UserError(f"{file} is no readable config ({type(error).__name__}): use another checkpoint") from error


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
