"""`net listen` and `net ping`: two hosts try the data plane without a cluster.

The logic behind the commands, on the caller's asyncio loop. The other end may be another implementation of the same
wire, so nothing is asked of it beyond what the wire promises.
"""

from __future__ import annotations

import asyncio
import collections
import os
import statistics
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from mlxcel_nb.cluster.address import Address, parse_address
from mlxcel_nb.cluster.config_keys import DEFAULT_CLUSTER
from mlxcel_nb.cluster.names import check_given_name, listener_id, new_incarnation, visitor_id
from mlxcel_nb.cluster.secret import Secrets
from mlxcel_nb.cluster.shape import LinkShape, Shapes
from mlxcel_nb.errors import ConfigError, PeerLost
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.net.links.link import Link, PeerInfo
from mlxcel_nb.net.links.listener import MISMATCHES, Listener
from mlxcel_nb.util.units import rate_text, trip_text
from mlxcel_nb.wire.frames import MAX_FILLER, MAX_FRAMES, PING_BYTES
from mlxcel_nb.wire.hello import SUITES, Identity, suite_number

T = TypeVar("T")

COUNT = 10
SIZE = 64

PONG_S = 10.0
"""For one pong with the largest filler over a slow line."""

LAST_PONG_S = 0.3
"""For the pong that is on its way when there are to be no more: whoever stops a ping waits for its end."""

WARNINGS, WARNINGS_S = 20, 10.0
"""A listener prints at most so many refusals in so many seconds; all are counted."""

LISTENER_ROLE, VISITOR_ROLE = "listener", "visitor"


