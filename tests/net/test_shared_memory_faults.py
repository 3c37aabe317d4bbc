"""What goes wrong with memory that two share: peers that die, stop or scribble, and a system that gives nothing."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import fcntl
import os
import random
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel_nb.errors import PeerLost, StepTimeout, WireError
from mlxcel_nb.net.collectives.group import Tag
from mlxcel_nb.net.further.agree import agree
from mlxcel_nb.net.further.offer import Unavailable
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.shared_memory import ring as rings
from mlxcel_nb.net.shared_memory.ring import DATA_AT
from mlxcel_nb.net.shared_memory.segment import Segment
from mlxcel_nb.wire.frames import Kind
from tests.net.far import LIMIT_S, Far, echo
from tests.net.moved import agree_both, both_moved, descriptors, mappings, offer, stream_of, two_ends

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared memory is used on Linux only")

SIZE = DATA_AT + 4096


def soon() -> float:
    return time.monotonic() + LIMIT_S


# -- a system that gives nothing -------------------------------------------------------------------------------------


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """So many more can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    limit, free = 0, 0
    while limit in used or free < count:
        free += limit not in used
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_end_without_descriptors_stays_on_tcp_and_gives_back_what_it_took() -> None:
    """At whichever of them it runs out: those of both ends, which are one process here, are ten in all."""
    with both_moved():
        pass  # what is imported or made once is there from now on
    said = []
    for left in range(14):
        with two_ends() as ends:
            open_before, mapped_before = descriptors(), mappings()
            with descriptors_left(left):
                reasons = agree_both(ends)
            said.append(reasons)
            assert all(reasons) or not any(reasons), "both move or none does"
            if all(reasons):
                # What other tests left to the collector may go meanwhile.
                assert descriptors() <= open_before and mappings() <= mapped_before, f"with {left} left"
            ends[0].send_tensor(Tag(1, 0, 0), "uint8", (1,), b"x", deadline=soon())
            assert ends[1].recv_tensor(Tag(1, 0, 0), deadline=soon()).data == b"x"
    assert said[-1] == ["", ""]
    assert all("Too many open files" in reason for reason in (*said[0], *said[1]))


