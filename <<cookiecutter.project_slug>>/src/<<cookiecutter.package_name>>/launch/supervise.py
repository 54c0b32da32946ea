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
from dataclasses import asdict, dataclass, field, replace
from types import FrameType

from ..errors import BURST_S, FAILURE, PREEMPTED, USER_ERROR
from .agent import MARK, POLL_S

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
ALIVE_EVERY_S = 2.0
SETTLE_S = 1.0  # after a first failure, for the others to say what they have to say
GIVE_UP_S = 5.0  # after a rank has waited in vain, for the others to give up too: who stays is the one that was missed
STOP_S = 10.0  # for the agents to end their processes
DRAIN_S = 1.0  # for the last words of what has ended: something else may hold the pipe

_REPORT = re.compile(MARK.encode() + rb'(\["[^"\n]*", \d+\])\n')
# What mpirun says of the first rank that failed, in Open MPI 4 and 5.
_MPI_EXIT = re.compile(rb"Process name: \[.*,(\d+)\]\s+Exit code: +(\d+)")
# The last sentence of a command of this project, see errors.py.
_SENTENCE = re.compile(rb"^error: [^\n]*\n?", re.MULTILINE)
_FOLLOWS = (FAILURE, 128 + signal.SIGABRT)  # how a rank ends because of another one
_MPI_SIGNAL = re.compile(rb"process rank (\d+) with PID \d+ on node \S+ exited\s+on\s+signal (\d+)")
# What Gloo says when its time limit is over.
_IN_VAIN = re.compile(rb"gloo\S+\d\] (Timed out waiting|Connect timeout|Read timeout|Application timeout|Wait timeout)")


@dataclass(frozen=True)
class Process:
    """One process to start: its name in messages, its command, and what its environment has beside the host's.

    `orphaned` is the signal that it gets if its agent is killed; mpirun must have the time to end its ranks.
    """

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    orphaned: int = signal.SIGKILL.value


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


class Errors:
    """What the ranks say on stderr: passed on as it comes, but from the first one's last sentence on kept to the end.

    What follows a refusal is noise of those that Horovod and mpirun take down with it; so the sentence comes last.
    """

    def __init__(self, holds: bool) -> None:
        self._holds = holds  # the ranks run a command of this project
        self._held = b""
        self._lock = threading.Lock()

    def add(self, text: bytes) -> None:
        """Pass on a piece of text, or keep it."""
        with self._lock:
            begins = _SENTENCE.search(text) if self._holds else None
            if self._held or begins:
                first = 0 if self._held or begins is None else begins.start()
                self._held += text[first:]
                text = text[:first]
            write_out(2, text)

    def close(self, refused: bool) -> None:
        """Say what was kept, sentences last; of a job that was `refused` those alone."""
        with self._lock:
            sentences = dict.fromkeys(_SENTENCE.findall(self._held))
            noise = _SENTENCE.sub(b"", self._held)
            write_out(2, b"".join([b"" if refused else noise, *sentences]))
            self._holds, self._held = False, b""


def write_out(stream: int, text: bytes) -> None:
    """Write all of it to stdout (1) or stderr (2), or nothing where nobody reads that any more."""
    with suppress(OSError):
        while text:
            text = text[os.write(stream, text) :]


