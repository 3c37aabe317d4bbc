"""What is sent out of each interface, and which addresses are told there."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from mlxcel_nb.cluster.address import Address, parse_address
from mlxcel_nb.net.discovery.legs import MAX_LEGS, Leg, legs

LO = Leg(name="lo", index=1, addresses=("127.0.0.1", "::1"), broadcasts=(("127.0.0.1", "127.255.255.255"),))
ETH = Leg(
    name="eth0", index=2, addresses=("10.0.0.5", "10.0.1.5", "fd00::5", "fe80::5"),
    broadcasts=(("10.0.0.5", "10.0.0.255"), ("10.0.1.5", "10.0.1.255")),
)  # fmt: skip
VPN = Leg(name="tun0", index=3, addresses=("10.8.0.2",))
ALL = [ETH, LO, VPN]


def told(leg: Leg, *listens: str) -> list[str]:
    return [str(address) for address in leg.announces([parse_address(text) for text in listens], ALL)]


def test_every_subnet_is_broadcast_to_and_a_group_of_each_family() -> None:
    assert [(way.name, way.target, way.source) for way in ETH.ways()] == [
        ("broadcast", "10.0.0.255", "10.0.0.5"),
        ("broadcast", "10.0.1.255", "10.0.1.5"),
        ("multicast", "239.77.88.78", "10.0.0.5"),
        ("IPv6", "ff02::4d58:4e42", ""),
    ]
    assert [way.name for way in LO.ways()] == ["broadcast", "multicast"]
    assert [way.name for way in VPN.ways()] == ["multicast"]


def test_a_wildcard_is_told_as_the_addresses_there_are_with_this_interface_first() -> None:
    assert told(VPN, "0.0.0.0:1") == ["10.8.0.2:1", "10.0.0.5:1", "10.0.1.5:1"]
    assert told(ETH, "[::]:1") == ["10.0.0.5:1", "10.0.1.5:1", "[fd00::5]:1", "[fe80::5]:1", "10.8.0.2:1"]


def test_link_local_addresses_are_told_only_on_their_own_interface_and_without_a_scope() -> None:
    assert told(ETH, "[fe80::5%eth0]:1") == ["[fe80::5]:1"]
    assert told(VPN, "[fe80::5%eth0]:1") == []
    assert "[fe80::5]:1" not in told(VPN, "[::]:1")


def test_loopback_is_told_only_on_loopback() -> None:
    for bound in ("127.0.0.1:1", "localhost:1", "[::1]:1"):
        assert told(ETH, bound) == [] and told(LO, bound) == [bound]
    assert told(LO, "0.0.0.0:1") == ["127.0.0.1:1"]
    assert told(LO, "10.0.0.5:1") == ["10.0.0.5:1"]


def test_several_bound_addresses_are_all_told() -> None:
    assert told(ETH, "127.0.0.1:1", "10.0.0.5:1", "mac.local:1") == ["10.0.0.5:1", "mac.local:1"]


def test_this_machine_has_a_loopback_leg() -> None:
    (loopback,) = [leg for leg in legs() if "127.0.0.1" in leg.addresses]
    assert loopback.loopback and loopback.index > 0
    assert Address("127.0.0.1", 1) in loopback.announces([Address("127.0.0.1", 1)], legs())


def test_a_host_full_of_containers_still_uses_its_own_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"cali{k}" for k in range(2 * MAX_LEGS)] + ["eth0", "lo"]
    entry = SimpleNamespace(family=socket.AF_INET, address="10.0.0.1", broadcast="10.0.0.255")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {name: [entry] for name in names})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=True) for name in names})
    monkeypatch.setattr(socket, "if_nametoindex", names.index)
    found = [leg.name for leg in legs()]
    assert found[:2] == ["eth0", "lo"] and len(found) == MAX_LEGS
