"""What may be said first on a connection, and what is answered to anything else."""

from __future__ import annotations

import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.wire import messages
from mlxcel_nb.wire.frame_reader import FrameReader
from mlxcel_nb.wire.frames import Kind, Opener, Sealer, close_reason
from mlxcel_nb.wire.handshake import ClientHandshake
from tests.net.helpers import (
    SECRET,
    identity,
    listening,
    raw_connection,
    read_all,
    run,
    shake_hands,
)


async def _say_first(address: Address, kind: Kind, payload: bytes) -> tuple[Kind, str]:
    """Get in, say `payload` first, and return what the server's last frame was."""
    async with raw_connection(address) as sock:
        handshake = ClientHandshake(identity("client"), SECRET)
        await shake_hands(sock, handshake)
        keys = handshake.established
        assert keys is not None
        sock.send(Sealer(keys.send, keys.suite).seal(kind, 0, payload))
        reader = FrameReader(Opener(keys.receive, keys.suite), keys.leftover)
        reader.feed(await read_all(sock))
        frames = [(f.kind, bytes(f.payload)) for f in reader.frames()]
        assert frames[0][0] is Kind.CONTROL
        last, text = frames[-1]
        return last, close_reason(text) if last is Kind.CLOSE else ""


def test_an_unknown_schema_is_closed_with_the_reason():
    async def case():
        async with listening() as (_, address, links):
            first = messages.pack({"schema": 2, "features": [], "versions": {}})
            kind, reason = await _say_first(address, Kind.CONTROL, first)
            assert kind is Kind.CLOSE
            assert "schema 2" in reason
            assert links.empty()

    run(case())


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (Kind.PING, b"12345678"),
        (Kind.CONTROL, b"\xc1"),
        (Kind.CONTROL, messages.pack({"features": []})),
    ],
)
def test_a_bad_first_frame_is_closed_with_a_reason(kind, payload):
    async def case():
        async with listening() as (_, address, links):
            last, reason = await _say_first(address, kind, payload)
            assert last is Kind.CLOSE
            assert reason
            assert links.empty()

    run(case())


@pytest.mark.parametrize(
    ("told", "features", "versions"),
    [
        ({}, [], {}),
        ({"features": "all", "versions": ["mlx"]}, [], {}),
        ({"features": ["kv", 3, None], "versions": {"mlx": 3, "python": "3.11"}}, ["kv"], {"python": "3.11"}),
        ({"features": ["f"] * 100, "versions": {}}, ["f"] * 64, {}),
    ],
)
def test_what_cannot_be_read_of_features_and_versions_is_dropped(told, features, versions):
    async def case():
        async with listening() as (_, address, links), raw_connection(address) as sock:
            handshake = ClientHandshake(identity("client"), SECRET)
            await shake_hands(sock, handshake)
            keys = handshake.established
            assert keys is not None
            sock.send(Sealer(keys.send, keys.suite).seal(Kind.CONTROL, 0, messages.pack({"schema": 1, **told})))
            peer = (await links.get()).peer
            assert (peer.hello["features"], peer.versions) == (features, versions)

    run(case())


def test_a_close_in_place_of_the_first_frame_is_answered():
    async def case():
        async with listening() as (_, address, links):
            assert await _say_first(address, Kind.CLOSE, b"\x03bye") == (Kind.CLOSE, "")
            assert links.empty()

    run(case())
