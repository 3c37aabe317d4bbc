"""Who has been heard: one entry a node, however many paths and datagrams it came by. Pure: times go in.

Belongs to whoever listens, on one thread. It is given beacons whose tags held; their senders are members, so what they
say is believed, but bounded: a member with a thousand names costs a thousand small entries and no more.
"""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from mlxcel_nb.cluster.address import Address, canonical_ip, parse_address
from mlxcel_nb.errors import ConfigError
from mlxcel_nb.wire.beacon import EVERY_S, Beacon

GONE_S = 5 * EVERY_S
"""A node, or a path to it, that has been silent this long is forgotten: Wi-Fi loses two broadcasts in a row easily."""

TWO_ALIVE_MS = round(EVERY_S / 2 * 1000)
"""A former process of a node may have a beacon under way when the newer one starts, but none as late as this. Less than
a beacon's period, so that who listens for five seconds is told."""

MAX_NODES = 1024
MAX_PROCESSES = 4
"""Incarnations of one node that are told apart at a time."""
MAX_PATHS = 64
MAX_ADDRESSES = 16
"""Of one node, merged from all its paths."""


@dataclass(frozen=True, order=True)
class Heard:
    """A path: the interface of this host, and the way by which a datagram arrived there."""

    interface: str
    way: str
    """"broadcast", "multicast" or "IPv6"."""

    def __str__(self) -> str:
        return f"{self.interface} {self.way}"


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """A node, as its latest beacons tell of it.

    Args:
        addresses: where its data plane listens, best first, each as this host would dial it.
        paths: what it was heard by within the last `GONE_S`.
        clock_s: how far its clock is ahead of this side's; negative when behind. Within what is accepted.
        first, last: when it was first and last heard, on the caller's monotonic clock.
        rivals: other live processes that announce the same id.
    """

    node_id: str
    role: str
    incarnation: bytes
    addresses: tuple[Address, ...]
    paths: tuple[Heard, ...]
    clock_s: float
    first: float
    last: float
    rivals: int = 0


class Event(enum.Enum):
    FOUND = "found"
    CHANGED = "changed"
    """Other addresses, another role, or another process under the same id."""
    GONE = "gone"


@dataclass(frozen=True)
class Change:
    """What has become different; `node` is how it is now or, when gone, how it was."""

    event: Event
    node: Sighting
    before: Sighting | None = None


@dataclass
class _Process:
    """One incarnation."""

    since_ms: int
    latest_ms: int
    role: str
    clock_s: float
    first: float
    last: float
    paths: dict[Heard, tuple[float, tuple[Address, ...]]] = field(default_factory=dict)


