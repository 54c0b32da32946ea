"""Start training with several ranks, watch them, and end with their code: see docs/launch.md.

    python -m <package>.launch -n 2 name=first                      on this machine
    python -m <package>.launch -H a:4,b:4 name=first                on hosts that ssh reaches
    python -m <package>.launch --elastic --hosts FILE name=first    on whatever hosts there are

What follows the options goes to the training; put `--` before it if it begins with a dash.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import PREEMPTED, USER_ERROR, Parser, UserError, end_at_sigterm
from ..gpus import count_gpus
from .hosts import Host, allot, parse_hosts, parse_lines, read_hosts
from .network import Network, is_here, parse_subnet
from .rendezvous import Rendezvous
from .ssh import port_number, ssh_command
from .supervise import Failure, Job, announce
from .transport import (
    LOCAL,
    NAME_IT,
    Start,
    choose_transport,
    common_card,
    mpi_version,
    mpirun_command,
    open_rendezvous,
    own_address,
    plan_gloo,
    plan_mpi,
)

PACKAGE = __package__.partition(".")[0]
DISCOVER_S, ANSWER_S = 60, 20  # seconds for a command that lists hosts, and for a host to answer
LEAST = {"grace": 0, "min": 1, "max": 1, "slots": 1, "wait": 0, "restarts": 0}
SET_HERE = ("COLUMNS", "HYDRA_FULL_ERROR", "TTY_COMPATIBLE")  # variables that the ranks get from this program
MAKE_RUNS = ("train", "compress")  # the modules that make the folder of a run
ELASTIC_ALONE = ("discover", "min", "max", "slots", "wait", "restarts")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(prog="launch", description=__doc__)
    add = parser.add_argument
    add("-n", metavar="RANKS", help="all slots of the hosts; on this machine its GPUs, or 2")
    add("--hosts", type=Path, metavar="FILE", help="a line for each host: 'host', 'host:4' or 'host slots=4'")
    add("-H", dest="host_list", metavar="a:4,b:4", help="the hosts and their slots")
    add("--transport", choices=("auto", "mpi", "gloo"), default="auto", help="auto: MPI where it is, else Gloo")
    add("--network", metavar="SUBNET", help="the network for the ranks, such as 10.0.0.0/16; else it is found")
    add("--port", type=port_number, help="of the hosts' ssh; else what ssh's own configuration says")
    add("--env", action="append", default=[], metavar="NAME", help="pass this variable on to the other hosts too")
    add("--grace", type=seconds, default=30.0, metavar="SECONDS", help="for saving when told to stop (default: 30)")
    add("--no-check", action="store_true", help="start whatever may be wrong with the hosts")
    add("--dry-run", action="store_true", help="print what would be started")
    add("--module", default="train", help="of the package: train (default), evaluate, ...")
    add("--command", action="store_true", help="what follows is a whole command, not options of a module")
    add("--elastic", action="store_true", help="go on when hosts are lost or come")
    add("--discover", metavar="COMMAND", help="elastic: prints 'host' or 'host:4' lines; else --hosts is read again")
    add("--min", type=int, default=1, help="elastic: wait while there are fewer slots")
    add("--max", type=int, help="elastic: start no more ranks")
    add("--slots", type=int, default=1, help="elastic: of a host that is listed without")
    add("--wait", type=seconds, default=600.0, metavar="SECONDS", help="elastic: for the hosts (default: 600)")
    add("--restarts", type=int, default=3, help="elastic: how many in a row without progress (default: 3)")
    add("arguments", nargs=argparse.REMAINDER, help="for the training")
    return parser.parse_args(arguments)


def seconds(text: str) -> float:
    """A finite number of seconds, as an option's value.

    Raises:
        ArgumentTypeError: if it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of seconds")
    return value


def check_flags(options: argparse.Namespace) -> None:
    """Refuse what would silently have no effect, or another one than is meant.

    Raises:
        UserError: names the option.
    """
    for name, least in LEAST.items():
        if (value := getattr(options, name)) is not None and value < least:
            raise UserError(f"--{name} {value:g} must be at least {least}")
    defaults = parse([])
    for name in () if options.elastic else ELASTIC_ALONE:
        if getattr(options, name) != getattr(defaults, name):
            raise UserError(f"--{name} is of use with --elastic only: add that, or leave --{name} out")
    if options.elastic and (options.n or (options.max or options.min) < options.min):
        raise UserError("--elastic takes --max of at least --min, and no -n: change them")
    _check_naming(options)
    for name in options.env:
        if name not in os.environ:
            raise UserError(f"--env {name}: there is no such variable here: give the name of one that is exported")
    for word in misplaced(options):
        raise UserError(
            f"{word} stands behind {options.arguments[0]}, where the training's options begin: move it before"
        )


