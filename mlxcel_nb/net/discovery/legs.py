"""The interfaces of this host as discovery uses them: what is sent out of each, and which addresses are told there.

Pure but for `legs`, which asks the system. Any thread.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mlxcel_nb.cluster.address import Address, canonical_ip
from mlxcel_nb.net.discovery.sightings import MAX_ADDRESSES
from mlxcel_nb.wire.beacon import MULTICAST_V4, MULTICAST_V6

BROADCAST, MULTICAST, IPV6, UNICAST = "broadcast", "multicast", "IPv6", "unicast"

LOOPBACK_BROADCAST = "127.255.255.255"
"""What Linux takes for the broadcast address of its loopback; macOS does multicast there instead."""

MAX_LEGS = 64
"""A host of containers has hundreds of interfaces; beacons go out of so many of them."""

_CONTAINERS = ("veth", "cali", "lxc", "tap", "vnet")
"""How the names of interfaces begin that lead to a container or a virtual machine each: the last to be used."""


@dataclass(frozen=True)
class Way:
    """One kind of datagram out of a leg: `target` is where to, `source` this host's address, where that is chosen."""

    name: str
    target: str
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Leg:
    """An interface that is up and has an address.

    Args:
        addresses: all of this host's addresses on it, without scopes.
        broadcasts: pairs of an own IPv4 address and the broadcast address of its subnet.
    """

    name: str
    index: int
    addresses: tuple[str, ...]
    broadcasts: tuple[tuple[str, str], ...] = ()

    @property
    def loopback(self) -> bool:
        return any(ipaddress.ip_address(address).is_loopback for address in self.addresses)

    def ways(self) -> list[Way]:
        """What to send, and where to listen: each subnet's broadcast, and a group of each family."""
        found = [Way(BROADCAST, target, source) for source, target in self.broadcasts]
        if ipv4 := next((address for address in self.addresses if ":" not in address), None):
            found.append(Way(MULTICAST, MULTICAST_V4, ipv4))
        if any(_link_local(address) for address in self.addresses):
            found.append(Way(IPV6, MULTICAST_V6))
        return found

    def announces(self, listens: Sequence[Address], others: Sequence[Leg]) -> tuple[Address, ...]:
        """Where a node that is bound to `listens` can be reached by whoever hears it on this leg, best first.

        Args:
            listens: the bound addresses; a wildcard stands for every interface. Names are passed on.
            others: all legs of this host.
        """
        places: dict[Address, None] = {}
        for bound in listens:
            for host in self._hosts(bound.host, others) if bound.is_wildcard else [bound.host]:
                place = Address(host, bound.port)
                bare = host.partition("%")[0]
                if _link_local(bare):
                    if bare not in self.addresses:
                        continue
                    place = Address(bare, bound.port)  # whoever hears it has scopes of its own
                if self.loopback or not place.is_loopback:
                    places[place] = None
        return tuple(places)[:MAX_ADDRESSES]

    def _hosts(self, wildcard: str, others: Sequence[Leg]) -> list[str]:
        """The addresses that a wildcard stands for: this leg's, then those of the rest; at home loopback is enough."""
        legs = [self] if self.loopback else [self, *(leg for leg in others if leg is not self)]
        # A socket for IPv6 takes IPv4 as well.
        return [address for leg in legs for address in leg.addresses if ":" in wildcard or ":" not in address]


def _link_local(address: str) -> bool:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    return ip.version == 6 and ip.is_link_local


def legs() -> list[Leg]:
    """The interfaces of this host that are up and have an address, at most `MAX_LEGS`, those of containers last."""
    import psutil

    found = []
    up = {name for name, facts in psutil.net_if_stats().items() if facts.isup}
    by_name = sorted(psutil.net_if_addrs().items(), key=lambda item: (item[0].startswith(_CONTAINERS), item[0]))
    for name, entries in by_name:
        addresses: list[str] = []
        broadcasts: list[tuple[str, str]] = []
        for entry in entries:
            if name in up and entry.family in {socket.AF_INET, socket.AF_INET6}:
                address = canonical_ip(entry.address.partition("%")[0])
                addresses.append(address)
                if entry.family == socket.AF_INET and entry.broadcast:
                    broadcasts.append((address, entry.broadcast))
        if sys.platform == "linux" and "127.0.0.1" in addresses:
            broadcasts = [("127.0.0.1", LOOPBACK_BROADCAST)]
        if addresses:
            with contextlib.suppress(OSError):  # gone between two questions
                index = socket.if_nametoindex(name)
                leg = Leg(name=name, index=index, addresses=tuple(addresses), broadcasts=tuple(broadcasts))
                found.append(leg)
    return found[:MAX_LEGS]
