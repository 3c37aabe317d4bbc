"""`net listen` and `net ping` between two ends, and against a peer that is not ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.secret import Secrets
from mlxcel_nb.errors import (
    AuthenticationFailed,
    ClusterMismatch,
    ConfigError,
    HandshakeError,
    PeerLost,
    SuiteMismatch,
    WireError,
)
from mlxcel_nb.net.links.listener import Listener
from mlxcel_nb.net.measuring import ping as ping_module
from mlxcel_nb.net.measuring.ping import listen, ping
from mlxcel_nb.util import times
from mlxcel_nb.wire import messages
from mlxcel_nb.wire.frame_reader import FrameReader
from mlxcel_nb.wire.frames import MAX_FILLER, Kind, Opener, Sealer
from mlxcel_nb.wire.handshake import ClientHandshake, Established
from mlxcel_nb.wire.hello import HEADER, MAGIC
from tests.net.helpers import OTHER_SECRET, SECRET, identity, listening, raw_connection, run, shake_hands


@contextlib.asynccontextmanager
async def listener(**more) -> AsyncIterator[tuple[Address, list[str]]]:
    said: list[str] = []
    ready: asyncio.Future[Listener] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(
        listen("127.0.0.1:0", Secrets(SECRET), echo=said.append, ready=ready.set_result, **more)
    )
    both: list[asyncio.Future] = [ready, task]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    try:
        address = (await ready).address
        assert address is not None
        yield address, said
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_ping_tells_who_is_there_and_how_fast():
    async def case():
        async with listener(node_id="mac-1") as (address, said):
            assert said == [f"listening on {address}"]
            lines: list[str] = []
            report = await ping(str(address), Secrets(SECRET), count=5, size=1000, echo=lines.append)
            assert report.peer.node_id == "mac-1"
            assert report.peer.data_addr == str(address)
            assert len(report.round_trips_s) == 5
            assert report.bytes_per_s > 1000
            assert "mac-1" in lines[0]
            assert "aes-256-gcm" in "\n".join(lines)
            plain = json.loads(json.dumps(report.to_dict()))
            assert plain["count"] == 5
            assert plain["rtt_min_s"] <= plain["rtt_median_s"] <= plain["rtt_max_s"]

    run(case())


@pytest.mark.parametrize("suite", ["aes-256-gcm", "chacha20-poly1305"])
@pytest.mark.parametrize("rekey_every", [1, 3])
def test_every_suite_and_rekeying_with_the_largest_filler(suite, rekey_every):
    async def case():
        async with listener(suite=suite, rekey_every=rekey_every) as (address, _):
            report = await ping(
                address, Secrets(SECRET), suite=suite, rekey_every=rekey_every, count=5, size=MAX_FILLER
            )
            assert report.cipher == suite

    run(case())


def test_what_does_not_fit_is_an_error_of_its_own_kind():
    async def case():
        async with listener(cluster="east") as (address, _):
            with pytest.raises(AuthenticationFailed, match=f"authentication failed with host {address}"):
                await ping(address, Secrets(OTHER_SECRET), cluster="east")
            with pytest.raises(ClusterMismatch):
                await ping(address, Secrets(SECRET))
            with pytest.raises(SuiteMismatch):
                await ping(address, Secrets(SECRET), cluster="east", suite="chacha20-poly1305")
            await ping(address, Secrets(SECRET), cluster="east", count=1)
        with pytest.raises(PeerLost, match="offline"):
            await ping(address, Secrets(SECRET))

    run(case())


def test_options_that_cannot_work_are_refused_before_anything_is_dialled():
    for bad in ({"count": 0}, {"size": MAX_FILLER + 1}, {"size": -1}, {"rekey_every": 0}, {"suite": "rot13"}):
        with pytest.raises(ConfigError):
            run(ping("127.0.0.1:1", Secrets(SECRET), **bad))
    with pytest.raises(ConfigError, match="in use"):

        async def twice():
            async with listener() as (address, _):
                await listen(str(address), Secrets(SECRET), echo=lambda line: None)

        run(twice())


def test_the_listener_answers_pings_and_drops_everything_else():
    async def case():
        async with listener() as (address, _), raw_connection(address) as sock:
            loop = asyncio.get_running_loop()
            handshake = ClientHandshake(identity("ping-0badcafe", cluster="mlxcel"), SECRET)
            await shake_hands(sock, handshake)
            keys = handshake.established
            assert keys is not None
            sealer = Sealer(keys.send, keys.suite)
            reader = FrameReader(Opener(keys.receive, keys.suite), keys.leftover)
            await loop.sock_sendall(sock, sealer.seal(Kind.CONTROL, 0, messages.pack({"schema": 1})))
            for _ in range(100):
                await loop.sock_sendall(sock, sealer.seal(Kind.TENSOR, 5, b"whatever"))
                await loop.sock_sendall(sock, sealer.seal(Kind.KV, 7, b"whatever"))
            await loop.sock_sendall(sock, sealer.seal(Kind.CONTROL, 0, messages.pack({"type": "load"})))
            await loop.sock_sendall(sock, sealer.seal(Kind.STREAM, 1, messages.pack({"token": 1})))
            await loop.sock_sendall(sock, sealer.seal(Kind.CREDIT, 1, b"\0\0\0\x20"))
            await loop.sock_sendall(sock, sealer.seal(Kind.PING, 3, b"12345678", b"filler"))
            while True:
                while (frame := reader.next_frame()) is not None:
                    assert frame.kind in (Kind.CONTROL, Kind.PING, Kind.CREDIT, Kind.PONG)
                    if frame.kind is Kind.PONG:
                        assert (frame.channel, bytes(frame.payload)) == (3, b"12345678filler")
                        return
                reader.feed(await loop.sock_recv(sock, 65536))

    run(case())


class Visitor:
    """A peer that is not ours: says and hears frames."""

    def __init__(self, sock: socket.socket, keys: Established) -> None:
        self.sock = sock
        self.sealer = Sealer(keys.send, keys.suite)
        self.reader = FrameReader(Opener(keys.receive, keys.suite), keys.leftover)

    async def say(self, kind: Kind, channel: int, payload: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, self.sealer.seal(kind, channel, payload))

    async def hear(self) -> tuple[Kind, int, bytes] | None:
        """The next frame; None at the end of the stream."""
        while (frame := self.reader.next_frame()) is None:
            data = await asyncio.get_running_loop().sock_recv(self.sock, 65536)
            if not data:
                self.reader.receive_eof()
                return None
            self.reader.feed(data)
        return frame.kind, frame.channel, bytes(frame.payload)


@contextlib.asynccontextmanager
async def visiting(address: Address) -> AsyncIterator[Visitor]:
    """Past the handshake and the first control frames."""
    async with raw_connection(address) as sock:
        handshake = ClientHandshake(identity("ping-0badcafe", cluster="mlxcel"), SECRET)
        await shake_hands(sock, handshake)
        assert handshake.established is not None
        visitor = Visitor(sock, handshake.established)
        await visitor.say(Kind.CONTROL, 0, messages.pack({"schema": 1}))
        first = await visitor.hear()
        assert first is not None and first[0] is Kind.CONTROL
        yield visitor


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (Kind.CONTROL, b"\xc1 is no MessagePack"),
        (Kind.CONTROL, b""),
        (Kind.TENSOR, b"no tensor"),
        (Kind.KV, b""),
        (Kind.STREAM, b"\xc1 is no MessagePack"),
        (Kind.CREDIT, bytes(4)),
        (Kind.CREDIT, b"\xff\xff\xff\xff"),
    ],
)
def test_the_listener_does_not_look_into_what_it_drops(kind, payload):
    async def case():
        async with listener() as (address, _), visiting(address) as visitor:
            for _ in range(20):
                await visitor.say(kind, 1, payload)
            await visitor.say(Kind.PING, 0, b"12345678")
            assert await visitor.hear() == (Kind.PONG, 0, b"12345678")

    run(case())


def test_a_visitor_is_not_greeted_with_a_ping_but_pinged_when_idle():
    async def case():
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with listener() as (address, _), visiting(address) as visitor:
            frame = await visitor.hear()
            assert frame is not None and frame[0] is Kind.PING
            assert loop.time() - began > times.PING_S - 0.1

    run(case())


def test_a_farewell_is_returned():
    async def case():
        async with listener() as (address, _), visiting(address) as visitor:
            await visitor.say(Kind.CLOSE, 0, b"\x03bye")
            frame = await visitor.hear()
            assert frame is not None and frame[0] is Kind.CLOSE
            assert await visitor.hear() is None

    run(case())


@contextlib.asynccontextmanager
async def host(spoil: Callable[[bytes], bytes] = bytes) -> AsyncIterator[tuple[Address, list[Kind]]]:
    """A node that is not ours: it answers pings with `spoil` applied, and notes what kinds of frames it gets."""
    kinds: list[Kind] = []
    async with listening(cluster="mlxcel") as (_, address, links):

        async def serve() -> None:
            link = await links.get()
            loop = asyncio.get_running_loop()
            while True:
                while (frame := link.reader.next_frame()) is not None:
                    kinds.append(frame.kind)
                    if frame.kind is Kind.PING:
                        pong = link.sealer.seal(Kind.PONG, frame.channel, spoil(bytes(frame.payload)))
                        await loop.sock_sendall(link.sock, pong)
                    if frame.kind is Kind.CLOSE:
                        return
                link.reader.feed(await loop.sock_recv(link.sock, 65536))

        task = asyncio.ensure_future(serve())
        yield address, kinds
        await task


def test_so_many_pings_are_so_many_pings():
    async def case():
        async with host() as (address, kinds):
            await ping(address, Secrets(SECRET), count=3)
        assert kinds == [Kind.PING] * 3 + [Kind.CLOSE]

    run(case())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda payload: payload[:-1] + bytes([payload[-1] ^ 1]),
        lambda payload: payload[:-1],
        lambda payload: payload + b"x",
        lambda payload: bytes(8) + payload[8:],
    ],
)
def test_a_pong_that_is_no_echo_is_an_error(spoil):
    async def case():
        async with host(spoil) as (address, _):
            with pytest.raises(WireError, match="pong differs"):
                await ping(address, Secrets(SECRET), count=3, size=100)

    run(case())


def test_many_visitors_at_once():
    async def case():
        async with listener() as (address, _):
            reports = await asyncio.gather(*(ping(address, Secrets(SECRET), count=3) for _ in range(20)))
            assert len({report.peer.incarnation for report in reports}) == 1

    run(case())


def test_a_listener_says_at_once_whom_it_turned_away_and_counts_them():
    async def case():
        stop = asyncio.Event()
        warned: list[str] = []
        ready: asyncio.Future[Listener] = asyncio.get_running_loop().create_future()
        listening = asyncio.ensure_future(
            listen("127.0.0.1:0", Secrets(SECRET), echo=str, warn=warned.append, ready=ready.set_result, stop=stop)
        )
        address = (await ready).address
        options: dict[str, Any]
        mismatches: dict[str, dict[str, Any]] = {
            "authentication failed with host 127.0.0.1": {"secrets": Secrets(OTHER_SECRET)},
            "this side aes-256-gcm": {"suite": "chacha20-poly1305"},
            "asked for cluster 'west', this side belongs to 'mlxcel'": {"cluster": "west"},
        }
        for says, options in mismatches.items():
            with pytest.raises(HandshakeError):
                await ping(address, **{"secrets": Secrets(SECRET), **options})
            await until(lambda: warned)
            assert says in warned.pop() and not warned
        async with raw_connection(address) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, HEADER.pack(MAGIC, 4, 1, 0))
            await until(lambda: warned)
            assert "speaks handshake version 4, this side version 5" in warned.pop()
        stop.set()
        visits = await listening
        assert visits.in_vain
        assert visits.refused == {"authentication": 1, "suite": 1, "cluster-name": 1, "version": 1}
        assert "1 for another secret" in str(visits)

    run(case())


def test_strangers_at_a_listener_count_for_nothing_and_a_guest_outweighs_all_that_were_refused():
    async def case(guest: bool) -> bool:
        stop = asyncio.Event()
        ready: asyncio.Future[Listener] = asyncio.get_running_loop().create_future()
        listening = asyncio.ensure_future(
            listen("127.0.0.1:0", Secrets(SECRET), echo=str, ready=ready.set_result, stop=stop)
        )
        address = (await ready).address
        async with raw_connection(address) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, b"GET / HTTP/1.1\r\n\r\n")
        if guest:
            with pytest.raises(AuthenticationFailed):
                await ping(address, Secrets(OTHER_SECRET))
            await ping(address, Secrets(SECRET), count=1)
        stop.set()
        return (await listening).in_vain

    assert not run(case(guest=False))
    assert not run(case(guest=True))


def test_knocking_again_and_again_fills_no_screen():
    said: list[str] = []
    warnings = ping_module._Warnings(said.append)
    for _ in range(1000):
        warnings("no")
    assert len(said) == ping_module.WARNINGS


async def until(condition) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_ping_that_is_stopped_reports_what_there_was():
    async def case():
        stop = asyncio.Event()

        def last(payload: bytes) -> bytes:
            stop.set()
            return payload

        async with host(last) as (address, _):
            assert len((await ping(address, Secrets(SECRET), count=100, stop=stop)).round_trips_s) == 1

    run(case())


def test_a_ping_whose_link_is_cut_reports_what_there_was_and_why_there_is_no_more(caplog):
    async def case():
        async with listening(cluster="mlxcel") as (_, address, links):

            async def serve():
                link, pongs = await links.get(), 0
                loop = asyncio.get_running_loop()
                while pongs < 3:
                    while (frame := link.reader.next_frame()) is not None:
                        if frame.kind is Kind.PING:
                            pong = link.sealer.seal(Kind.PONG, frame.channel, bytes(frame.payload))
                            await loop.sock_sendall(link.sock, pong)
                            pongs += 1
                    if pongs < 3:
                        link.reader.feed(await loop.sock_recv(link.sock, 65536))
                link.sock.close()

            task = asyncio.ensure_future(serve())
            report = await ping(address, Secrets(SECRET), count=100)
            await task
        assert len(report.round_trips_s) == 3 and report.lost is not None
        assert report.to_dict()["lost"] == report.lost.cause
        assert any(line.startswith("3 pings") for line in report.lines())
        assert not [each for each in caplog.records if each.name.endswith("control_link")]

    run(case())


def test_port_0_is_refused_before_anything_is_dialled():
    with pytest.raises(ConfigError, match=r"nobody listens at 127\.0\.0\.1:0"):
        run(ping("127.0.0.1:0", Secrets(SECRET)))
