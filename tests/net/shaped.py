"""Links made slower, for the tests of them: with their loop, for threads, and bare."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import psutil

from mlxcel_nb.cluster.shape import parse_link
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.links.listener import Listener
from mlxcel_nb.net.shaping import relay as shaping
from tests.net.helpers import SECRET, identity, listening, run
from tests.waiting import until

SLACK_S = 2.0
"""For a machine that is busy with something else."""


def descriptors() -> int:
    return psutil.Process().num_fds()


def relays() -> int:
    return sum(thread.name == "shaped-links" for thread in threading.enumerate())


@contextlib.contextmanager
def nothing_stays() -> Iterator[None]:
    """What is done within ends without the thread and with the descriptors it began with."""
    before = descriptors()
    yield
    assert until(lambda: relays() == 0 and descriptors() <= before), (relays(), descriptors(), before)


@contextlib.asynccontextmanager
async def shaped(text: str, theirs: str | None = None) -> AsyncIterator[tuple[Link, Link]]:
    """The dialled and the accepted end of a link that is shaped at both."""
    here, there = parse_link(text), parse_link(text if theirs is None else theirs)
    async with listening(shapes=lambda _: there) as (_, address, links):
        ours = await dial(identity("client"), SECRET, address, shapes=lambda _: here)
        try:
            yield ours, await links.get()
        finally:
            ours.close()


@contextlib.contextmanager
def shaped_hot(text: str) -> Iterator[tuple[HotLink, HotLink]]:
    """The same for threads."""

    async def make() -> tuple[Link, Link]:
        links: asyncio.Queue[Link] = asyncio.Queue()
        shape = parse_link(text)
        listener = Listener(identity("server"), [SECRET], on_link=links.put_nowait, shapes=lambda _: shape)
        address = await listener.start()
        ours = await dial(identity("client"), SECRET, address, shapes=lambda _: shape)
        theirs = await links.get()
        await listener.close()
        return ours, theirs

    ends = [HotLink(link) for link in run(make())]
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()


def pair(text: str) -> tuple[socket.socket, socket.socket]:
    """A shaped end of a TCP connection over loopback, and the other end as it is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    near = shaping.shape(ours, parse_link(text))
    near.settimeout(10)
    theirs.settimeout(10)
    return near, theirs


def read_all(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def send_all(sock: socket.socket, data: bytes) -> None:
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