class Sightings:
    """The nodes that are announcing themselves.

    Args:
        rank: orders the paths a node is heard by, best first; addresses follow their best path. The order in which
            they were first heard decides between equals.
    """

    def __init__(self, rank: Callable[[Heard], int] = lambda _: 0) -> None:
        self._rank = rank
        self._nodes: dict[str, dict[bytes, _Process]] = {}
        self._shown: dict[str, Sighting] = {}
        self.refused = 0
        """Beacons of more nodes, or of more processes of one node, than are kept."""

    def __len__(self) -> int:
        return len(self._shown)

    def nodes(self) -> list[Sighting]:
        """By node id."""
        return [self._shown[node_id] for node_id in sorted(self._shown)]

    def heard(
        self, beacon: Beacon, path: Heard, addresses: Sequence[Address], *, now: float, now_ms: int
    ) -> Change | None:
        """Take a beacon that was believed.

        Args:
            addresses: those it announced, after `dialable`.
            now, now_ms: the monotonic clock in seconds, and Unix time in milliseconds.
        """
        processes = self._nodes.get(beacon.node_id)
        if processes is None:
            if len(self._nodes) >= MAX_NODES:
                self.refused += 1
                return None
            processes = self._nodes[beacon.node_id] = {}
        process = processes.get(beacon.incarnation)
        if process is None:
            if len(processes) >= MAX_PROCESSES and not self._make_room(processes, beacon.time_ms):
                return None
            process = processes[beacon.incarnation] = _Process(
                since_ms=beacon.time_ms, latest_ms=beacon.time_ms, role=beacon.role, clock_s=0.0, first=now, last=now
            )
        process.since_ms = min(process.since_ms, beacon.time_ms)
        process.last = now
        if beacon.time_ms >= process.latest_ms:  # datagrams overtake each other
            process.latest_ms = beacon.time_ms
            process.role = beacon.role
            process.clock_s = (beacon.time_ms - now_ms) / 1000
        if path in process.paths or len(process.paths) < MAX_PATHS:
            process.paths[path] = (now, tuple(addresses))
        return self._show(beacon.node_id)

    def expire(self, now: float) -> list[Change]:
        """Forget what has been silent for `GONE_S`."""
        changes = []
        for node_id, processes in list(self._nodes.items()):
            for incarnation, process in list(processes.items()):
                process.paths = {path: kept for path, kept in process.paths.items() if now - kept[0] < GONE_S}
                if now - process.last >= GONE_S:
                    del processes[incarnation]
            if not processes:
                del self._nodes[node_id]
            if change := self._show(node_id):
                changes.append(change)
        return changes

    def _make_room(self, processes: dict[bytes, _Process], time_ms: int) -> bool:
        """The oldest process of a node gives way to a newer one: a node that crashes at each start has many."""
        oldest = min(processes, key=lambda incarnation: processes[incarnation].since_ms)
        if processes[oldest].since_ms >= time_ms:
            self.refused += 1
            return False
        del processes[oldest]
        return True

    def _show(self, node_id: str) -> Change | None:
        """Bring what is shown of a node up to date."""
        before = self._shown.get(node_id)
        processes = self._nodes.get(node_id)
        if not processes:
            return Change(Event.GONE, self._shown.pop(node_id), before) if before else None
        node = self._shown[node_id] = self._merge(node_id, processes)
        if before is None:
            return Change(Event.FOUND, node)
        if _told(before) != _told(node):
            return Change(Event.CHANGED, node, before)
        return None

    def _merge(self, node_id: str, processes: dict[bytes, _Process]) -> Sighting:
        # The newest process is the one that began last by its own clock, so neither two processes that share an id nor
        # somebody who sends an old one's beacons again can make the entry go back and forth.
        incarnation, process = max(processes.items(), key=lambda item: (item[1].since_ms, item[0]))
        paths = sorted(process.paths, key=self._rank)
        merged = dict.fromkeys(address for path in paths for address in process.paths[path][1])
        return Sighting(
            node_id=node_id,
            role=process.role,
            incarnation=incarnation,
            addresses=tuple(merged)[:MAX_ADDRESSES],
            paths=tuple(paths),
            clock_s=process.clock_s,
            first=process.first,
            last=process.last,
            rivals=sum(
                other is not process and other.latest_ms > process.since_ms + TWO_ALIVE_MS
                for other in processes.values()
            ),
        )


def _told(node: Sighting) -> tuple[object, ...]:
    """What a change of is worth telling."""
    return node.role, node.incarnation, node.addresses, node.rivals


def dialable(announced: Sequence[str], *, source: str, interface: str, own: Collection[str]) -> tuple[Address, ...]:
    """The addresses of a beacon that this host can dial.

    Loopback, and this host's own addresses (two hosts may both have a bridge at 172.17.0.1), are right only in a beacon
    from this very host. A link-local address gets the scope of the interface it was heard on: the sender's names of
    its own interfaces mean nothing here.

    Args:
        source: where the datagram came from.
        interface: name of the interface of this host that it arrived at.
        own: addresses of this host, in their canonical spelling, without scopes.
    """
    from_here = _bare(source) in own or _is_loopback(source)
    kept: dict[Address, None] = {}
    for text in announced[:MAX_ADDRESSES]:
        try:
            address = parse_address(text)
        except ConfigError:
            continue
        ip = _ip(address.host)
        if address.port == 0 or (ip is not None and (ip.is_unspecified or ip.is_multicast)):
            continue
        if not from_here and (address.is_loopback or _bare(address.host) in own):
            continue
        if ip is not None and ip.version == 6 and ip.is_link_local:
            address = Address(f"{_bare(address.host)}%{interface}", address.port)
        kept[address] = None
    return tuple(kept)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(_bare(host))
    except ValueError:
        return None


def _bare(host: str) -> str:
    """Without a scope, and in the canonical spelling where it is an IP address."""
    bare = host.partition("%")[0]
    try:
        return canonical_ip(bare)
    except ValueError:
        return bare


def _is_loopback(host: str) -> bool:
    ip = _ip(host)
    return ip is not None and ip.is_loopback
