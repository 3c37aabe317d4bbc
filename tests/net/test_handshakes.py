"""Who gets in, who does not, and what each end says about it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
import struct

import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.secret import Secrets
from mlxcel_nb.errors import (
    AuthenticationFailed,
    ClusterMismatch,
    HandshakeError,
    PeerLost,
    SuiteMismatch,
)
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.util.versions import local_versions
from mlxcel_nb.wire import messages
from mlxcel_nb.wire.frames import Kind, Sealer
from mlxcel_nb.wire.handshake import ClientHandshake, RejectCode, ServerHandshake, State
from mlxcel_nb.wire.hello import HEADER, MAGIC, MessageType
from tests.net.helpers import (
    OTHER_SECRET,
    SECRET,
    identity,
    listening,
    raw_connection,
    read_all,
    run,
    shake_hands,
)

NO_LINGER = struct.pack("ii", 1, 0)
"""Closing is a reset."""


def test_both_ends_know_each_other_after_dialling():
    async def case():
        async with listening(hello={"motto": "here"}) as (listener, address, links):
            ours = await dial(identity("client"), SECRET, address, expect_node_id="server", hello={"link": "hot"})
            theirs = await links.get()
            assert (ours.peer.node_id, theirs.peer.node_id) == ("server", "client")
            assert ours.peer.data_addr == str(address)
            assert theirs.peer.hello["link"] == "hot"
            assert ours.peer.hello["motto"] == "here"
            assert ours.peer.versions == dict(local_versions())
            assert ours.peer.version_differences() == {}
            assert ours.dialled
            assert not theirs.dialled
            assert listener.pending == 0
            assert ours.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            ours.close()

    run(case())


def test_a_peer_with_other_libraries_is_accepted_and_the_difference_kept():
    """Case 51."""

    async def case():
        async with listening() as (_, address, links):
            ours = await dial(identity("client"), SECRET, address)
            theirs = await links.get()
            hello = {**theirs.peer.hello, "versions": {**local_versions(), "mlx": "0.1.0", "other": "2"}}
            older = dataclasses.replace(theirs.peer, hello=hello)
            assert older.version_differences() == {"mlx": (local_versions()["mlx"], "0.1.0")}
            ours.close()

    run(case())


@pytest.mark.parametrize("suite", [1, 2])
def test_either_suite_connects(suite):
    async def case():
        async with listening(suite=suite) as (_, address, _links):
            link = await dial(identity("client", suite=suite), SECRET, address)
            assert link.suite_name == {1: "aes-256-gcm", 2: "chacha20-poly1305"}[suite]
            link.close()

    run(case())


def test_a_wrong_secret_is_an_authentication_failure_on_both_ends(caplog):
    """Case 50."""

    async def case():
        async with listening() as (listener, address, links):
            with pytest.raises(AuthenticationFailed, match=f"authentication failed with host {address}"):
                await dial(identity("client"), OTHER_SECRET, address)
            assert links.empty()
            assert listener.counts["authentication"] == 1

    with caplog.at_level(logging.WARNING, "mlxcel_nb"):
        run(case())
    assert "authentication failed with host 127.0.0.1" in caplog.text
    for secret in (SECRET, OTHER_SECRET):
        assert str(secret.reveal()) not in caplog.text


def test_a_server_that_does_not_know_the_secret_is_told_apart_too():
    """The client's own secret is older than the server's previous one: neither side knows the other's."""

    async def case():
        async with listening(secrets=(OTHER_SECRET,)) as (_, address, _links):
            with pytest.raises(AuthenticationFailed):
                await dial(identity("client"), SECRET, address)

    run(case())


def test_an_old_secret_is_let_in_while_it_is_named_and_whoever_comes_with_it_is_told_of(caplog):
    """Case 50."""

    async def case():
        async with listening(secrets=(OTHER_SECRET, SECRET)) as (listener, address, links):
            for _ in range(3):
                (await dial(identity("client"), SECRET, address)).close()
                await links.get()
            assert listener.counts["established"] == listener.counts["older-secret"] == 3
            assert [record.message for record in caplog.records] == [
                "client (host 127.0.0.1) comes with the older secret"
            ]
            (await dial(identity("client"), OTHER_SECRET, address)).close()
            await links.get()
            assert listener.counts["older-secret"] == 3

    run(case())


def test_a_client_refused_with_the_new_secret_tries_the_old_one_once():
    """Case 50."""

    async def case():
        async with listening() as (listener, address, _links):
            (await dial(identity("client"), Secrets(OTHER_SECRET, SECRET), address)).close()
            with pytest.raises(AuthenticationFailed):
                await dial(identity("client"), Secrets(OTHER_SECRET, OTHER_SECRET), address)
            assert listener.counts["authentication"] == 3

    run(case())


