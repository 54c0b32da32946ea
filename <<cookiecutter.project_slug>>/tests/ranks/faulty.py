"""Data sources that fail on one rank; test_two_ranks.py names them by data.source._target_."""

import math
import os

import numpy as np

from << cookiecutter.package_name >>.data import ArrayDataset, Samples, Splits, digits
from << cookiecutter.package_name >>.distributed import launched_rank
from << cookiecutter.package_name >>.sampler import Indices


class FailsLater(ArrayDataset):
    """Digits until epoch 1, then an exception on rank 1."""

    def fetch(self, indices: Indices, epoch: int) -> Samples:
        if epoch == 1 and launched_rank() == 1:
            raise ValueError("the disk of rank 1 is gone")
        return super().fetch(indices, epoch)


class NotANumber(ArrayDataset):
    """Digits, but one training batch of rank 1 is not a number."""

    def fetch(self, indices: Indices, epoch: int) -> Samples:
        inputs, labels = super().fetch(indices, epoch)
        if epoch == 1 and launched_rank() == 1 and 7 in indices:
            inputs = np.full_like(inputs, math.nan)
        return inputs, labels


def _with_training(kind: type[ArrayDataset]) -> Splits:
    splits = digits()
    assert isinstance(splits.train, ArrayDataset)
    return Splits(kind(splits.train.inputs, splits.train.labels), splits.validation)


def fails_later() -> Splits:
    """See FailsLater."""
    return _with_training(FailsLater)


def not_a_number() -> Splits:
    """See NotANumber."""
    return _with_training(NotANumber)


def fails_at_once() -> Splits:
    """Digits that only rank 0 can read."""
    if launched_rank() == 1:
        raise FileNotFoundError(f"no data on this host for {os.getpid() > 0}")
    return digits()
