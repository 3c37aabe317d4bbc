"""Where a node can be reached: its host, its listener, and the host's interfaces with their addresses. Pure.

`net/interfaces/probe.py` finds these facts on the spot; nodes tell them as a `Place`; `cluster/paths.py` derives the
ways between two places. What is read from a peer's `Place` is its word: a wrong one costs a connection attempt, which
the handshake ends.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxcel_nb.cluster.address import Address, canonical_ip
from mlxcel_nb.errors import ConfigError, WireError

THUNDERBOLT, WIRED, WIFI, VPN, OTHER = "thunderbolt", "wired", "wifi", "vpn", "other"
VIRTUAL, LOOPBACK = "virtual", "loopback"

PREFERENCE = (THUNDERBOLT, WIRED, WIFI, VPN, OTHER)
"""Best first. VIRTUAL (bridges of containers and virtual machines) leads to no other host; their addresses are even
the same on every host (docker0 is 172.17.0.1 everywhere)."""

KINDS = (*PREFERENCE, VIRTUAL, LOOPBACK)

TRANSPORTS = ("auto", "tcp", "thunderbolt", "rdma")
"""What a configuration may want: "auto" takes the best way; "tcp" leaves Thunderbolt alone; the others fall
back to the best way that there is, and say so."""

MAX_INTERFACES = 64
MAX_ADDRESSES = 16
"""Of one interface, and as many interfaces, that are taken from a peer's word."""

_NAME = re.compile(r"[A-Za-z0-9_.:@-]{1,32}")

_IP = ipaddress.IPv4Interface | ipaddress.IPv6Interface


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface of a host.

    Args:
        addresses: with the network's length, as "10.0.0.1/24"; IPv6 without zone.
        speed_bps: bits a second; 0 where nobody says.
        mtu: bytes; 0 where nobody says.
    """

    name: str
    kind: str
    addresses: tuple[str, ...] = ()
    speed_bps: int = 0
    mtu: int = 0
    up: bool = True

    def to_list(self) -> list[Any]:
        return [self.name, self.kind, list(self.addresses), self.speed_bps, self.mtu, self.up]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One address of a host, and the interface that has it."""

    address: str
    prefix: int
    interface: str
    kind: str
    speed_bps: int = 0
    mtu: int = 0

    @property
    def ip(self) -> _IP:
        return ipaddress.ip_interface(f"{self.address}/{self.prefix}")

    def __str__(self) -> str:
        return f"{self.interface} ({self.address}/{self.prefix})"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a node can be reached, in its own words.

    Args:
        host: the same for nodes of one network stack, different for any two others; "" where it is not known.
        listens: the IP address its listener is bound to, perhaps a wildcard, or the name it is known by.
        interfaces: none where it listens on loopback alone, or where nobody asked.
        transport: what its configuration wants of links, one of `TRANSPORTS`.
    """

    node_id: str
    host: str
    listens: str
    port: int
    interfaces: tuple[Interface, ...] = ()
    transport: str = "auto"

    def to_dict(self) -> dict[str, Any]:
        return {
            "transport": self.transport,
            "host": self.host,
            "listens": self.listens,
            "port": self.port,
            "interfaces": [interface.to_list() for interface in self.interfaces],
        }

    @classmethod
    def from_dict(cls, node_id: str, told: Mapping[str, Any]) -> Place:
        """What `node_id` told.

        Raises:
            WireError: it is not a place.
        """
        try:
            interfaces = tuple(_read_interface(each) for each in list(told["interfaces"])[:MAX_INTERFACES])
            place = cls(
                node_id=node_id,
                host=str(told["host"])[:64],
                listens=str(told["listens"]),
                port=int(told["port"]),
                interfaces=interfaces,
                transport=str(told["transport"]),
            )
            if place.transport not in TRANSPORTS:
                raise ValueError(f"a transport {place.transport!r:.40}")
            Address(place.listens, place.port)
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise WireError(f"{node_id} tells its addresses in a way that cannot be read: {error}") from None
        return place

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The addresses its listener is reached at, on interfaces that are up; loopback ones too."""
        return tuple(e for interface in self.interfaces if interface.up for e in self.listening_on(interface))

    @property
    def sources(self) -> tuple[Endpoint, ...]:
        """The addresses it can dial from, wherever it listens: all of its host's, on interfaces that are up."""
        return tuple(e for interface in self.interfaces if interface.up for e in _endpoints(interface))

    def listening_on(self, interface: Interface) -> list[Endpoint]:
        """The addresses of one interface that the listener is bound to."""
        return [endpoint for endpoint in _endpoints(interface) if self._covers(endpoint.ip)]

    def _covers(self, ip: _IP) -> bool:
        bound = numeric(self.listens)
        if bound is None:
            return True  # known by a name: any of its addresses may be meant
        if bound.is_unspecified:
            return bound.version == 6 or ip.version == 4
        return str(ip.ip) == canonical_ip(self.listens).partition("%")[0]

    @property
    def loopback(self) -> str | None:
        """The loopback address its listener is reached at, if it is."""
        bound = numeric(self.listens)
        if bound is None:
            return None
        if bound.is_unspecified:
            return "127.0.0.1"
        return canonical_ip(self.listens) if bound.is_loopback else None


def _endpoints(interface: Interface) -> list[Endpoint]:
    return [
        Endpoint(
            address=str(ip.ip),
            prefix=ip.network.prefixlen,
            interface=interface.name,
            kind=interface.kind,
            speed_bps=interface.speed_bps,
            mtu=interface.mtu,
        )
        for ip in map(ipaddress.ip_interface, interface.addresses)
    ]


def published(place: Place) -> Address:
    """The one address under which a node is best told to anybody: what it listens on, and for a wildcard an address of
    its best interface that is not a private cable (wired, Wi-Fi, VPN, Thunderbolt in this order).
    """
    bound = numeric(place.listens)
    if bound is None or not bound.is_unspecified:
        return Address(place.listens, place.port)
    order = (WIRED, WIFI, VPN, OTHER, THUNDERBOLT)
    usable = [e for e in place.endpoints if e.kind in order and not e.ip.ip.is_link_local and not e.ip.ip.is_loopback]
    if not usable:
        return Address("::1" if bound.version == 6 else "127.0.0.1", place.port)
    best = min(usable, key=lambda e: (order.index(e.kind), e.ip.version, -e.speed_bps, e.interface, e.address))
    return Address(best.address, place.port)


def numeric(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """`host` as an IP address, IPv4-mapped ones as IPv4; None for a name."""
    try:
        return ipaddress.ip_address(canonical_ip(host))
    except ValueError:
        return None


def _read_interface(told: Any) -> Interface:
    name, kind, addresses, speed, mtu, up = told
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not an interface's name")
    if kind not in KINDS:
        kind = OTHER
    return Interface(
        name=name,
        kind=kind,
        addresses=tuple(str(ipaddress.ip_interface(str(each))) for each in addresses[:MAX_ADDRESSES]),
        speed_bps=int(speed),
        mtu=int(mtu),
        up=bool(up),
    )
