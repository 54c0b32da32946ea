"""What to start on hosts that one network joins; launch/transport.py has what is the same on a single one.

The values of variables never stand on a command line, where every user of a host could read them.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..launch.supervise import Part, Process
from ..launch.transport import Host, Start
from .network import Network, is_here, own_interfaces
from .ssh import remote, ssh_arguments, ssh_command

# ssh itself notices within 20 s that a link is cut.
WATCH = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
SET_HERE = ("COLUMNS", "HYDRA_FULL_ERROR", "TTY_COMPATIBLE")  # variables that the ranks get from the launcher

# The variables that other hosts get from here; secrets are not among them, `--env NAME` adds to them.
PASSED = re.compile(
    "(HOROVOD|NCCL|UCX|FI|OMP|KMP|MKL|TF|TORCH|XLA|PYTHON|CUDA|HYDRA)_\\w+"
    "|PATH|VIRTUAL_ENV|LD_LIBRARY_PATH|PYTHON\\w+|COLUMNS|TTY_COMPATIBLE|NO_COLOR|LANG|LC_ALL|TZ"
)


@dataclass(frozen=True)
class HostsStart(Start):
    """A start on several hosts: the network that joins them, the port of their sshd, more variables for them."""

    network: Network
    port: int | None = None
    passed: tuple[str, ...] = ()

    def address(self) -> str:
        """Where the ranks reach this process."""
        subnet = ipaddress.ip_network(self.network.subnet)
        return next(item.address for item in own_interfaces() if ipaddress.ip_address(item.address) in subnet)

    def card_variables(self, host: str) -> dict[str, str]:
        """What tells the ranks of a host by which network card they reach the others."""
        card = self.network.interfaces[host].name
        return {"HOROVOD_GLOO_IFACE": card, **nccl_card({card})}

    def mpi_options(self, version: int, variables: Iterable[str]) -> list[str]:
        """What mpirun needs for other hosts, which get these variables too."""
        subnet, arguments, cards = self.network.subnet, " ".join(ssh_arguments(self.port)), self._cards()
        options = ["--mca", "btl_tcp_if_include", subnet]
        if version >= 5:
            # 5.0 finds no subnet where a card has an IPv6 address too (github.com/openpmix/openpmix/pull/4031), and
            # crashes on the name of a card that a host lacks: so only a name that is the same on all.
            options += ["--prtemca", "prte_if_include", *cards] if len(cards) == 1 else []
            options += ["--prtemca", "plm_ssh_args", arguments]
        else:
            options += ["--mca", "oob_tcp_if_include", subnet, "--mca", "plm_rsh_args", arguments]
        names = {*variables, *passed_names(os.environ, self.passed), *nccl_card(cards)}
        return options + [word for name in sorted(names) for word in ("-x", name)]

    def mpi_settings(self) -> dict[str, str]:
        """The variables that mpirun needs when its command is copied."""
        return {name: os.environ[name] for name in SET_HERE if name in os.environ} | nccl_card(self._cards())

    def part(self, host: Host, ranks: range, processes: list[Process]) -> Part:
        """What a host does."""
        part = super().part(host, ranks, processes)
        if is_here(host.name):
            return replace(part, environment=nccl_card(self._cards()))
        session = [*ssh_command(host.name, self.port, WATCH), remote(part.start)]
        variables = {name: os.environ[name] for name in passed_names(os.environ, self.passed)}
        return replace(part, start=session, environment=variables)

    def mpi_parts(self, mpirun: Process) -> list[Part]:
        """One mpirun on this host, and a guard on every other one that ends what mpirun leaves there."""
        places = self.placed()
        if not any(is_here(host.name) for host, _ in places):
            places.append((Host(socket.gethostname()), range(0)))
        return [self.part(host, ranks, [mpirun] if is_here(host.name) else []) for host, ranks in places]

    def _cards(self) -> set[str]:
        return {interface.name for interface in self.network.interfaces.values()}


def nccl_card(cards: set[str]) -> dict[str, str]:
    """NCCL takes a card by its name: only where all hosts call it the same can one setting serve all."""
    if len(cards) != 1 or "NCCL_SOCKET_IFNAME" in os.environ:
        return {}
    return {"NCCL_SOCKET_IFNAME": f"={next(iter(cards))}"}


def passed_names(environment: Iterable[str], more: Iterable[str] = ()) -> list[str]:
    """The names of the variables that other hosts get."""
    return sorted(name for name in environment if PASSED.fullmatch(name) or name in set(more))
