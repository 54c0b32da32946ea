"""Watches a job that runs on one or more hosts, and ends it as a whole: for whatever reason, everywhere, with one code.

Each host has an agent (agent.py): a local process, or one at the other end of an ssh connection.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from types import FrameType

from .agent import MARK, POLL_S
from .errors import FAILURE
from .preemption import EXIT_CODE as PREEMPTED

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
ALIVE_EVERY_S = 2.0
SETTLE_S = 1.0  # after a first failure, for the others to say what they have to say
GIVE_UP_S = 5.0  # after a rank has waited in vain, for the others to give up too: who stays is the one that was missed
STOP_S = 10.0  # for the agents to end their processes

_REPORT = re.compile(MARK.encode() + rb'(\["[^"\n]*", \d+\])\n')
# What mpirun says of the first rank that failed, in Open MPI 4 and 5.
_MPI_EXIT = re.compile(rb"Process name: \[.*,(\d+)\]\s+Exit code: +(\d+)")
_MPI_SIGNAL = re.compile(rb"process rank (\d+) with PID \d+ on node \S+ exited\s+on\s+signal (\d+)")
# What Gloo says when its time limit is over.
_IN_VAIN = re.compile(rb"gloo\S+\d\] (Timed out waiting|Connect timeout|Read timeout|Application timeout|Wait timeout)")
_FOLLOWS = (FAILURE, 128 + signal.SIGABRT)  # how a rank ends because of another one


@dataclass(frozen=True)
class Process:
    """One process to start: its name in messages, its command, and what its environment has beside the host's."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """What a host does in a job. `start` is the command that starts its agent; `ranks` are those on this host."""

    host: str
    start: list[str]
    ranks: range
    processes: list[Process]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """What ended a job before its time; `host` is where, and is lost if it does not answer any more."""

    sentence: str
    code: int
    host: str | None = None
    lost: bool = False


