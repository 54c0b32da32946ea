"""Ending early without losing work: a signal is noted, the ranks agree, all save and end together.

Nothing is saved inside the signal handler: it may interrupt a collective that the other ranks wait in.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from types import FrameType

from .errors import BURST_S, PREEMPTED, UserError
from .ranks import Communicator

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ASK_EVERY_S = 1.0


class Preempted(UserError):
    """All ranks have saved and stop; the same command goes on from there."""

    code = PREEMPTED


class Preemption:
    """Asks the ranks about once per second whether any of them was told to stop."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._signal: int | None = None
        self._told_at = 0.0
        self.restart()

    def listen(self) -> None:
        """Take over SIGTERM and SIGUSR1; a second one, if it is not of the same burst, ends this process at once."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal, self._told_at = number, time.monotonic()
        elif time.monotonic() > self._told_at + BURST_S:
            os._exit(128 + number)

    def restart(self) -> None:
        """Ask at the next call again: the calls to come may take longer than those before."""
        self._interval = 1
        self._calls = 0
        self._began = time.monotonic()

    def agreed(self) -> bool:
        """Whether to stop now, the same on all ranks; call it once per step or batch, in the same order on all.

        The number of calls between two questions follows the slowest rank, so that they cost nothing that counts.
        """
        self._calls += 1
        if self._calls < self._interval:
            return False
        answers = self._communicator.gather((self._signal, time.monotonic() - self._began), "preemption")
        per_call = max(seconds for _, seconds in answers) / self._calls
        interval = min(2 * self._interval, int(ASK_EVERY_S / max(per_call, 1e-9)))
        self.restart()
        self._interval = max(1, interval)
        told = [rank for rank, (number, _) in enumerate(answers) if number is not None]
        if told:
            log.info(f"told to stop: rank {', '.join(map(str, told))}")
        return bool(told)
