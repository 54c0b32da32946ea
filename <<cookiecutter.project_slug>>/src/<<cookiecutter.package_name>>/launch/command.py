"""Start training with several ranks, watch them, and end with their code: see docs/launch.md.

    python -m <package>.launch -n 2 name=first                 on this machine
    python -m <package>.launch ssh -H a:4,b:4 name=first       on hosts that ssh reaches
    python -m <package>.launch elastic --min 4 name=first      on those of them that there are

What follows the options goes to the training; put `--` before it if it begins with a dash.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import PREEMPTED, USER_ERROR, Parser, UserError, end_at_sigterm
from ..gpus import count_gpus
from .rendezvous import Rendezvous
from .supervise import Failure, Job, announce
from .transport import (
    LOCAL,
    Host,
    Start,
    choose_transport,
    mpi_version,
    mpirun_command,
    open_rendezvous,
    plan_gloo,
    plan_mpi,
)

PACKAGE = __package__.partition(".")[0]
KINDS = ("ssh", "elastic")  # jobs on several hosts


class OfOtherJobs(argparse.Action):
    """Options that jobs on several hosts have."""

    def __call__(self, parser: object, namespace: object, values: object, option: str | None = None) -> None:
        """Refuse one."""
        cluster("command")
        raise UserError(f"{option} is of use with several hosts only: start launch/ssh.sh or launch/elastic.sh")


def job_parser(kind: str = "") -> Parser:
    """The options of every kind of job."""
    parser = Parser(prog=f"launch {kind}".strip(), description=__doc__)
    add, what = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("--transport", choices=("auto", "mpi", "gloo"), default="auto", help="auto: MPI where it is, else Gloo")
    add("--grace", type=seconds, default=30.0, metavar="SECONDS", help="for saving when told to stop (default: 30)")
    add("--dry-run", action="store_true", help="print what would be started")
    what("--module", type=module, default="train", help="of the package: train (default), evaluate, ...")
    what("--command", action="store_true", help="what follows is a whole command, not options of a module")
    add("arguments", nargs=argparse.REMAINDER, help="for the training")
    return parser


def local_parser() -> Parser:
    """The options of a job on this machine."""
    parser = job_parser()
    parser.add_argument("-n", type=count(1), metavar="RANKS", help="the GPUs of this machine, or 2, by default")
    parser.add_argument("-H", "--hosts", "--elastic", nargs="?", action=OfOtherJobs, help=argparse.SUPPRESS)
    return parser


def seconds(text: str) -> float:
    """A finite number of seconds, as an option's value.

    Raises:
        ArgumentTypeError: if it is none, or negative.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of seconds")
    return value


