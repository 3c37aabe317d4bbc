"""Hot links to peers that misbehave or end at any byte, and sends that did not come to their own end."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from mlxcel_nb.errors import PeerLost, StepTimeout, WireError
from mlxcel_nb.net.collectives.group import Group, Tag
from mlxcel_nb.net.hot.controls import abort_message
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.hot.inbox import MAX_TENSOR_BYTES, TENSOR_CHANNEL
from mlxcel_nb.net.hot.moulds import SHORT_BYTES
from mlxcel_nb.wire import messages, quantised, tensors
from mlxcel_nb.wire.frames import MAX_UNANSWERED_PINGS, Kind
from tests.net.helpers import both, deliver, detached_pairs, hot_pair, soon

MB = 1 << 20


# -- members that misbehave ---------------------------------------------------------------------------


def test_a_quantised_tensor_is_refused_where_plain_numbers_are_due() -> None:
    """Its data is not as long as its dims say, and nobody here could read it."""
    dims = (1, 64)
    data = quantised.prefix(4, 32) + bytes(64 // 2 + 2 * 2 * 4)
    parts = tensors.encode("float32", dims, Tag(1, 1, 1).name, data, quantised_data=True)
    with hot_pair() as (a, b):
        b._sock.send(b._sealer.seal(Kind.TENSOR, TENSOR_CHANNEL, *parts))
        with pytest.raises(WireError, match=r"server: .*quantised"):
            Group(0, {1: a}).all_reduce(Tag(1, 1, 1), np.ones(dims, np.float32), deadline=soon(10))


def test_claims_of_large_tensors_take_no_memory_and_the_last_one_counts() -> None:
    import psutil

    def first_piece(number: int) -> list[Any]:
        dims = (1 << 16, (MAX_TENSOR_BYTES >> 16) - number)
        size = dims[0] * dims[1]
        header = tensors.encode_header("uint8", dims, Tag(1, number, 0).name, size)
        lead = number.to_bytes(4, "big") + bytes(8) + (len(header) + size).to_bytes(8, "big")
        return [lead, header, bytes(100)]

    with hot_pair() as (a, b):
        before = psutil.Process().memory_info()
        for number in range(60):
            b._sock.send(b._sealer.seal(Kind.TENSOR, TENSOR_CHANNEL, *first_piece(number)))
        with pytest.raises(StepTimeout):
            a.recv_tensor(Tag(1, 1, 1), deadline=soon(0.5))
        after = psutil.Process().memory_info()
        assert after.rss - before.rss < 256 * MB
        assert after.vms - before.vms < 16 << 30
        b.send_tensor(Tag(2, 1, 1), "uint8", (4,), b"here")
        assert a.recv_tensor(Tag(2, 1, 1), deadline=soon(10)).data == b"here"


def test_credits_for_a_peer_that_never_reads_do_not_pile_up() -> None:
    with hot_pair() as (a, b):
        a._replies.extend([(Kind.PONG, 0, bytes(MB))] * 2 * MAX_UNANSWERED_PINGS)  # more than sockets hold
        for step in range(1000):
            b._may_send.grant(TENSOR_CHANNEL, 1)
            b.send_tensor(Tag(1, step, 0), "uint8", (1,), b"x", deadline=soon(10))
            a.recv_tensor(Tag(1, step, 0), deadline=soon(10))
        assert a.wants_write and len(a._replies) <= 2 * MAX_UNANSWERED_PINGS
        assert sum(kind is Kind.CREDIT for kind, _, _ in a._replies) == 1


class Flooding:
    """In place of a peer's socket: takes nothing and says the same for ever."""

    def __init__(self, peer: HotLink) -> None:
        self._peer, self._left = peer, memoryview(b"")

    def send(self, _data: memoryview) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def recv_into(self, buffer: memoryview) -> int:
        self._left = self._left or memoryview(bytes(self._peer._sealer.seal(Kind.PONG, 0, b"12345678")))
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


@pytest.mark.timeout(30)
def test_a_peer_that_takes_nothing_and_talks_for_ever_is_given_up() -> None:
    """As over shared memory, whose writer may go on when the connection is gone."""
    with hot_pair() as (a, b):
        sock, a._sock = a._sock, Flooding(b)  # type: ignore[assignment]
        with pytest.raises(PeerLost, match="Broken pipe"):
            a.send_tensor(Tag(1, 1, 1), "uint8", (1,), b"x")
        a._sock = sock


