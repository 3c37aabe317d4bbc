"""Whoever can reach the port can neither fill it nor keep it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket

import pytest

from mlxcel_nb.errors import AuthenticationFailed, HandshakeError
from mlxcel_nb.net.links.dial import TRIES, dial
from mlxcel_nb.net.links.pending import POOL_SIZE
from mlxcel_nb.util import times
from mlxcel_nb.wire.handshake import ClientHandshake
from tests.net.helpers import (
    OTHER_SECRET,
    SECRET,
    identity,
    listening,
    raw_connection,
    read_all,
    run,
)


def test_silent_connections_neither_fill_the_pool_nor_stay(monkeypatch):
    monkeypatch.setattr(times, "HANDSHAKE_S", 2.0)  # none is over before the last is there

    async def case():
        async with listening() as (listener, address, _links):
            loop = asyncio.get_running_loop()
            silent = []
            for _ in range(3 * POOL_SIZE):
                sock = socket.socket()
                sock.setblocking(False)
                await loop.sock_connect(sock, (address.host, address.port))
                silent.append(sock)
            began = loop.time()
            (await dial(identity("client"), SECRET, address)).close()
            assert loop.time() - began < times.HANDSHAKE_S
            assert listener.pending <= POOL_SIZE
            assert listener.counts["evicted"] >= 2 * POOL_SIZE
            await asyncio.gather(*(read_all(sock) for sock in silent))
            assert loop.time() - began < 5 * times.HANDSHAKE_S
            assert listener.pending == 0
            for sock in silent:
                sock.close()

    run(case())


def test_a_slow_loris_has_five_seconds_for_all_its_bytes(monkeypatch):
    monkeypatch.setattr(times, "HANDSHAKE_S", 0.3)

    async def case():
        async with listening() as (_, address, _links), raw_connection(address) as sock:
            loop = asyncio.get_running_loop()
            began = loop.time()
            hello = ClientHandshake(identity("client"), SECRET).data_to_send()
            ended = asyncio.ensure_future(read_all(sock))
            for byte in hello:
                sock.send(bytes([byte]))
                if (await asyncio.wait([ended], timeout=0.05))[0]:
                    break
            await ended
            assert loop.time() - began < 5.0

    run(case())


@pytest.fixture
def crowd(monkeypatch):
    """A listener's pool turns the first so many away, and counts them."""

    def fill(listener, times):
        turned_away = []
        arrive = listener._pool.arrive

        def crowded(key, ip):
            arrival = arrive(key, ip)
            if len(turned_away) < times:
                turned_away.append(ip)
                listener._pool.leave(key)
                return dataclasses.replace(arrival, admitted=False, reason="full")
            return arrival

        monkeypatch.setattr(listener._pool, "arrive", crowded)
        return turned_away

    return fill


@pytest.mark.parametrize("times", [2, TRIES + 2])
def test_a_crowded_listener_is_tried_again(crowd, times):
    """The first attempts are turned away; a client with patience gets in."""

    async def case():
        async with listening() as (listener, address, _links):
            turned_away = crowd(listener, times)
            (await dial(identity("client"), SECRET, address)).close()
            assert len(turned_away) == times

    run(case())


def test_a_listener_that_stays_crowded_is_named_so_at_the_deadline(crowd):
    async def case():
        async with listening() as (listener, address, _links):
            turned_away = crowd(listener, 1000)
            with pytest.raises(HandshakeError, match="too many unfinished connections"):
                await dial(identity("client"), SECRET, address, deadline=1.0)
            assert len(turned_away) >= 2

    run(case())


def test_what_closes_in_silence_is_given_up_soon():
    """It is no listener of ours, or a crowded one that could not say so."""

    async def case():
        came = 0

        def close(_reader, writer):
            nonlocal came
            came += 1
            writer.close()

        server = await asyncio.start_server(close, "127.0.0.1")
        async with server:
            host, port = server.sockets[0].getsockname()
            with pytest.raises(HandshakeError):
                await dial(identity("client"), SECRET, f"{host}:{port}", deadline=15)
        assert came == TRIES

    run(case())


def test_a_flood_of_failures_does_not_flood_the_log(caplog):
    async def case():
        async with listening() as (listener, address, _links):
            for _ in range(20):
                with pytest.raises(AuthenticationFailed):
                    await dial(identity("client"), OTHER_SECRET, address)
            assert listener.counts["authentication"] == 20

    with caplog.at_level(logging.WARNING, "mlxcel_nb"):
        run(case())
    assert caplog.text.count("authentication failed") == 1
