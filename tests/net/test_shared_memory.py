"""Shared memory in place of TCP between processes of one host: the ring, its memory, the waking, and the agreement."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import random
import select
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mlxcel_nb.errors import PeerLost
from mlxcel_nb.net.collectives.group import Tag
from mlxcel_nb.net.further.agree import agree
from mlxcel_nb.net.further.offer import Unavailable
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.shared_memory.offer import SharedMemoryOffer
from mlxcel_nb.net.shared_memory.ring import DATA_AT, Reader, Writer
from mlxcel_nb.net.shared_memory.segment import Segment
from mlxcel_nb.net.shared_memory.stream import SharedMemoryStream
from tests.net.far import LIMIT_S, Far, echo
from tests.net.moved import agree_both, both_moved, descriptors, offer, stream_of, two_ends

RING = 4096


# -- the ring, whose memory need not be shared for this --------------------------------------------------------------


@pytest.fixture
def ring() -> tuple[Writer, Reader, memoryview]:
    memory = memoryview(bytearray(DATA_AT + RING))
    return Writer(memory), Reader(memory), memory


def test_bytes_come_out_as_they_went_in_however_they_are_cut(ring: tuple[Writer, Reader, memoryview]) -> None:
    writer, reader, _ = ring
    draw = random.Random(1)
    sent = draw.randbytes(100_000)
    left, got = memoryview(sent), bytearray()
    while len(got) < len(sent):
        left = left[writer.put(left[: draw.choice((1, 100, RING - 1, RING, RING + 1))]) :]
        room = memoryview(bytearray(draw.choice((1, 99, RING, 2 * RING))))
        got += room[: reader.take(room)]
    assert got == sent
    assert reader.empty and not reader.take(memoryview(bytearray(1)))


def test_what_does_not_fit_is_not_taken(ring: tuple[Writer, Reader, memoryview]) -> None:
    writer, reader, _ = ring
    assert writer.put(memoryview(bytes(RING + 7))) == RING
    assert writer.put(memoryview(b"x")) == 0
    assert reader.take(memoryview(bytearray(5))) == 5
    assert writer.put(memoryview(bytes(RING))) == 5


def test_a_wish_to_be_woken_is_seen_once_and_a_look_comes_after_it(ring: tuple[Writer, Reader, memoryview]) -> None:
    writer, reader, _ = ring
    assert not writer.reader_sleeps
    reader.wish()
    assert reader.empty
    writer.put(memoryview(b"x"))
    assert writer.reader_sleeps and not writer.reader_sleeps
    reader.wish()
    assert not reader.empty
    reader.take(memoryview(bytearray(9)))
    reader.awake()
    assert not writer.reader_sleeps
    writer.wish()
    assert writer.room
    writer.put(memoryview(bytes(RING)))
    writer.wish()
    assert not writer.room
    reader.take(memoryview(bytearray(9)))
    assert reader.writer_sleeps and not reader.writer_sleeps


@pytest.mark.parametrize("count", [RING + 1, 2**64 - 1, 2**63])
def test_a_count_that_cannot_be_is_an_error(ring: tuple[Writer, Reader, memoryview], count: int) -> None:
    writer, reader, memory = ring
    words = memory[:DATA_AT].cast("Q")
    words[8] = count
    with pytest.raises(OSError, match="put more into shared memory than fits"):
        reader.take(memoryview(bytearray(9)))
    words[16] = count
    with pytest.raises(OSError, match="took more out of shared memory than was put in"):
        writer.put(memoryview(b"x"))


# -- the memory ------------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared memory is used on Linux only")


def test_a_segment_is_seen_by_whoever_opens_it_and_has_no_name() -> None:
    ours = Segment.make(DATA_AT + RING)
    theirs = Segment.open(*ours.where, ours.word, DATA_AT + RING)
    ours.buffer[5000:5005] = b"hello"
    assert bytes(theirs.buffer[5000:5005]) == b"hello"
    assert not any("mlxcel" in name for name in (entry.name for entry in Path("/dev/shm").iterdir()))
    for segment in (ours, theirs):
        segment.close()


def test_only_the_very_segment_that_is_meant_is_opened() -> None:
    size = DATA_AT + RING
    ours, other = Segment.make(size), Segment.make(size)
    with pytest.raises(Unavailable, match="another process's"):
        Segment.open(*other.where, ours.word, size)
    with pytest.raises(Unavailable, match="something else"):
        Segment.open(*ours.where, ours.word, size + 4096)
    with Path(__file__).open("rb") as file, pytest.raises(Unavailable):  # a file has no seals
        Segment.open(os.getpid(), file.fileno(), ours.word, size)
    reads, writes = os.pipe()
    with pytest.raises(Unavailable, match="something else"):
        Segment.open(os.getpid(), reads, ours.word, size)
    with pytest.raises(Unavailable, match="cannot be opened: No such file"):
        Segment.open(os.getpid(), 99_999, ours.word, size)
    for descriptor in (reads, writes):
        os.close(descriptor)
    for segment in (ours, other):
        segment.close()


def test_a_peer_cannot_cut_a_segment_short() -> None:
    """Reading what was cut off would kill the process."""
    segment = Segment.make(DATA_AT + RING)
    with Path(f"/proc/{os.getpid()}/fd/{segment.where[1]}").open("r+b") as file, pytest.raises(PermissionError):
        file.truncate(0)
    segment.close()


# -- the stream ------------------------------------------------------------------------------------------------------


def readable(stream: SharedMemoryStream, within_s: float) -> bool:
    poller = select.poll()
    poller.register(stream, select.POLLIN)
    return bool(poller.poll(within_s * 1000))


def test_a_sleeper_is_woken_for_what_comes_and_only_for_that() -> None:
    with both_moved() as (a, b):
        here, there = stream_of(a), stream_of(b)
        assert not readable(there, 0.05)
        here.send(memoryview(b"one"))
        assert readable(there, LIMIT_S)
        assert there.recv(9) == b"one"
        assert not readable(there, 0.05), "the call that woke it is used up"
        here.send(memoryview(b"two"))
        assert there.recv(9) == b"two"
        with pytest.raises(BlockingIOError):
            there.recv(9)


def test_a_sender_without_room_is_woken_when_there_is_some() -> None:
    with both_moved() as (a, b):
        here, there = stream_of(a), stream_of(b)
        data = memoryview(bytes(1 << 20))
        with pytest.raises(BlockingIOError):
            while True:
                here.send(data)
        assert not readable(here, 0.05)
        assert len(there.recv(1000)) == 1000
        assert readable(here, LIMIT_S)
        assert here.send(data) == 1000


def test_nothing_is_left_open() -> None:
    with both_moved():
        pass  # what is imported or made once is there from now on
    before = descriptors()
    with both_moved() as (a, _):
        assert a.link.transport == "shared memory"
        assert descriptors() > before
    assert descriptors() <= before  # what other tests left to the collector may go meanwhile


def test_an_end_that_heard_a_goodbye_and_closed_may_be_closed_again() -> None:
    """A follower closes its links when the leader has left, and once more when its part is dropped."""
    with both_moved() as (a, b):
        a.close("enough")
        with pytest.raises(PeerLost, match="enough"):
            b.recv_control(deadline=time.monotonic() + LIMIT_S)
        b.close()


def test_a_peer_that_scribbles_over_the_counts_ends_the_link_and_no_more() -> None:
    with both_moved() as (a, b):
        stream_of(a)._segments[0].buffer[64:72] = b"\xff" * 8
        with pytest.raises(PeerLost, match="put more into shared memory than fits"):
            b.recv_control(deadline=time.monotonic() + LIMIT_S)


def test_both_ends_send_far_more_than_the_ring_holds_at_the_same_time() -> None:
    data = random.Random(2).randbytes(5_000_000)

    def swap(hot: HotLink) -> bytes:
        hot.send_tensor(Tag(1, 1, 1), "uint8", (len(data),), data, deadline=time.monotonic() + LIMIT_S)
        return bytes(hot.recv_tensor(Tag(1, 1, 1), deadline=time.monotonic() + LIMIT_S).data)

    with both_moved() as ends, concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert [future.result(LIMIT_S) == data for future in [pool.submit(swap, end) for end in ends]] == [True, True]


# -- with another process --------------------------------------------------------------------------------------------


@pytest.fixture
def far() -> Iterator[tuple[Far, HotLink]]:
    process = Far("shared-memory")
    hot = process.join()
    yield process, hot
    hot.close()
    process.close()


@pytest.mark.parametrize("spin_s", [0.0, 150e-6])
def test_tensors_of_any_size_go_through_memory(far: tuple[Far, HotLink], spin_s: float) -> None:
    _, hot = far
    hot.spin.most_s = spin_s
    assert agree(hot, offer(hot.link)) == ""
    for step, size in enumerate((1, 8192, 700_000, 9_000_001, *[4096] * 200)):
        data = os.urandom(size)
        assert echo(hot, step, data) == data


def test_frames_in_memory_are_sealed(far: tuple[Far, HotLink]) -> None:
    _, hot = far
    assert agree(hot, offer(hot.link)) == ""
    text = b"the weights of nobody else's model" * 30
    assert echo(hot, 0, text) == text
    for segment in stream_of(hot)._segments:
        assert bytes(segment.buffer[DATA_AT : DATA_AT + 512]).strip(b"\0")
        assert text[:34] not in bytes(segment.buffer)


def test_a_killed_peer_is_noticed_by_its_connection(far: tuple[Far, HotLink]) -> None:
    process, hot = far
    assert agree(hot, offer(hot.link)) == ""
    process.process.send_signal(signal.SIGKILL)
    with pytest.raises(PeerLost, match="far") as caught:
        hot.recv_tensor(Tag(1, 0, 2), deadline=time.monotonic() + LIMIT_S)
    assert str(caught.value).lower().count("reset") <= 2, "reset (Connection reset by peer), or a plain end"


def test_ends_with_other_addresses_are_two_hosts(far: tuple[Far, HotLink]) -> None:
    """Namespaces that stand for hosts share one memory; so may containers."""
    _, hot = far
    elsewhere = dataclasses.replace(hot.link, peer=dataclasses.replace(hot.peer, address=("192.0.2.7", 1)))
    assert agree(hot, offer(elsewhere)) == "the ends are not on one host"
    assert hot.link.transport == "tcp"
    assert echo(hot, 0, b"still here") == b"still here"


@pytest.mark.parametrize("ip", ["127.0.0.2", "::1"])
def test_all_loopback_addresses_are_one_host(far: tuple[Far, HotLink], ip: str) -> None:
    """Case 47: a node may be bound to one, and be dialled from another."""
    _, hot = far
    other = dataclasses.replace(hot.link, peer=dataclasses.replace(hot.peer, address=(ip, 1)))
    assert agree(hot, offer(other)) == ""
    assert echo(hot, 0, b"through memory") == b"through memory"


def test_a_peer_that_names_another_piece_of_memory_keeps_the_link_on_tcp() -> None:
    class Liar(SharedMemoryOffer):
        def __init__(self, link: Link) -> None:
            super().__init__(link)
            self.words = {**self.words, "word": bytes(32)}

    with two_ends() as (honest, liar):
        one, other = agree_both((honest, liar), offer(honest.link), partial(Liar, liar.link))
        assert one == "what the peer calls its memory is another process's"
        assert other.endswith(": what the peer calls its memory is another process's")
        assert {hot.link.transport for hot in (honest, liar)} == {"tcp"}


@pytest.mark.parametrize("words", [{}, {"process": "1", "descriptor": 2}, {"process": -1, "descriptor": 0}])
def test_an_offer_without_a_place_keeps_the_link_on_tcp(words: dict[str, object]) -> None:
    class Vague(SharedMemoryOffer):
        def __init__(self, link: Link) -> None:
            super().__init__(link)
            self.words = words

    with two_ends() as (honest, vague):
        agreed = agree_both((honest, vague), offer(honest.link), partial(Vague, vague.link))
        assert all(said.endswith("an offer of shared memory without a place") for said in agreed)


def test_other_systems_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Unavailable, match="on Linux only"):
        Segment.make(DATA_AT + RING)
