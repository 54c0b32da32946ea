"""The training loop: steps, epochs, evaluation and checkpoints, in the same order on every rank.

No framework in it: the sampler plans, the engine steps, the saver saves, the tracker records.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

from .data import Splits
from .engine import Engine, Sums, other_wire
from .errors import UserError
from .preemption import Preempted, Preemption
from .ranks import Communicator
from .sampler import Indices, Sampler, Share, evaluation_batches
from .schedule import Schedule
from .tracking import Tracker
from .train_state import TrainState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cadence:
    """When the loop does what.

    Args:
        epochs: How many in all.
        log_every: Steps between two looks at the training loss.
        evaluate_every: Epochs between evaluations; the last epoch always has one.
        save_every: Epochs between checkpoints; the last epoch always has one.
        save_every_steps: Steps between checkpoints besides, or None.
        patience: Evaluations without a better accuracy after which training ends, or None.
    """

    epochs: int
    log_every: int
    evaluate_every: int
    save_every: int
    save_every_steps: int | None = None
    patience: int | None = None

    def is_over(self, state: TrainState) -> bool:
        """Whether nothing is left to train."""
        return state.position.epoch >= self.epochs or self.out_of_patience(state)

    def out_of_patience(self, state: TrainState) -> bool:
        """Whether the accuracy has not become better for too long."""
        return self.patience is not None and state.stale >= self.patience

    def is_finished(self, state: TrainState) -> bool:
        """Whether nothing is left to train or to measure, or more is done than these epochs."""
        if (state.position.epoch, state.position.offset) > (self.epochs, 0):
            return True
        return self.is_over(state) and not owes_evaluation(state) and bool(state.metrics)


@dataclass(frozen=True)
class Loop:
    """Everything that a training run needs."""

    communicator: Communicator
    engine: Engine
    splits: Splits
    sampler: Sampler
    schedule: Schedule
    tracker: Tracker
    save: Callable[[TrainState], None]
    preemption: Preemption
    cadence: Cadence
    evaluation_batch: int
    compression: str = "none"  # of gradients on the wire

    def fit(self, state: TrainState) -> TrainState:
        """Train from `state` to the end; the ranks' weights are proved equal before and after.

        Raises:
            Preempted: on all ranks, after a signal to any of them and a last checkpoint.
            UserError: on all ranks, if the loss is not finite.
        """
        self._check_weights()
        if owes_evaluation(state):
            state = self._end_epoch(state)
        if not self.cadence.is_over(state):
            state = self._train(state)
        if not state.metrics:
            state = self._evaluate(state)
        self.save(state)
        self._check_weights()
        return state

    def _train(self, state: TrainState) -> TrainState:
        window = _Window(state.step)
        shares = self.sampler.shares(state.position, self.cadence.epochs)
        self.preemption.restart()
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
                if self.cadence.is_over(state):
                    break
            elif self.cadence.save_every_steps and state.step % self.cadence.save_every_steps == 0:
                self.save(state)
            if self.preemption.agreed():
                self._leave(state)
        return state

    def _leave(self, state: TrainState) -> NoReturn:
        self.save(state)
        raise Preempted(
            f"stopped by a signal after step {state.step}: start it again to go on from there (resume=auto)",
            agreed=True,
        )

    def _check_weights(self) -> None:
        self.communicator.check_equal(self.engine.fingerprint(), "the weights")

    def _end_epoch(self, state: TrainState) -> TrainState:
        epoch = state.position.epoch
        last = epoch == self.cadence.epochs
        if last or epoch % self.cadence.evaluate_every == 0:
            state = self._evaluate(state)
        state = replace(state, ended=epoch)
        if epoch % self.cadence.save_every == 0:
            self.save(state)
        return state

    def _log_training(self, state: TrainState, learning_rate: float, window: _Window) -> None:
        """Look at the loss of the steps since the last look; stops all ranks if it is not a number."""
        sums = add_up(self.communicator, self.engine.train_sums(), "train")
        if not sums.count:
            log.warning(f"no step from {window.first + 1} to {state.step} was taken: each had a bad sample")
            return
        if not math.isfinite(sums.loss):
            raise UserError(
                f"the loss is not finite between steps {window.first + 1} and {state.step}: lower optimizer.lr,"
                f" set clip_norm,{other_wire(self.compression)} look at the data, or step over single bad batches with"
                " on_nan=skip",
                agreed=True,
            )
        metrics = {"train/loss": sums.loss / sums.count, "lr": learning_rate, "samples_per_s": window.rate()}
        self.tracker.log(state.step, self.sampler.progress(state.position), metrics)

    def _evaluate(self, state: TrainState) -> TrainState:
        watch = _Watch(self.preemption)
        metrics = evaluate(self.communicator, self.engine, self.splits, self.evaluation_batch, watch)
        if watch.stopped:
            self._leave(state)
        self.preemption.restart()
        self.tracker.log(state.step, self.sampler.progress(state.position), metrics)
        better = state.best is None or metrics["val/accuracy"] > state.best
        best = metrics["val/accuracy"] if better else state.best
        stale = 0 if better else state.stale + 1
        return replace(state, metrics=metrics, measured=state.step, best=best, stale=stale)


def owes_evaluation(state: TrainState) -> bool:
    """Whether it was stopped between the last step of an epoch and the evaluation."""
    return state.position.offset == 0 and state.position.epoch > state.ended


class _Watch:
    """Passes batches on until the ranks agree to stop."""

    def __init__(self, preemption: Preemption) -> None:
        self._preemption = preemption
        self.stopped = False
        preemption.restart()

    def __call__(self, batches: Iterable[Indices]) -> Iterator[Indices]:
        for batch in batches:
            if self._preemption.agreed():
                self.stopped = True
                return
            yield batch


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


def evaluate(
    communicator: Communicator,
    engine: Engine,
    splits: Splits,
    batch: int,
    watch: Callable[[Iterable[Indices]], Iterable[Indices]] = iter,
) -> dict[str, float]:
    """Loss and accuracy over the whole validation part: each sample counted once, on one rank.

    Args:
        communicator: The ranks.
        engine: What answers.
        splits: Where the validation part is.
        batch: Samples per rank at once.
        watch: What the batches pass through; it may end them early.
    """
    plan = evaluation_batches(len(splits.validation), batch, communicator.rank, communicator.size)
    sums = add_up(communicator, engine.evaluate(splits.validation, watch(plan)), "validation")
    if not sums.count:
        return {"val/loss": math.nan, "val/accuracy": 0.0}
    return {"val/loss": sums.loss / sums.count, "val/accuracy": sums.correct / sums.count}


def add_up(communicator: Communicator, sums: Sums, name: str) -> Sums:
    """The totals over all ranks."""
    return Sums(*communicator.sum([sums.loss, sums.correct, sums.count], name))