def _check_naming(options: argparse.Namespace) -> None:
    """Hosts are named once, and what is said of their network is about some."""
    others = {"--hosts": options.hosts, "--discover": options.discover}
    named = [option for option, value in others.items() if value is not None]
    if named and options.host_list is not None:
        raise UserError(f"{named[0]} and -H both name hosts: give one of them")
    for name in () if named or options.host_list is not None else ("network", "port"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} is of use with other hosts only: name them with --hosts or -H, or leave it out")
    if options.network is not None:
        parse_subnet(options.network)


def misplaced(options: argparse.Namespace) -> list[str]:
    """The launcher's own options among those for the training, if no `--` says that they are meant so."""
    if options.command or options.arguments[:1] == ["--"]:
        return []
    own = {"-n", "-H", *(f"--{name.replace('_', '-')}" for name in vars(options))}
    return [word for word in options.arguments if word.partition("=")[0] in own]


def listed_hosts(options: argparse.Namespace) -> list[Host]:
    """The hosts that the command line names; none means this machine.

    Raises:
        UserError: if an entry is no host.
    """
    if options.hosts:
        return read_hosts(options.hosts)
    return [] if options.host_list is None else parse_hosts(options.host_list)


def discovered_hosts(options: argparse.Namespace) -> list[Host]:
    """The hosts that an elastic job may use now.

    Raises:
        UserError: if the command that lists them fails, or lists something else.
    """
    if options.discover is None:
        hosts = listed_hosts(options)
    else:
        try:
            pipes: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace"}
            done = subprocess.run(options.discover, shell=True, check=False, timeout=DISCOVER_S, **pipes)
        except subprocess.TimeoutExpired:
            raise UserError(f"--discover '{options.discover}' took over {DISCOVER_S} s: try it by hand") from None
        if done.returncode != 0:
            said = done.stderr.strip() or "it says nothing"
            raise UserError(f"--discover '{options.discover}' ended with {done.returncode} ({said}): try it by hand")
        hosts = parse_lines(done.stdout, f"--discover '{options.discover}'")
    if not hosts and options.discover is None:
        raise UserError("--elastic needs to know the hosts: name a file with --hosts, or a command with --discover")
    return [host if host.slots else Host(host.name, options.slots) for host in hosts]


def sweeps(command: list[str]) -> bool:
    """Whether a training command makes several runs."""
    return not {"--multirun", "-m", "hydra.mode=MULTIRUN"}.isdisjoint(command[3:])  # before them is python -m package