def test_an_abort_that_was_read_together_with_a_tensor_is_heeded_while_another_rank_is_waited_for() -> None:
    """It lies in this process already: no poll tells of it."""
    pairs = [(HotLink(ours), HotLink(theirs)) for ours, theirs in detached_pairs(2)]
    (to_one, one), (to_two, _) = pairs
    tag, why = Tag(1, 1, 1), PeerLost("its power failed", node="worker-9")
    frames = (
        (Kind.TENSOR, TENSOR_CHANNEL, tensors.encode("uint8", (1,), tag.name, b"x")),
        (Kind.CONTROL, 0, [messages.pack(abort_message(tag, why))]),
    )
    at_once = memoryview(b"".join(bytes(one._sealer.seal(kind, on, *parts)) for kind, on, parts in frames))
    late = threading.Timer(0.3, deliver, [one, [at_once]])  # or the tensor would be read by itself
    late.start()
    began = time.monotonic()
    with pytest.raises(PeerLost, match="worker-9: its power failed"):
        Group(0, {1: to_one, 2: to_two}).all_gather(tag, b"x", deadline=soon(10))
    assert time.monotonic() - began < 9
    late.join()
    for link in itertools.chain(*pairs):
        link.close()


# -- an end at any byte -------------------------------------------------------------------------------


def last_frames(link: HotLink) -> bytes:
    """A small tensor, a message, a tensor of several pieces and the close frame, as they go out."""
    sealed = bytearray()
    for parts in (
        tensors.encode("uint8", (100,), "1.1.0", bytes(100)),
        *tensors.payloads(tensors.encode("uint8", (MB,), "1.2.0", bytes(MB)), 1),
    ):
        sealed += link._sealer.seal(Kind.TENSOR, TENSOR_CHANNEL, *parts)
        sealed += link._sealer.seal(Kind.CONTROL, 0, b"\x80")
    return bytes(sealed + link._sealer.seal_close("bye"))


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("usual", [False, True])
def test_a_peer_that_ends_at_any_byte_is_lost_and_named(usual: bool, reset: bool) -> None:
    draw = random.Random(usual)
    for cut in (0, 1, 3, 4, 5, 20, 140, 150, 200, draw.randrange(MB), MB + 100, -30, -1, 1 << 30):
        with hot_pair() as (a, b):
            if usual:  # the short way knows what is due
                b.send_tensor(Tag(1, 0, 0), "uint8", (100,), bytes(100))
                a.recv_tensor(Tag(1, 0, 0), deadline=soon(10))
            whole = last_frames(b)
            ended = whole[:cut]
            seen = []

            def receive(link: HotLink = a, seen: list[int] = seen) -> None:
                seen.extend(len(link.recv_tensor(Tag(1, step, 0), deadline=soon(10)).data) for step in (1, 2, 3))

            def end(link: HotLink = b, ended: bytes = ended) -> None:
                deliver(link, [memoryview(ended)])
                if reset:
                    link.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                link.link.close()

            ending = threading.Thread(target=end)
            ending.start()
            began = time.monotonic()
            with pytest.raises(PeerLost, match="server: connection to host"):
                receive()
            ending.join(10)
            assert time.monotonic() - began < 9
            assert seen == [100, MB][: len(seen)]
            if not reset and len(ended) == len(whole):
                assert seen == [100, MB]
            for _ in range(2):
                with pytest.raises(PeerLost):
                    a.send_tensor(Tag(1, 4, 0), "uint8", (100,), bytes(100), deadline=soon(5))


def test_a_send_that_ran_out_of_time_in_the_middle_of_a_frame_is_finished_by_the_next() -> None:
    """The rest of what was sealed goes first, however the next tensor is sent."""
    with hot_pair() as (a, b):
        size, step = SHORT_BYTES, 0
        with pytest.raises(StepTimeout, match="to take tensor"):
            while True:
                step += 1
                a._may_send.grant(TENSOR_CHANNEL, 1)
                a.send_tensor(Tag(1, step, 0), "uint8", (size,), bytes([step % 251]) * size, deadline=soon(0.05))
        assert a.wants_write

        def go_on() -> None:
            for later in range(step + 1, step + 4):
                a.send_tensor(Tag(1, later, 0), "uint8", (size,), bytes([later % 251]) * size, deadline=soon(10))

        def receive() -> None:
            for number in range(1, step + 4):
                if number <= step:
                    b._inbox._credits._left[TENSOR_CHANNEL] = 64  # as the sender was granted more
                assert b.recv_tensor(Tag(1, number, 0), deadline=soon(10)).data == bytes([number % 251]) * size

        both(go_on, receive)
