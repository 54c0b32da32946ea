"""The training loop: steps, epochs, evaluation and checkpoints, in the same order on every rank.

No framework in it: the sampler plans, the engine steps, the saver saves, the tracker records.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from .data import Splits
from .distributed import Communicator
from .engine import Engine, Sums
from .errors import UserError
from .sampler import Sampler, Share, evaluation_batches
from .schedule import Schedule
from .state import State
from .tracking import Tracker

Save = Callable[[State], None]


@dataclass(frozen=True)
class Cadence:
    """When the loop does what: steps between two logs, epochs between evaluations and between checkpoints."""

    log_every: int
    evaluate_every: int
    save_every: int


@dataclass(frozen=True)
class Loop:
    """Everything that a training run needs."""

    communicator: Communicator
    engine: Engine
    splits: Splits
    sampler: Sampler
    schedule: Schedule
    tracker: Tracker
    save: Save
    cadence: Cadence
    epochs: int
    evaluation_batch: int

    def fit(self, state: State) -> State:
        """Train from `state` to the last epoch; the ranks' weights are proved equal before and after."""
        self._check_weights()
        window = _Window(state.step)
        shares = self.sampler.shares(state.position, self.epochs)
        for share, batch in self.engine.train_batches(self.splits.train, shares):
            learning_rate = self.schedule(self.sampler.progress(share.start))
            self.engine.train_step(share, batch, learning_rate)
            window.add(share)
            state = replace(state, step=state.step + 1, position=share.end)
            epoch_ends = share.end.offset == 0
            if epoch_ends or state.step % self.cadence.log_every == 0:
                self._log_training(state, learning_rate, window)
                window = _Window(state.step)
            if epoch_ends:
                state = self._end_epoch(state)
                window = _Window(state.step)
        self._check_weights()
        return state

    def _check_weights(self) -> None:
        self.communicator.check_equal(self.engine.fingerprint(), "the weights")

    def _end_epoch(self, state: State) -> State:
        epoch = state.position.epoch
        last = epoch == self.epochs
        if last or epoch % self.cadence.evaluate_every == 0:
            state = self._evaluate(state)
        if last or epoch % self.cadence.save_every == 0:
            self.save(state)
        return state

    def _log_training(self, state: State, learning_rate: float, window: _Window) -> None:
        """Look at the loss of the steps since the last look; stops all ranks if it is not a number."""
        sums = add_up(self.communicator, self.engine.train_sums(), "train")
        if not (sums.count and math.isfinite(sums.loss)):
            raise UserError(
                f"the loss is not finite between steps {window.first + 1} and {state.step}: lower optimizer.lr,"
                " set clip_norm, look at the data, or step over single bad batches with on_nan=skip",
                agreed=True,
            )
        metrics = {"train/loss": sums.loss / sums.count, "lr": learning_rate, "samples_per_s": window.rate()}
        self.tracker.log(state.step, self.sampler.progress(state.position), metrics)

    def _evaluate(self, state: State) -> State:
        metrics = evaluate(self.communicator, self.engine, self.splits, self.evaluation_batch)
        self.tracker.log(state.step, self.sampler.progress(state.position), metrics)
        best = max(metrics["val/accuracy"], state.best or 0.0)
        return replace(state, metrics=metrics, best=best)


class _Window:
    """Samples and seconds since the last log."""

    def __init__(self, step: int) -> None:
        self.first = step
        self.samples = 0
        self.began = time.monotonic()

    def add(self, share: Share) -> None:
        self.samples += share.global_count

    def rate(self) -> float:
        """Samples per second over all ranks."""
        return round(self.samples / max(time.monotonic() - self.began, 1e-9), 1)


def evaluate(communicator: Communicator, engine: Engine, splits: Splits, batch: int) -> dict[str, float]:
    """Loss and accuracy over the whole validation part: each sample counted once, on one rank."""
    plan = evaluation_batches(len(splits.validation), batch, communicator.rank, communicator.size)
    sums = add_up(communicator, engine.evaluate(splits.validation, plan), "validation")
    if not sums.count:
        raise UserError("not one validation sample could be read: see the warnings above", agreed=True)
    return {"val/loss": sums.loss / sums.count, "val/accuracy": sums.correct / sums.count}


def add_up(communicator: Communicator, sums: Sums, name: str) -> Sums:
    """The totals over all ranks."""
    return Sums(*communicator.sum([sums.loss, sums.correct, sums.count], name))
