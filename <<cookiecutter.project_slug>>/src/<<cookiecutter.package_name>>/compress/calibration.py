"""What both wings' quantize.py ask of the method, the target and the calibration data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..export.artefacts import Floats
from ..ranks import Communicator


def check_method(method: str, target: Path, methods: Mapping[str, Sequence[str]]) -> None:
    """Refuse a method, or a file that cannot hold its result; `methods` lists the suffixes of each.

    Raises:
        UserError: if the method is unknown, the target's suffix is none of its own, or the target exists.
    """
    if method not in methods:
        raise UserError(f"the method {method} is not there for this engine: choose {', '.join(methods)}", agreed=True)
    if target.suffix not in methods[method]:
        raise UserError(
            f"{target} cannot hold a {method} model: its name must end in {' or '.join(methods[method])}", agreed=True
        )
    if target.exists():
        raise UserError(f"{target} exists: name a new one for the model", agreed=True)


def checked(batches: Iterable[Floats], shape: Sequence[int]) -> Iterator[Floats]:
    """The calibration batches, float32 of shape (n, *shape).

    Raises:
        UserError: if one has another shape, or values that are no numbers.
    """
    for batch in batches:
        if batch.shape[1:] != tuple(shape):
            raise UserError(f"calibration samples have shape {batch.shape[1:]}, the model takes {tuple(shape)}")
        if not np.isfinite(batch).all():
            raise UserError("calibration samples hold NaN or infinite values: leave those samples out")
        if len(batch):
            yield np.asarray(batch, np.float32)


def count_samples(mine: int, communicator: Communicator) -> int:
    """How many calibration samples all ranks have together.

    Raises:
        UserError: agreed by all ranks, if there are fewer than ranks.
    """
    samples = sum(communicator.gather(mine, "calibration samples"))
    if samples < communicator.size:
        raise UserError(
            f"{samples} calibration samples for {communicator.size} ranks: give at least one for each, and some 100s"
            " for good ranges",
            agreed=True,
        )
    return samples
