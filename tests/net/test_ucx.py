"""UCX in place of TCP: a byte stream, the way two ends agree on it, and what keeps a link on TCP.

No adapter exists where these run, so UCX is told to use shared memory or TCP: the same calls, other wires.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel_nb.errors import PeerLost
from mlxcel_nb.net.collectives.group import Tag
from mlxcel_nb.net.further.agree import agree
from mlxcel_nb.net.further.bell import Bell
from mlxcel_nb.net.further.offer import Unavailable
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.ucx import library
from mlxcel_nb.net.ucx.offer import UcxOffer
from mlxcel_nb.net.ucx.stream import RDMA, UcxStream, Worker
from mlxcel_nb.wire import messages
from mlxcel_nb.wire.frames import Kind
from tests.net.far import LIMIT_S, Far, echo
from tests.net.helpers import detached_pairs
from tests.net.moved import descriptors

WIRES = ("sm,self", "tcp,self")


@pytest.fixture(autouse=True, scope="module")
def ucx() -> None:
    """UCX itself. CI demands it; elsewhere a machine without it leaves these tests out."""
    try:
        library.load()
    except Unavailable as reason:
        if os.environ.get("MLXCEL_NB_REQUIRE_ALL"):
            pytest.fail(str(reason))
        pytest.skip(str(reason))  # a user need not have RDMA


class End:
    """One end of a stream, used as a hot link uses it: it blocks in poll, with a deadline."""

    def __init__(self, wires: str, link: Link) -> None:
        self.worker = Worker(wires)
        self.link = link

    def meet(self, peer: bytes) -> None:
        self.stream = UcxStream(self.worker, peer, Bell(self.link))

    def close(self) -> None:
        self.stream.close()
        self.link.close()


def wait(a: End, b: End, end: float) -> None:
    """Until something can be done at either end: UCX works on both while it connects them."""
    poller = select.poll()
    for one in (a, b):
        poller.register(one.stream, select.POLLIN)
    poller.poll(max(0, (end - time.monotonic()) * 1000))
    assert time.monotonic() < end, "nothing woke the ends"


@pytest.fixture(params=WIRES)
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[End, End]]:
    before = descriptors()
    a, b = (End(request.param, link) for link in detached_pairs(1)[0])
    a.meet(b.worker.address)
    b.meet(a.worker.address)
    yield a, b
    a.close()
    b.close()
    assert descriptors() <= before  # what other tests left to the collector may go meanwhile


def carry(a: End, b: End, data: bytes) -> bytes:
    """What arrives at `b` of what `a` sends, both driven by this thread."""
    out, got, room = memoryview(data), bytearray(), memoryview(bytearray(100_000))
    end = time.monotonic() + LIMIT_S
    while len(got) < len(data):
        moved = False
        try:
            if out:
                out = out[a.stream.send(out) :]
                moved = True
        except BlockingIOError:
            pass
        try:
            got += room[: b.stream.recv_into(room)]
            moved = True
        except BlockingIOError:
            pass
        if not moved:
            wait(a, b, end)
    return bytes(got)


@pytest.mark.parametrize("size", [1, 5000, 1 << 20, 5_000_001])
def test_bytes_arrive_whole_and_in_order(ends: tuple[End, End], size: int) -> None:
    a, b = ends
    data = os.urandom(size)
    assert carry(a, b, data) == data
    assert carry(b, a, data[::-1]) == data[::-1]


def test_the_end_is_read_behind_the_last_bytes(ends: tuple[End, End]) -> None:
    a, b = ends
    assert carry(a, b, b"hello") == b"hello"
    a.stream.send(memoryview(b"farewell"))
    a.stream.shutdown(socket.SHUT_WR)
    got, end = b"", time.monotonic() + LIMIT_S
    while True:
        try:
            piece = b.stream.recv(100)
        except BlockingIOError:
            wait(a, b, end)
            continue
        if not piece:
            break
        got += piece
    assert got == b"farewell"


def test_a_peer_whose_connection_ends_wakes_the_other(ends: tuple[End, End]) -> None:
    a, b = ends
    a.link.hang_up()
    wait(a, b, time.monotonic() + LIMIT_S)
    assert b.stream.recv(10) == b""


def test_what_the_peer_says_on_the_connection_meanwhile_is_not_eaten(ends: tuple[End, End]) -> None:
    """An end that is done with the trial says so there, and UCX may bring its last frame later than that."""
    a, b = ends
    before = b.link.reader.total
    a.link.sock.send(a.link.sealer.seal(Kind.CONTROL, 0, messages.pack({"type": "path"})))
    end = time.monotonic() + LIMIT_S
    while b.link.reader.total == before:
        assert time.monotonic() < end, "nothing came"
        with pytest.raises(BlockingIOError):
            b.stream.recv(100)
    frame = b.link.reader.next_frame()
    assert frame is not None and messages.unpack(frame.payload) == {"type": "path"}


def test_an_end_that_has_not_read_all_that_came_may_be_closed(ends: tuple[End, End]) -> None:
    """UCX's memory goes back by the endpoint it came by; without it, the process would end."""
    a, b = ends
    a.stream.send(memoryview(bytes(5000)))
    end, got = time.monotonic() + LIMIT_S, b""
    while not got:
        try:
            got = b.stream.recv(1)
        except BlockingIOError:
            wait(a, b, end)
    assert got == b"\0" and len(b.stream._pending) > 0


