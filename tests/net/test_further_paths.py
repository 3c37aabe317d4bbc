"""How two ends agree on a further path, whichever it is: a late peer, a path that never carries, reasons, the bell."""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from mlxcel_nb.errors import PeerLost
from mlxcel_nb.net.further import agree as agreeing
from mlxcel_nb.net.further import bell as bells
from mlxcel_nb.net.further.agree import agree
from mlxcel_nb.net.further.bell import Bell
from mlxcel_nb.net.further.offer import Unavailable
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.hot.tag import Tag
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.wire.frame_reader import READ_BYTES
from mlxcel_nb.wire.frames import Kind
from tests.net.far import LIMIT_S
from tests.net.moved import agree_both, both_moved, offer, stream_of, two_ends


class Deaf:
    """A path whose poll is always woken and that never carries a byte; it can be told from a socket by nothing else."""

    name: ClassVar[str] = "deaf"
    path_id: ClassVar[int] = 9
    words: Mapping[str, Any] = {}
    transport = "deaf"

    def __init__(self) -> None:
        self.awake = os.eventfd(1, os.EFD_CLOEXEC)

    def connect(self, _link: Link, _theirs: Mapping[str, Any]) -> Deaf:
        return self

    def fileno(self) -> int:
        return self.awake

    def send(self, data: memoryview) -> int:
        return len(data)

    def recv_into(self, _buffer: memoryview) -> int:
        raise BlockingIOError

    def recv(self, _count: int) -> bytes:
        raise BlockingIOError

    def flush(self, _within_s: float) -> bool:
        return True

    def shutdown(self, _how: int) -> None:
        return

    def close(self) -> None:
        if self.awake >= 0:
            os.close(self.awake)
            self.awake = -1


def still_carries(a: HotLink, b: HotLink) -> bool:
    a.send_tensor(Tag(7, 0, 0), "uint8", (3,), b"tcp", deadline=time.monotonic() + LIMIT_S)
    return bytes(b.recv_tensor(Tag(7, 0, 0), deadline=time.monotonic() + LIMIT_S).data) == b"tcp"


def test_a_path_that_is_woken_all_the_time_and_carries_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreeing, "TRIAL_S", 0.2)
    with two_ends() as ends:
        for said in agree_both(ends, Deaf, Deaf):
            assert "nothing came within 0.2 s" in said
        assert still_carries(*ends)


def test_an_end_that_has_others_to_try_first_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreeing, "AGREE_S", 0.2)
    with two_ends() as (early, late), concurrent.futures.ThreadPoolExecutor(1) as pool:
        agreed = pool.submit(agree, early, offer(early.link))
        time.sleep(0.6)  # the case: three times what a message about the path may take
        assert agree(late, offer(late.link)) == ""
        assert agreed.result(LIMIT_S) == ""


def test_a_peer_s_reason_is_a_line_of_status_and_steers_no_terminal() -> None:
    def rude() -> Deaf:
        raise Unavailable("\x1b[2J" + "no " * 10_000)

    with two_ends() as ends:
        polite, _ = agree_both(ends, offer(ends[0].link), rude)
        assert polite.startswith(f"{ends[0].node}: ?[2Jno no")
        assert len(polite) < 300


def test_an_error_of_the_system_s_is_told_in_its_words() -> None:
    def poor() -> Deaf:
        raise OSError(24, "Too many open files")

    with two_ends() as ends:
        rich, told = agree_both(ends, offer(ends[0].link), poor)
        assert told == "Too many open files"
        assert rich == f"{ends[0].node}: Too many open files"


# -- the connection beside the path ----------------------------------------------------------------------------------


def flood(link: Link, kind: Kind, payload: bytes) -> int:
    """Send whole frames until the socket takes no more; how many bytes."""
    sent = 0
    try:
        while True:
            frame = link.sealer.seal(kind, 0, payload)
            while frame:
                count = link.sock.send(frame)
                sent, frame = sent + count, frame[count:]
    except BlockingIOError:
        return sent


def test_a_flood_of_calls_costs_one_read_at_a_time() -> None:
    with both_moved() as (a, b):
        sent = flood(b.link, Kind.PONG, bytes(1000))
        assert sent > 2 * READ_BYTES
        bell = stream_of(a)._bell
        before = bell._reader.total
        assert bell.hear()
        assert 0 < bell._reader.total - before <= READ_BYTES
        assert len(bell._reader._buffer) <= 2 * READ_BYTES


def test_what_comes_while_a_path_is_tried_is_bounded() -> None:
    with two_ends() as (a, b):
        bell = Bell(a.link)
        assert bell.hear()
        assert flood(b.link, Kind.CONTROL, bytes(1000)) > 2 * READ_BYTES
        for _ in range(3):
            bell.hear()
        assert not bell.hear() and "more came than belongs" in bell.why
        assert a.link.reader.total <= READ_BYTES + bells.TRIAL_BYTES


def test_what_does_not_belong_beside_a_path_ends_the_link_at_once() -> None:
    with both_moved() as (a, b):
        heard = stream_of(a)._bell._reader
        before = heard.total
        b.link.sock.send(b.link.sealer.seal(Kind.STREAM, 1, b"x"))
        while heard.total == before:  # until it has been heard, by a poll that was to sleep
            stream_of(a).fileno()
        began = time.monotonic()
        with pytest.raises(PeerLost, match="a stream frame beside a further path"):
            a.recv_control(deadline=began + LIMIT_S)
        assert time.monotonic() - began < LIMIT_S / 2, "it did not sleep until its deadline"