def test_an_interpreter_built_for_an_old_system_asks_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of conda and of standalone builds name none of this, and the systems they run on have it all the same."""
    monkeypatch.delattr(os, "memfd_create")
    for name in [name for name in vars(fcntl) if "SEAL" in name]:
        monkeypatch.delattr(fcntl, name)
    with both_moved() as (a, b):
        a.send_tensor(Tag(1, 0, 0), "uint8", (1,), b"x", deadline=soon())
        assert b.recv_tensor(Tag(1, 0, 0), deadline=soon()).data == b"x"


def test_a_system_that_forbids_such_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's filter of system calls does."""

    def forbidden(_name: str, _flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    with two_ends() as ends:
        ours, theirs = agree_both(ends)
        assert ours == "this system gives none: Operation not permitted"
        assert theirs == "this system gives none: Operation not permitted"
        assert ends[0].link.transport == "tcp"


def test_a_c_library_without_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    with pytest.raises(Unavailable, match="this system's C library has none"):
        Segment.make(SIZE)


def test_a_limit_on_the_size_of_files_is_a_reason_and_no_signal() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = descriptors()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(Unavailable, match="this system gives none: File too large"):
            Segment.make(SIZE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert descriptors() <= before


def test_a_member_cannot_have_anything_else_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a terminal may make it the process's own, and opening a device may start it."""
    ours, word = Segment.make(SIZE), bytes(32)
    one, other = os.openpty()
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it was opened"))
    for descriptor in (one, other):
        with pytest.raises(Unavailable, match="something else"):
            Segment.open(os.getpid(), descriptor, word, SIZE)
        os.close(descriptor)
    ours.close()


def test_a_program_that_is_started_later_inherits_none_of_it() -> None:
    with both_moved():
        assert mappings() > 0
        told = subprocess.check_output(["ls", "-l", "/proc/self/fd"], close_fds=False, text=True, timeout=LIMIT_S)
    assert "memfd" not in told and "eventpoll" not in told


# -- peers that end --------------------------------------------------------------------------------------------------


def test_what_a_peer_said_before_it_was_gone_is_read_to_its_end() -> None:
    """Its wish to be woken cannot be granted any more, and that is no reason to lose what it had put in."""
    with both_moved() as (a, b):
        stream = stream_of(b)
        stream.send(b._sealer.seal_close("the model does not fit"))
        stream._writer.wish()  # as one does that found no room
        sock = b.link.sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        poller = select.poll()
        poller.register(a.link.sock, select.POLLIN)
        assert poller.poll(LIMIT_S * 1000), "the reset is there"
        with pytest.raises(PeerLost, match="the model does not fit"):
            a.recv_control(deadline=soon())


def test_a_peer_that_ends_within_a_frame_is_lost_and_nothing_of_the_frame_is_used() -> None:
    with both_moved() as (a, b):
        frame = b._sealer.seal(Kind.CONTROL, 0, b"\x80" + bytes(1000))
        stream_of(b).send(frame[:500])
        b.link.hang_up()
        with pytest.raises(PeerLost, match="it ended without a goodbye"):
            a.recv_control(deadline=soon())


@pytest.fixture
def far() -> Iterator[tuple[Far, HotLink]]:
    process = Far("shared-memory")
    hot = process.join()
    assert agree(hot, offer(hot.link)) == ""
    yield process, hot
    hot.close()
    process.process.send_signal(signal.SIGCONT)
    process.close()


def test_a_peer_that_is_killed_amid_a_tensor_is_lost(far: tuple[Far, HotLink]) -> None:
    """More than the ring holds, so that it cannot have been sent whole."""
    process, hot = far
    data = bytes(9_000_000)
    hot.send_tensor(Tag(1, 0, 1), "uint8", (len(data),), data, deadline=soon())
    while not hot.absorb():
        time.sleep(0.01)  # for its first frame
    process.process.kill()
    with pytest.raises(PeerLost, match="far"):
        hot.recv_tensor(Tag(1, 0, 2), deadline=soon())


def test_a_peer_that_is_stopped_while_the_ring_is_full_is_a_deadline_missed_and_may_go_on(
    far: tuple[Far, HotLink],
) -> None:
    process, hot = far
    data = random.Random(3).randbytes(4_000_000)
    process.process.send_signal(signal.SIGSTOP)
    with pytest.raises(StepTimeout, match="far to take tensor"):
        hot.send_tensor(Tag(1, 0, 1), "uint8", (len(data),), data, deadline=time.monotonic() + 0.3)
    process.process.send_signal(signal.SIGCONT)
    assert echo(hot, 0, data) == data


# -- peers that scribble ---------------------------------------------------------------------------------------------


def test_whatever_a_peer_writes_into_either_ring_ends_the_link_or_does_nothing() -> None:
    """A member that is hostile: every count and wish of both rings, again and again, while the other end works."""
    draw = random.Random(4)
    counts = (0, 1, 2**20 - 1, 2**20, 2**20 + 1, 2**63, 2**64 - 1)
    ended = 0
    for _ in range(25):
        with both_moved() as (a, b):
            for segment in stream_of(b)._segments:
                words = segment.buffer[:DATA_AT].cast("Q")
                for index in draw.sample((8, 16, 24, 32), 2):
                    words[index] = draw.choice((*counts, draw.getrandbits(64)))
                words.release()
                for at in draw.sample(range(DATA_AT, DATA_AT + 5000), 50):
                    segment.buffer[at] = draw.getrandbits(8)
            with pytest.raises((PeerLost, WireError, StepTimeout), match=a.node) as caught:
                a.send_tensor(Tag(1, 0, 0), "uint8", (3000,), bytes(3000), deadline=time.monotonic() + 0.05)
                a.recv_control(deadline=time.monotonic() + 0.05)
            ended += not isinstance(caught.value, StepTimeout)
    assert ended > 10


# -- sleeping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loose", [False, True], ids=["as here", "as where writes may be swapped"])
def test_ends_that_sleep_at_any_moment_are_always_woken(loose: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both send and receive in turn what often does not fit; each may fall asleep just as the other writes."""
    monkeypatch.setattr(rings, "_LOOSE", loose)
    rounds = 150

    def work(hot: HotLink, seed: int) -> int:
        draw = random.Random(seed)
        done = 0
        for step in range(rounds):
            data = bytes([step % 256]) * draw.choice((1, 100, 9000, 300_000, 1 << 20, 2_000_000))
            hot.send_tensor(Tag(1, step, 0), "uint8", (len(data),), data, deadline=soon())
            got = hot.recv_tensor(Tag(1, step, 0), deadline=soon()).data
            done += got[0] == got[-1] == step % 256
        return done

    with both_moved() as ends, concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(work, end, seed) for seed, end in enumerate(ends)]
        assert [future.result(50) for future in futures] == [rounds, rounds]