def run_folder(command: list[str]) -> Path:
    """The folder of the run that a training command makes, as Hydra says; of a sweep that of all its runs.

    Raises:
        UserError: if the configuration refuses the command's options.
    """
    from omegaconf import OmegaConf

    words, part = command[3:], "run"
    if sweeps(command):  # Hydra shows no config of one; the values to try are lists
        words, part = [word for word in words if word not in ("--multirun", "-m") and "," not in word], "sweep"
    asked = [*command[:3], *words, "--cfg", "all", "--resolve", "--package", f"hydra.{part}"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(done.stderr.strip().removeprefix("error: "))
    if not re.search("^dir: ", done.stdout, re.MULTILINE):  # --help makes no run
        return Path("runs")
    return Path(OmegaConf.select(OmegaConf.create(done.stdout), "dir"))


def newest_checkpoint(folder: Path | None) -> str:
    """What the pointer to the newest checkpoint says; nothing where there is none."""
    pointer = folder / "checkpoints" / "latest" if folder else None
    return pointer.read_text() if pointer and pointer.exists() else ""


def ranks_wanted(text: str | None) -> int | None:
    """The value of -n.

    Raises:
        UserError: if it is no number of ranks.
    """
    if text is not None and not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise UserError(f"-n is '{text}', but it must be a number of ranks, for example -n 2")
    return int(text) if text else None


def check_distinct(hosts: list[Host]) -> None:
    """Refuse this machine under two names: its ranks would take the same places. Other hosts say who they are.

    Raises:
        UserError: names the two.
    """
    here = [host.name for host in hosts if is_here(host.name)]
    if len(here) > 1:
        raise UserError(f"{' and '.join(here)} are both this machine: list it once, with all its slots")


def place(hosts: list[Host], ranks: int | None, most: int | None = None) -> list[Host]:
    """The hosts that get ranks, with how many: `ranks`, or all slots up to `most`; this machine takes any number.

    Raises:
        UserError: if there are fewer slots than ranks.
    """
    if not hosts:
        return [Host(LOCAL, ranks or count_gpus() or 2)]
    slots = sum(host.ranks for host in hosts)
    return allot(hosts, ranks or min(slots, most or slots))


def command_of(options: argparse.Namespace) -> list[str]:
    """What each rank runs.

    Raises:
        UserError: if there is no such module, or no command.
    """
    words = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    if options.command:
        if not words:
            raise UserError("--command needs a command: write it behind --")
        return list(words)
    if not is_command(options.module):
        raise UserError(f"--module {options.module} is not in this project: name train, evaluate or another file of it")
    return [sys.executable, "-m", f"{PACKAGE}.{options.module}", *words]


def is_command(module: str) -> bool:
    """Whether `python -m` can run a module of this package."""
    place = Path(__file__).parents[1].joinpath(*module.split("."))
    return place.with_suffix(".py").exists() or (place / "__main__.py").exists()


def cluster(module: str) -> Any:
    """A module of the room for several hosts, which a project may lack.

    Raises:
        UserError: if it does.
    """
    if find_spec(f"{PACKAGE}.cluster") is None:
        raise UserError("this project was generated without cluster/: leave --hosts, -H and --elastic out")
    return import_module(f"{PACKAGE}.cluster.{module}")


class Launcher:
    """Starts jobs on sets of hosts by one transport."""

    def __init__(self, options: argparse.Namespace, hosts: list[Host]) -> None:
        self.options = options
        self.command = command_of(options)
        self.transport = choose_transport(options.transport, hosts)
        self._rendezvous: Rendezvous | None = None
        self._prepare_terminal()

    def _prepare_terminal(self) -> None:
        """Tell rank 0 the width of this terminal, or that there is none: mpirun gives it one of its own."""
        if os.isatty(1):
            os.environ["COLUMNS"] = str(shutil.get_terminal_size().columns)
        else:
            os.environ["TTY_COMPATIBLE"] = "0"
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            del os.environ[name]  # within an allocation mpirun would take its hosts from there

    def start(self, hosts: list[Host]) -> Start:
        """What is to be started on hosts; finds the network that joins them.

        Raises:
            UserError: if they have no network in common.
        """
        remote = [host for host in hosts if not is_here(host.name)]
        network = self._network(hosts) if remote else None
        return Start(self.command, hosts, network, self.options.port, tuple(self.options.env))

    def _network(self, hosts: list[Host]) -> Network:
        """The network that joins the hosts; looks at them all, and at what would stop a job there."""
        diagnosis = self._check(hosts)
        for finding in diagnosis.findings:
            if finding.state == "warning":
                print(f"launch: warning: {finding}", file=sys.stderr, flush=True)
        faults = diagnosis.faults()
        if diagnosis.network is not None and self.options.no_check:  # but not without a host
            missing = {host.name for host in hosts} - diagnosis.network.interfaces.keys()
            faults = [fault for fault in faults if missing & {*fault.hosts}]
        if faults or diagnosis.network is None:
            raise UserError("; ".join(map(str, faults)))
        if self.transport == "gloo" and ":" in diagnosis.network.subnet:
            raise UserError(
                f"Gloo cannot meet over IPv6, and the hosts' network is {diagnosis.network.subnet}:"
                " give them IPv4 addresses in one, or list them by name and use --transport mpi"
            )
        network: Network = diagnosis.network
        return network

    @cached_property
    def folder(self) -> Path:
        """That of the run, where the command makes one; else that of all runs."""
        makes = self.options.module in MAKE_RUNS and not self.options.command
        return run_folder(self.command) if makes else Path("runs")

    def _check(self, hosts: list[Host]) -> Any:
        mpi = self.transport == "mpi"
        return cluster("doctor").check(hosts, self.folder, self.options.port, self.options.network, quick=True, mpi=mpi)

    def begin(self, hosts: list[Host]) -> Job:
        """Start a job."""
        start = self.start(hosts)
        if self.transport == "mpi":
            return Job(
                plan_mpi(start, mpi_version() or 4), os.getcwd(), self.options.grace, own=not self.options.command
            )
        if self._rendezvous is not None:  # a new one, at which nothing of an earlier start can call
            self._rendezvous.stop()
        self._rendezvous = meeting = open_rendezvous(start)
        parts = plan_gloo(start, meeting.address, meeting.port, meeting.secrets)
        return Job(parts, os.getcwd(), self.options.grace, meeting.absent, own=not self.options.command)

    def fault(self, host: Host, known: bool) -> str:
        """Why a host cannot be used now; nothing if it can. One that is `known` to be fit need only answer."""
        if is_here(host.name):
            return ""
        if ":" in host.name and self.transport == "mpi":
            return f"mpirun takes no IPv6 address: {NAME_IT}"
        if known or self.options.no_check:
            return "" if self._answers(host) else "it does not answer"
        faults = self._check([host]).faults()
        return "; ".join(str(fault) for fault in faults if fault.check != "run")  # the job itself works on it

    def _answers(self, host: Host) -> bool:
        command = [*ssh_command(host.name, self.options.port), "true"]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=ANSWER_S)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def describe(self, hosts: list[Host]) -> str:
        """The command lines: to copy, or over Gloo to read."""
        start = self.start(hosts)
        if self.transport == "mpi":
            own = {name: os.environ[name] for name in SET_HERE if name in os.environ} | common_card(start.network)
            settings = ["env", *(f"{name}={value}" for name, value in own.items())] if start.network else []
            return shlex.join([*settings, *mpirun_command(start, mpi_version() or 4)])
        lines = [
            "# To read, not to copy: over Gloo the launcher itself holds the server where the ranks meet (port 0)."
        ]
        for part in plan_gloo(start, own_address(start), port=0):
            for process in part.processes:
                settings = [f"{name}={value}" for name, value in process.environment.items()]
                lines.append(f"# {process.name}, on host {part.host}:")
                lines.append(shlex.join(["env", *settings, *process.command]))
        return "\n".join(lines)


