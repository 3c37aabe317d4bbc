"""Who gets in, who does not, and what each end says about it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket

import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.errors import (
    AuthenticationFailed,
    ClusterMismatch,
    ConfigError,
    HandshakeError,
    PeerLost,
    Refused,
    SuiteMismatch,
)
from mlxcel_nb.net import sockets
from mlxcel_nb.net.dial import dial
from mlxcel_nb.net.link import local_versions
from mlxcel_nb.net.pending import POOL_SIZE
from mlxcel_nb.util import times
from mlxcel_nb.wire import messages
from mlxcel_nb.wire.frames import FrameReader, Kind, Opener, Sealer, close_reason
from mlxcel_nb.wire.handshake import ClientHandshake, RejectCode
from mlxcel_nb.wire.hello import HEADER, MAGIC, MessageType
from tests.net.helpers import (
    OTHER_SECRET,
    SECRET,
    Heard,
    identity,
    listening,
    raw_connection,
    read_all,
    run,
    shake_hands,
)


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


def test_an_old_secret_is_let_in_while_it_is_named():
    async def case():
        async with listening(secrets=(OTHER_SECRET, SECRET)) as (_, address, _links):
            (await dial(identity("client"), SECRET, address)).close()

    run(case())


def test_a_client_refused_with_the_new_secret_tries_the_old_one_once():
    async def case():
        async with listening() as (listener, address, _links):
            (await dial(identity("client"), OTHER_SECRET, address, previous_secret=SECRET)).close()
            with pytest.raises(AuthenticationFailed):
                await dial(identity("client"), OTHER_SECRET, address, previous_secret=OTHER_SECRET)
            assert listener.counts["authentication"] == 3

    run(case())


def test_another_suite_or_cluster_is_refused_with_both_names(caplog):
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


# -- the first control frame ------------------------------------------------------------------------


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
        (Kind.CONTROL, messages.pack({"schema": 1, "features": "all"})),
        (Kind.CONTROL, messages.pack({"schema": 1, "versions": {"mlx": 3}})),
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


def test_a_peer_may_say_no_more_than_its_schema():
    async def case():
        async with listening() as (_, address, links), raw_connection(address) as sock:
            handshake = ClientHandshake(identity("client"), SECRET)
            await shake_hands(sock, handshake)
            keys = handshake.established
            assert keys is not None
            sock.send(Sealer(keys.send, keys.suite).seal(Kind.CONTROL, 0, messages.pack({"schema": 1})))
            assert (await links.get()).peer.versions == {}

    run(case())


# -- identity ---------------------------------------------------------------------------------------


def test_one_process_may_hold_several_connections():
    async def case():
        async with listening() as (listener, address, _links):
            who = identity("client")
            first, second = await dial(who, SECRET, address), await dial(who, SECRET, address)
            assert len(listener.admission) == 2
            first.close()
            second.close()

    run(case())


def test_another_process_of_the_same_id_is_refused_while_the_first_lives():
    async def case():
        async with listening() as (_, address, links):
            first = Heard(await dial(identity("client"), SECRET, address))
            holder = Heard(await links.get())
            with pytest.raises(Refused, match="another"):
                await dial(identity("client"), SECRET, address)
            assert first.link.open
            first.link.close()
            holder.link.close()

    run(case())


def test_a_holder_that_no_longer_answers_gives_way_after_a_second(monkeypatch):
    monkeypatch.setattr(times, "PING_S", 0.2)

    async def case():
        async with listening() as (listener, address, links):
            frozen = await dial(identity("client"), SECRET, address)  # nobody drives it: no pong
            holder = Heard(await links.get())
            newcomer = await dial(identity("client"), SECRET, address)
            state, _ = await holder.states.get()
            assert state == "dead"
            assert len(listener.admission) == 1
            frozen.close()
            newcomer.close()

    run(case())


def test_an_id_is_free_when_its_connection_has_ended():
    async def case():
        async with listening() as (_, address, links):
            first = Heard(await dial(identity("client"), SECRET, address))
            holder = Heard(await links.get())
            first.link.close("done")
            assert await holder.states.get() == ("closed", "done")
            (await dial(identity("client"), SECRET, address)).close()

    run(case())


def test_an_id_configured_elsewhere_is_refused():
    async def case():
        async with listening(configured={"client": ["192.0.2.1"]}) as (_, address, _links):
            with pytest.raises(Refused, match=r"192\.0\.2\.1"):
                await dial(identity("client"), SECRET, address)
            (await dial(identity("other"), SECRET, address)).close()

    run(case())


def test_a_full_house_is_said_so():
    async def case():
        async with listening() as (listener, address, _links):
            listener.admission.limit = 1
            first = await dial(identity("one"), SECRET, address)
            with pytest.raises(Refused, match="no room"):
                await dial(identity("two"), SECRET, address)
            first.close()

    run(case())


def test_a_node_does_not_join_itself():
    async def case():
        incarnation = new_incarnation()
        async with listening() as (listener, address, _links):
            listener._identity = dataclasses.replace(listener._identity, incarnation=incarnation)
            with pytest.raises(HandshakeError):
                await dial(identity("client", incarnation=incarnation), SECRET, address)

    run(case())


# -- strangers --------------------------------------------------------------------------------------


def test_silent_connections_neither_fill_the_pool_nor_stay(monkeypatch):
    monkeypatch.setattr(times, "HANDSHAKE_S", 0.6)

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
            assert loop.time() - began < 0.5
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
            assert loop.time() - began < 2.0

    run(case())


def test_a_crowded_listener_is_tried_again(monkeypatch):
    """The first attempts are turned away; a client with patience gets in."""

    async def case():
        async with listening() as (listener, address, _links):
            turned_away = 0
            arrive = listener._pool.arrive

            def crowded(key, ip, now):
                nonlocal turned_away
                arrival = arrive(key, ip, now)
                if turned_away < 2:
                    turned_away += 1
                    listener._pool.leave(key)
                    return dataclasses.replace(arrival, admitted=False, reason="full")
                return arrival

            monkeypatch.setattr(listener._pool, "arrive", crowded)
            (await dial(identity("client"), SECRET, address)).close()
            assert turned_away == 2

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


# -- ports and names --------------------------------------------------------------------------------


def test_a_busy_port_names_the_process_that_has_it():
    async def case():
        async with listening() as (_, address, _links), listening("second") as (second, _, _more):
            await second.close()
            with pytest.raises(ConfigError, match=f"port {address.port} in use by pid {os.getpid()}"):
                await second.start("127.0.0.1", address.port)
            assert (await second.start()).port != address.port

    run(case())


def test_a_port_range_gives_its_first_free_port():
    async def case():
        async with listening() as (_, address, _links), listening("second") as (second, _, _more):
            await second.close()
            found = await second.start("127.0.0.1", port_range=(address.port, min(65535, address.port + 20)))
            assert address.port < found.port <= address.port + 20
            await second.close()
            with pytest.raises(ConfigError, match="no free port"):
                await second.start("127.0.0.1", port_range=(address.port, address.port))

    run(case())


def test_a_look_up_that_fails_once_is_asked_again(monkeypatch):
    async def case():
        async with listening() as (_, address, _links):
            real, failed = sockets.resolve, set()

            def flaky(host, port, family):
                if family not in failed:
                    failed.add(family)
                    raise socket.gaierror(socket.EAI_AGAIN, "try again")
                return real("127.0.0.1", port, family)

            monkeypatch.setattr(sockets, "resolve", flaky)
            (await dial(identity("client"), SECRET, Address("somewhere.test", address.port))).close()

    run(case())


def test_a_family_that_answers_late_holds_nobody_up(monkeypatch):
    async def case():
        async with listening() as (_, address, _links):
            real, slow = sockets.resolve, asyncio.Event()
            loop = asyncio.get_running_loop()

            def half(host, port, family):
                if family == socket.AF_INET6:
                    asyncio.run_coroutine_threadsafe(slow.wait(), loop).result()
                return real("127.0.0.1", port, socket.AF_INET)

            monkeypatch.setattr(sockets, "resolve", half)
            began = loop.time()
            (await dial(identity("client"), SECRET, Address("somewhere.test", address.port))).close()
            assert loop.time() - began < 2.0
            slow.set()

    run(case())


def test_the_second_address_of_a_name_is_tried_when_the_first_refuses(monkeypatch):
    async def case():
        async with listening() as (_, address, _links):
            with socket.create_server(("127.0.0.1", 0)) as gone:
                dead = gone.getsockname()[1]

            def two(host, port, family):
                if family == socket.AF_INET6:
                    raise socket.gaierror(socket.EAI_NONAME, "no such name")
                return [(family, ("127.0.0.1", dead)), (family, ("127.0.0.1", port))]

            monkeypatch.setattr(sockets, "resolve", two)
            (await dial(identity("client"), SECRET, Address("somewhere.test", address.port))).close()

    run(case())


def test_an_unknown_name_is_offline_with_the_reason(monkeypatch):
    def unknown(host, port, family):
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(sockets, "resolve", unknown)
    with pytest.raises(PeerLost, match="not known"):
        run(dial(identity("client"), SECRET, Address("nowhere.test", 9000)))
