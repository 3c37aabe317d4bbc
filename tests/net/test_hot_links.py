"""Hot links and collectives between threads: any size, both ways at once, and every way a wait can end."""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from mlxcel_nb.errors import Cancelled, FrameError, PeerAborted, PeerLost, StepTimeout, WireError
from mlxcel_nb.net.collectives.group import Group, Tag, recv_from, send_to
from mlxcel_nb.net.hot.hot_link import HotLink, Interrupt
from mlxcel_nb.net.hot.outgoing import Outgoing
from mlxcel_nb.util import times
from mlxcel_nb.wire import messages, tensors
from mlxcel_nb.wire.frames import Frame, Kind, close_reason
from tests.net.helpers import both, detached_pairs, hot_pair, soon

MB = 1 << 20


def gather(ranks: list[Group], tag: Tag, own: Sequence) -> list[list[memoryview]]:
    """What every rank gets when all of them exchange `own`."""
    return both(*(functools.partial(group.all_gather, tag, own[group.rank]) for group in ranks))


@pytest.fixture
def groups() -> Iterator[Callable[..., list[Group]]]:
    """Makes stages of so many ranks, each joined to each."""
    opened: list[HotLink] = []

    def make(size: int, **more) -> list[Group]:
        pairs = iter(detached_pairs(size * (size - 1) // 2, **more))
        links: list[dict[int, HotLink]] = [{} for _ in range(size)]
        for a in range(size):
            for b in range(a + 1, size):
                ours, theirs = next(pairs)
                links[a][b], links[b][a] = HotLink(ours), HotLink(theirs)
                opened.extend((links[a][b], links[b][a]))
        return [Group(rank, links[rank]) for rank in range(size)]

    yield make
    for link in opened:
        link.close()


@pytest.mark.parametrize("size", [0, 1, 64, 8192, 300_000, MB, 64 * MB])
def test_two_ranks_that_send_at_once_get_each_others_bytes(size, groups):
    data = [np.random.default_rng(rank).integers(0, 256, size, np.uint8) for rank in range(2)]
    ranks = groups(2)
    for tag in (Tag(1, 1, 1), Tag(1, 1, 2)):
        for parts in gather(ranks, tag, data):
            assert all(np.array_equal(np.frombuffer(p, np.uint8), d) for p, d in zip(parts, data, strict=True))


def test_three_ranks_gather_buffers_of_different_sizes_in_rank_order(groups):
    ranks = groups(3, rekey_every=5)
    sizes = (0, 700_000, 33)
    for seq in range(20):
        own = [bytes([rank + seq]) * sizes[rank] for rank in range(3)]
        for parts in gather(ranks, Tag(1, 1, seq), own):
            assert [bytes(part) for part in parts] == own


def test_a_rank_alone_gathers_its_own_buffer():
    assert Group(0, {}).all_gather(Tag(1, 1, 1), b"alone") == [b"alone"]


def test_ranks_leave_no_gap():
    with pytest.raises(ValueError, match="not 0 to 0"):
        Group(1, {})


def test_a_rank_may_be_steps_ahead(groups):
    """Nobody waits for a peer that has all it needs, however often."""
    ranks = groups(2)

    def loop(group: Group) -> int:
        total = 0
        for step in range(500):
            parts = group.all_gather(Tag(1, step, 0), np.full(16, step + group.rank, np.int64))
            total += sum(int(np.frombuffer(p, np.int64)[0]) for p in parts)
        return total

    first, second = both(*(lambda g=g: loop(g) for g in ranks))
    assert first == second == sum(2 * step + 1 for step in range(500))


@pytest.mark.parametrize("size", [10, 10 * MB])
def test_tensors_keep_their_shape_and_type(size):
    with hot_pair() as (a, b):
        x = np.arange(size // 2, dtype=np.float16).reshape(1, -1, 5)
        y = np.full((3, 4), 7, np.int32)

        def left():
            send_to(a, Tag(1, 1, 1), "float16", x.shape, x)
            return recv_from(a, Tag(1, 1, 1))

        def right():
            send_to(b, Tag(1, 1, 1), "int32", y.shape, y)
            return recv_from(b, Tag(1, 1, 1))

        (kind_y, dims_y, data_y), (kind_x, dims_x, data_x) = both(left, right)
        assert (kind_x, dims_x) == ("float16", x.shape)
        assert np.array_equal(np.frombuffer(data_x, np.uint16), x.view(np.uint16).ravel())
        assert (kind_y, dims_y, bytes(data_y)) == ("int32", (3, 4), y.tobytes())


def test_two_large_sends_at_once_do_not_wait_for_each_other():
    """Neither end receives before it has sent all of it."""
    with hot_pair() as (a, b):
        big = np.random.default_rng(0).integers(0, 256, 48 * MB, np.uint8)

        def end(link):
            send_to(link, Tag(1, 1, 1), "uint8", big.shape, big)
            return np.array_equal(np.frombuffer(recv_from(link, Tag(1, 1, 1))[2], np.uint8), big)

        assert both(lambda: end(a), lambda: end(b)) == [True, True]


def test_a_sender_far_ahead_waits_for_credit_and_then_goes_on():
    with hot_pair() as (a, b):
        sent = threading.Semaphore(0)

        def left():
            for n in range(300):
                send_to(a, Tag(1, n, 0), "uint8", (1,), bytes([n & 255]))
                sent.release()

        thread = threading.Thread(target=left)
        thread.start()
        for _ in range(64):
            assert sent.acquire(timeout=5)
        assert not sent.acquire(timeout=0.1)
        assert [bytes(recv_from(b, Tag(1, n, 0))[2])[0] for n in range(300)] == [n & 255 for n in range(300)]
        thread.join(5)


def test_messages_and_tensors_do_not_stand_in_each_others_way():
    with hot_pair() as (a, b):
        for n in range(3):
            send_to(a, Tag(1, n, 0), "uint8", (MB,), bytes([n]) * MB)
            a.send_control({"type": "step", "n": n})
        assert [b.recv_control()["n"] for _ in range(3)] == [0, 1, 2]
        for n in range(3):
            assert bytes(recv_from(b, Tag(1, n, 0))[2][:1]) == bytes([n])


def test_what_an_older_step_left_is_dropped_and_a_newer_one_is_kept():
    with hot_pair() as (a, b):
        for tag in (Tag(1, 1, 1), Tag(1, 2, 1), Tag(2, 1, 1), Tag(3, 1, 1)):
            send_to(a, tag, "uint8", (1,), bytes([tag.epoch]))
        assert bytes(recv_from(b, Tag(2, 1, 1))[2]) == b"\2"
        with pytest.raises(StepTimeout):
            recv_from(b, Tag(2, 2, 1), deadline=soon(0.05))
        assert bytes(recv_from(b, Tag(3, 1, 1))[2]) == b"\3"


@pytest.mark.parametrize("rekey_every", [None, 3])
def test_what_comes_between_the_pieces_of_a_tensor_does_not_disturb_it(rekey_every):
    """Pieces are decrypted where they belong, and so is whatever has the size of the piece that is due."""
    piece = tensors.PART_BYTES + 20
    fillers = [bytes([n]) * (piece - 8) for n in range(4)]
    with hot_pair(rekey_every=rekey_every) as (a, b):
        x = np.random.default_rng(0).integers(0, 256, 5 * tensors.PART_BYTES + 77, np.uint8)

        def pieces(epoch: int) -> Iterator[Sequence]:
            parts = tensors.payloads(tensors.encode("uint8", x.shape, Tag(epoch, 1, 1).name, x), epoch)
            for n, part in enumerate(parts):
                if 0 < n <= len(fillers):
                    message = messages.pack({"f": fillers[n - 1]})
                    assert len(message) == piece
                    a._replies.extend([(Kind.CONTROL, 0, message), (Kind.PING, 0, b"12345678")])
                yield part

        def left():
            given_up = Outgoing(Kind.TENSOR, 1, itertools.islice(pieces(1), 3))  # its step was left in the middle
            a._drive(given_up, None, None, "")
            a._drive(Outgoing(Kind.TENSOR, 1, pieces(2)), None, None, "")
            a.recv_control()

        def right():
            got = np.frombuffer(recv_from(b, Tag(2, 1, 1))[2], np.uint8)
            same = np.array_equal(got, x)
            heard = [b.recv_control()["f"] for _ in range(2 + len(fillers))]
            b.send_control({})
            return same, heard

        assert both(left, right)[1] == (True, fillers[:2] + fillers)


@pytest.mark.parametrize("size", [1000, 3 * MB + 5])
def test_a_tensor_can_be_received_into_memory_of_the_caller_s(size):
    with hot_pair() as (a, b):
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        mine = np.zeros(size, np.uint8)
        for step in range(3):
            send = threading.Thread(target=send_to, args=(a, Tag(1, step, 0), "uint8", data.shape, data))
            send.start()
            recv_from(b, Tag(1, step, 0), into=memoryview(mine))
            send.join(10)
            assert np.array_equal(mine, data)
            mine[:] = 0
        send = threading.Thread(target=send_to, args=(a, Tag(2, 0, 0), "uint8", data.shape, data))
        send.start()
        with pytest.raises(WireError, match=f"has {size} bytes, {size - 1} are due"):
            recv_from(b, Tag(2, 0, 0), into=memoryview(mine)[1:])
        send.join(10)


# -- how a wait ends ----------------------------------------------------------------------------------


def test_a_wait_that_is_too_long_names_the_node_and_what_was_waited_for(groups):
    ranks = groups(3)
    with pytest.raises(StepTimeout, match=r"server: no progress for 0\.\d+ s while waiting for exchange 4\.2\.7"):
        ranks[0].all_gather(Tag(4, 2, 7), b"x", deadline=soon(0.1))
    with hot_pair() as (a, _), pytest.raises(StepTimeout, match="the token of step 3 from server"):
        a.recv_control(deadline=soon(0.05), what="the token of step 3")


def test_an_interrupt_breaks_a_wait_from_another_thread():
    interrupt = Interrupt()
    with hot_pair() as (a, b):
        timer = threading.Timer(0.1, interrupt.set, [Cancelled("stopped by the user")])
        timer.start()
        began = time.monotonic()
        with pytest.raises(Cancelled):
            a.recv_control(interrupt=interrupt)
        assert time.monotonic() - began < 10
        with pytest.raises(Cancelled):
            recv_from(a, Tag(1, 1, 1), interrupt=interrupt)
        interrupt.clear()
        b.send_control({"still": "usable"})
        assert a.recv_control(interrupt=interrupt) == {"still": "usable"}
    interrupt.close()


def test_after_an_interrupt_in_the_middle_of_large_sends_the_next_epoch_is_clean(groups):
    ranks = groups(2)
    for round_ in range(3):
        interrupts = [Interrupt(), Interrupt()]
        for group, interrupt in zip(ranks, interrupts, strict=True):
            group._interrupt = interrupt
        big = bytes(16 * MB)

        def leave(group, epoch=2 * round_, big=big):
            with pytest.raises(Cancelled):
                for seq in range(1000):
                    group.all_gather(Tag(epoch, 1, seq), big)

        timers = [threading.Timer(0.05 + 0.02 * n, i.set, [Cancelled("stop")]) for n, i in enumerate(interrupts)]
        for timer in timers:
            timer.start()
        both(*(lambda g=g: leave(g) for g in ranks))
        for interrupt in interrupts:
            interrupt.clear()
        for size in (5, 3 * MB):
            own = [bytes([rank]) * size for rank in range(2)]
            for parts in gather(ranks, Tag(2 * round_ + 1, size, 1), own):
                assert [bytes(part) for part in parts] == own
        for interrupt in interrupts:
            interrupt.close()


def test_a_peer_that_leaves_the_step_says_why(groups):
    ranks = groups(2)
    error = {"code": "node-failed", "node": "worker-1", "cause": "ValueError: bad layer", "advice": None}
    ranks[1]._links[0].send_control({"type": "abort", "epoch": 1, "step": 1, "error": error})  # over long since
    ranks[1]._links[0].send_control({"type": "abort", "epoch": 2, "step": 5, "error": error})
    with pytest.raises(PeerAborted, match="worker-1: ValueError: bad layer"):
        ranks[0].all_gather(Tag(2, 5, 1), b"x")
    ranks[1]._links[0].send_control({"type": "abort", "epoch": 3, "step": -1, "error": error})
    with pytest.raises(PeerAborted):
        recv_from(ranks[0]._links[1], Tag(3, 9, 1))


def test_a_goodbye_a_silent_end_and_a_reset_name_the_node_and_its_host():
    def goodbye(link):
        link.close("node stops")

    def silent(link):
        link.link.close()

    def reset(link):
        link.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        link.link.close()

    for end, words in ((goodbye, "node stops"), (silent, "without a goodbye"), (reset, "reset")):
        with hot_pair() as (a, b):
            end(b)
            for _ in range(2):
                with pytest.raises(PeerLost, match=rf"server: connection to host 127\.0\.0\.1 lost: .*{words}"):
                    recv_from(a, Tag(1, 1, 1))


def test_sending_to_a_peer_that_left_raises_its_reason():
    with hot_pair() as (a, b):
        b.close("model unloaded")
        with pytest.raises(PeerLost, match="model unloaded"):
            for _ in range(100):
                send_to(a, Tag(1, 1, 1), "uint8", (MB,), bytes(MB))


def test_a_frame_that_does_not_authenticate_ends_the_link():
    with hot_pair() as (a, b):
        b._sock.send(b"\0\0\0\x20" + bytes(32))
        with pytest.raises(FrameError, match="server"):
            a.recv_control()
        with pytest.raises(FrameError):
            a.send_control({})


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (Kind.STREAM, b"\x80"),
        (Kind.CONTROL, b"\xc1"),
        (Kind.TENSOR, b"".join(tensors.encode("uint8", (1,), "not a tag", b"x"))),
        (Kind.TENSOR, b"\1\xff\0\0"),
    ],
)
def test_a_member_that_breaks_the_contract_is_refused_by_name(kind, payload):
    with hot_pair() as (a, b):
        b._sock.send(b._sealer.seal(kind, 1, payload))
        with pytest.raises(WireError, match="server"):
            recv_from(a, Tag(1, 1, 1))
        with pytest.raises(PeerLost, match="closed by it"):
            b.recv_control()


def test_half_a_frame_is_not_waited_for_longer_than_its_time(monkeypatch):
    monkeypatch.setattr(times, "FRAME_REST_S", 0.2)
    with hot_pair() as (a, b):
        b._sock.send(bytes(b._sealer.seal(Kind.CONTROL, 0, bytes(100)))[:50])
        began = time.monotonic()
        with pytest.raises(WireError, match="rest of a frame"):
            a.recv_control()
        assert time.monotonic() - began < 10


def test_half_a_frame_gets_no_more_time_from_one_wait_to_the_next(monkeypatch):
    monkeypatch.setattr(times, "FRAME_REST_S", 0.5)
    with hot_pair() as (a, b):
        b._sock.send(bytes(b._sealer.seal(Kind.CONTROL, 0, bytes(100)))[:50])
        began = time.monotonic()
        with pytest.raises(WireError, match="rest of a frame"):
            while time.monotonic() - began < 5:
                with contextlib.suppress(StepTimeout):
                    a.recv_control(deadline=soon(0.1))
        assert 0.4 < time.monotonic() - began < 4
        frame = last_frame(b)
        assert frame is not None and frame.kind is Kind.CLOSE
        assert "rest of a frame" in close_reason(frame.payload)


def test_the_time_in_which_nobody_waited_is_not_the_peer_s(monkeypatch):
    monkeypatch.setattr(times, "FRAME_REST_S", 1.0)
    with hot_pair() as (a, b):
        frame = bytes(b._sealer.seal(Kind.CONTROL, 0, messages.pack({"whole": True})))
        b._sock.send(frame[:20])
        with pytest.raises(StepTimeout):
            a.recv_control(deadline=soon(0.1))
        time.sleep(1.1)  # this side computes
        rest = threading.Timer(0.1, b._sock.send, [frame[20:]])
        rest.start()
        assert a.recv_control() == {"whole": True}
        rest.join()


def test_a_goodbye_is_returned():
    with hot_pair() as (a, b):
        b._sock.send(b._sealer.seal_close("bye"))
        with pytest.raises(PeerLost, match="bye"):
            a.recv_control()
        frame = last_frame(b)
        assert frame is not None and frame.kind is Kind.CLOSE


def test_a_credit_of_nothing_is_no_error():
    with hot_pair() as (a, b):
        b._sock.send(b._sealer.seal(Kind.CREDIT, 1, bytes(4)))
        b.send_control({"type": "still here"})
        assert a.recv_control() == {"type": "still here"}


def last_frame(link: HotLink) -> Frame | None:
    """The last frame before the end of the stream, which must be a clean one."""
    link.link.sock.settimeout(5)
    last = None
    while data := link._sock.recv(65536):
        link._reader.feed(data)
        while (frame := link._reader.next_frame()) is not None:
            last = frame
    link._reader.receive_eof()
    return last


def test_pings_are_answered_while_waiting():
    with hot_pair() as (a, b):
        b._sock.send(b._sealer.seal(Kind.PING, 0, b"12345678", b"filler"))
        with pytest.raises(StepTimeout):
            a.recv_control(deadline=soon(0.1))
        b.fill()
        frame = b._reader.next_frame()
        assert frame is not None
        assert (frame.kind, bytes(frame.payload)) == (Kind.PONG, b"12345678filler")


def test_a_slow_but_steady_peer_is_no_timeout():
    """The deadline moves along while bytes move."""
    with hot_pair() as (a, b):
        began = time.monotonic()

        def left():
            for n in range(6):
                time.sleep(0.3)  # the peer is at work
                b.send_control({"n": n})
            send_to(b, Tag(1, 1, 1), "uint8", (1,), b"x")

        def right():
            return bytes(recv_from(a, Tag(1, 1, 1), deadline=soon(1.5))[2])

        assert both(left, right)[1] == b"x"
        assert time.monotonic() - began > 1.5


def test_waiting_costs_no_processor_time():
    with hot_pair() as (a, _):
        began = time.thread_time()
        with pytest.raises(StepTimeout):
            a.recv_control(deadline=soon(0.5))
        assert time.thread_time() - began < 0.05
