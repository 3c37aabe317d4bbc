"""Links made slower: how long things take, what holds back whom, and what the rest of the house makes of them.

Times have one hard bound, the shape's own: nothing arrives sooner. The bounds on the other side are generous, for
machines that are busy.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import os
import random
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel_nb.cluster.shape import parse_link
from mlxcel_nb.errors import HandshakeError
from mlxcel_nb.net.collectives.group import Tag
from mlxcel_nb.net.further.agree import agree
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.net.links.guest import _received
from mlxcel_nb.net.links.opening import MAX_FIRST_BYTES
from mlxcel_nb.net.shaping import relay as shaping
from mlxcel_nb.net.shaping.pipe import BUFFER_BYTES
from mlxcel_nb.net.ucx.offer import UcxOffer
from mlxcel_nb.wire.handshake import ClientHandshake
from tests.net.helpers import SECRET, Heard, identity, listening, raw_connection, run, shake_hands
from tests.net.shaped import SLACK_S, nothing_stays, pair, read_all, relays, send_all, shaped, shaped_hot
from tests.waiting import until

REPO = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    with nothing_stays():
        yield


# -- time ---------------------------------------------------------------------------------------------


def test_a_round_trip_takes_twice_the_latency_on_a_control_link() -> None:
    async def case() -> None:
        async with shaped("20ms") as (ours, theirs):
            ends = Heard(ours), Heard(theirs)
            trips = [await end.link.ping() for end in ends for _ in range(5)]
            assert min(trips) >= 0.040
            assert min(trips) < 0.040 + SLACK_S
            for end in ends:
                end.link.close()

    run(case())


def test_a_round_trip_takes_twice_the_latency_on_a_hot_link() -> None:
    with shaped_hot("20ms") as (here, there):

        def answer() -> None:
            for _ in range(5):
                there.send_control(there.recv_control())

        echo = threading.Thread(target=answer, daemon=True)
        echo.start()
        trips = []
        for number in range(5):
            began = time.monotonic()
            here.send_control({"number": number})
            assert here.recv_control() == {"number": number}
            trips.append(time.monotonic() - began)
        echo.join(10)
    assert 0.040 <= min(trips) < 0.040 + SLACK_S


def test_each_end_shapes_what_it_sends() -> None:
    async def case() -> None:
        async with shaped("30ms", "0ms") as (ours, theirs):
            ends = Heard(ours), Heard(theirs)
            trips = [await end.link.ping() for end in ends for _ in range(3)]
            assert 0.030 <= min(trips) < 0.030 + SLACK_S
            for end in ends:
                end.link.close()

    run(case())


def test_a_tensor_takes_its_size_over_the_rate() -> None:
    size, rate = 4 << 20, 20e6
    data = random.Random(1).randbytes(size)
    with shaped_hot("1ms,160Mbit") as (here, there):
        began = time.monotonic()
        sender = threading.Thread(target=here.send_tensor, args=(Tag(1, 1, 1), "uint8", (size,), data), daemon=True)
        sender.start()
        got = there.recv_tensor(Tag(1, 1, 1))
        took = time.monotonic() - began
        assert bytes(got.data) == data
        sender.join(10)
    assert size / rate <= took < 2 * size / rate + SLACK_S


def test_both_directions_have_the_whole_rate() -> None:
    near, far = pair("1ms,80Mbit")
    ends = near, shaping.shape(far, parse_link("1ms,80Mbit"))
    ends[1].settimeout(10)
    data = bytes(2_000_000)

    began = time.monotonic()
    senders = [threading.Thread(target=send_all, args=(end, data), daemon=True) for end in ends]
    for sender in senders:
        sender.start()
    got = [threading.Thread(target=lambda end=end: sizes.append(len(read_all(end)))) for end in ends]
    sizes: list[int] = []
    for reader in got:
        reader.start()
    for thread in senders + got:
        thread.join(20)
    took = time.monotonic() - began
    for end in ends:
        end.close()
    assert sizes == [len(data)] * 2
    assert 0.2 <= took < 0.2 + 2 * SLACK_S


def test_losses_delay_and_lose_nothing() -> None:
    near, far = pair("1ms,400Mbit,1%")
    data = random.Random(2).randbytes(3_000_000)
    digest = hashlib.sha256()
    sender = threading.Thread(target=send_all, args=(near, data), daemon=True)
    sender.start()
    for piece in iter(lambda: far.recv(1 << 16), b""):
        digest.update(piece)
    assert digest.digest() == hashlib.sha256(data).digest()
    sender.join(10)
    near.close()
    far.close()


def test_a_latency_shorter_than_a_millisecond_is_kept_too() -> None:
    near, far = pair("300us")
    trips = []
    for _ in range(50):
        began = time.monotonic()
        near.send(b"x")
        assert far.recv(1) == b"x"
        trips.append(time.monotonic() - began)
    near.close()
    far.close()
    assert 0.0003 <= min(trips) < 0.0003 + 0.05


# -- what is held back ---------------------------------------------------------------------------------


def test_a_sender_ahead_of_the_rate_is_held_back() -> None:
    near, far = pair("50ms,8Mbit")  # 50 kB on their way
    near.setblocking(False)
    taken = 0
    while select.select([], [near], [], 0.02)[1] and taken < 1 << 24:
        with contextlib.suppress(BlockingIOError):
            taken += near.send(bytes(64 << 10))
    near.close()
    far.close()
    assert taken < 50_000 + BUFFER_BYTES + 6 * shaping.SOCKET_BYTES


def test_a_reader_that_does_not_read_holds_the_sender_back_and_gets_all_in_the_end() -> None:
    near, far = pair("0ms")
    near.setblocking(False)
    sent = hashlib.sha256()
    count = 0
    while select.select([], [near], [], 0.2)[1]:
        piece = os.urandom(1 << 16)
        with contextlib.suppress(BlockingIOError):
            taken = near.send(piece)
            sent.update(piece[:taken])
            count += taken
        assert count < 1 << 28
    near.close()
    got = hashlib.sha256(read_all(far))
    assert got.digest() == sent.digest()
    far.close()


def test_an_owner_that_does_not_read_holds_the_peer_back() -> None:
    near, far = pair("0ms")
    far.setblocking(False)
    count = 0
    while select.select([], [far], [], 0.2)[1]:
        with contextlib.suppress(BlockingIOError):
            count += far.send(bytes(1 << 16))
        assert count < 1 << 28
    far.close()
    near.settimeout(10)
    assert len(read_all(near)) == count
    near.close()


# -- the rest of the house -----------------------------------------------------------------------------


def test_a_shaped_link_knows_its_peers_address_and_says_that_it_is_shaped() -> None:
    async def case() -> None:
        async with shaped("1ms,1Gbit") as (ours, theirs):
            assert ours.peer.address[0] == theirs.peer.address[0] == "127.0.0.1"
            heard = Heard(ours)
            assert heard.link.info()["shape"] == "1 ms, 1 Gbit/s"
            heard.link.close()

    run(case())


def test_the_listener_sees_life_on_a_shaped_link_that_nobody_drives() -> None:
    async def case() -> None:
        async with shaped("1ms") as (ours, theirs):
            before = _received(theirs)
            Heard(ours, measure=True)
            end = time.monotonic() + 10
            while _received(theirs) <= before and time.monotonic() < end:
                await asyncio.sleep(0.01)  # the ping is on its way
            assert _received(theirs) > before

    run(case())


def test_a_shaped_link_stays_where_its_shape_is() -> None:
    """RDMA would go past it."""
    with shaped_hot("1ms") as (here, there), concurrent.futures.ThreadPoolExecutor(2) as pool:
        reasons = [future.result(10) for future in [pool.submit(agree, end, UcxOffer) for end in (here, there)]]
        assert all("the link is shaped" in reason for reason in reasons)
        assert here.link.transport == "tcp"


def test_one_thread_serves_all_links_and_ends_with_the_last() -> None:
    ends = [pair("1ms") for _ in range(20)]
    assert relays() == 1
    for near, far in ends:
        near.send(b"x")
        assert far.recv(1) == b"x"
    for near, far in ends:
        near.close()
        far.close()
    assert until(lambda: relays() == 0)
    near, far = pair("1ms")  # and starts again
    assert relays() == 1
    near.close()
    far.close()


def test_a_process_without_shaped_links_does_not_even_load_the_module() -> None:
    imports = "import sys, mlxcel_nb.runtime.node, mlxcel_nb.net.measuring.ping"
    code = f"{imports}; print('mlxcel_nb.net.shaping.relay' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_a_link_that_is_not_opened_after_all_leaves_nothing() -> None:
    """At either end: the client goes after the verdict, or the server's first message is not one to work with."""

    async def case() -> None:
        async with listening(shapes=lambda _: parse_link("5ms")) as (listener, address, _links):
            async with raw_connection(address) as sock:
                await shake_hands(sock, ClientHandshake(identity("client"), SECRET))
            while listener.counts["handshake"] == 0:
                await asyncio.sleep(0.01)  # until the listener has seen the end
            assert len(listener.admission) == 0
            listener._hello = {"x": "y" * 2 * MAX_FIRST_BYTES}
            with pytest.raises(HandshakeError, match="sent a first message of"):
                await dial(identity("client"), SECRET, address, shapes=lambda _: parse_link("5ms"))

    run(case())
