"""Reading ahead: from a plan of sample indices to tensors, in the threads of a tf.data pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import tensorflow as tf

from ..data import Dataset
from ..sampler import Indices, Share

READ_AHEAD = 2  # batches, beside those that the threads work on

Tensors = tuple[tf.Tensor, tf.Tensor]


def read_shares(dataset: Dataset, shares: Iterable[Share], workers: int) -> Iterator[tuple[Share, list[Tensors]]]:
    """Each share with its tensors, one pair of (inputs, labels) for each accumulation pass."""
    kept: list[Share] = []

    def plan() -> Iterator[tuple[int, Indices]]:
        for share in shares:
            kept.append(share)
            for indices in share.passes:
                yield share.start.epoch, indices

    batches = _load(dataset, plan(), workers)
    for first in batches:
        share = kept.pop(0)
        yield share, [first, *islice(batches, len(share.passes) - 1)]


def read_batches(dataset: Dataset, batches: Iterable[Indices], workers: int) -> Iterator[Tensors]:
    """Each batch of indices as tensors."""
    return _load(dataset, ((0, indices) for indices in batches), workers)


def _load(dataset: Dataset, plan: Iterator[tuple[int, Indices]], workers: int) -> Iterator[Tensors]:
    if workers:
        yield from _Pipeline(dataset, plan, workers)
        return
    for epoch, indices in plan:
        inputs, labels = dataset.fetch(indices, epoch)
        yield tf.convert_to_tensor(inputs), tf.convert_to_tensor(labels)


class _Pipeline:
    """Fetches whole batches in threads, in the plan's order; what a fetch raises is raised here as it was."""

    def __init__(self, dataset: Dataset, plan: Iterator[tuple[int, Indices]], workers: int) -> None:
        self._dataset = dataset
        self._errors: list[Exception] = []
        sample, _ = dataset.fetch(np.arange(1), 0)
        self._shape, self._type = (None, *sample.shape[1:]), tf.as_dtype(sample.dtype)
        scalar, vector = tf.TensorSpec((), tf.int64), tf.TensorSpec((None,), tf.int64)
        batches = tf.data.Dataset.from_generator(lambda: plan, output_signature=(scalar, vector))
        options = tf.data.Options()
        options.threading.private_threadpool_size = workers
        self._batches = (
            batches.map(self._read, num_parallel_calls=workers, deterministic=True)
            .prefetch(READ_AHEAD)
            .with_options(options)
        )

    def __iter__(self) -> Iterator[Tensors]:
        try:
            yield from self._batches
        except tf.errors.OpError:
            if self._errors:
                raise self._errors[0] from None
            raise

    def _read(self, epoch: tf.Tensor, indices: tf.Tensor) -> Tensors:
        inputs, labels = tf.numpy_function(self._fetch, [epoch, indices], (self._type, tf.int64))
        return tf.ensure_shape(inputs, self._shape), tf.ensure_shape(labels, (None,))

    def _fetch(self, epoch: Any, indices: Indices) -> tuple[Any, Any]:
        try:
            return self._dataset.fetch(indices, int(epoch))
        except Exception as error:
            self._errors.append(error)
            raise
