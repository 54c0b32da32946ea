"""Asks all hosts of a job at once what they are like, through one ssh session each."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import UserError
from .host_report import HostReport
from .network import is_here
from .ssh import remote, ssh_command

T = TypeVar("T")

ANSWER_S = 30.0  # for ssh and the report together
CONNECT_S = 15.0  # for the hosts to connect to each other

_MARK = "session-open"

# What ssh says when it fails, what that means, and what helps; the first that fits.
SSH_FAILURES = (
    ("Could not resolve hostname", "its name is unknown here", "correct it, or add it to DNS or to /etc/hosts"),
    ("Connection refused", "it refuses connections", "start sshd there, or give sshd's port with --port"),
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key has changed",
        "make sure that it is the right host, then run ssh-keygen -R with its name and connect once by hand",
    ),
    ("Host key verification failed", "its host key is not known here", "connect once by hand and accept the key"),
    ("Permission denied", "it refuses the key", "put your public key into its ~/.ssh/authorized_keys (ssh-copy-id)"),
    ("timed out", "it does not answer", "see whether it is up, and whether a firewall drops ssh"),
    ("No route to host", "it does not answer", "see whether it is up and on this network"),
    ("Network is unreachable", "no route leads to it", "see whether this machine and it are on one network"),
)


@dataclass(frozen=True)
class Answer:
    """What came of asking a host: a report, or what is wrong (`check` names the stage) and a way out.

    `connected_s` is how long ssh took, `ahead_s` by how much its clock is ahead of this machine's.
    """

    report: HostReport | None = None
    connected_s: float = 0.0
    ahead_s: float = 0.0
    check: str = ""
    found: str = ""
    way_out: str = ""


class HostSessions:
    """Sessions with hosts: `answers` by host; each host listens until they are closed.

    Raises:
        UserError: if there is no ssh.
    """

    def __init__(self, hosts: Sequence[str], folder: Path, sees: str, port: int | None = None) -> None:
        if shutil.which("ssh") is None and not all(map(is_here, hosts)):
            raise UserError("there is no ssh on this machine, which reaches the other hosts: install openssh-client")
        options = ["--wait", "--folder", str(folder), "--sees", sees]
        program = [sys.executable, "-m", f"{__package__}.host_report", *options]
        self._sessions = {host: _Session(host, program, port) for host in hosts}
        self.answers = self._all(hosts, lambda host: self._sessions[host].read_answer())

    def __enter__(self) -> HostSessions:
        return self

    def __exit__(self, *error: object) -> None:
        for session in self._sessions.values():
            session.close()

    def _all(self, hosts: Iterable[str], step: Callable[[str], T]) -> dict[str, T]:
        """A step with every host at once; an interrupt ends the sessions, and with them the steps."""
        with ThreadPoolExecutor(len(self._sessions)) as pool:
            try:
                return dict(zip(hosts, pool.map(step, hosts), strict=True))
            except BaseException:
                for session in self._sessions.values():
                    session.kill()
                raise

    def reports(self) -> dict[str, HostReport]:
        """The reports of the hosts that gave one."""
        return {host: answer.report for host, answer in self.answers.items() if answer.report}

    def connect(self, addresses: Mapping[str, tuple[str, int]]) -> dict[str, dict[str, str]]:
        """Let every host of `addresses` connect to all others: by host, which it cannot reach and why."""

        def attempt(host: str) -> dict[str, str]:
            others = {other: address for other, address in addresses.items() if other != host}
            reasons = self._sessions[host].ask(list(others.values()))
            if reasons is None:
                return dict.fromkeys(others, "it stopped answering")
            return {other: reasons[address] for other, (address, _) in others.items() if address in reasons}

        return self._all(addresses, attempt)


class _Session:
    """A report that is made on a host, and the two ends of the conversation."""

    def __init__(self, host: str, program: list[str], port: int | None) -> None:
        shell = f"echo {_MARK} && {remote(program)}"
        here = ["env", "-u", "SSH_CONNECTION", "sh", "-c"]  # that would be about how the user came here
        command = [*(here if is_here(host) else ssh_command(host, port)), shell]
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, errors="replace"
        )

    def read_answer(self) -> Answer:
        """What came of it."""
        return self._within(ANSWER_S, self._read_answer)

    def ask(self, addresses: list[tuple[str, int]]) -> dict[str, str] | None:
        """The addresses that the host cannot connect to, with the reasons; None if it says nothing."""
        assert self._process.stdin
        try:
            print(json.dumps(addresses), file=self._process.stdin, flush=True)
        except OSError:
            return None
        line = self._within(CONNECT_S, self._line)
        return dict(json.loads(line)) if line.endswith("\n") else None

    def close(self) -> None:
        """End it and the connection."""
        self.kill()
        self._process.communicate()
        self._errors.close()

    def kill(self) -> None:
        """End it; who reads from it reads no more."""
        self._process.kill()

    def _within(self, seconds: float, step: Callable[[], T]) -> T:
        """Run a step that reads; after so long the session is ended and the step finds nothing more to read."""
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            return step()
        finally:
            timer.cancel()

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()

    def _read_answer(self) -> Answer:
        start = time.monotonic()
        while (line := self._line()).strip() != _MARK:  # a shell's start files may print something before
            if not line:
                return self._failure(connected=False)
        connected_s = time.monotonic() - start
        line = self._line()
        received = time.time()
        try:
            report = HostReport(**json.loads(line))
        except ValueError:
            return self._failure(connected=True)
        except TypeError:
            return _other_code()
        return Answer(report, connected_s, report.time - received)

    def _failure(self, connected: bool) -> Answer:
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip()
        if code < 0:  # ended from here
            where = "Python there" if connected else "ssh"
            way_out = "see with ssh whether a file system there hangs, or the host is overloaded"
            return Answer(check="answer", found=f"{where} gave no answer within {ANSWER_S:.0f} s", way_out=way_out)
        return _report_failure(said) if connected else _ssh_failure(said)


def _ssh_failure(said: str) -> Answer:
    for words, found, way_out in SSH_FAILURES:
        if words in said:
            return Answer(check="ssh", found=found, way_out=way_out)
    return Answer(check="ssh", found=said.rpartition("\n")[2], way_out="try ssh -v with its name by hand")


def _report_failure(said: str) -> Answer:
    last = said.rpartition("\n")[2]
    if "cd:" in said:
        way_out = f"put the project into {Path.cwd()} there, or share this folder"
        return Answer(check="code", found=f"there is no folder {Path.cwd()}", way_out=way_out)
    if "env:" in said:
        way_out = "make the same environment at the same path there, or share its folder"
        return Answer(check="python", found=f"there is no {sys.executable}", way_out=way_out)
    if "unrecognized arguments" in said:
        return _other_code()
    return Answer(check="python", found=last, way_out=f"install the project into {shlex.quote(sys.prefix)} there")


def _other_code() -> Answer:
    way_out = "bring the same commit to all hosts"
    return Answer(check="code", found="it has another version of this project", way_out=way_out)
