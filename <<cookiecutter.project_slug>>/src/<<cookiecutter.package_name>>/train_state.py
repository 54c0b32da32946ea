"""How far a run has come: the part of a checkpoint that no framework is needed for."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .errors import UserError
from .files import read_json
from .sampler import Position

FILE = "train_state.json"


@dataclass(frozen=True)
class TrainState:
    """Steps done, the position in the data, and what was measured.

    `samples` and `global_batch` are those of the plan that the position belongs to; `ended` is the last epoch whose
    evaluation is done; `metrics` were measured after step `measured`; `stale` counts evaluations since the best one.
    """

    samples: int
    global_batch: int
    world_size: int
    step: int = 0
    position: Position = field(default_factory=Position)
    ended: int = 0
    best: float | None = None
    stale: int = 0
    measured: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write train_state.json."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")


def read_train_state(folder: Path) -> TrainState:
    """The state in a checkpoint's folder.

    Raises:
        UserError: if the file is not what this version writes.
    """
    try:
        values = read_json(folder / FILE)
        return TrainState(**{**values, "position": Position(**values["position"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder / FILE} cannot be read ({error}): resume from another checkpoint") from error