def launch_elastic(launcher: Launcher, options: argparse.Namespace) -> Failure | None:
    """Run the job on the hosts that there are; what ended it, if it was not the end of the training.

    Raises:
        UserError: if it cannot be started like this.
    """
    trains = options.module == "train" and not options.command
    if trains and sweeps(launcher.command):
        raise UserError("--elastic starts one run again and again, not a sweep: leave --multirun or --elastic out")
    folder = launcher.folder if trains else None
    before = newest_checkpoint(folder)

    def begin(hosts: list[Host]) -> Job:
        if newest_checkpoint(folder) != before:  # from now on from the newest one, whatever the first start had to
            launcher.command = [word for word in launcher.command if not word.startswith("resume=")]
        return launcher.begin(hosts)

    elastic = cluster("elastic")
    limits = elastic.Limits(options.min, options.max, options.wait, options.restarts)
    pool = elastic.Pool(lambda: discovered_hosts(options), launcher.fault, limits)
    failure: Failure | None = elastic.run_elastic(pool, begin, lambda: newest_checkpoint(folder), limits)
    return failure


def launch(options: argparse.Namespace) -> Failure | None:
    """Run the whole job; what ended it, if it was not the end of the training.

    Raises:
        UserError: if it cannot be started like this.
    """
    check_flags(options)
    hosts = discovered_hosts(options) if options.elastic else listed_hosts(options)
    check_distinct(hosts)
    ranks = ranks_wanted(options.n)
    launcher = Launcher(options, hosts)
    if options.dry_run:
        slots = sum(host.ranks for host in hosts)
        if options.elastic and slots < options.min:
            raise UserError(
                f"the hosts have {slots} slots now, fewer than --min {options.min}: the job would wait for more"
            )
        print(launcher.describe(place(hosts, ranks, options.max)))
        return None
    if options.elastic:
        return launch_elastic(launcher, options)
    return launcher.begin(place(hosts, ranks)).wait(enough=lambda: False)


def main() -> None:
    """Launch, and say what has ended the job unless a rank has said it already."""
    end_at_sigterm()
    options = parse(sys.argv[1:])
    failure = launch(options)
    if failure is None:
        return
    said = (PREEMPTED,) if options.command else (USER_ERROR, PREEMPTED)  # a rank of this project says it itself
    if failure.code not in said:
        announce(failure)
    sys.exit(failure.code)
