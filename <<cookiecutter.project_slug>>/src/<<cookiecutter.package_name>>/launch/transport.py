"""How ranks come to be and find each other: mpirun starts them, or we do and they meet over Gloo.

The values of variables never stand on a command line, where every user of a host could read them.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from ..errors import UserError
from . import agent
from .hosts import Host
from .network import Network, is_here, own_interfaces
from .rendezvous import Rendezvous
from .ssh import remote, ssh_arguments, ssh_command
from .supervise import Part, Process

LOCAL = "localhost"
GLOO_TIMEOUT_S = 300  # as horovod.stall_shutdown_s, for commands that do not read it; Gloo's own 30 s end healthy jobs
NAME_IT = "give hosts by their names, or use --transport gloo"
# ssh itself notices within 20 s that a link is cut.
WATCH = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")

# The variables that other hosts get from here; secrets are not among them, `--env NAME` adds to them.
PASSED = re.compile(
    "(HOROVOD|NCCL|UCX|FI|OMP|KMP|MKL|TF|TORCH|XLA|PYTHON|CUDA|HYDRA)_\\w+"
    "|PATH|VIRTUAL_ENV|LD_LIBRARY_PATH|PYTHON\\w+|COLUMNS|TTY_COMPATIBLE|NO_COLOR|LANG|LC_ALL|TZ"
)


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
    """What to start where. `hosts` have as many slots as they get ranks; `network` joins them if there are several."""

    command: list[str]
    hosts: list[Host]
    network: Network | None
    port: int | None = None
    passed: tuple[str, ...] = ()

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

    def variables(self) -> dict[str, str]:
        """What other hosts get of this environment."""
        return {name: os.environ[name] for name in passed_names(os.environ, self.passed)}


def passed_names(environment: Iterable[str], more: Iterable[str] = ()) -> list[str]:
    """The names of the variables that other hosts get."""
    return sorted(name for name in environment if PASSED.fullmatch(name) or name in set(more))


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


def choose_transport(wanted: str, hosts: Sequence[Host] = ()) -> str:
    """`mpi` or `gloo`: MPI is the faster one, Gloo needs nothing but Horovod itself.

    Raises:
        UserError: if MPI is wanted and is not there, or cannot take the names of the hosts.
    """
    colons = [host.name for host in hosts if ":" in host.name]
    if wanted == "mpi" and colons:
        raise UserError(f"{colons[0]} is no host for mpirun, which takes no IPv6 address: {NAME_IT}")
    if wanted == "gloo" or colons:
        return "gloo"
    built, found = horovod_has_mpi(), mpi_version() is not None
    if wanted == "mpi" and not (built and found):
        missing = "Horovod was built without MPI" if not built else "there is no mpirun of Open MPI"
        raise UserError(f"--transport mpi is not possible: {missing}; use --transport gloo, or install it")
    return "mpi" if built and found else "gloo"


def plan_mpi(start: Start, version: int) -> list[Part]:
    """One mpirun on this host, and a guard on every other one that ends what mpirun leaves there."""
    parts = [_part(start, host, ranks, []) for host, ranks in start.placed()]
    here = next((part for part in parts if is_here(part.host)), None)
    if here is None:
        here = _part(start, Host(socket.gethostname()), range(0), [])
        parts.append(here)
    here.processes.append(Process("mpirun", mpirun_command(start, version, [agent.JOB]), orphaned=signal.SIGTERM.value))
    return parts


def mpirun_command(start: Start, version: int, more: Iterable[str] = ()) -> list[str]:
    """The command line for Open MPI 4 or 5, which share few names for what is below MPI itself.

    The hosts get the variables `more` too.
    """
    new = version >= 5
    hosts = ",".join(f"{host.name}:{host.ranks}" for host in start.hosts)
    # Binding would put all threads of a rank on one core; the ranks fill one host after the other.
    command = [_mpirun(), "-np", str(start.size), "--host", hosts, "--bind-to", "none", "--map-by", "slot"]
    # A rank that waits must not take a core from one that works; containers forbid the single copy.
    command += ["--mca", "mpi_yield_when_idle", "1"]
    command += ["--mca", "smsc", "^cma"] if new else ["--mca", "btl_vader_single_copy_mechanism", "none"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    if start.network is not None:
        subnet, arguments = start.network.subnet, " ".join(ssh_arguments(start.port))
        command += ["--mca", "btl_tcp_if_include", subnet]
        if new:
            # 5.0 finds no subnet where a card has an IPv6 address too (github.com/openpmix/openpmix/pull/4031), and
            # crashes on the name of a card that a host lacks: so only a name that is the same on all.
            cards = {interface.name for interface in start.network.interfaces.values()}
            command += ["--prtemca", "prte_if_include", cards.pop()] if len(cards) == 1 else []
            command += ["--prtemca", "plm_ssh_args", arguments]
        else:
            command += ["--mca", "oob_tcp_if_include", subnet, "--mca", "plm_rsh_args", arguments]
        names = {*more, *passed_names(os.environ, start.passed), *common_card(start.network)}
        command += [word for name in sorted(names) for word in ("-x", name)]
    return [*command, *start.command]


def _mpirun() -> str:
    """By its full path where it lies in an environment: so Open MPI finds its other half on other hosts too."""
    found = shutil.which("mpirun") or "mpirun"
    return found if Path(found).is_relative_to(sys.prefix) else "mpirun"


def common_card(network: Network | None) -> dict[str, str]:
    """NCCL takes a card by its name: only where all hosts call it the same can one setting serve all."""
    cards = {interface.name for interface in network.interfaces.values()} if network else set()
    if len(cards) != 1 or "NCCL_SOCKET_IFNAME" in os.environ:
        return {}
    return {"NCCL_SOCKET_IFNAME": f"={cards.pop()}"}


def plan_gloo(start: Start, address: str, port: int, secrets: Mapping[str, str] = MappingProxyType({})) -> list[Part]:
    """Every rank by itself; they meet at the store that this process holds, and know its secrets (variables)."""
    seats = start.seats()
    return [
        _part(start, host, ranks, [_gloo_rank(start, seats[rank], address, port, secrets) for rank in ranks])
        for host, ranks in start.placed()
    ]


def _gloo_rank(start: Start, seat: Seat, address: str, port: int, secrets: Mapping[str, str]) -> Process:
    card = start.network.interfaces[seat.hostname].name if start.network else "lo"
    where = {
        **{name.upper(): value for name, value in asdict(seat).items()},
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_IFACE": card,
        "GLOO_RENDEZVOUS_ADDR": address,
        "GLOO_RENDEZVOUS_PORT": port,
        "GLOO_TIMEOUT_SECONDS": os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", GLOO_TIMEOUT_S),
    }
    environment = {f"HOROVOD_{name}": str(value) for name, value in where.items()} | {"PYTHONUNBUFFERED": "1"}
    if start.network and "NCCL_SOCKET_IFNAME" not in os.environ:
        environment["NCCL_SOCKET_IFNAME"] = f"={card}"
    return Process(f"rank {seat.rank}", start.command, {**environment, **secrets})


def own_address(start: Start) -> str:
    """Where the ranks reach this process."""
    if start.network is None:
        return "127.0.0.1"
    subnet = ipaddress.ip_network(start.network.subnet)
    return next(item.address for item in own_interfaces() if ipaddress.ip_address(item.address) in subnet)


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
    return Rendezvous(own_address(start), start.size, {"global", *scopes})


def _part(start: Start, host: Host, ranks: range, processes: list[Process]) -> Part:
    program = [sys.executable, str(Path(agent.__file__).resolve())]
    if is_here(host.name):
        return Part(host.name, program, ranks, processes, common_card(start.network))
    session = [*ssh_command(host.name, start.port, WATCH), remote(program)]
    return Part(host.name, session, ranks, processes, start.variables())
