"""Which samples each rank sees in each step, as a pure function of (seed, epoch, position).

The *global* batch is planned; a rank takes its slice. So with the same global batch any number of ranks
trains on the same batches, and a run can go on at another world size from the middle of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .errors import UserError

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Position:
    """How far training has come: `offset` samples into epoch `epoch` of the plan."""

    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Share:
    """One rank's part of one step.

    `passes` holds the sample indices of each gradient accumulation pass; some may be empty in a short batch.
    `global_count` counts the samples of all ranks and passes: the weight of one sample is its inverse.
    """

    start: Position
    end: Position
    passes: tuple[Indices, ...]
    global_count: int


@dataclass(frozen=True)
class Sampler:
    """The plan of a training run for one rank.

    `shard`: every sample is seen once per epoch, by one rank. `replicate`: every rank sees every sample
    once per epoch, in an order of its own, so an epoch is `size` times as much work.
    """

    samples: int
    global_batch: int
    rank: int = 0
    size: int = 1
    accumulation: int = 1
    seed: int = 0
    distribution: str = "shard"

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError("the training data has no samples: an epoch needs at least one")
        parts = self.size * self.accumulation
        if self.global_batch < parts:
            raise UserError(
                f"the global batch of {self.global_batch} is smaller than {parts} = {self.size} ranks x"
                f" {self.accumulation} accumulation passes: raise data.global_batch (or data.batch_size)"
            )
        if self.distribution == "replicate" and self.global_batch % self.size:
            raise UserError(
                f"the global batch of {self.global_batch} is not a multiple of {self.size} ranks:"
                " data.distribution=replicate gives every rank the same number of samples"
            )

    @property
    def stride(self) -> int:
        """Samples by which one full step moves the position."""
        return self.global_batch if self.distribution == "shard" else self.global_batch // self.size

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch, the last of which may be short."""
        return -(-self.samples // self.stride)

    @property
    def shortest_pass(self) -> int:
        """Samples in the smallest pass of any rank and step."""
        last = self.samples - (self.steps_per_epoch - 1) * self.stride
        return (last if self.distribution == "replicate" else last // self.size) // self.accumulation

    def progress(self, position: Position) -> float:
        """Epochs done, as a fraction: what the learning rate's schedule is a function of."""
        return position.epoch + position.offset / self.samples

    def shares(self, start: Position, epochs: int) -> Iterator[Share]:
        """This rank's shares from `start` to the end of the last epoch."""
        position = start
        while position.epoch < epochs:
            share = self.share(position)
            yield share
            position = share.end

    def share(self, start: Position) -> Share:
        """This rank's share of the step that begins at `start`."""
        stop = min(start.offset + self.stride, self.samples)
        end = Position(start.epoch, stop) if stop < self.samples else Position(start.epoch + 1, 0)
        if self.distribution == "shard":
            batch = self._order(start.epoch)[start.offset : stop]
            mine, global_count = np.array_split(batch, self.size)[self.rank], len(batch)
        else:
            mine = self._order(start.epoch)[start.offset : stop]
            global_count = len(mine) * self.size
        return Share(start, end, tuple(np.array_split(mine, self.accumulation)), global_count)

    def _order(self, epoch: int) -> Indices:
        key = (self.seed, epoch) if self.distribution == "shard" else (self.seed, epoch, self.rank)
        return _permutation(self.samples, key)


@lru_cache(maxsize=2)
def _permutation(samples: int, key: tuple[int, ...]) -> Indices:
    order: Indices = np.random.default_rng(key).permutation(samples).astype(np.int64)
    return order


def evaluation_batches(samples: int, batch: int, rank: int, size: int) -> list[Indices]:
    """One rank's contiguous part of a data set in batches; over all ranks each sample comes exactly once.

    All ranks get the same number of batches, of which the last may be empty.
    """
    mine = np.array_split(np.arange(samples, dtype=np.int64), size)[rank]
    largest = -(-samples // size)
    return [mine[start : start + batch] for start in range(0, largest, batch)]
