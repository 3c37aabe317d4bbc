"""Discovery datagrams: how a node says it is there, and which of those heard are believed.

Pure: the caller brings the bytes and the time. Anybody can send a datagram; one is trusted to be from a member when
its tag holds, and to be fresh when its time and nonce say so.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from mlxcel_nb.cluster.names import INCARNATION_BYTES, check_name, check_role, has_control
from mlxcel_nb.errors import ConfigError, WireError
from mlxcel_nb.wire.fields import Reader, str8
from mlxcel_nb.wire.hello import MAGIC, VERSION

PORT = 49555
MULTICAST_V4 = "239.77.88.78"
MULTICAST_V6 = "ff02::4d58:4e42"
EVERY_S = 2.0

MAX_BYTES = 1200
TYPE = 16
NONCE_BYTES = 16
TAG_BYTES = 32
WINDOW_MS = 30_000
REPORT_EVERY_MS = 60_000
MAX_NONCES = 65_536
"""Fresh beacons that are remembered; at one every 2 s that is thousands of nodes."""
MAX_CLOCKS = 256
"""Nodes whose clocks are noted as too far off."""
FORGET_EVERY_MS = 1_000

_HEAD = struct.Struct(f"!4sHBBQ{NONCE_BYTES}s{INCARNATION_BYTES}s")


@dataclass(frozen=True, kw_only=True)
class Beacon:
    """What a node announces. `time_ms` is Unix time; `nonce` is fresh for every datagram."""

    time_ms: int
    nonce: bytes
    incarnation: bytes
    cluster: str
    node_id: str
    role: str
    addresses: tuple[str, ...]


def encode(beacon: Beacon, key: bytes) -> bytes:
    """The datagram, tagged under `key` (K_beacon)."""
    if len(beacon.nonce) != NONCE_BYTES or len(beacon.incarnation) != INCARNATION_BYTES:
        raise ValueError("nonce and incarnation of a beacon have 16 bytes")
    body = b"".join(
        (
            _HEAD.pack(MAGIC, VERSION, TYPE, 0, beacon.time_ms, beacon.nonce, beacon.incarnation),
            str8(beacon.cluster),
            str8(beacon.node_id),
            str8(beacon.role),
            bytes([len(beacon.addresses)]),
            *map(str8, beacon.addresses),
        )
    )
    datagram = body + _tag(key, body)
    if len(datagram) > MAX_BYTES:
        raise WireError(f"a beacon of {len(datagram)} bytes; {MAX_BYTES} fit into a datagram: announce fewer addresses")
    return datagram


def verify(datagram: bytes, key: bytes) -> bool:
    """Whether a holder of `key` made this beacon. Looks at nothing but its size, magic and tag."""
    if not _HEAD.size + TAG_BYTES < len(datagram) <= MAX_BYTES or not datagram.startswith(MAGIC):
        return False
    body, tag = datagram[:-TAG_BYTES], datagram[-TAG_BYTES:]
    return hmac.compare_digest(tag, _tag(key, body))


def decode(datagram: bytes, key: bytes) -> Beacon:
    """The beacon in `datagram`.

    Raises:
        WireError: the tag does not hold, or what it covers is not exactly one beacon of this version.
    """
    if not verify(datagram, key):
        raise WireError("a beacon of somebody who does not know the secret")
    reader = Reader(datagram[:-TAG_BYTES], "a beacon")
    _, version, kind, zero, time_ms, nonce, incarnation = _HEAD.unpack(reader.take(_HEAD.size, "head"))
    if (version, kind, zero) != (VERSION, TYPE, 0):
        raise WireError(f"a beacon of version {version}, type {kind}; this side knows version {VERSION}, type {TYPE}")
    cluster, node_id, role = reader.str8("cluster name"), reader.str8("node id"), reader.str8("role")
    addresses = tuple(reader.str8("address") for _ in range(reader.integer(1, "count")))
    reader.finish()
    try:
        check_name("cluster name", cluster)
        check_name("node id", node_id)
        check_role(role)
    except ConfigError as error:
        raise WireError(f"a beacon: {error.cause}") from None
    if any(has_control(address) for address in addresses):
        raise WireError("a beacon with a control character in an address")
    return Beacon(
        time_ms=time_ms,
        nonce=nonce,
        incarnation=incarnation,
        cluster=cluster,
        node_id=node_id,
        role=role,
        addresses=addresses,
    )


class BeaconFilter:
    """Decides which datagrams are believed. One owner.

    Args:
        cluster: the only cluster that is listened to.
        keys: K_beacon of the current secret, then of an older one during a rotation.
    """

    def __init__(self, cluster: str, keys: Sequence[bytes]) -> None:
        self._cluster = cluster
        self.use(keys)
        self._seen: dict[bytes, int] = {}
        self._forgotten_ms: int | None = None
        self._reported: dict[str, int] = {}
        self.foreign = 0
        """Datagrams without a good tag: counted, not logged."""
        self.replayed = 0
        self.malformed = 0
        self.elsewhere = 0
        """Beacons of another cluster under the same secret."""
        self.clocks: dict[str, float] = {}
        """By node, how many seconds its last beacon was ahead of this side's clock, where that was too much."""
        self.report: str | None = None
        """A sentence about a good tag with a bad time, once a minute for a node; the caller shows and clears it."""

    def use(self, keys: Sequence[bytes]) -> None:
        """Believe what is tagged under one of these from now on."""
        self._keys = tuple(keys)

    def accept(self, datagram: bytes, now_ms: int) -> Beacon | None:
        """The beacon, when it is a fresh one of our cluster."""
        key = next((key for key in self._keys if verify(datagram, key)), None)
        if key is None:
            self.foreign += 1
            return None
        try:
            beacon = decode(datagram, key)
        except WireError:
            self.malformed += 1
            return None
        if beacon.cluster != self._cluster:
            self.elsewhere += 1
            return None
        if abs(beacon.time_ms - now_ms) > WINDOW_MS:
            self._note_time(beacon, now_ms)
            return None
        self._forget(now_ms)
        if beacon.nonce in self._seen or len(self._seen) >= MAX_NONCES:
            self.replayed += 1
            return None
        self._seen[beacon.nonce] = beacon.time_ms
        self.clocks.pop(beacon.node_id, None)
        return beacon

    def _forget(self, now_ms: int) -> None:
        """Drop nonces whose beacons would be refused for their time anyway; once a second, for there may be many."""
        if self._forgotten_ms is not None and 0 <= now_ms - self._forgotten_ms < FORGET_EVERY_MS:
            return
        self._forgotten_ms = now_ms
        self._seen = {nonce: time_ms for nonce, time_ms in self._seen.items() if now_ms - time_ms <= WINDOW_MS}

    def _note_time(self, beacon: Beacon, now_ms: int) -> None:
        node, seconds = beacon.node_id, (beacon.time_ms - now_ms) / 1000
        if node in self.clocks or len(self.clocks) < MAX_CLOCKS:
            self.clocks[node] = seconds
        last = self._reported.get(node)
        if last is not None and 0 <= now_ms - last < REPORT_EVERY_MS:
            return
        if last is None and len(self._reported) >= MAX_CLOCKS:
            self._reported = {n: ms for n, ms in self._reported.items() if 0 <= now_ms - ms < REPORT_EVERY_MS}
            if len(self._reported) >= MAX_CLOCKS:
                return
        self._reported[node] = now_ms
        self.report = f"{node}: {clock_text(seconds)}"


def clock_text(seconds: float) -> str:
    """What a beacon from `seconds` ahead of this side's clock (behind it, if negative) means."""
    if seconds > 0:
        return f"its clock is {round(seconds)} seconds ahead of this one"
    return f"its clock is {round(-seconds)} seconds behind this one, or somebody replays an old recording"


def _tag(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, body, "sha256")