@pytest.mark.parametrize("reset", [False, True])
def test_the_old_secret_is_tried_too_where_a_server_just_closes_after_the_proof(reset):
    """Case 50: the wire lets it say why, but does not make it."""

    async def case():
        asked = []

        async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            handshake = ServerHandshake(identity("server"), [SECRET])
            try:
                while handshake.state is not State.AWAITING_VERDICT:
                    handshake.receive_data(await reader.read(1033))
                    writer.write(handshake.data_to_send())
            except AuthenticationFailed:
                asked.append("wrong")
                if reset:
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            else:
                asked.append("right")
                handshake.verdict()
                keys = handshake.established
                assert keys is not None
                first = Sealer(keys.send, keys.suite).seal(Kind.CONTROL, 0, messages.pack({"schema": 1}))
                writer.write(handshake.data_to_send() + bytes(first))
            writer.close()

        async with await asyncio.start_server(mute, "127.0.0.1", 0) as server:
            address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
            (await dial(identity("client"), Secrets(OTHER_SECRET, SECRET), address)).close()
            assert asked == ["wrong", "right"]
            with pytest.raises(HandshakeError):
                await dial(identity("client"), OTHER_SECRET, address)
            assert asked == ["wrong", "right", "wrong"]

    run(case())


def test_another_suite_or_cluster_is_refused_with_both_names(caplog):
    """Case 51."""

    async def case():
        async with listening() as (_, address, _links):
            with pytest.raises(SuiteMismatch, match="chacha20-poly1305") as caught:
                await dial(identity("client", suite=2), SECRET, address)
            assert "aes-256-gcm" in str(caught.value)
            with pytest.raises(ClusterMismatch, match="'elsewhere'"):
                await dial(identity("client", cluster="elsewhere"), SECRET, address)

    with caplog.at_level(logging.WARNING, "mlxcel_nb"):
        run(case())
    assert "chacha20-poly1305" in caplog.text
    assert "'elsewhere'" in caplog.text


def test_the_wrong_node_at_an_address_is_not_talked_to():
    async def case():
        async with listening() as (_, address, _links):
            with pytest.raises(HandshakeError, match="worker-7"):
                await dial(identity("client"), SECRET, address, expect_node_id="worker-7")

    run(case())


def test_nobody_there_is_offline():
    """Case 50."""

    async def case():
        async with listening() as (_, address, _links):
            pass
        with pytest.raises(PeerLost, match=f"host {address} is offline: connection refused"):
            await dial(identity("client"), SECRET, address, expect_node_id="server")

    run(case())


def test_a_host_that_takes_connections_and_stays_silent_is_told_apart():
    async def case():
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = Address("127.0.0.1", silent.getsockname()[1])
            with pytest.raises(PeerLost, match="did not finish the handshake"):
                await dial(identity("client"), SECRET, address, deadline=0.2)

    run(case())


@pytest.mark.parametrize("version", [4, 6])
def test_another_version_is_told_what_this_side_speaks(version, caplog):
    """Case 51."""

    async def case():
        async with listening() as (_, address, _links), raw_connection(address) as sock:
            sock.send(HEADER.pack(MAGIC, version, MessageType.CLIENT_HELLO, 5) + b"hello")
            reply = await read_all(sock)
            _, _, kind, _ = HEADER.unpack_from(reply)
            assert kind == MessageType.REJECT
            assert reply[HEADER.size] == RejectCode.VERSION
            assert reply[HEADER.size + 2 :] == b"5"

    with caplog.at_level(logging.WARNING, "mlxcel_nb"):
        run(case())
    assert f"version {version}" in caplog.text


def test_random_bytes_end_the_connection_at_once():
    """Case 51."""

    async def case():
        async with listening() as (_, address, links):
            for size in (1, 9, 40, 1033, 5000):
                async with raw_connection(address) as sock:
                    sock.send(b"\xee" + os.urandom(size))
                    await read_all(sock)
            (await dial(identity("client"), SECRET, address)).close()
            assert (await links.get()).peer.node_id == "client"
            assert links.empty()

    run(case())


def test_a_handshake_that_dribbles_in_byte_by_byte_succeeds():
    async def case():
        async with listening() as (_, address, _links), raw_connection(address) as sock:
            handshake = ClientHandshake(identity("client"), SECRET)
            await shake_hands(sock, handshake, piece=1)
            assert handshake.peer is not None
            assert handshake.peer.node_id == "server"

    run(case())


def test_bytes_behind_the_proof_end_the_connection():
    async def case():
        async with listening() as (_, address, links), raw_connection(address) as sock:
            loop = asyncio.get_running_loop()
            handshake = ClientHandshake(identity("client"), SECRET)
            await loop.sock_sendall(sock, handshake.data_to_send())
            handshake.receive_data(await loop.sock_recv(sock, 2000))
            await loop.sock_sendall(sock, handshake.data_to_send() + b"early")
            reply = await read_all(sock)
            assert not reply or reply[6] != MessageType.VERDICT
            assert links.empty()

    run(case())