def count(least: int) -> Callable[[str], int]:
    """A number of things, as an option's value; it raises an ArgumentTypeError if it is none, or too small."""

    def number(text: str) -> int:
        if not re.fullmatch("[0-9]{1,6}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"'{text}' is no whole number from {least} to 999999")
        return int(text)

    return number


def module(name: str) -> str:
    """A module of this package that `python -m` can run, as an option's value.

    Raises:
        ArgumentTypeError: if there is none.
    """
    place = Path(__file__).parents[1].joinpath(*name.split("."))
    if not place.with_suffix(".py").exists() and not (place / "__main__.py").exists():
        raise argparse.ArgumentTypeError(f"{name} is not in this project: name train, evaluate or another file of it")
    return name


def parse(parser: Parser, words: list[str]) -> argparse.Namespace:
    """The options; `arguments` are those for the training.

    Raises:
        UserError: if one is wrong, or stands among those for the training though no `--` says that it is meant so.
    """
    options = parser.parse_args(words)
    own = {f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}" for name in vars(options)}
    for word in [] if options.command or options.arguments[:1] == ["--"] else options.arguments:
        if word.partition("=")[0] in own:
            first = options.arguments[0]
            raise UserError(f"{word} stands behind {first}, where the training's options begin: move it before")
    if options.arguments[:1] == ["--"]:
        del options.arguments[0]
    if options.command and not options.arguments:
        raise UserError("--command needs a command: write it behind --")
    return options


def cluster(module: str) -> Any:
    """A module of the room for several hosts, which a project may lack.

    Raises:
        UserError: if it does.
    """
    if find_spec(f"{PACKAGE}.cluster") is None:
        raise UserError("this project was generated without cluster/, so it trains on one machine: name no hosts")
    return import_module(f"{PACKAGE}.cluster.{module}")


class Launcher:
    """Starts a job on this machine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.command: list[str] = options.arguments
        if not options.command:
            self.command = [sys.executable, "-m", f"{PACKAGE}.{options.module}", *options.arguments]
        self.transport = choose_transport(options.transport)
        self._rendezvous: Rendezvous | None = None
        prepare_terminal()

    def run(self) -> Failure | None:
        """Run the whole job; what ended it, if it was not the end of the training.

        Raises:
            UserError: if it cannot be started like this.
        """
        return self.run_on([Host(LOCAL, self.options.n or count_gpus() or 2)])

    def run_on(self, hosts: list[Host]) -> Failure | None:
        """The same on hosts with a slot for each rank; of a dry run only say what it would be."""
        if self.options.dry_run:
            print(self.describe(hosts))
            return None
        return self.begin(hosts).wait(enough=lambda: False)

    def start(self, hosts: list[Host]) -> Start:
        """What is to be started."""
        return Start(self.command, hosts)

    def begin(self, hosts: list[Host]) -> Job:
        """Start the job."""
        start, settings = self.start(hosts), (os.getcwd(), self.options.grace)
        own = not self.options.command
        if self.transport == "mpi":
            return Job(plan_mpi(start, mpi_version() or 4), *settings, own=own)
        if self._rendezvous is not None:  # a new one, at which nothing of an earlier start can call
            self._rendezvous.stop()
        self._rendezvous = meeting = open_rendezvous(start)
        parts = plan_gloo(start, meeting.address, meeting.port, meeting.secrets)
        return Job(parts, *settings, meeting.absent, own=own)

    def describe(self, hosts: list[Host]) -> str:
        """The command lines: to copy, or over Gloo to read."""
        start = self.start(hosts)
        if self.transport == "mpi":
            return shlex.join([*with_settings(start.mpi_settings()), *mpirun_command(start, mpi_version() or 4)])
        lines = [
            "# To read, not to copy: over Gloo the launcher itself holds the server where the ranks meet (port 0)."
        ]
        for part in plan_gloo(start, start.address(), port=0):
            for process in part.processes:
                lines.append(f"# {process.name}, on host {part.host}:")
                lines.append(shlex.join([*with_settings(process.environment), *process.command]))
        return "\n".join(lines)


def with_settings(variables: dict[str, str]) -> list[str]:
    """The beginning of a command line that sets variables."""
    return ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []


def prepare_terminal() -> None:
    """Tell rank 0 the width of this terminal, or that there is none: mpirun gives it one of its own."""
    if os.isatty(1):
        os.environ["COLUMNS"] = str(shutil.get_terminal_size().columns)
    else:
        os.environ["TTY_COMPATIBLE"] = "0"
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]  # within an allocation mpirun would take its hosts from there


def launcher_for(words: list[str]) -> Launcher:
    """The one for the kind of job that the first word names; without such a word for this machine.

    Raises:
        UserError: if an option is wrong, or the project lacks what the job needs.
    """
    if words[:1] and words[0] in KINDS:
        launcher: Launcher = cluster("command").launcher_for(words[0], words[1:])
        return launcher
    return Launcher(parse(local_parser(), words))


def main() -> None:
    """Launch, and say what has ended the job unless a rank has said it already."""
    end_at_sigterm()
    launcher = launcher_for(sys.argv[1:])
    failure = launcher.run()
    if failure is None:
        return
    said = (PREEMPTED,) if launcher.options.command else (USER_ERROR, PREEMPTED)  # a rank of this project says it
    if failure.code not in said:
        announce(failure)
    sys.exit(failure.code)
