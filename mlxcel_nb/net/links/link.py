"""One established connection, before anything drives it, and the first thing said on it.

A `Link` is made by `dial` or by a `Listener` on an asyncio loop, when the handshake and the first control frame of
either side are done. It is then given to exactly one driver: a `ControlLink` on the loop, or a `HotLink` on another
thread; from there on nobody else reads or writes its socket. The peer has proved that it knows the cluster secret;
what it says of itself in the first frame is taken on its word.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.shape import LinkShape
from mlxcel_nb.cluster.transports import TCP_BIT
from mlxcel_nb.errors import HandshakeError
from mlxcel_nb.net.links.addresses import normal_ip
from mlxcel_nb.net.links.resolver import zoned
from mlxcel_nb.util.versions import local_versions
from mlxcel_nb.wire.frame_reader import FrameReader
from mlxcel_nb.wire.frames import Sealer
from mlxcel_nb.wire.handshake import Hello
from mlxcel_nb.wire.keys import DirectionKeys

SCHEMA = 1
"""Schema of the control messages that this side speaks."""

SHARED_MEMORY = "shared-memory"
"""A feature: this side answers an offer of it on a hot link (`net.shared_memory`), if only with a reason against it."""

FEATURES = ("credit", "rekey", SHARED_MEMORY, "tensor-lz4", "tensor-split")

MAX_HELLO_ENTRIES = 64
"""Entries of `features` and `versions` that are kept of what a peer sends."""


BENT = "Install the same mlxcel-nb on both; if they have it, something between them changes what is sent."
"""What to do about a peer that does not keep to the contract of the wire."""


def first_message(extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What this side says first on every connection; `extra` tells what the connection is for."""
    return {**(extra or {}), "schema": SCHEMA, "features": list(FEATURES), "versions": dict(local_versions())}


def read_first_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A peer's first message; of `features` and `versions` only what can be read is left.

    Raises:
        HandshakeError: another schema, with the reason that the close frame carries.
    """
    schema = message.get("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        what = f"unknown schema {schema!r:.40} of control messages; this side speaks {SCHEMA}"
        raise HandshakeError(what, advice="Install the same mlxcel-nb on both.")
    features, versions = message.get("features"), message.get("versions")
    listed = [f for f in features if isinstance(f, str)] if isinstance(features, list) else []
    told = [(k, v) for k, v in versions.items() if isinstance(v, str)] if isinstance(versions, dict) else []
    return {**message, "features": listed[:MAX_HELLO_ENTRIES], "versions": dict(told[:MAX_HELLO_ENTRIES])}


@dataclass(frozen=True, kw_only=True)
class PeerInfo:
    """Who is at the other end.

    `node_id`, `role`, `incarnation` and `data_addr` come from the handshake, `address` from the socket (a link-local
    one with its interface), `hello` is the peer's first control message.
    """

    node_id: str
    role: str
    incarnation: bytes
    data_addr: str
    address: tuple[str, int]
    hello: Mapping[str, Any]

    @classmethod
    def of(cls, hello: Hello, address: tuple[str, int], message: Mapping[str, Any]) -> PeerInfo:
        return cls(
            node_id=hello.node_id,
            role=hello.role,
            incarnation=hello.incarnation,
            data_addr=hello.data_addr,
            address=address,
            hello=message,
        )

    @property
    def where(self) -> str:
        """The address as `host:port`, for people."""
        host, port = self.address
        return str(Address(host, port)) if host else "an address that is gone"

    @property
    def versions(self) -> dict[str, str]:
        """Library versions at the peer."""
        return dict(self.hello.get("versions", {}))

    def version_differences(self) -> dict[str, tuple[str, str]]:
        """Libraries both sides have in different versions: name to (ours, theirs). A warning, never a refusal."""
        ours = local_versions()
        return {k: (ours[k], theirs) for k, theirs in self.versions.items() if k in ours and ours[k] != theirs}


def peer_address(sock: socket.socket) -> tuple[str, int]:
    """Address and port of the other end, IPv4 spelled as IPv4 however it came; empty when it is gone already."""
    try:
        name = sock.getpeername()
    except OSError:
        return "", 0
    return normal_ip(name[0]), name[1]


def dialled_address(sock: socket.socket) -> tuple[str, int]:
    """As `peer_address`, with the interface behind a link-local one: without it nobody can dial that."""
    ip, port = peer_address(sock)
    try:
        name = sock.getpeername()
        return (zoned(name) if ip and name[0] == ip else ip), port
    except OSError:  # gone meanwhile
        return ip, port


def local_address(sock: socket.socket) -> str:
    """This end's IP address, without a zone; empty when the connection is gone, or is not `sock` itself."""
    try:
        name = sock.getsockname()
    except OSError:
        return ""
    return normal_ip(name[0]).partition("%")[0] if isinstance(name, tuple) else ""


class Driver(Protocol):
    """What a driver on the listener's own loop can do for it."""

    async def probe(self) -> bool:
        """Whether the peer answers a ping within `times.PROBE_S`."""

    def give_up(self, reason: str) -> None:
        """End the link, telling the peer."""


@dataclass(eq=False)
class Link:
    """An established connection; `sock` is non-blocking, `reader` may hold bytes that came early.

    With a `shape`, `sock` is the near end of `net.shaping.relay` and not the connection itself.
    `driver` is set by a driver that can ping; hot links and links that still wait for one have none. `path_keys` gives
    the keys, to send and to receive with, of a further path between the same two; `transports` are the bits that both
    named. `path` and `why` are for people: the way it takes, as "wired eth0", and why no better one.
    """

    sock: socket.socket
    peer: PeerInfo
    suite_name: str
    sealer: Sealer
    reader: FrameReader
    dialled: bool
    path_keys: Callable[[int], tuple[DirectionKeys, DirectionKeys]]
    transports: int = TCP_BIT
    transport: str = "tcp"
    path: str = ""
    why: str = ""
    shape: LinkShape | None = None
    since: float = field(default_factory=time.monotonic)
    driver: Driver | None = None
    _at_end: list[Callable[[], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the link has ended, on whichever thread ends it; now, if it has."""
        with self._lock:
            if not self._closed:
                self._at_end.append(callback)
                return
        callback()

    def close(self) -> None:
        """Close the socket. For the owner, or for whoever ends a link that has none; twice is once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            callbacks, self._at_end = self._at_end, []
        self.sock.close()
        self.driver = None
        for callback in callbacks:
            callback()

    def hang_up(self) -> None:
        """End the connection from any thread: the owner's next read or write fails, and the owner closes."""
        with self._lock:
            if not self._closed:
                try:
                    self.sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return

    def __repr__(self) -> str:
        return f"<link to {self.peer.node_id} at {self.peer.where}>"
