"""Which network the ranks talk over."""

import ipaddress
import socket

import pytest

from my_training.cluster.network import (
    Interface,
    choose_network,
    common_networks,
    is_here,
    own_interfaces,
)
from my_training.errors import UserError

LO = Interface("lo", "127.0.0.1", 8)
DOCKER = Interface("docker0", "172.17.0.1", 16)
LINK = Interface("eth0", "fe80::1", 64)
ALIKE = Interface("bridge7", "192.168.122.1", 24)  # no name that gives it away, but the same address everywhere


def host(number: int, *more: Interface, card: str = "eth0") -> list[Interface]:
    """A host with everything that must not be chosen, and one good network."""
    return [LO, DOCKER, LINK, ALIKE, Interface(card, f"10.1.0.{number}", 24), *more]


def test_a_subnet_has_another_card_on_each_host() -> None:
    (network,) = common_networks({"a": host(1), "b": host(2, card="enp3s0")})
    assert network.subnet == "10.1.0.0/24"
    assert {name: item.name for name, item in network.interfaces.items()} == {"a": "eth0", "b": "enp3s0"}


def test_the_network_of_ssh_wins_over_a_decoy() -> None:
    by_host = {name: host(n, Interface("wlan0", f"192.168.1.{n}", 28)) for n, name in enumerate("ab", 1)}
    assert {network.subnet for network in common_networks(by_host)} == {"10.1.0.0/24", "192.168.1.0/28"}
    assert choose_network(by_host, {"b": "10.1.0.2"}).subnet == "10.1.0.0/24"
    assert choose_network(by_host, {"b": "192.168.1.2"}).subnet == "192.168.1.0/28"
    assert choose_network(by_host, {"b": "203.0.113.9"}).subnet == "192.168.1.0/28"
    assert choose_network(by_host, {}, subnet="10.0.0.0/8").interfaces["b"].address == "10.1.0.2"


def test_a_wider_mask_on_one_host_is_the_same_network() -> None:
    by_host = {"a": [Interface("eth0", "10.1.0.1", 16)], "b": [Interface("eth0", "10.1.2.2", 24)]}
    assert choose_network(by_host, {}).subnet == "10.1.0.0/16"


def test_ipv4_wins_over_the_ipv6_of_ssh() -> None:
    """On the same card."""
    by_host = {
        name: host(n, Interface("eth0", f"2001:db8::{n}", 64), Interface("wlan0", f"192.168.1.{n}", 28))
        for n, name in enumerate("ab", 1)
    }
    assert choose_network(by_host, {"b": "2001:db8::2"}).subnet == "10.1.0.0/24"


def test_only_ipv6() -> None:
    by_host = {name: [LINK, Interface("eth0", f"2001:db8::{n}", 64)] for n, name in enumerate("ab", 1)}
    assert choose_network(by_host, {"a": "2001:db8::1"}).subnet == "2001:db8::/64"


def test_none_in_common_lists_what_each_host_has() -> None:
    by_host = {"a": host(1), "b": [LO, DOCKER, Interface("eth0", "10.2.0.1", 24)], "c": [LO]}
    with pytest.raises(UserError) as caught:
        choose_network(by_host, {})
    assert "a: bridge7 192.168.122.1/24, eth0 10.1.0.1/24; b: eth0 10.2.0.1/24; c: none" in str(caught.value)
    with pytest.raises(UserError, match=r"no 10.9.0.0/16 in which every host has an address"):
        choose_network(by_host, {}, subnet="10.9.0.0/16")
    with pytest.raises(UserError, match="--network eth0 is no subnet"):
        choose_network(by_host, {}, subnet="eth0")


def test_this_host() -> None:
    loopback = next(item for item in own_interfaces() if item.address == "127.0.0.1")
    assert loopback.prefix == 8
    assert loopback.subnet == ipaddress.ip_network("127.0.0.0/8")
    assert is_here("localhost")
    assert is_here(socket.gethostname())
    assert not is_here("192.0.2.1")
    assert not is_here("no-such-host.invalid")
