"""The protocol that a framework wing implements; the loop knows nothing else of a framework.

What a run needs to go on is asked of each part in one way: state() gives it, as it is now; load_state() goes on from
it. So do hooks, reducers, compressors and, as seeds.host_state(), random generators. An engine puts together two
states, which it writes and reads as files of its framework: `shared` is the same on all ranks, `rank` each one's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from .data import Dataset
from .errors import UserError
from .ranks import Bytes, Communicator
from .sampler import Indices, Share

HOOKS = "hooks.safetensors"  # the file of Hooks.state()

NO_RANK = (
    "{} is not there: another version of this project made the checkpoint, or model.fit did; start from its weights"
    " with weights_from=..."
)


@dataclass(frozen=True)
class Sums:
    """Totals over one rank's samples; over all ranks they add up exactly."""

    loss: float = 0.0
    correct: float = 0.0
    count: float = 0.0


class Hooks:
    """What a compression adds to an engine's steps; these add nothing."""

    def begin(self) -> None:
        """Called on all ranks before the first step of a training, not when one goes on."""

    def loss(self, plain: Any, inputs: Any, outputs: Any) -> Any:
        """The loss to train with, summed over the samples of a batch; `plain` is the cross-entropy."""
        return plain

    def after_step(self, share: Share) -> None:
        """Called on all ranks after the optimizer's step."""

    def fingerprint(self) -> str:
        """A hash of what must be the same on every rank before the training."""
        return ""

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """What a resumed run needs; the same on every rank."""
        return {}

    def load_state(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Go on from what state() gave; the engine has its weights already."""


class Engine(Protocol):
    """A model, its optimizer and their device on one rank."""

    model: Any
    hooks: Hooks

    def train_batches(self, dataset: Dataset, shares: Iterator[Share]) -> Iterator[tuple[Share, Any]]:
        """Read ahead along the plan: each share with its batch in the framework's own form."""

    def train_step(self, share: Share, batch: Any, learning_rate: float) -> None:
        """One optimizer step of all ranks together; waits for no device and adds to the running loss."""

    def train_sums(self) -> Sums:
        """This rank's loss (summed) and count since the last call; waits for the device. `correct` is 0."""

    def evaluate(self, dataset: Dataset, batches: Iterable[Indices]) -> Sums:
        """Loss, correct answers and count over this rank's batches, with batch-norm statistics of all ranks."""

    def statistics(self) -> dict[str, Any]:
        """The local statistics of all ranks merged, as evaluate() takes them; all ranks call it together."""

    def shared_state(self, statistics: dict[str, Any]) -> Callable[[Path], None]:
        """Copy weights and optimizer as they are now, with `statistics`; the result writes them, from any thread."""

    def load_shared_state(self, folder: Path) -> None:
        """Take a checkpoint's weights and optimizer, on every rank; nothing is set if they do not fit."""

    def rank_state(self) -> Bytes:
        """The content of this rank's rank_file(): random generators, local statistics, running loss."""

    def load_rank_state(self, file: Path) -> None:
        """Take a rank_file() when there are as many ranks as before."""

    def load_sums(self, files: list[Path]) -> None:
        """Take the sum of the running losses of all rank_files() alone, on one rank, when there are not."""

    def load_weights(self, folder: Path) -> dict[str, str]:
        """Take the weights that fit from a checkpoint or model folder; what became of each, by name."""

    def fingerprint(self) -> str:
        """A hash of the weights."""


def rank_file(folder: Path, rank: int) -> Path:
    """Where a checkpoint has what rank_state() of this rank gave."""
    return folder / f"rank-{rank}.state"


def rank_files(folder: Path) -> list[Path]:
    """All of them, in rank order."""
    return [rank_file(folder, rank) for rank in range(len([*folder.glob("rank-*.state")]))]


def check_finite(finite: bool, compression: str) -> None:
    """Refuse to save weights that are not finite.

    Raises:
        UserError: unless they are.
    """
    if not finite:
        raise UserError(
            f"the weights are not finite and were not saved:{other_wire(compression)} lower optimizer.lr"
            " or set clip_norm"
        )


def other_wire(compression: str) -> str:
    """What a sentence about numbers that are not finite says of compressed gradients; begins with a space."""
    if compression == "none":
        return ""
    smaller = ", or a larger horovod.predivide_factor" if compression == "fp16" else ""
    return f" try horovod.compression=none instead of {compression}{smaller},"


def open_engine(config: Any, communicator: Communicator) -> Engine:
    """Build the wing that config.engine names, before any other collective: it must claim its device first."""
    wing = importlib.import_module(f".{config.engine}.engine", __package__)
    engine: Engine = wing.build(config, communicator)
    return engine
