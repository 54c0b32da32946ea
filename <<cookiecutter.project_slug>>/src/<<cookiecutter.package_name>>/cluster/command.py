"""Jobs on several hosts, which launch/command.py starts for `launch ssh` and `launch elastic`: see docs/cluster.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import ArgumentTypeError, Namespace
from functools import cached_property
from pathlib import Path

from ..errors import Parser, UserError
from ..launch.command import Launcher, count, job_parser, parse, seconds
from ..launch.supervise import Failure, Job
from ..launch.transport import Host, Start
from . import doctor
from .elastic import Limits, Pool, run_elastic
from .hosts import allot, discover_hosts, parse_hosts, read_hosts
from .network import Network, checked_subnet, is_here
from .ssh import port_number, ssh_command
from .start import HostsStart

HOSTS = Path("launch/hosts")
ANSWER_S = 20  # for a host to answer
MAKE_RUNS = ("train", "compress")  # the modules that make the folder of a run
NAME_IT = "give hosts by their names, or use --transport gloo"


def launcher_for(kind: str, words: list[str]) -> Launcher:
    """The one for a kind of job, `ssh` or `elastic`.

    Raises:
        UserError: if an option is wrong, or a host.
    """
    if kind == "elastic":
        return ElasticLauncher(parse(elastic_parser(), words))
    options = parse(hosts_parser(), words)
    return HostsLauncher(options, listed_hosts(options))


def hosts_parser(kind: str = "ssh") -> Parser:
    """The options of a job on hosts that ssh reaches; those of every kind of job on several hosts for another kind."""
    parser = job_parser(kind)
    add, which = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    which("--hosts", type=Path, default=HOSTS, metavar="FILE", help=f"a host a line, see {HOSTS}.example")
    which("-H", type=parse_hosts, metavar="a:4,b:4", help="the hosts and their slots")
    if kind == "ssh":
        add("-n", type=count(1), metavar="RANKS", help="all slots of the hosts by default")
    else:
        which("--discover", metavar="COMMAND", help="prints 'host' or 'host:4' lines; else --hosts is read again")
    add("--network", type=checked_subnet, metavar="SUBNET", help="for the ranks, such as 10.0.0.0/16; else it is found")
    add("--port", type=port_number, help="of the hosts' ssh; else what ssh's own configuration says")
    add("--env", type=variable, action="append", default=[], metavar="NAME", help="pass it on to the other hosts too")
    add("--no-check", action="store_true", help="start whatever may be wrong with the hosts")
    return parser


def elastic_parser() -> Parser:
    """The options of a job that goes on when hosts are lost or come."""
    parser = hosts_parser("elastic")
    add = parser.add_argument
    add("--min", type=count(1), default=1, help="wait while there are fewer slots")
    add("--max", type=count(1), help="start no more ranks")
    add("--slots", type=count(1), default=1, help="of a host that is listed without")
    add("--wait", type=seconds, default=600.0, metavar="SECONDS", help="for the hosts (default: 600)")
    add("--restarts", type=count(0), default=3, help="how many in a row without progress (default: 3)")
    return parser


def variable(name: str) -> str:
    """A variable that other hosts get too, as an option's value.

    Raises:
        ArgumentTypeError: if there is none of this name.
    """
    if name not in os.environ:
        raise ArgumentTypeError(f"{name} is no variable here: give the name of one that is exported")
    return name


def listed_hosts(options: Namespace) -> list[Host]:
    """The hosts that the command line or its file names.

    Raises:
        UserError: if an entry is no host.
    """
    hosts: list[Host] = options.H
    return hosts or read_hosts(options.hosts)


def check_distinct(hosts: list[Host]) -> None:
    """Refuse this machine under two names: its ranks would take the same places. Other hosts say who they are.

    Raises:
        UserError: names the two.
    """
    here = [host.name for host in hosts if is_here(host.name)]
    if len(here) > 1:
        raise UserError(f"{' and '.join(here)} are both this machine: list it once, with all its slots")


def is_sweep(command: list[str]) -> bool:
    """Whether a training command makes several runs."""
    return not {"--multirun", "-m", "hydra.mode=MULTIRUN"}.isdisjoint(command[3:])  # before them is python -m package


def run_folder(command: list[str]) -> Path:
    """The folder of the run that a training command makes, as Hydra says; of a sweep that of all its runs.

    Raises:
        UserError: if the configuration refuses the command's options.
    """
    from omegaconf import OmegaConf

    words, part = command[3:], "run"
    if is_sweep(command):  # Hydra shows no config of one; the values to try are lists
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


class HostsLauncher(Launcher):
    """Starts a job on hosts that ssh reaches; mpirun takes none by its IPv6 address."""

    def __init__(self, options: Namespace, hosts: list[Host]) -> None:
        check_distinct(hosts)
        colons = [host.name for host in hosts if ":" in host.name]
        if colons and options.transport == "mpi":
            raise UserError(f"{colons[0]} is no host for mpirun, which takes no IPv6 address: {NAME_IT}")
        if colons:
            options.transport = "gloo"
        super().__init__(options)
        self._hosts = hosts

    def run(self) -> Failure | None:
        """Run the whole job; what ended it, if it was not the end of the training.

        Raises:
            UserError: if it cannot be started like this.
        """
        return self.run_on(allot(self._hosts, self.options.n or sum(host.ranks for host in self._hosts)))

    def start(self, hosts: list[Host]) -> Start:
        """What is to be started on hosts; finds the network that joins them.

        Raises:
            UserError: if they have no network in common.
        """
        if all(is_here(host.name) for host in hosts):
            return super().start(hosts)
        return HostsStart(self.command, hosts, self._network(hosts), self.options.port, tuple(self.options.env))

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
        return diagnosis.network

    def _check(self, hosts: list[Host]) -> doctor.Diagnosis:
        port, subnet, mpi = self.options.port, self.options.network, self.transport == "mpi"
        return doctor.check(hosts, self.folder, port, subnet, quick=True, mpi=mpi)

    @cached_property
    def folder(self) -> Path:
        """That of the run, where the command makes one; else that of all runs."""
        makes = self.options.module in MAKE_RUNS and not self.options.command
        return run_folder(self.command) if makes else Path("runs")


class ElasticLauncher(HostsLauncher):
    """Starts a job again and again, on the hosts that there are."""

    def __init__(self, options: Namespace) -> None:
        if options.max is not None and options.max < options.min:
            raise UserError(f"--max {options.max} must be at least --min {options.min}: change one of them")
        super().__init__(options, available_hosts(options))
        self._trains = options.module == "train" and not options.command
        if self._trains and is_sweep(self.command):
            raise UserError("an elastic job starts one run again and again, no sweep: leave --multirun out")

    def run(self) -> Failure | None:
        """Run the job on the hosts that there are; what ended it, if it was not the end of the training.

        Raises:
            UserError: if it cannot be started like this.
        """
        options = self.options
        if options.dry_run:
            return self.run_on(self._largest())
        folder = self.folder if self._trains else None
        before = newest_checkpoint(folder)

        def begin(hosts: list[Host]) -> Job:
            if newest_checkpoint(folder) != before:  # from now on from the newest one, whatever the first start had to
                self.command = [word for word in self.command if not word.startswith("resume=")]
            return self.begin(hosts)

        limits = Limits(options.min, options.max, options.wait, options.restarts)
        pool = Pool(lambda: available_hosts(options), self.fault, limits)
        return run_elastic(pool, begin, lambda: newest_checkpoint(folder), limits)

    def _largest(self) -> list[Host]:
        """What the job would start on if all hosts answered."""
        slots, least = sum(host.ranks for host in self._hosts), self.options.min
        if slots < least:
            raise UserError(f"the hosts have {slots} slots now, fewer than --min {least}: the job would wait for more")
        return allot(self._hosts, min(slots, self.options.max or slots))

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


def available_hosts(options: Namespace) -> list[Host]:
    """The hosts that an elastic job may use now, each with its slots.

    Raises:
        UserError: if the command that lists them fails, or lists something else.
    """
    hosts = listed_hosts(options) if options.discover is None else discover_hosts(options.discover)
    return [host if host.slots else Host(host.name, options.slots) for host in hosts]
