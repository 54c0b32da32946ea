"""How ranks come to be and find each other: mpirun starts them, or we do and they meet over Gloo.

The values of variables never stand on a command line, where every user of a host could read them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from ..errors import UserError
from . import agent
from .rendezvous import Rendezvous
from .supervise import Part, Process

LOCAL = "localhost"
GLOO_TIMEOUT_S = 300  # as horovod.stall_shutdown_s, for commands that do not read it; Gloo's own 30 s end healthy jobs


@dataclass(frozen=True)
class Host:
    """A host and how many processes it takes; None where no number was given."""

    name: str
    slots: int | None = None

    @property
    def ranks(self) -> int:
        """How many ranks it takes: one where no number was given."""
        return self.slots or 1


@dataclass(frozen=True)
class Seat:
    """A rank and its place: on its host, and across the hosts among those with the same local rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hostname: str


@dataclass(frozen=True)
class Start:
    """What to start on this machine; cluster/start.py adds what other hosts need. `hosts` have a slot for each rank."""

    command: list[str]
    hosts: list[Host]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(host.ranks for host in self.hosts)

    def placed(self) -> list[tuple[Host, range]]:
        """The hosts with their ranks."""
        firsts = [sum(host.ranks for host in self.hosts[:number]) for number in range(len(self.hosts))]
        return [(host, range(first, first + host.ranks)) for host, first in zip(self.hosts, firsts, strict=True)]

    def seats(self) -> list[Seat]:
        """Where each rank is, in rank order."""
        return [
            Seat(rank, self.size, local, len(ranks), *self._across(host, local), host.name)
            for host, ranks in self.placed()
            for local, rank in enumerate(ranks)
        ]

    def _across(self, host: Host, local: int) -> tuple[int, int]:
        """The place of a host among those that have such a local rank too, and the number of these."""
        peers = [other for other in self.hosts if other.ranks > local]
        return peers.index(host), len(peers)

    def address(self) -> str:
        """Where the ranks reach this process."""
        return "127.0.0.1"

    def card_variables(self, host: str) -> dict[str, str]:
        """What tells the ranks of a host by which network card they reach the others."""
        return {"HOROVOD_GLOO_IFACE": "lo"}

    def mpi_options(self, version: int, variables: Iterable[str]) -> list[str]:
        """What mpirun needs for other hosts, which get these variables too."""
        return []

    def mpi_settings(self) -> dict[str, str]:
        """The variables that mpirun needs when its command is copied."""
        return {}

    def part(self, host: Host, ranks: range, processes: list[Process]) -> Part:
        """What a host does."""
        return Part(host.name, [sys.executable, str(Path(agent.__file__).resolve())], ranks, processes)

    def mpi_parts(self, mpirun: Process) -> list[Part]:
        """What each host does if mpirun starts the ranks."""
        return [self.part(host, ranks, [mpirun]) for host, ranks in self.placed()]


def mpi_version() -> int | None:
    """The major version of Open MPI, where its mpirun is found; Horovod speaks no other MPI here."""
    try:
        said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    found = re.search(r"Open MPI\) (\d+)", said)
    return int(found[1]) if found else None


def horovod_has_mpi() -> bool:
    """Whether Horovod was built with MPI.

    Raises:
        UserError: if Horovod is not installed.
    """
    return _horovod_names(b"libmpi.so")


def _horovod_names(text: bytes) -> bool:
    """Whether a text stands in Horovod's library."""
    spec = find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"Horovod is not installed for {sys.executable}: run 'nox -s train' once")
    libraries = Path(spec.submodule_search_locations[0]).glob("*/mpi_lib*.so")
    return any(text in library.read_bytes() for library in libraries)


def choose_transport(wanted: str) -> str:
    """`mpi` or `gloo`: MPI is the faster one, Gloo needs nothing but Horovod itself.

    Raises:
        UserError: if MPI is wanted and is not there.
    """
    if wanted == "gloo":
        return "gloo"
    built, found = horovod_has_mpi(), mpi_version() is not None
    if wanted == "mpi" and not (built and found):
        missing = "Horovod was built without MPI" if not built else "there is no mpirun of Open MPI"
        raise UserError(f"--transport mpi is not possible: {missing}; use --transport gloo, or install it")
    return "mpi" if built and found else "gloo"


def plan_mpi(start: Start, version: int) -> list[Part]:
    """One mpirun on this machine."""
    command = mpirun_command(start, version, [agent.JOB])
    return start.mpi_parts(Process("mpirun", command, orphaned=signal.SIGTERM.value))


def mpirun_command(start: Start, version: int, variables: Iterable[str] = ()) -> list[str]:
    """The command line for Open MPI 4 or 5, which share few names for what is below MPI itself.

    Other hosts get these variables too.
    """
    hosts = ",".join(f"{host.name}:{host.ranks}" for host in start.hosts)
    # Binding would put all threads of a rank on one core; the ranks fill one host after the other.
    command = [_mpirun(), "-np", str(start.size), "--host", hosts, "--bind-to", "none", "--map-by", "slot"]
    # A rank that waits must not take a core from one that works; containers forbid the single copy.
    command += ["--mca", "mpi_yield_when_idle", "1"]
    command += ["--mca", "smsc", "^cma"] if version >= 5 else ["--mca", "btl_vader_single_copy_mechanism", "none"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    return [*command, *start.mpi_options(version, variables), *start.command]


def _mpirun() -> str:
    """By its full path where it lies in an environment: so Open MPI finds its other half on other hosts too."""
    found = shutil.which("mpirun") or "mpirun"
    return found if Path(found).is_relative_to(sys.prefix) else "mpirun"


def plan_gloo(start: Start, address: str, port: int, secrets: Mapping[str, str] = MappingProxyType({})) -> list[Part]:
    """Every rank by itself; they meet at the store that this process holds, and know its secrets (variables)."""
    seats = start.seats()
    return [
        start.part(host, ranks, [_gloo_rank(start, seats[rank], address, port, secrets) for rank in ranks])
        for host, ranks in start.placed()
    ]


def _gloo_rank(start: Start, seat: Seat, address: str, port: int, secrets: Mapping[str, str]) -> Process:
    where = {
        **{name.upper(): value for name, value in asdict(seat).items()},
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_RENDEZVOUS_ADDR": address,
        "GLOO_RENDEZVOUS_PORT": port,
        "GLOO_TIMEOUT_SECONDS": os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", GLOO_TIMEOUT_S),
    }
    environment = {f"HOROVOD_{name}": str(value) for name, value in where.items()}
    environment |= {"PYTHONUNBUFFERED": "1", **start.card_variables(seat.hostname), **secrets}
    return Process(f"rank {seat.rank}", start.command, environment)


def open_rendezvous(start: Start) -> Rendezvous:
    """The store at which the ranks of a job learn each other's addresses: at the address where they reach this host.

    Raises:
        UserError: if the ranks' Horovod would let anyone take part.
    """
    if not _horovod_names(b"HOROVOD_GLOO_KEY"):
        raise UserError(
            "the Horovod that is installed would let strangers take part in a job over Gloo: build it again with"
            " 'python scripts/build_horovod.py' and install the wheel that it prints, or use --transport mpi"
        )
    seats = start.seats()
    scopes = {f"local_{seat.hostname}" for seat in seats} | {f"cross_{seat.local_rank}" for seat in seats}
    return Rendezvous(start.address(), start.size, {"global", *scopes})
