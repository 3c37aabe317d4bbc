"""From an accepted verdict to a `Link`: the first control frame, both ways. On an asyncio loop.

The bytes go through `loop.sock_*` calls, not streams: when this is done nothing of asyncio's holds the socket, and a
hot link may take it to another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from typing import Any

from mlxcel_nb.cluster.shape import LinkShape, Shapes
from mlxcel_nb.errors import HandshakeError, WireError
from mlxcel_nb.net.links.link import Link, PeerInfo, dialled_address, first_message, read_first_message
from mlxcel_nb.wire import messages
from mlxcel_nb.wire.frame_reader import FrameReader
from mlxcel_nb.wire.frames import Frame, Kind, Opener, Sealer, close_reason
from mlxcel_nb.wire.handshake import Established
from mlxcel_nb.wire.hello import remote, suite_name

READ_BYTES = 64 * 1024

MAX_FIRST_BYTES = 64 * 1024
"""Of a first message: it is kept as long as the connection lives."""


async def open_link(
    sock: socket.socket,
    established: Established,
    *,
    where: str,
    dialled: bool,
    hello: Mapping[str, Any] | None,
    rekey_every: int | None = None,
    shapes: Shapes | None = None,
) -> Link:
    """Say the first message, hear the peer's, and make the link. The caller bounds the time and closes on errors.

    Args:
        where: the peer, for error texts.
        hello: merged into our own first message.
        shapes: how what is sent to a peer is shaped: `sock` is then taken over, and the link has another in its place.

    Raises:
        HandshakeError: the peer's first frame is not one this side can work with.
    """
    address = dialled_address(sock)
    shape = shapes(established.peer.node_id) if shapes is not None else None
    sealer = Sealer(established.send, established.suite, rekey_every=rekey_every)
    reader = FrameReader(Opener(established.receive, established.suite), established.leftover)
    if shape is not None:
        sock = _shaped(sock, shape)
    try:
        message = await _exchange(sock, sealer, reader, where, hello)
    except BaseException:
        if shape is not None:
            sock.close()
        raise
    return Link(
        sock=sock,
        peer=PeerInfo.of(established.peer, address, message),
        suite_name=suite_name(established.suite),
        sealer=sealer,
        reader=reader,
        dialled=dialled,
        path_keys=established.path_keys,
        transports=established.transports,
        shape=shape,
    )


def _shaped(sock: socket.socket, how: LinkShape) -> socket.socket:
    from mlxcel_nb.net.shaping.relay import shape  # who does not ask for it does not pay for it

    return shape(sock, how)


async def _exchange(
    sock: socket.socket, sealer: Sealer, reader: FrameReader, where: str, hello: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Say our first message and return the peer's."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, sealer.seal(Kind.CONTROL, 0, messages.pack(first_message(hello))))
    try:
        frame = await _first_frame(sock, reader, where)
        if frame.kind is Kind.CLOSE:
            raise remote(HandshakeError(f"{where} closed the connection: {close_reason(frame.payload)}"))
        if frame.kind is not Kind.CONTROL or reader.opener.rekeys:  # the reader deals with rekey frames by itself
            kind = Kind.REKEY if reader.opener.rekeys else frame.kind
            raise HandshakeError(f"{where} sent a {kind.name.lower()} frame before its first control frame")
        if len(frame.payload) > MAX_FIRST_BYTES:
            raise HandshakeError(f"{where} sent a first message of {len(frame.payload)} bytes")
        return read_first_message(messages.unpack(frame.payload))
    except BaseException as error:
        if not isinstance(error, WireError):
            reason = "given up before the first control frame came"
        else:
            reason = "" if isinstance(error, HandshakeError) and not error.local else error.cause
        with contextlib.suppress(OSError):
            sock.send(sealer.seal_close(reason))
        raise


async def _first_frame(sock: socket.socket, reader: FrameReader, where: str) -> Frame:
    loop = asyncio.get_running_loop()
    while True:
        if (frame := reader.next_frame()) is not None:
            return frame
        data = await loop.sock_recv(sock, READ_BYTES)
        if not data:
            raise HandshakeError(f"{where} closed the connection before its first message")
        reader.feed(data)
