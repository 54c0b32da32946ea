"""The network that the ranks talk over: one subnet in which every host has an address."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from ..errors import UserError

# Bridges and virtual cables of containers and virtual machines: they look alike on all hosts and join none of them.
_VIRTUAL = re.compile(r"(lo|docker|podman|br-|virbr|lxcbr|lxdbr|cni|flannel|cali|veth|vnet|kube-)")

Subnet = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class Interface:
    """An address of a network card, with the length of its subnet's prefix."""

    name: str
    address: str
    prefix: int

    @property
    def subnet(self) -> Subnet:
        """The addresses that it reaches without a router."""
        return ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False)


@dataclass(frozen=True)
class Network:
    """A subnet, and by host the interface that lies in it: names of cards differ between hosts."""

    subnet: str
    interfaces: Mapping[str, Interface]


def own_interfaces() -> list[Interface]:
    """The addresses of this host on cards that are up."""
    states = psutil.net_if_stats()
    return [
        Interface(card, entry.address.partition("%")[0], _bits(entry.netmask))
        for card, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and entry.netmask and states[card].isup
    ]


def is_here(name: str) -> bool:
    """Whether a host's name or address leads to this machine."""
    if name in ("localhost", socket.gethostname()):  # also where no name is known
        return True
    try:
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):  # a name that DNS cannot even encode
        return False
    own = {interface.address for interface in own_interfaces()}
    return any(address in own or ipaddress.ip_address(address).is_loopback for address in found)


def common_networks(by_host: Mapping[str, Sequence[Interface]]) -> list[Network]:
    """The networks in which every host has an address of its own.

    Loopback, link-local addresses and the bridges of containers are left out, and so is a subnet in which two hosts
    have the same address: it cannot join them.
    """
    subnets = {item.subnet: None for interfaces in by_host.values() for item in _usable(interfaces)}
    found = [_network(subnet, by_host) for subnet in subnets]
    return [network for network in found if network is not None]


def choose_network(
    by_host: Mapping[str, Sequence[Interface]], reached: Mapping[str, str], subnet: str | None = None
) -> Network:
    """The network for the ranks: that of the addresses by which ssh reached the hosts, if it is one for all.

    Args:
        by_host: The interfaces of all hosts, of the one that launches too.
        reached: By host its address that ssh connected to, where it is known.
        subnet: The user's own choice, such as 10.0.0.0/16.

    Raises:
        UserError: if no network has all hosts; it lists those of each host.
    """
    if subnet is not None:
        networks = [network for network in [_network(parse_subnet(subnet), by_host)] if network is not None]
    else:
        networks = common_networks(by_host)
    if not networks:
        listed = "; ".join(f"{host}: {_listed(interfaces)}" for host, interfaces in by_host.items())
        raise UserError(
            f"no {'network' if subnet is None else subnet} in which every host has an address of its own ({listed}):"
            " put all hosts on one network, or name the network to use with --network"
        )
    cards = {(host, item.address): item.name for host, interfaces in by_host.items() for item in interfaces}

    def preference(network: Network) -> tuple[bool, int, int, int]:
        """IPv4 first, which every transport knows; then ssh's own, or on its cards; then the narrower subnet."""
        subnet = ipaddress.ip_network(network.subnet)
        inside = sum(ipaddress.ip_address(address) in subnet for address in reached.values())
        beside = sum(network.interfaces[item[0]].name == cards.get(item) for item in reached.items())
        return subnet.version == 4, inside, beside, subnet.prefixlen

    return max(networks, key=preference)


def _network(subnet: Subnet, by_host: Mapping[str, Sequence[Interface]]) -> Network | None:
    """The subnet with an interface of every host; None if one has none, or two have the same address."""
    chosen = {}
    for host, interfaces in by_host.items():
        inside = [item for item in _usable(interfaces) if ipaddress.ip_address(item.address) in subnet]
        if not inside:
            return None
        chosen[host] = inside[0]
    if len({interface.address for interface in chosen.values()}) < len(chosen):
        return None
    return Network(str(subnet), chosen)


def _usable(interfaces: Sequence[Interface]) -> list[Interface]:
    return [
        item
        for item in interfaces
        if not _VIRTUAL.match(item.name)
        and not ipaddress.ip_address(item.address).is_loopback
        and not ipaddress.ip_address(item.address).is_link_local
    ]


def _listed(interfaces: Sequence[Interface]) -> str:
    return ", ".join(f"{item.name} {item.address}/{item.prefix}" for item in _usable(interfaces)) or "none"


def checked_subnet(text: str) -> str:
    """The subnet that the user names, as an option's value.

    Raises:
        UserError: if it is none.
    """
    parse_subnet(text)
    return text


def parse_subnet(subnet: str) -> Subnet:
    """The subnet that the user names.

    Raises:
        UserError: if it is none.
    """
    try:
        return ipaddress.ip_network(subnet, strict=False)
    except ValueError:
        raise UserError(f"--network {subnet} is no subnet: write one such as 10.0.0.0/16") from None


def _bits(netmask: str) -> int:
    return int(ipaddress.ip_address(netmask)).bit_count()