@dataclass(frozen=True, kw_only=True)
class PingReport:
    """What a ping found out.

    Args:
        size: bytes of filler in each ping.
        shape: how what this side sent was shaped, in words; "" for the line as it is.
        connect_s: from the first packet to the first control frame: look-up, TCP and handshake.
        round_trips_s: one per ping that was answered, in order.
        lost: why there are no more of them, where the peer was lost on the way.
    """

    peer: PeerInfo
    cluster: str
    cipher: str
    size: int
    connect_s: float
    shape: str
    round_trips_s: tuple[float, ...]
    lost: PeerLost | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.round_trips_s)

    @property
    def bytes_per_s(self) -> float:
        """Payload that crossed the line, both directions added, in the time the pings took."""
        payload = 2 * len(self.round_trips_s) * (PING_BYTES + self.size)
        return payload / max(sum(self.round_trips_s), 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`."""
        peer = self.peer
        return {
            "address": peer.where,
            "node_id": peer.node_id,
            "role": peer.role,
            "cluster": self.cluster,
            "data_addr": peer.data_addr,
            "incarnation": peer.incarnation.hex(),
            "cipher": self.cipher,
            "features": list(peer.hello["features"]),
            "versions": peer.versions,
            "connect_s": self.connect_s,
            "shape": self.shape,
            "count": len(self.round_trips_s),
            "size": self.size,
            "round_trips_s": list(self.round_trips_s),
            "rtt_min_s": min(self.round_trips_s),
            "rtt_median_s": self.median_s,
            "rtt_max_s": max(self.round_trips_s),
            "bytes_per_s": self.bytes_per_s,
            "lost": self.lost.cause if self.lost else None,
        }

    def lines(self) -> list[str]:
        """The same for people."""
        peer = self.peer
        listens = f", listens on {peer.data_addr}" if peer.data_addr else ""
        versions = ", ".join(f"{name} {version}" for name, version in sorted(peer.versions.items()))
        extremes = (min(self.round_trips_s), self.median_s, max(self.round_trips_s))
        count = len(self.round_trips_s)
        trips = " / ".join(trip_text(seconds) for seconds in extremes)
        found = [
            f"{peer.node_id} ({peer.role}) of cluster {self.cluster} at {peer.where}{listens}",
            f"versions: {versions or 'not told'}",
            f"{self.cipher}, connected in {trip_text(self.connect_s)}"
            + (f", this side shaped to {self.shape}" if self.shape else ""),
            f"{count} ping{'s' if count > 1 else ''} of {self.size} bytes: {trips} (least, median, most)"
            + (f", {rate_text(self.bytes_per_s)}" if self.size else ""),
        ]
        differing = peer.version_differences()
        if differing:
            pairs = ", ".join(f"{name} {ours} here, {theirs} there" for name, (ours, theirs) in differing.items())
            found.append(f"warning: versions differ: {pairs}")
        return found


@dataclass(frozen=True, kw_only=True)
class Visits:
    """Who came while a listener was there.

    Args:
        refused: how many were turned away for another secret, version, suite or cluster, by the error's code.
    """

    accepted: int
    refused: dict[str, int]

    @property
    def in_vain(self) -> bool:
        """Whether all who came were turned away."""
        return bool(self.refused) and not self.accepted

    def __str__(self) -> str:
        return ", ".join(f"{count} for {_WHY[code]}" for code, count in sorted(self.refused.items()))


_WHY = {
    "authentication": "another secret",
    "version": "another version",
    "suite": "another cipher suite",
    "cluster-name": "another cluster",
}


class _Warnings:
    """Passes lines on at once, but no more than a person reads when somebody knocks and knocks."""

    def __init__(self, warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._said: collections.deque[float] = collections.deque(maxlen=WARNINGS)

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if len(self._said) < WARNINGS or now - self._said[0] > WARNINGS_S:
            self._said.append(now)
            self._warn(line)


async def listen(
    bind: str,
    secrets: Secrets,
    *,
    cluster: str = DEFAULT_CLUSTER,
    node_id: str | None = None,
    suite: str = SUITES[1],
    rekey_every: int | None = None,
    shape: LinkShape | None = None,
    echo: Callable[[str], object] = print,
    warn: Callable[[str], object] | None = None,
    ready: Callable[[Listener], object] | None = None,
    stop: asyncio.Event | None = None,
) -> Visits:
    """Answer pings at `bind` until `stop` is set or it is cancelled; frames that are no pings are dropped.

    Args:
        shape: how what is sent is shaped.
        echo: prints a line, `listening on HOST:PORT` being the first.
        warn: prints a line for each peer that is turned away; the log has it otherwise.
        ready: given the listener when it listens: it has the address, and takes other secrets.

    Raises:
        ConfigError: the address cannot be bound.
    """
    where = parse_address(bind, default_port=0)
    identity = _identity(cluster, node_id or listener_id(), LISTENER_ROLE, suite)
    _check_rekey(rekey_every)
    links: set[ControlLink] = set()

    def take(link: Link) -> None:
        links.add(ControlLink(link, on_frame=_drop, on_state=forget))

    def forget(link: ControlLink, state: str, reason: str) -> None:
        del reason
        if state in ("dead", "closed"):
            links.discard(link)

    on_mismatch = _Warnings(warn) if warn is not None else None
    listener = Listener(
        identity, secrets, on_link=take, rekey_every=rekey_every, shapes=_always(shape), on_mismatch=on_mismatch
    )
    address = await listener.start(where.host, where.port)
    try:
        if ready is not None:
            ready(listener)
        echo(f"listening on {address}")
        if shape is not None:
            echo(f"what is sent is shaped: {shape.words}")
        await (stop or asyncio.Event()).wait()
    finally:
        await listener.close()
        for link in list(links):
            link.close("the listener ends")
    refused = {code: count for code, count in listener.counts.items() if code in MISMATCHES}
    return Visits(accepted=listener.counts["established"], refused=refused)


async def ping(
    address: str | Address,
    secrets: Secrets,
    *,
    cluster: str = DEFAULT_CLUSTER,
    node_id: str | None = None,
    suite: str = SUITES[1],
    rekey_every: int | None = None,
    shape: LinkShape | None = None,
    count: int = COUNT,
    size: int = SIZE,
    echo: Callable[[str], object] | None = None,
    stop: asyncio.Event | None = None,
) -> PingReport:
    """Connect to a node, ping it `count` times with `size` bytes of filler, and leave.

    Args:
        stop: when set, connecting ends at once, the pong that is on its way has `LAST_PONG_S` to come, and there is no
            further ping; the report is of those there were.
        shape: how what is sent is shaped; what comes back is the other side's affair.

    Raises:
        PeerLost: nobody there, or gone before the first pong; later, the report says so.
        WireError: the peer does not echo what it was sent.
        HandshakeError: wrong secret, version, suite or cluster, or another refusal; the message says which.
        CancelledError: stopped before the first pong; nothing is left of the connection.
    """
    if count < 1:
        raise ConfigError(f"{count} pings", advice="Ask for at least one.")
    if not 0 <= size <= MAX_FILLER:
        raise ConfigError(f"pings of {size} bytes", advice=f"0 to {MAX_FILLER} bytes are possible.")
    _check_rekey(rekey_every)
    to = parse_address(address) if isinstance(address, str) else address
    if not to.port:
        raise ConfigError(f"nobody listens at {to}", advice="Write the port that the node says it listens on.")
    identity = _identity(cluster, node_id or visitor_id(), VISITOR_ROLE, suite)
    began = time.perf_counter()
    dialling = dial(identity, secrets, to, rekey_every=rekey_every, shapes=_always(shape))
    link = await _unless(stop, dialling, grace_s=0.0)
    if link is None:
        raise asyncio.CancelledError
    connect_s = time.perf_counter() - began
    control = ControlLink(link, on_frame=_drop, on_state=_drop, quiet=True)
    filler = os.urandom(size)
    round_trips: list[float] = []
    lost: PeerLost | None = None
    try:
        while len(round_trips) < count and not (round_trips and stop and stop.is_set()):
            trip = await _unless(stop, control.ping(filler, within_s=PONG_S), grace_s=LAST_PONG_S)
            if trip is not None:
                round_trips.append(trip)
            elif not round_trips:
                raise asyncio.CancelledError
    except PeerLost as error:
        lost = error
        if not round_trips:
            raise
    finally:
        control.close("done")
    report = PingReport(
        peer=link.peer,
        cluster=cluster,
        cipher=link.suite_name,
        size=size,
        connect_s=connect_s,
        shape=shape.words if shape else "",
        round_trips_s=tuple(round_trips),
        lost=lost,
    )
    if echo is not None:
        for line in report.lines():
            echo(line)
    return report


async def _unless(stop: asyncio.Event | None, work: Coroutine[Any, Any, T], *, grace_s: float) -> T | None:
    """What `work` returns or raises; None, and it is cancelled, where it goes on `grace_s` after `stop` was set."""
    if stop is None:
        return await work
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await asyncio.wait({working}, timeout=grace_s)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def _identity(cluster: str, node_id: str, role: str, suite: str) -> Identity:
    check_given_name("cluster name", cluster)
    check_given_name("node id", node_id)
    return Identity(
        cluster=cluster, node_id=node_id, role=role, incarnation=new_incarnation(), suite=suite_number(suite)
    )


def _always(shape: LinkShape | None) -> Shapes | None:
    return None if shape is None else lambda _: shape


def _check_rekey(rekey_every: int | None) -> None:
    if rekey_every is not None and not 1 <= rekey_every < MAX_FRAMES:
        raise ConfigError(f"a rekey every {rekey_every} frames", advice=f"1 to {MAX_FRAMES - 1} are possible.")


def _drop(*_: object) -> None:
    """Takes whatever a handler is given; a visitor has no use for it."""
