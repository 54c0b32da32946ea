"""Reading ahead: from a plan of sample indices to tensors, in worker processes."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from ..data import Dataset
from ..errors import UserError
from ..sampler import Indices, Share

NO_SHARED_MEMORY = (
    "/dev/shm is full, through which the processes that read data hand on what they read: enlarge it"
    " (--shm-size=8g of a container), or use fewer data.workers, or none"
)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

Tensors = tuple[Tensor, Tensor]
Item = TypeVar("Item")


class _Reader(TorchDataset[list[Tensors] | UserError]):
    """Fetches whole batches: an "index" is (epoch, index arrays)."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, wanted: tuple[int, tuple[Indices, ...]]) -> list[Tensors] | UserError:
        epoch, parts = wanted
        try:
            return [_shared(*self.dataset.fetch(part, epoch)) for part in parts]
        except UserError as error:
            return error  # raised in a worker it would come back wrapped in a traceback


def _tensors(inputs: object, labels: object) -> Tensors:
    return torch.as_tensor(inputs), torch.as_tensor(labels)


def _shared(inputs: object, labels: object) -> Tensors:
    """Tensors, in a worker in shared memory already: what fails later, on the way to the rank, would never arrive."""
    tensors = _tensors(inputs, labels)
    if get_worker_info() is not None:
        with _shared_memory():
            for tensor in tensors:
                tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensors


@contextmanager
def _shared_memory() -> Iterator[None]:
    """Errors for lack of shared memory as one sentence.

    Raises:
        UserError: names /dev/shm.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None
        if full or "shared memory" in str(error):
            raise UserError(NO_SHARED_MEMORY) from error
        raise


def _leave_signals_to_the_rank(worker: int) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def read_shares(
    dataset: Dataset, shares: Iterable[Share], workers: int, pin: bool
) -> Iterator[tuple[Share, list[Tensors]]]:
    """Each share with its tensors, one pair of (inputs, labels) for each accumulation pass.

    The plan runs over all epochs, so that workers live as long as the training and never wait for an epoch.
    """
    kept: list[Share] = []
    wanted = _remember(shares, kept)
    plan = ((share.start.epoch, share.passes) for share in wanted)
    for batches in _load(dataset, plan, workers, pin):
        yield kept.pop(0), batches


def read_batches(dataset: Dataset, batches: Iterable[Indices], workers: int, pin: bool) -> Iterator[Tensors]:
    """Each batch of indices as tensors."""
    for tensors in _load(dataset, ((0, (indices,)) for indices in batches), workers, pin):
        yield tensors[0]


def _remember(items: Iterable[Item], kept: list[Item]) -> Iterator[Item]:
    for item in items:
        kept.append(item)
        yield item


def _load(
    dataset: Dataset, plan: Iterable[tuple[int, tuple[Indices, ...]]], workers: int, pin: bool
) -> Iterator[list[Tensors]]:
    if workers:
        _start_forkserver()
    loader = DataLoader(
        _Reader(dataset),
        batch_size=None,  # the plan names whole batches
        sampler=plan,
        num_workers=workers,
        pin_memory=pin,
        collate_fn=_as_is,
        worker_init_fn=_leave_signals_to_the_rank if workers else None,
        generator=torch.Generator(),  # else each loader draws from the one that dropout uses
        # A fork would copy the threads of Horovod and MPI, which is not safe with InfiniBand.
        multiprocessing_context="forkserver" if workers else None,
    )
    with _shared_memory():
        results = iter(loader)
    while True:
        with _shared_memory():
            result = next(results, None)
        if result is None:
            return
        if isinstance(result, UserError):
            raise result
        yield result


def _start_forkserver() -> None:
    """Start the processes that make and watch the workers deaf to signals that are meant for the rank."""
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # starting the tracker has let some through
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


def _as_is(batch: Item) -> Item:
    return batch