def test_a_peer_that_closes_amid_a_transfer_is_an_error_of_who_sends_or_reads(ends: tuple[End, End]) -> None:
    """Not of who polls, who would not know what to do with it; and neither process ends."""
    a, b = ends
    data, end = memoryview(bytes(1 << 20)), time.monotonic() + LIMIT_S
    with contextlib.suppress(BlockingIOError):
        while True:
            a.stream.send(data)
    b.close()
    with contextlib.suppress(OSError):
        while time.monotonic() < end:
            a.stream.fileno()
            with contextlib.suppress(BlockingIOError):
                a.stream.send(data)
            try:
                if not a.stream.recv(1):
                    break
            except BlockingIOError:
                continue
    assert time.monotonic() < end


def test_a_host_without_an_adapter_is_told_so() -> None:
    if any(Path("/sys/class").glob("infiniband/*")):
        Worker(RDMA).close()
        return
    with pytest.raises(Unavailable, match="this host has no adapter for rc,dc,ud"):
        Worker(RDMA)


def test_transports_that_do_not_exist_are_told() -> None:
    with pytest.raises(Unavailable, match="no adapter for nonsense"):
        Worker("nonsense")


# -- agreeing --------------------------------------------------------------------------------------------------------


@pytest.fixture
def far(request: pytest.FixtureRequest) -> Iterator[tuple[Far, HotLink]]:
    """A far end that may use the parameter's transports, and the link to it."""
    process = Far("ucx", request.param)
    hot = process.join()
    yield process, hot
    hot.close()
    process.close()


@pytest.mark.parametrize("far", WIRES, indirect=True)
def test_tensors_go_over_ucx_once_both_ends_have_tried_it(far: tuple[Far, HotLink], request) -> None:
    _, hot = far
    wires = request.node.callspec.params["far"]
    assert agree(hot, lambda: UcxOffer(wires)) == ""
    assert hot.link.transport.startswith("rdma (UCX ")
    for step, size in enumerate((1, 8192, 700_000, 9_000_001)):
        data = os.urandom(size)
        assert echo(hot, step, data) == data


@pytest.mark.parametrize("far", ["rc,ud"], indirect=True)
def test_a_peer_without_an_adapter_keeps_the_link_on_tcp_and_says_why(far: tuple[Far, HotLink]) -> None:
    _, hot = far
    assert agree(hot, lambda: UcxOffer("tcp,self")) == "far: this host has no adapter for rc,ud"
    assert hot.link.transport == "tcp"
    assert echo(hot, 0, b"still here") == b"still here"


@pytest.mark.parametrize("far", ["tcp,self"], indirect=True)
def test_this_host_s_own_reason_comes_first(far: tuple[Far, HotLink]) -> None:
    _, hot = far
    assert agree(hot, lambda: UcxOffer("rc,ud")) == "this host has no adapter for rc,ud"
    assert echo(hot, 0, b"still here") == b"still here"


@pytest.mark.parametrize("far", ["sm,self"], indirect=True)
def test_ends_without_a_wire_in_common_stay_on_tcp(far: tuple[Far, HotLink]) -> None:
    _, hot = far
    assert agree(hot, lambda: UcxOffer("tcp,self"))
    assert hot.link.transport == "tcp"
    assert echo(hot, 0, b"still here") == b"still here"


@pytest.mark.parametrize("far", ["tcp,self"], indirect=True)
def test_a_killed_peer_is_noticed_on_the_connection_beside_it(far: tuple[Far, HotLink]) -> None:
    process, hot = far
    assert agree(hot, lambda: UcxOffer("tcp,self")) == ""
    process.process.send_signal(signal.SIGKILL)
    with pytest.raises(PeerLost, match="far"):
        hot.recv_tensor(Tag(1, 0, 2), deadline=time.monotonic() + LIMIT_S)
