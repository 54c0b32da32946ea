"""Data sources that fail on one rank; test_two_ranks.py names them by data.source._target_."""

import json
import math
import os
import signal
import time

import numpy as np

from << cookiecutter.package_name >>.data import ArrayDataset, Samples, Splits, digits
from << cookiecutter.package_name >>.ranks import launched_rank
from << cookiecutter.package_name >>.sampler import Indices


class FailsLater(ArrayDataset):
    """Digits until epoch 1, then an exception on the victims, while FAULT is set."""

    victims: tuple[int, ...] = (1,)

    def fetch(self, indices: Indices, epoch: int) -> Samples:
        if epoch == 1 and launched_rank() in self.victims and os.environ.get("FAULT"):
            raise ValueError(f"the disk of rank {launched_rank()} is gone")
        return super().fetch(indices, epoch)


class Recorded(ArrayDataset):
    """Digits that note which samples were fetched in the file RECORD, and ask for an end after STOP_AFTER batches."""

    fetched = 0

    def fetch(self, indices: Indices, epoch: int) -> Samples:
        Recorded.fetched += 1
        with open(os.environ["RECORD"], "a") as file:
            file.write(json.dumps([epoch, indices.tolist()]) + "\n")
        if launched_rank() == 0 and Recorded.fetched == int(os.environ.get("STOP_AFTER", 0)):
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().fetch(indices, epoch)


class Stops(ArrayDataset):
    """Validation digits that ask for an end in the middle of the first evaluation, while FAULT is set."""

    def fetch(self, indices: Indices, epoch: int) -> Samples:
        if os.environ.get("FAULT") and launched_rank() == 1 and 250 in indices:
            os.kill(os.getpid(), signal.SIGTERM)
            del os.environ["FAULT"]
        return super().fetch(indices, epoch)


class Waits(ArrayDataset):
    """Digits that come slowly until there is the file that HURRY names."""

    def fetch(self, indices: Indices, epoch: int) -> Samples:
        if not os.path.exists(os.environ["HURRY"]):
            time.sleep(1)
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


def recorded() -> Splits:
    """See Recorded."""
    return _with_training(Recorded)


def stops() -> Splits:
    """See Stops."""
    splits = digits()
    assert isinstance(splits.validation, ArrayDataset)
    return Splits(splits.train, Stops(splits.validation.inputs, splits.validation.labels))


def waits() -> Splits:
    """See Waits."""
    return _with_training(Waits)


def not_a_number() -> Splits:
    """See NotANumber."""
    return _with_training(NotANumber)


def fails_at_once() -> Splits:
    """Digits that only rank 0 can read."""
    if launched_rank() == 1:
        raise FileNotFoundError(f"no data on this host for {os.getpid() > 0}")
    return digits()
