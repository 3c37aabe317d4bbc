"""Discovery: a node tells every interface that it is there, and hears who else is.

`Beacons` belongs to one asyncio loop. Off unless somebody asks: making one does nothing until `start`. A datagram is
trusted when its tag holds, and then only to come from a member, who is where it says. Strangers cost a counter: what
is read and what is verified in a second is limited, for each source and in all.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import secrets as random
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.names import check_name, check_role
from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.errors import WireError
from mlxcel_nb.net.discovery.budget import Budget, Sources
from mlxcel_nb.net.discovery.datagrams import Datagrams, reason
from mlxcel_nb.net.discovery.findings import Findings
from mlxcel_nb.net.discovery.legs import Leg, legs
from mlxcel_nb.net.discovery.sightings import Change, Heard, Sighting, Sightings, dialable
from mlxcel_nb.net.links.addresses import is_numeric
from mlxcel_nb.net.links.resolver import addresses_of
from mlxcel_nb.util.log import get_logger, trail
from mlxcel_nb.wire.beacon import EVERY_S, NONCE_BYTES, PORT, Beacon, BeaconFilter, encode
from mlxcel_nb.wire.keys import beacon_key

log = get_logger("net.discovery")

READS_PER_S, READS_AT_ONCE = 5000, 500
"""Datagrams taken from the sockets; the kernel drops what does not fit into its buffer meanwhile."""
SOURCE_PER_S, SOURCE_AT_ONCE = 200, 400
"""Datagrams verified for one source address: room for all the nodes of a large host on all its interfaces."""
MAX_SOURCES = 1024
TURN = 64
"""Datagrams read before the loop's other work gets its turn."""
PAUSE_S = 0.05
"""Before looking again when more came than may be read."""

MAX_NAMESAKES = 16
"""Other processes under this node's id that are told of."""

LOOKUP_S = 2.0
"""For the addresses behind a name that a node is bound to."""


