"""One checkpoint: how its folder is called, and what its meta.json says."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import files
from . import manifest

META = "meta.json"

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint; `meta` is what its meta.json says, empty when that cannot be read."""

    step: int
    folder: Path
    meta: dict[str, Any]

    @property
    def name(self) -> str:
        """The folder's name: `step-00001000`, or `step-00001000.1` when the step was saved again."""
        return self.folder.name

    @cached_property
    def size(self) -> int:
        """Bytes by the manifest; 0 when that cannot be read."""
        try:
            return sum(size for size, _ in manifest.read_manifest(self.folder).values())
        except (OSError, ValueError):
            return 0


def read_checkpoint(folder: Path) -> Checkpoint:
    """Describe the checkpoint in a folder, damaged or not.

    Raises:
        UserError: if it cannot be read for want of a right.
    """
    try:
        files.check_folder(folder)
        meta = files.read_json(f"{folder}/{META}")
    except ValueError:
        meta = None
    except OSError as error:
        if refusal := files.access_error(error):
            raise refusal from error
        meta = None
    meta = meta if isinstance(meta, dict) else {}
    step = order(folder.name)[0] if is_name(folder.name) else meta.get("step")
    return Checkpoint(step if isinstance(step, int) else 0, folder, meta)


def order(name: str) -> tuple[int, int]:
    """The step in a checkpoint's name and how often it had been saved before; (0, 0) for any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else (0, 0)


def is_name(name: str) -> bool:
    """Whether this is how a checkpoint's folder is called."""
    return _NAME.fullmatch(name) is not None


def metric_of(checkpoint: Checkpoint, metric: str | None) -> float | None:
    """A metric in a checkpoint's meta.json; None when it has no such number."""
    metrics = checkpoint.meta.get("metrics")
    value = metrics.get(metric) if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def best_by(checkpoints: list[Checkpoint]) -> tuple[str | None, str]:
    """The metric and mode that the newest one was saved with."""
    newest = max((item for item in checkpoints if item.meta), key=by_publication, default=None)
    metric, mode = (newest.meta.get("metric"), newest.meta.get("mode")) if newest else (None, None)
    return (metric if isinstance(metric, str) else None), ("min" if mode == "min" else "max")


def by_publication(checkpoint: Checkpoint) -> tuple[float, int, int]:
    """Sorts from the first to the last published. One without a readable meta.json comes last, to be looked at."""
    if not checkpoint.meta:
        return (math.inf, *order(checkpoint.name))
    sequence = checkpoint.meta.get("sequence")
    return (sequence if isinstance(sequence, int) else 0, *order(checkpoint.name))
