"""Goes on when hosts are lost or come: starts the job again, from its newest checkpoint, on the hosts that there are.

Horovod has an elastic mode of its own, within a running job. Ours starts anew, as torchrun does: a resume is exact
here, so nothing but the steps since the last checkpoint is lost, and no part of the training has to know of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import FAILURE, PREEMPTED, USER_ERROR, UserError
from ..launch.agent import POLL_S
from ..launch.supervise import Failure, Job, announce, noticed_signals
from ..launch.transport import Host
from .hosts import allot

CHECK_EVERY_S = 3.0
AT_ONCE = 32  # hosts that are asked
COOLDOWN_S, LONGEST_COOLDOWN_S = 10.0, 600.0
PAUSE_S = 10.0  # after a loss, times the starts in vain: until the lost host has ended its ranks, and its lock is gone


@dataclass(frozen=True)
class Limits:
    """How few and how many slots (None: all), how long to wait for the few, and how often to start in vain."""

    minimum: int
    maximum: int | None
    wait_s: float
    restarts: int


class Pool:
    """The hosts that can be used now, kept up to date by a thread.

    Args:
        discover: Lists the hosts.
        fault: Why a host cannot be used, nothing if it can; asked again and again, and told whether it could before.
        limits: See there.
    """

    def __init__(self, discover: Callable[[], list[Host]], fault: Callable[[Host, bool], str], limits: Limits) -> None:
        self._discover, self._fault, self._limits = discover, fault, limits
        self._failures: dict[str, int] = {}
        self._aside_until: dict[str, float] = {}
        self._listed = discover()  # an error here is the user's to mend
        self._trouble = ""  # why the hosts cannot be listed now
        self._faults: dict[str, str] = {}  # of the hosts that were asked
        self._asked: set[str] = set()  # those that have not answered yet
        self._unheard = {host.name for host in self._listed}  # the first start waits for all
        self.used: list[Host] = []
        self._lock = threading.Lock()
        self._few = threading.BoundedSemaphore(AT_ONCE)
        threading.Thread(target=self._keep_up, daemon=True).start()

    def choice(self) -> list[Host]:
        """The best hosts to start on now, those in use first; none while there are too few."""
        with self._lock:
            usable = [host for host in self._listed if self._is_usable(host.name) and not self._unheard]
            used = {host.name for host in self.used}
        usable.sort(key=lambda host: host.name not in used)
        slots = sum(host.ranks for host in usable)
        if slots < self._limits.minimum:
            return []
        return allot(usable, min(slots, self._limits.maximum or slots))

    def has_changed(self) -> bool:
        """Whether a new start would have more ranks, or a host in use is listed no more."""
        with self._lock:
            listed = {host.name for host in self._listed}
        if any(host.name not in listed for host in self.used):
            return True
        return sum(host.ranks for host in self.choice()) > sum(host.ranks for host in self.used)

    def put_aside(self, name: str) -> None:
        """Leave a host alone for a while, at each failure for longer."""
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        rest = min(LONGEST_COOLDOWN_S, COOLDOWN_S * 2 ** (failures - 1))
        with self._lock:
            self._aside_until[name] = time.monotonic() + rest
            self._faults.pop(name, None)
        print(f"launch: host {name} is left alone for {rest:g} s", flush=True)

    def forgive(self) -> None:
        """After progress a failure counts as the first one."""
        self._failures.clear()

    def _is_aside(self, name: str) -> bool:
        return time.monotonic() < self._aside_until.get(name, 0)

    def _is_usable(self, name: str) -> bool:
        return self._faults.get(name) == "" and not self._is_aside(name)

    def _keep_up(self) -> None:
        while True:
            listed = self._list_again()
            with self._lock:
                self._listed = listed
                self._unheard &= {host.name for host in listed}
                due = [host for host in listed if host.name not in self._asked and not self._is_aside(host.name)]
                self._asked.update(host.name for host in due)
            for host in due:  # each by itself: one that is slow keeps none waiting
                threading.Thread(target=self._ask, args=(host,), daemon=True).start()
            time.sleep(CHECK_EVERY_S)

    def _list_again(self) -> list[Host]:
        """The hosts as they are listed now, or as they were; says what is wrong when it begins, changes and is over."""
        trouble, listed = "", self._listed
        try:
            listed = self._discover()
        except Exception as error:  # whatever it is, the job goes on
            trouble = str(error)
        if trouble != self._trouble:
            print(f"launch: {trouble or 'the hosts can be listed again'}", flush=True)
        self._trouble = trouble
        return listed

    def _ask(self, host: Host) -> None:
        with self._few:
            try:
                fault = self._fault(host, self._faults.get(host.name) == "")
            except Exception as error:
                fault = str(error)
        with self._lock:
            self._asked.remove(host.name)
            self._unheard.discard(host.name)
            if self._is_aside(host.name):  # it has failed in the meantime
                return
            if fault and fault != self._faults.get(host.name):
                print(f"launch: host {host.name} is not used: {fault}", flush=True)
            if fault:
                self._aside_until[host.name] = time.monotonic() + COOLDOWN_S
            self._faults[host.name] = fault


def run_elastic(
    pool: Pool, begin: Callable[[list[Host]], Job], progress: Callable[[], str], limits: Limits
) -> Failure | None:
    """Start jobs on what hosts there are until one trains to the end; what ended the last one, if it did not.

    Args:
        pool: The hosts.
        begin: Starts a job on hosts, each with as many ranks as slots.
        progress: Something that changes whenever a checkpoint is published.
        limits: See there.
    """
    vain, reached, lost = 0, progress(), False
    started: set[str] = set()  # the hosts of the last start
    while True:
        hosts = _wait_for_hosts(pool, limits, pause=PAUSE_S * vain if lost else 0)
        if hosts is None:
            return Failure("told to stop while waiting for hosts", PREEMPTED)
        pool.used = hosts
        print(f"launch: starting on {', '.join(f'{host.name}:{host.slots}' for host in hosts)}", flush=True)
        try:
            job = begin(hosts)
        except UserError as error:
            newcomers = [host.name for host in hosts if started and host.name not in started]
            if not (newcomers or lost):
                raise
            failure = Failure(str(error), FAILURE)
            if not lost:  # the others have trained together
                announce(failure)
                for name in newcomers:
                    pool.put_aside(name)
                continue
        else:
            started = {host.name for host in hosts}
            ended = job.wait(enough=pool.has_changed)
            # What the user can mend ends it, but not that the run is still locked by a host that was lost.
            if ended is None or job.signalled or (ended.code == USER_ERROR and not lost):
                return ended
            if ended.code == PREEMPTED:
                print("launch: all have saved; starting again", flush=True)
                continue
            failure = ended
        announce(failure)
        before, reached = reached, progress()
        vain = 1 if reached != before else vain + 1
        lost = failure.lost or (lost and reached == before)
        if vain > limits.restarts:
            return Failure(f"{vain} starts in a row brought no new checkpoint; the last: {failure.sentence}", FAILURE)
        if reached != before:
            pool.forgive()
        if failure.host is not None:
            pool.put_aside(failure.host)


def _wait_for_hosts(pool: Pool, limits: Limits, pause: float) -> list[Host] | None:
    """The hosts to start on, after a pause; None if a signal says to stop.

    Raises:
        UserError: if there are too few for too long.
    """
    began = time.monotonic()
    with noticed_signals() as signals:
        while time.monotonic() < began + pause or not (hosts := pool.choice()):
            if signals.came:
                return None
            if time.monotonic() > began + pause + limits.wait_s:
                raise UserError(
                    f"fewer than {limits.minimum} slots answered for {limits.wait_s:g} s:"
                    " look at the hosts, or change --min or --wait"
                )
            time.sleep(POLL_S)
    return hosts
