"""Runs on each host of a job, started by the launcher there, over ssh or beside itself: starts ranks and ends them.

It needs nothing but Python. The first line of its input is the order (JSON), the lines after it are commands: `alive`
every few seconds, `signal NUMBER`, `stop`. When the input ends or falls silent the launcher is gone, or the link to
it: then this host's part of the job ends too, so that nothing is left behind. What it reports goes to stderr between
the ranks' own lines, marked.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

MARK = "\x1e"  # ASCII's record separator begins a report, a line's end ends it
JOB = "LAUNCH_JOB"  # in the environment of every process of a job: its identity
MPI_DAEMONS = ("orted", "prted")  # what mpirun starts its ranks with on other hosts; they outlive a cut link
POLL_S = 0.1
SILENCE_S = 20.0
TERM_S = 5.0  # between SIGTERM and SIGKILL
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


class Agent:
    """The processes of one host."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._job = order["job"]
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        environment = {**os.environ, **order["environment"], JOB: self._job}
        for process in order["processes"]:
            self._start(process, {**environment, **process["environment"]}, order["folder"])

    def _start(self, process: dict[str, Any], environment: dict[str, str], folder: str) -> None:
        orphaned = partial(_end_with, os.getpid(), process["orphaned"])
        try:
            self._running[process["name"]] = subprocess.Popen(
                process["command"],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=orphaned,  # this program has one thread
            )
        except OSError as error:
            with suppress(OSError):
                os.write(2, f"error: {error.strerror}: {error.filename}\n".encode())
            _report(process["name"], 127)

    def reap(self) -> None:
        """Report the processes that have ended, and end what they left running: it may hold the output open."""
        for name, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[name]
                _kill_group(process.pid)
                _report(name, code if code >= 0 else 128 - code)

    def signal(self, number: int) -> None:
        """Pass a signal on to each rank, not to its children."""
        for process in self._running.values():
            process.send_signal(number)

    def end(self) -> None:
        """End everything of this job on this host, politely first."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + TERM_S
        while self._running and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self.reap()
        ranks = set(members(self._job))
        for process in ranks | {parent for parent, name in map(_parent, ranks) if name in MPI_DAEMONS}:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def members(job: str) -> Iterator[int]:
    """The processes of a job on this host, also those that another program (Open MPI's daemon) has started."""
    wanted = f"{JOB}={job}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
        except OSError:  # gone by now, or another user's
            continue


def _parent(process: int) -> tuple[int, str]:
    """The parent of a process, and its name."""
    with suppress(OSError):
        parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        return parent, Path(f"/proc/{parent}/comm").read_text().strip()
    return 0, ""


def _end_with(agent: int, number: int) -> None:
    """In a process that is about to become a rank: it gets this signal when the agent has ended, however that was."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != agent:  # it has ended already
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _report(name: str, code: int) -> None:
    with suppress(OSError):  # the launcher may be gone
        os.write(2, f"{MARK}{json.dumps([name, code])}\n".encode())


def commands() -> Iterator[str]:
    """What the launcher says; an empty string when it has said nothing for a moment. Ends when it is gone."""
    heard, pending = time.monotonic(), b""
    ended = _ends_of_children()
    while time.monotonic() - heard < SILENCE_S:
        ready = select.select([0, ended], [], [], POLL_S)[0]
        if ended in ready:  # to be reported at once: of two ranks that end, the first one counts
            os.read(ended, 4096)
        if 0 not in ready:
            yield ""
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            return
        heard = time.monotonic()
        *lines, pending = (pending + chunk).split(b"\n")
        yield from (line.decode() for line in lines)


def _ends_of_children() -> int:
    """A pipe that can be read as soon as a child has ended."""
    ended, tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return ended


def main() -> None:
    """Follow the launcher's commands until it says stop, or says nothing more."""
    if sys.argv[1:]:
        print(f"error: {sys.argv[1]}: the launcher starts this, with no options: use launch", file=sys.stderr)
        sys.exit(2)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # what is sent to a whole group is the launcher's to pass on
    talk = commands()
    order = next((line for line in talk if line), None)
    if order is None:
        return
    agent = Agent(json.loads(order))
    for command in talk:
        if command == "stop":
            break
        if command.startswith("signal "):
            agent.signal(int(command.split()[1]))
        agent.reap()
    agent.end()


if __name__ == "__main__":
    main()