class _Link:
    """The launcher's end of the connection to an agent."""

    def __init__(self, part: Part, folder: str, job: str) -> None:
        self.part = part
        self.codes: dict[str, int] = {}  # of the processes that have ended, in the order of their ends
        self.first: tuple[int, int] | None = None  # the rank that failed first, and its code, as mpirun says
        self.gave_up = False  # a rank here has waited for another one in vain
        self._process = subprocess.Popen(
            part.start, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        self._reader = threading.Thread(target=self._relay, daemon=True)
        self._reader.start()
        processes = [asdict(process) for process in part.processes]
        order = {"job": job, "folder": folder, "environment": part.environment, "processes": processes}
        self.say(json.dumps(order))

    def say(self, line: str) -> None:
        """Send a line to the agent, if it is there."""
        assert self._process.stdin
        with suppress(OSError, ValueError):
            self._process.stdin.write(f"{line}\n".encode())

    def finished(self) -> bool:
        """Whether all its processes have ended."""
        return len(self.codes) == len(self.part.processes)

    def gone(self) -> bool:
        """Whether the agent has ended, or the connection to it."""
        return self._process.poll() is not None and not self._reader.is_alive()

    def close(self, deadline: float) -> None:
        """Wait for the agent to end, and end the connection then."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.1, deadline - time.monotonic()))
        self._process.kill()
        self._process.wait()
        self._reader.join(POLL_S)  # not for long: something else may hold the pipe

    def _relay(self) -> None:
        """Pass on what the host says on stderr, and take the reports out."""
        assert self._process.stderr
        pending, recent = b"", b""
        while chunk := os.read(self._process.stderr.fileno(), 65536):
            text, reports, pending = _split(pending + chunk)
            self.codes.update(reports)
            recent = (recent + text)[-4000:]
            if self.first is None:
                self.first = _first_of_mpi(recent)
            self.gave_up = self.gave_up or _IN_VAIN.search(recent) is not None
            with suppress(OSError):
                os.write(2, text)


def _split(data: bytes) -> tuple[bytes, dict[str, int], bytes]:
    """The text between the reports; the reports' names and codes; the beginning of a report that is not all here."""
    reports = dict(json.loads(report) for report in _REPORT.findall(data))
    text, mark, rest = _REPORT.sub(b"", data).partition(MARK.encode())
    if b"\n" in rest:  # a rank's own
        return text + mark + rest, reports, b""
    return text, reports, mark + rest


def _first_of_mpi(text: bytes) -> tuple[int, int] | None:
    if said := _MPI_EXIT.search(text):
        return int(said[1]), int(said[2])
    if said := _MPI_SIGNAL.search(text):
        return int(said[1]), 128 + int(said[2])
    return None


class Job:
    """The ranks of one start.

    Args:
        parts: What each host does.
        folder: Where the ranks run.
        grace_s: How long they may take to save when they are told to stop.
        absent: The ranks that others wait for since the start.
    """

    def __init__(
        self, parts: list[Part], folder: str, grace_s: float, absent: Callable[[], list[int]] = list[int]
    ) -> None:
        self._grace_s = grace_s
        self._absent = absent
        self._deadline = float("inf")
        self._told = False
        self.signalled = False  # told to stop from outside
        self._alive_at = 0.0
        job = uuid.uuid4().hex
        self._links = [_Link(part, folder, job) for part in parts]

    def save_and_stop(self) -> None:
        """Tell the ranks to save and stop; they have the grace time for it."""
        if not self._told:
            self._told = True
            self._deadline = time.monotonic() + self._grace_s
            for link in self._links:
                link.say(f"signal {signal.SIGUSR1.value}")

    def wait(self, enough: Callable[[], bool]) -> Failure | None:
        """Return when the job has ended and nothing of it is left; None if every rank has ended with 0.

        `enough` is asked all the time: once it says yes, the ranks are told to save and stop.
        """
        with noticed_signals() as signals:
            try:
                return self._watch(signals, enough)
            finally:
                self._stop()

    def _watch(self, signals: list[int], enough: Callable[[], bool]) -> Failure | None:
        failure = None
        while not all(link.finished() for link in self._links):
            time.sleep(POLL_S)
            self.signalled = bool(signals)
            if signals or (not self._told and enough()):
                self.save_and_stop()
            self._say_alive()
            if len(signals) > 1:
                return Failure("stopped by a second signal, without saving", 128 + signals[1])
            if failure is None:
                failure = self._lost_host()
                if failure:
                    return failure
                failure = self._fault()
                if failure and failure.code != PREEMPTED:
                    settle = GIVE_UP_S if any(link.gave_up for link in self._links) else SETTLE_S
                    self._deadline = min(self._deadline, time.monotonic() + settle)
                elif failure:
                    self._deadline = min(self._deadline, time.monotonic() + self._grace_s)
            if time.monotonic() > self._deadline:
                late = f"the ranks did not end within {self._grace_s:g} s after they were told to save and stop"
                return self._fault() or Failure(f"{late}: give them more with --grace", FAILURE)
        return self._fault()

    def _say_alive(self) -> None:
        if time.monotonic() - self._alive_at > ALIVE_EVERY_S:
            self._alive_at = time.monotonic()
            for link in self._links:
                link.say("alive")

    def _lost_host(self) -> Failure | None:
        for link in self._links:
            if link.gone() and not (link.part.processes and link.finished()):
                sentence = f"host {link.part.host} is lost: it cannot be reached, or has ended its part of the job"
                return Failure(sentence, FAILURE, link.part.host, lost=True)
        return None

    def _failed_rank(self) -> Failure | None:
        """The rank that failed first; one with exit code 1 may have failed only because another one was gone."""
        failed = [(link, name, code) for link in self._links for name, code in link.codes.items() if code != 0]
        if not failed:
            return None
        link, name, code = min(failed, key=lambda one: one[2] == FAILURE)
        host = link.part.host
        if link.first is not None:
            rank, code = link.first
            name = f"rank {rank}"
            host = next(other.part.host for other in self._links if rank in other.part.ranks)
        if self._told and code == 128 + signal.SIGUSR1:  # before it could listen: there was nothing to save
            code = PREEMPTED
        return Failure(f"{name} on host {host} ended with code {code}", code, host)

    def _fault(self) -> Failure | None:
        """What has gone wrong, by the rank that is to blame: others may have failed because they missed it."""
        failure = self._failed_rank()
        if failure and failure.code not in _FOLLOWS:
            return failure
        absent = {f"rank {rank}" for rank in self._absent()}
        if failure and (late := self._missed(absent)):
            return late
        left = [place for name, place in self._with_code(0).items() if failure or name in absent]
        if left and failure:
            return Failure(f"{' and '.join(left)} had ended with code 0 when {failure.sentence}", failure.code)
        if left:
            return Failure(f"{' and '.join(left)} ended with code 0 before it had joined the others", FAILURE)
        return failure

    def _missed(self, absent: set[str]) -> Failure | None:
        """The ranks that still run when the others have given up waiting."""
        missed = self._with_code(None)
        if not missed or not any(link.gave_up for link in self._links):
            return None
        late = {name: place for name, place in missed.items() if name in absent}
        what = "did not join the others in time" if late else "was silent for longer than the others wait"
        blamed = late or missed
        sentence = f"{' and '.join(blamed.values())} {what}"
        host = next(link.part.host for link in self._links for one in link.part.processes if one.name in blamed)
        return Failure(f"{sentence}: see what it is doing, or raise horovod.stall_shutdown_s", FAILURE, host)

    def _with_code(self, code: int | None) -> dict[str, str]:
        """The processes that ended with this code, or still run, with their places."""
        return {
            process.name: f"{process.name} on host {link.part.host}"
            for link in self._links
            for process in link.part.processes
            if link.codes.get(process.name) == code
        }

    def _stop(self) -> None:
        deadline = time.monotonic() + STOP_S
        for link in self._links:
            link.say("stop")
        for link in self._links:
            link.close(deadline)


@contextmanager
def noticed_signals() -> Iterator[list[int]]:
    """The signals that come within, noted instead of obeyed."""
    noticed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noticed.append(number)

    before: Mapping[int, object] = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield noticed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def announce(failure: Failure) -> None:
    """Say what has ended a job."""
    print(f"error: {failure.sentence}", file=sys.stderr)
