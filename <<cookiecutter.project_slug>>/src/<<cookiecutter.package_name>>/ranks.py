"""What the ranks say to each other: the only room that starts Horovod and knows its collectives by name.

Everything works at size 1, so no other room asks whether it is distributed.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import UserError, user_sentence
from .messages import LARGEST, decode, encode

log = logging.getLogger(__name__)
T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]

ASK_AGAIN_S = 10.0
BLOCK = 2**25  # bytes that the writing rank takes at once

# What each launcher says about a process, in the order in which one launcher may run inside another.
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")

# Our option, Horovod's variable, and what turns one into the other.
SETTINGS: tuple[tuple[str, str, Callable[[Any], object]], ...] = (
    ("fusion_threshold_mb", "HOROVOD_FUSION_THRESHOLD", lambda value: int(value * 2**20)),
    ("cycle_time_ms", "HOROVOD_CYCLE_TIME", float),
    ("cache_capacity", "HOROVOD_CACHE_CAPACITY", int),
    ("autotune", "HOROVOD_AUTOTUNE", int),
    ("timeline", "HOROVOD_TIMELINE", str),
    ("stall_check_s", "HOROVOD_STALL_CHECK_TIME_SECONDS", int),
    ("stall_shutdown_s", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", int),
    ("stall_shutdown_s", "HOROVOD_GLOO_TIMEOUT_SECONDS", lambda value: max(30, int(value)) if value else 30 * 86400),
)


def launched_rank() -> int:
    """The rank that the launcher gave this process, known before Horovod starts; 0 without a launcher."""
    return int(_first_variable(RANK_VARIABLES) or 0)


@dataclass(frozen=True)
class Communicator:
    """The ranks of one job. `hvd` is Horovod's module for the framework (horovod.torch, ...).

    `tensor` makes a tensor of the framework, on the CPU, from a numpy array. What travels is data alone (see
    messages.py): Horovod's own functions for objects would run what a pickle from the network says.
    """

    hvd: Any
    tensor: Callable[[npt.NDArray[Any]], Any]
    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def writes(self) -> bool:
        """Whether this is the one rank that writes shared files."""
        return self.rank == 0

    def gather(self, value: T, name: str) -> list[T]:
        """Every rank's value, in rank order, on every rank; what can travel is said in messages.encode()."""
        if self.size == 1:
            return [value]
        message = encode(value)
        sizes = self._sizes(len(message), name)
        received = self._allgather(message, name)
        parts = np.split(received, np.cumsum(sizes)[:-1])
        return [_decode(part, rank, name) for rank, part in enumerate(parts)]

    def broadcast(self, value: T, name: str) -> T:
        """Rank 0's value on every rank; the others' `value` is not looked at."""
        if self.size == 1:
            return value
        message = encode(value) if self.rank == 0 else np.zeros(0, np.uint8)
        size = _checked(int(self._broadcast(np.array([len(message)]), f"{name}.size")[0]), 0, name)
        received = self._broadcast(message if self.rank == 0 else np.zeros(size, np.uint8), name)
        result: T = value if self.rank == 0 else _decode(received, 0, name)
        return result

    def hand_over(self, part: Bytes, take: Callable[[Bytes], object], name: str) -> list[int]:
        """Give every rank's bytes, in rank order, to the writing rank's `take`, a block at a time.

        No rank ever holds more than its own part and a block. `take` must not fail: the others would wait.

        Returns:
            How many bytes each rank had, on every rank.
        """
        if self.size == 1:
            take(part)
            return [len(part)]
        sizes = self._sizes(len(part), name, largest=2**63 - 1)
        first = sum(sizes[: self.rank])  # where this rank's part begins in the row of all
        for start in range(0, sum(sizes), BLOCK):
            low, high = (min(max(end - first, 0), len(part)) for end in (start, start + BLOCK))
            splits = np.array([high - low, *[0] * (self.size - 1)], np.int32)
            # Of all collectives this one alone can bring bytes to one rank and to no other.
            block, _ = self.hvd.alltoall(self.tensor(part[low:high]), splits=self.tensor(splits), name=name)
            if self.writes:
                take(block.numpy())
        return sizes

    def _sizes(self, size: int, name: str, largest: int = LARGEST) -> list[int]:
        sizes = self._allgather(np.array([size]), f"{name}.size").tolist()
        return [_checked(one, rank, name, largest) for rank, one in enumerate(sizes)]

    def _allgather(self, array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
        received: npt.NDArray[Any] = self.hvd.allgather(self.tensor(array), name=name).numpy()
        return received

    def _broadcast(self, array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
        received: npt.NDArray[Any] = self.hvd.broadcast(self.tensor(array), root_rank=0, name=name).numpy()
        return received

    def sum(self, values: list[float], name: str) -> list[float]:
        """The sums over ranks, added in rank order so that every rank gets the same bits."""
        if self.size == 1:
            return values
        # One collective where gather() needs two: this is called within the training loop.
        rows = self._allgather(np.array([values], np.float64), name).tolist()
        return [sum(column) for column in zip(*rows, strict=True)]

    def together(self, step: Callable[[], T], name: str) -> T:
        """Run `step` on every rank; if it fails on any, fail on all with the sentences of those ranks.

        Raises:
            UserError: agreed by all ranks, if every failure is the user's to mend.
            RuntimeError: on all ranks, for any other failure.
        """
        result, mine = _attempt(step)
        failures = self.gather(mine, name)
        _raise(_one_sentence(failures), [failure for failure in failures if failure])
        return result  # type: ignore[return-value]

    def on_writer(self, step: Callable[[], T], name: str) -> T:
        """Run `step` on the writing rank alone; every rank gets its result, or fails with its error.

        Raises:
            UserError: agreed by all ranks, if the failure is the user's to mend.
            RuntimeError: on all ranks, for any other failure.
        """
        if self.size == 1:
            return step()
        work = ThreadPoolExecutor(1).submit(_attempt, step) if self.writes else None
        while True:  # the others ask now and then: to wait in one collective for long would look like a stall
            done = work is not None and bool(wait([work], ASK_AGAIN_S).done)
            answer = self.broadcast(work.result() if work and done else None, name)
            if answer is not None:
                break
        result, failure = answer
        if failure:
            _raise(failure["sentence"], [failure])
        return result  # type: ignore[return-value]

    def check_equal(self, value: str, what: str) -> None:
        """Fail on all ranks, naming those that differ from rank 0, unless all values are equal.

        Raises:
            RuntimeError: if `value` is not the same on every rank.
        """
        values = self.gather(value, f"check.{what}")
        strays = [str(rank) for rank, other in enumerate(values) if other != values[0]]
        if strays:
            raise RuntimeError(
                f"{what} of rank {', '.join(strays)} differ from rank 0's: the ranks no longer train the same model"
            )

    def check_gpus(self, gpu: str | None) -> None:
        """Refuse ranks that share a GPU; `gpu` is a name that is unique on the host, None for the CPU.

        Raises:
            UserError: agreed by all ranks, if two ranks of one host have the same GPU.
        """
        owners = self.gather((socket.gethostname(), gpu), "gpus")
        shared = {owner for owner in owners if owner[1] and owners.count(owner) > 1}
        if shared:
            raise UserError(
                f"more than one rank on {min(shared)[0]} uses the same GPU: start at most one rank per GPU,"
                " or use device=cpu",
                agreed=True,
            )

    def threads_per_rank(self) -> int:
        """The CPU cores of this host that fall to one rank, after the launcher's binding."""
        cores = tuple(sorted(os.sched_getaffinity(0)))
        mine = (socket.gethostname(), cores)
        sharing = self.gather(mine, "cores").count(mine)
        return max(1, len(cores) // sharing)


def open_communicator(framework: str, settings: Mapping[str, Any] = MappingProxyType({})) -> Communicator:
    """Start Horovod for one framework with the settings under `horovod` and check that it sees the launcher's world.

    Raises:
        UserError: if Horovod is missing, or sees another number of ranks than the launcher started.
    """
    for option, variable, convert in SETTINGS:
        if settings.get(option) is not None:
            os.environ[variable] = str(convert(settings[option]))
    if settings.get("timeline") is not None and launched_rank() == 0:
        _check_writable(Path(settings["timeline"]))
    if _first_variable(SIZE_VARIABLES) is None:  # a process alone needs no network, not even a name of this host
        os.environ.setdefault("HOROVOD_GLOO_IFACE", "lo")
    hvd = _import_horovod(framework)
    hvd.init()
    _check_size(hvd.size())
    log.info(f"rank {hvd.rank()} of {hvd.size()} on {socket.gethostname()}, process {os.getpid()}")
    return Communicator(hvd, _tensor_maker(framework), hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())


def _check_writable(file: Path) -> None:
    """Refuse what Horovod could not write: it says so only in a line among others."""
    place = file if file.exists() else file.parent
    if not os.access(place, os.W_OK) or (not file.is_file() if file.exists() else not place.is_dir()):
        raise UserError(f"horovod.timeline={file} cannot be written: name a file in a folder that is there and yours")
    if file.exists() and file.read_bytes()[:1] not in (b"", b"["):
        raise UserError(f"horovod.timeline={file} is a file of something else: name a new one")


def check_adasum(hvd: Any, size: int) -> None:
    """Refuse Adasum where Horovod's would stop or hang.

    Raises:
        UserError: if the number of ranks is no power of 2, or the transport is not MPI.
    """
    if size & (size - 1):
        raise UserError(f"horovod.op=adasum needs 2, 4, 8, ... ranks and there are {size}: use horovod.op=average")
    if not hvd.mpi_enabled():
        raise UserError("horovod.op=adasum needs MPI and this job runs over Gloo: launch with mpirun")


def _import_horovod(framework: str) -> Any:
    if find_spec(f".{framework}", __package__) is None:
        raise UserError(
            f"engine={framework} is not in this project: generate one with framework={framework}", agreed=True
        )
    importlib.import_module(f".{framework}", __package__)  # a wing may set its framework's variables first
    try:
        return importlib.import_module(f"horovod.{framework}")
    except ImportError as error:
        raise UserError(
            f"Horovod for {framework} cannot be imported ({error}): build it for this environment"
            " with 'python scripts/build_horovod.py' and install the wheel that it prints",
        ) from error


def _tensor_maker(framework: str) -> Callable[[npt.NDArray[Any]], Any]:
    module = importlib.import_module(framework)
    if framework == "torch":
        return lambda array: module.from_numpy(array if array.flags.writeable else array.copy())

    def on_cpu(array: npt.NDArray[Any]) -> Any:
        with module.device("CPU:0"):
            return module.constant(array)

    return on_cpu


def _check_size(size: int) -> None:
    launched = int(_first_variable(SIZE_VARIABLES) or size)
    if launched != size:
        raise UserError(
            f"the launcher started {launched} ranks but Horovod sees {size}: start with launch/local.sh, with"
            " the mpirun of the MPI that Horovod was built with, or with srun (-n 1 for one process in an allocation)",
            agreed=True,
        )


def _first_variable(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


class _StepError(TypedDict):
    """Why a rank could not do its step, and whether that is the user's to mend."""

    sentence: str
    user: bool


def _attempt(step: Callable[[], T]) -> tuple[T | None, _StepError | None]:
    try:
        return step(), None
    except Exception as error:
        log.exception("failed")
        sentence = user_sentence(error)
        return None, _StepError(sentence=sentence or f"{type(error).__name__}: {error}", user=sentence is not None)


def _raise(sentence: str, failures: list[_StepError]) -> None:
    if failures and all(failure["user"] for failure in failures):
        raise UserError(sentence, agreed=True)
    if failures:
        raise RuntimeError(sentence)


def _one_sentence(failures: list[_StepError | None]) -> str:
    """The sentence itself if all ranks say the same, else each failing rank's with its number."""
    sentences = [failure["sentence"] if failure else None for failure in failures]
    if len(set(sentences)) == 1:
        return str(sentences[0])
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(sentences) if text)


def _checked(size: int, rank: int, name: str, largest: int = LARGEST) -> int:
    if not 0 <= size <= largest:
        raise RuntimeError(_foreign(rank, name, f"{size} bytes"))
    return size


def _decode(message: npt.NDArray[Any], rank: int, name: str) -> Any:
    try:
        return decode(message)
    except ValueError as error:
        raise RuntimeError(_foreign(rank, name, str(error))) from error


def _foreign(rank: int, name: str, why: str) -> str:
    return (
        f"what rank {rank} sent as '{name}' is no message of this project ({why}): start all ranks with the same code,"
        " in a network that you trust"
    )