def unix_ms() -> int:
    """Unix time in milliseconds."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """What a node says of itself.

    Args:
        listens: the address its data plane is bound to, a wildcard for all interfaces; None for nowhere.
    """

    node_id: str
    role: str
    incarnation: bytes
    listens: Address | None = None


class Beacons:
    """Hears beacons from `start` to `stop`, and sends them where there is something to announce.

    Args:
        secrets: the cluster secret, under which beacons are sent, then an older one that is still heard.
        announce: what to say; None only listens.
        on_change: told on the loop of nodes found, changed and gone.
        prefer: how good an interface of this host is, by name, 0 for the best: addresses heard there come first.
        find_legs, clock_ms: the system's interfaces and Unix time.
    """

    def __init__(
        self,
        cluster: str,
        secrets: Iterable[Secret],
        *,
        announce: Announcement | None = None,
        on_change: Callable[[Change], None] | None = None,
        prefer: Callable[[str], int] = lambda _: 0,
        port: int = PORT,
        find_legs: Callable[[], list[Leg]] = legs,
        clock_ms: Callable[[], int] = unix_ms,
    ) -> None:
        check_name("cluster name", cluster)
        if announce is not None:
            check_name("node id", announce.node_id)
            check_role(announce.role)
        self._cluster = cluster
        self._announce = announce
        self._on_change = on_change
        self._prefer = prefer
        self._find_legs = find_legs
        self._clock_ms = clock_ms
        self._filter = BeaconFilter(cluster, ())
        self.use(secrets)
        self._sightings = Sightings(rank=self._rank)
        self._datagrams = Datagrams(port)
        self._socks: list[socket.socket] = []
        self._legs: list[Leg] = []
        self._own: frozenset[str] = frozenset()
        self._loopbacks: frozenset[str] = frozenset()
        self._listens: list[Address] = []
        self._troubles: dict[tuple[str, Heard], str] = {}
        self._namesakes: set[bytes] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.sent: collections.Counter[Heard] = collections.Counter()
        """Datagrams that left, by path."""
        self.crowded = 0

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the sockets; the first beacons leave at once, then every `EVERY_S`.

        Raises:
            ConfigError: the port is held by a program that does not share it.
        """
        loop = self._loop = asyncio.get_running_loop()
        self._listens = await _bound_addresses(self._announce.listens if self._announce else None)
        now = loop.time()
        self._reads = Budget(READS_PER_S, READS_AT_ONCE, now)
        self._sources = Sources(SOURCE_PER_S, SOURCE_AT_ONCE, MAX_SOURCES)
        self._socks = self._datagrams.open()
        self._next = now
        self._tick()
        for sock in self._socks:
            loop.add_reader(sock, self._readable, sock)

    def stop(self) -> None:
        """Fall silent and deaf, at once; no socket stays open. Twice is once."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._loop is not None:
            for sock in self._socks:
                self._loop.remove_reader(sock)
        self._socks = []
        self._datagrams.close()

    def use(self, secrets: Iterable[Secret]) -> None:
        """From now on send under the first of these, and hear whoever sends under any; on the loop."""
        keys = [beacon_key(secret.reveal()) for secret in secrets]
        self._key = keys[0]
        self._filter.use(keys)

    @property
    def nodes(self) -> list[Sighting]:
        """Those that are announcing themselves, this one excepted, by node id."""
        return self._sightings.nodes()

    def findings(self) -> Findings:
        """All that is known now."""
        heard = self._filter
        return Findings(
            nodes=tuple(self._sightings.nodes()),
            clocks=dict(sorted(heard.clocks.items())),
            foreign=heard.foreign,
            elsewhere=heard.elsewhere,
            replayed=heard.replayed,
            malformed=heard.malformed,
            crowded=self.crowded,
            troubles=tuple(f"{doing} {path}: {why}" for (doing, path), why in sorted(self._troubles.items())),
            interfaces=tuple(leg.name for leg in self._legs),
            now=self._loop.time() if self._loop else 0.0,
        )

    # -- the loop ---------------------------------------------------------------------------------

    def _later(self, when: float, what: Callable[..., None], *args: object) -> None:
        assert self._loop is not None

        def run() -> None:
            self._timers.discard(timer)
            what(*args)

        timer = self._loop.call_at(when, run)
        self._timers.add(timer)

    def _tick(self) -> None:
        """Every `EVERY_S`: see which interfaces there are, send, and forget who is silent."""
        assert self._loop is not None
        now = self._loop.time()
        self._next = max(self._next + EVERY_S, now + EVERY_S / 2)  # after a sleep of the machine: no burst
        self._later(self._next, self._tick)
        try:
            found = self._find_legs()
        except OSError as error:
            log.warning("discovery: the interfaces cannot be listed: %s", reason(error))
            found = self._legs
        self._follow(found)
        if self._announce is not None:
            self._send(self._announce)
        for change in self._sightings.expire(now):
            self._tell(change)

    def _follow(self, found: list[Leg]) -> None:
        failed = dict(self._datagrams.follow(found))
        self._legs = found
        self._own = frozenset(address for leg in found for address in leg.addresses)
        self._loopbacks = frozenset(leg.name for leg in found if leg.loopback)
        for key in [key for key in self._troubles if key[0] == "cannot hear" and key[1] not in failed]:
            del self._troubles[key]
        for path, why in failed.items():
            self._trouble("cannot hear", path, why)

    def _send(self, what: Announcement) -> None:
        there = {leg.name for leg in self._legs}
        for key in [key for key in self._troubles if key[0] == "cannot send by" and key[1].interface not in there]:
            del self._troubles[key]
        for leg in self._legs:
            addresses = leg.announces(self._listens, self._legs)
            if not addresses and what.listens is not None:
                continue  # nothing that anybody there could dial
            for way in leg.ways():
                path = Heard(leg.name, way.name)
                try:
                    self._datagrams.send(leg, way, self._datagram(what, addresses))
                except BlockingIOError:
                    continue
                except OSError as error:
                    self._trouble("cannot send by", path, reason(error))
                else:
                    self.sent[path] += 1
                    self._troubles.pop(("cannot send by", path), None)

    def _datagram(self, what: Announcement, addresses: Sequence[Address]) -> bytes:
        """With a nonce of its own, and as many of the addresses as fit."""
        beacon = Beacon(
            time_ms=self._clock_ms(),
            nonce=random.token_bytes(NONCE_BYTES),
            incarnation=what.incarnation,
            cluster=self._cluster,
            node_id=what.node_id,
            role=what.role,
            addresses=tuple(str(address) for address in addresses),
        )
        while True:
            try:
                return encode(beacon, self._key)
            except WireError:
                beacon = dataclasses.replace(beacon, addresses=beacon.addresses[:-1])

    def _trouble(self, doing: str, path: Heard, why: str) -> None:
        """Note what does not work on one interface; it is logged once, until it works or fails otherwise."""
        if self._troubles.get((doing, path)) != why:
            self._troubles[doing, path] = why
            log.warning("discovery %s %s: %s", doing, path, why)

    def _readable(self, sock: socket.socket) -> None:
        assert self._loop is not None
        for _ in range(TURN):
            if not self._reads.take(self._loop.time()):
                self._loop.remove_reader(sock)
                self._later(self._loop.time() + PAUSE_S, self._resume, sock)
                return
            try:
                arrival = self._datagrams.receive(sock)
            except OSError as error:
                log.debug("discovery: %s", reason(error))
                return
            if arrival is None:
                return
            if not self._sources.take(arrival.source, self._loop.time()):
                self.crowded += 1
            else:
                self._take(arrival.data, arrival.source, arrival.path)

    def _resume(self, sock: socket.socket) -> None:
        if self._loop is not None and sock in self._socks:
            self._loop.add_reader(sock, self._readable, sock)

    def _take(self, data: bytes, source: str, path: Heard) -> None:
        assert self._loop is not None
        now_ms = self._clock_ms()
        beacon = self._filter.accept(data, now_ms)
        if (report := self._filter.report) is not None:
            self._filter.report = None
            log.warning("discovery: a beacon is not believed. %s", report)
        if beacon is None or (self._announce is not None and beacon.node_id == self._announce.node_id):
            if beacon is not None:
                self._own_name(beacon, source)
            return
        addresses = dialable(beacon.addresses, source=source, interface=path.interface, own=self._own)
        change = self._sightings.heard(beacon, path, addresses, now=self._loop.time(), now_ms=now_ms)
        if change is not None:
            self._tell(change)

    def _own_name(self, beacon: Beacon, source: str) -> None:
        """A beacon of this node comes back to it; one of another process under the same id is told once."""
        assert self._announce is not None
        if beacon.incarnation in self._namesakes or beacon.incarnation == self._announce.incarnation:
            return
        if len(self._namesakes) < MAX_NAMESAKES:
            self._namesakes.add(beacon.incarnation)
            log.warning("discovery: another process, at %s, goes by this node's id %s", source, beacon.node_id)

    def _rank(self, path: Heard) -> int:
        """Loopback is heard only from this very host, and then nothing is nearer."""
        return -1 if path.interface in self._loopbacks else self._prefer(path.interface)

    def _tell(self, change: Change) -> None:
        if change.node.rivals and (change.before is None or not change.before.rivals):
            log.warning("discovery: several processes announce the node id %s", change.node.node_id)
        if self._on_change is not None:
            try:
                self._on_change(change)
            except Exception as error:  # noqa: BLE001  # whoever is told may fail; discovery goes on
                log.error("a handler failed on what was discovered: %s", trail(error))


async def _bound_addresses(listens: Address | None) -> list[Address]:
    """The numeric addresses behind what a node is bound to: a host's own name is often a loopback address at home."""
    if listens is None:
        return []
    if is_numeric(listens.host):
        return [listens]
    found = await addresses_of(listens.host, LOOKUP_S)
    return [Address(ip, listens.port) for ip in found] or [listens]


async def discover(
    cluster: str,
    secrets: Iterable[Secret],
    *,
    seconds: float,
    announce: Announcement | None = None,
    port: int = PORT,
    find_legs: Callable[[], list[Leg]] = legs,
    clock_ms: Callable[[], int] = unix_ms,
) -> Findings:
    """Listen for `seconds`, and tell what was heard.

    Raises:
        ConfigError: the port is held by a program that does not share it.
    """
    beacons = Beacons(cluster, secrets, announce=announce, port=port, find_legs=find_legs, clock_ms=clock_ms)
    await beacons.start()
    try:
        await asyncio.sleep(seconds)
        return beacons.findings()
    finally:
        beacons.stop()
