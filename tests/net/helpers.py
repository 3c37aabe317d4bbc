"""Ends of real connections over loopback, for the tests of this folder."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.cluster.secret import Secret, Secrets, random_secret
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.links.dial import Dialler, dial
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.links.listener import Listener
from mlxcel_nb.wire.handshake import ClientHandshake, Identity, State

SECRET = random_secret()
OTHER_SECRET = random_secret()


def identity(node_id: str, **more: Any) -> Identity:
    defaults = {"cluster": "test", "role": "worker", "incarnation": new_incarnation()}
    return Identity(node_id=node_id, **{**defaults, **more})


def dialler(node_id: str) -> Dialler:
    """Makes the connections of a node that knows the secret."""
    me = identity(node_id)
    return Dialler(identity=lambda: me, secrets=Secrets(SECRET))


def soon(seconds: float) -> float:
    """A deadline so far from now."""
    return time.monotonic() + seconds


def both(*calls: Callable[[], Any]) -> list[Any]:
    """Run each call on a thread of its own; their results, or the first error."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(15) for future in [pool.submit(call) for call in calls]]


def run(coro: Coroutine[Any, Any, Any], limit_s: float = 20.0) -> Any:
    """`asyncio.run` with the case's wall-clock limit."""

    async def limited() -> Any:
        async with asyncio.timeout(limit_s):
            return await coro

    return asyncio.run(limited())


@contextlib.asynccontextmanager
async def listening(
    node_id: str = "server", secrets: tuple[Secret, ...] = (SECRET,), **more: Any
) -> AsyncIterator[tuple[Listener, Address, asyncio.Queue[Link]]]:
    """A listener on loopback and the links it made; those that are left are closed at the end."""
    links: asyncio.Queue[Link] = asyncio.Queue()
    taken: list[Link] = []

    def take(link: Link) -> None:
        taken.append(link)
        links.put_nowait(link)

    suite = more.pop("suite", 1)
    cluster = more.pop("cluster", "test")
    listener = Listener(identity(node_id, suite=suite, cluster=cluster), secrets, on_link=take, **more)
    address = await listener.start()
    try:
        yield listener, address, links
    finally:
        await listener.close()
        for link in taken:
            link.close()


@contextlib.asynccontextmanager
async def link_pair(*, rekey_every: int | None = None) -> AsyncIterator[tuple[Link, Link]]:
    """The dialled and the accepted end of one connection."""
    async with listening(rekey_every=rekey_every) as (_, address, links):
        ours = await dial(identity("client"), SECRET, address, rekey_every=rekey_every)
        try:
            yield ours, await links.get()
        finally:
            ours.close()


class Heard:
    """A `ControlLink` and everything it was told."""

    def __init__(self, link: Link, **more: Any) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.streamed: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.states: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        handlers: dict[str, Callable[..., Any]] = {
            "on_message": lambda _, message: self.messages.put_nowait(message),
            "on_stream": lambda _, message: self.streamed.put_nowait(message),
            "on_state": lambda _, state, reason: self.states.put_nowait((state, reason)),
        }
        self.link = ControlLink(link, **{**handlers, **more})


@contextlib.asynccontextmanager
async def control_pair(**more: Any) -> AsyncIterator[tuple[Heard, Heard]]:
    """Both ends of one connection, driven."""
    async with link_pair(**more) as (ours, theirs):
        ends = Heard(ours), Heard(theirs)
        try:
            yield ends
        finally:
            for end in ends:
                end.link.close("the test is over")


def detached_pairs(count: int = 1, *, rekey_every: int | None = None) -> list[tuple[Link, Link]]:
    """Connections whose loop is gone: ready for hot links on any thread."""

    async def make() -> list[tuple[Link, Link]]:
        made = []
        links: asyncio.Queue[Link] = asyncio.Queue()
        listener = Listener(identity("server"), [SECRET], on_link=links.put_nowait, rekey_every=rekey_every)
        address = await listener.start()
        for n in range(count):
            ours = await dial(identity(f"client-{n}"), SECRET, address, rekey_every=rekey_every)
            made.append((ours, await links.get()))
        await listener.close()
        return made

    return run(make())


@contextlib.contextmanager
def hot_pair(*, rekey_every: int | None = None) -> Iterator[tuple[HotLink, HotLink]]:
    ours, theirs = detached_pairs(rekey_every=rekey_every)[0]
    ends = HotLink(ours), HotLink(theirs)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


@contextlib.asynccontextmanager
async def raw_connection(address: Address) -> AsyncIterator[socket.socket]:
    """A plain TCP connection of a stranger's."""
    sock = socket.socket()
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (address.host, address.port))
        yield sock
    finally:
        sock.close()


async def read_all(sock: socket.socket) -> bytes:
    """Everything until the other end closes; a reset counts as one."""
    loop, data = asyncio.get_running_loop(), b""
    with contextlib.suppress(ConnectionError):
        while piece := await loop.sock_recv(sock, 65536):
            data += piece
    return data


async def shake_hands(sock: socket.socket, handshake: ClientHandshake, *, piece: int = 65536) -> None:
    """Drive a client's handshake over `sock`, sending `piece` bytes at a time."""
    loop = asyncio.get_running_loop()
    while handshake.state is not State.ESTABLISHED:
        data = handshake.data_to_send()
        for at in range(0, len(data), piece):
            await loop.sock_sendall(sock, data[at : at + piece])
        if received := await loop.sock_recv(sock, piece):
            handshake.receive_data(received)
        else:
            handshake.receive_eof()


def deliver(link: HotLink, frames: Sequence[memoryview]) -> None:
    """Put `frames` on the connection of `link` as they are, by a thread that may block."""
    link.link.sock.setblocking(True)
    for frame in frames:
        link.link.sock.sendall(frame)
    link.link.sock.setblocking(False)
