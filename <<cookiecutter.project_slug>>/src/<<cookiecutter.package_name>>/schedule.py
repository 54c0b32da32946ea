"""The learning rate as a pure function of progress, so that a resumed run cannot scale or warm up twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import UserError


def scaling_factor(scaling: str, batches: float, adasum_batches: float) -> float:
    """By what the learning rate of one batch is multiplied for a step over many.

    Args:
        scaling: linear (Goyal et al. 2017, arXiv:1706.02677), sqrt (Krizhevsky 2014, arXiv:1404.5997),
            adasum (Maleki et al. 2020, arXiv:2006.02924: only what is summed before Adasum counts) or none.
        batches: global batch / data.batch_size.
        adasum_batches: batches that are averaged before Adasum combines the ranks.
    """
    factors = {"linear": batches, "sqrt": math.sqrt(batches), "adasum": adasum_batches, "none": 1.0}
    return factors[scaling]


@dataclass(frozen=True)
class Schedule:
    """Warm-up from `base` to `peak`, then decay to `final` x `peak`; all times are in epochs.

    The warm-up is Goyal et al. 2017's: linear from the learning rate of one batch to the scaled one.
    """

    base: float
    peak: float
    epochs: float
    warmup_epochs: float = 0.0
    decay: str = "cosine"
    final: float = 0.0
    milestones: Sequence[float] = ()
    gamma: float = 0.1
    power: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_epochs <= self.epochs:
            raise UserError(f"schedule.warmup_epochs={self.warmup_epochs} must lie between 0 and epochs={self.epochs}")

    def __call__(self, progress: float) -> float:
        """The learning rate of a step that begins after `progress` epochs."""
        if progress < self.warmup_epochs:
            return self.base + (self.peak - self.base) * progress / self.warmup_epochs
        return self.peak * self._decay(progress)

    def _decay(self, progress: float) -> float:
        if self.decay == "constant":
            return 1.0
        if self.decay == "step":
            return self.gamma ** sum(progress >= milestone for milestone in self.milestones)
        done = min(1.0, (progress - self.warmup_epochs) / max(self.epochs - self.warmup_epochs, 1e-9))
        left = (1 - done) ** self.power if self.decay == "polynomial" else (1 + math.cos(math.pi * done)) / 2
        return self.final + (1 - self.final) * left