class _Link:
    """The launcher's end of the connection to an agent."""

    def __init__(self, part: Part, folder: str, job: str, errors: Errors) -> None:
        self.part = part
        self.codes: dict[str, int] = {}  # of the processes that have ended
        self.ended: dict[str, float] = {}  # when that was heard
        self.first: tuple[int, int] | None = None  # the rank that failed first, and its code, as mpirun says
        self.gave_up = False  # a rank here has waited for another one in vain
        self._errors = errors
        # Ranks see a terminal if there is one; else what they print goes through here: nobody may read it any more.
        output = None if os.isatty(1) else subprocess.PIPE
        self._process = subprocess.Popen(
            part.start, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        relays = [self._relay, *([self._relay_output] if output else [])]
        self._readers = [threading.Thread(target=relay, daemon=True) for relay in relays]
        for reader in self._readers:
            reader.start()
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
        """Whether the agent has ended, or the connection to it; its children may still hold the pipe."""
        if self._process.poll() is None:
            return False
        self._drain()
        return True

    def close(self, deadline: float) -> None:
        """Wait for the agent to end, and end the connection then."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.1, deadline - time.monotonic()))
        self._process.kill()
        self._process.wait()
        self._drain()

    def _drain(self) -> None:
        for reader in self._readers:
            reader.join(DRAIN_S)

    def _relay_output(self) -> None:
        assert self._process.stdout
        while chunk := os.read(self._process.stdout.fileno(), 65536):
            write_out(1, chunk)

    def _relay(self) -> None:
        """Pass on what the host says on stderr, and take the reports out."""
        assert self._process.stderr
        pending, recent = b"", b""
        while chunk := os.read(self._process.stderr.fileno(), 65536):
            text, reports, pending = _split(pending + chunk)
            self.ended.update(dict.fromkeys(reports, time.monotonic()))
            self.codes.update(reports)
            recent += text
            if self.first is None:
                self.first = _first_of_mpi(recent)
            self.gave_up = self.gave_up or _IN_VAIN.search(recent) is not None
            recent = recent[-4000:]  # what was looked for may have come in part
            self._errors.add(text)


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
        own: Whether they run a command of this project, of which one sentence is the last.
    """

    def __init__(
        self,
        parts: list[Part],
        folder: str,
        grace_s: float,
        absent: Callable[[], list[int]] = list[int],
        own: bool = False,
    ) -> None:
        self._grace_s = grace_s
        self._absent = absent
        self._deadline = float("inf")
        self._told = False
        self.signalled = False  # told to stop from outside
        self._alive_at = 0.0
        self._folder, self._job = folder, uuid.uuid4().hex
        self._errors = Errors(holds=own)
        self._links = [self._connect(part) for part in parts]

    def _connect(self, part: Part) -> _Link:
        return _Link(part, self._folder, self._job, self._errors)

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
            failure = None
            try:
                failure = self._watch(signals, enough)
            finally:
                self._stop()
                self._errors.close(refused=failure is not None and failure.code == USER_ERROR)
            return failure

    def _watch(self, signals: Signals, enough: Callable[[], bool]) -> Failure | None:
        failure = None
        while not all(link.finished() for link in self._links):
            time.sleep(POLL_S)
            self.signalled = signals.came
            if signals.came or (not self._told and enough()):
                self.save_and_stop()
            self._say_alive()
            if signals.again is not None:
                return Failure("stopped by a second signal, without saving", 128 + signals.again)
            if failure is None:
                if lost := self._lost_host():
                    return lost
                if failure := self._fault():
                    self._deadline = min(self._deadline, time.monotonic() + self._patience(failure))
            if time.monotonic() > self._deadline:
                late = f"the ranks did not end within {self._grace_s:g} s after they were told to save and stop"
                return self._fault() or Failure(f"{late}: give them more with --grace", FAILURE)
        return self._fault()

    def _patience(self, failure: Failure) -> float:
        """How many seconds the others have to end by themselves."""
        if failure.code == PREEMPTED:
            return self._grace_s
        return GIVE_UP_S if any(link.gave_up for link in self._links) else SETTLE_S

    def _say_alive(self) -> None:
        if time.monotonic() - self._alive_at > ALIVE_EVERY_S:
            self._alive_at = time.monotonic()
            for link in self._links:
                link.say("alive")

    def _lost_host(self) -> Failure | None:
        for link in self._links:
            if link.gone() and not (link.part.processes and link.finished()):
                sentence = f"host {link.part.host} is lost: it cannot be reached, or its agent was killed there"
                return Failure(sentence, FAILURE, link.part.host, lost=True)
        return None

    def _failed_rank(self) -> Failure | None:
        """The rank that failed first; one that ends like those that miss another one is taken only if all did."""
        failed = [(link, name, code) for link in self._links for name, code in link.codes.items() if code != 0]
        if not failed:
            return None
        link, name, code = min(failed, key=lambda one: (one[2] in _FOLLOWS, one[0].ended[one[1]]))
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
        # Where an agent was killed another one ends what is left.
        links = [self._connect(replace(link.part, processes=[])) if link.gone() else link for link in self._links]
        deadline = time.monotonic() + STOP_S
        for link in links:
            link.say("stop")
        for link in links:
            link.close(deadline)


class Signals:
    """The signals that told this process to stop: whether any `came`, and one that came `again` after the first burst.

    A scheduler may send to the process, to its group and by another way at once: that is one wish to save and stop.
    """

    def __init__(self) -> None:
        self.again: int | None = None
        self._first = float("inf")

    @property
    def came(self) -> bool:
        """Whether there was any."""
        return self._first < float("inf")

    def note(self, number: int, frame: FrameType | None) -> None:
        """A handler of signals."""
        self._first = min(self._first, time.monotonic())
        if time.monotonic() > self._first + BURST_S:
            self.again = number


@contextmanager
def noticed_signals() -> Iterator[Signals]:
    """The signals that come within, noted instead of obeyed; after one late ones are ignored, since all ends then."""
    noticed = Signals()
    before: Mapping[int, object] = {number: signal.signal(number, noticed.note) for number in SIGNALS}
    try:
        yield noticed
    finally:
        for number, handler in before.items():  # an ignored one is ignored to the very end of the interpreter
            signal.signal(number, signal.SIG_IGN if noticed.came else handler)  # type: ignore[arg-type]


def announce(failure: Failure) -> None:
    """Say what has ended a job."""
    print(f"error: {failure.sentence}", file=sys.stderr, flush=True)
