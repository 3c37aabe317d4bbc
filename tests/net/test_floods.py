"""Thousands of strangers, and proper peers all at once: processes on loopback, and hosts of their own.

What a handshake takes meanwhile is measured by `python -m benchmarks flood`; here it is held against a quiet listener
with room for a machine that is busy.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.flood import MODES, STRANGERS, Guarded, flood, handshakes
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.links.admission import ESTABLISHED_LIMIT
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.links.pending import PER_ADDRESS, POOL_SIZE
from mlxcel_nb.util import times
from mlxcel_nb.util.loop import LoopThread
from mlxcel_nb.wire.frames import Kind
from tests.hosts import hosts
from tests.net.helpers import run
from tests.waiting import until

STANDING = 4
GROWTH_BYTES = 16 << 20
"""More than a busy allocator keeps for itself, less than 2,000 connections would hold."""

pytestmark = pytest.mark.timeout(120)


class Standing:
    """Links to a listener that are there before a flood, driven all the while by a loop of their own."""

    def __init__(self, guarded: Guarded) -> None:
        self._io = LoopThread("standing")
        self.changes: list[str] = []
        self.links: list[ControlLink] = self._io.call(self._open(guarded), timeout=20, what="links")

    async def _open(self, guarded: Guarded) -> list[ControlLink]:
        def changed(link: ControlLink, state: str, reason: str) -> None:
            self.changes.append(f"{link.peer.node_id}: {state}: {reason}")

        return [ControlLink(await dial(*guarded.peer(f"standing-{n}")), on_state=changed) for n in range(STANDING)]

    def ping(self) -> None:
        """Every link answers."""

        async def all_of_them() -> None:
            await asyncio.gather(*(link.ping(b"x" * 1000) for link in self.links))

        self._io.call(all_of_them(), timeout=20, what="pongs")

    def close(self) -> None:
        for link in self.links:
            self._io.soon(link.close)
        self._io.close()


class Stalled:
    """A member that begins a frame, and then says nothing, or a byte a second, on a link nobody drives."""

    def __init__(self, guarded: Guarded, name: str, first: int, *, drips: bool) -> None:
        self.name = name
        self._io = LoopThread(name)
        self._link: Link = self._io.call(dial(*guarded.peer(name)), timeout=20, what="a link")
        self._frame = bytes(self._link.sealer.seal(Kind.CONTROL, 0, bytes(100)))
        self.since = time.monotonic()
        self._link.sock.send(self._frame[:first])
        self._watching = self._io.spawn(self._watch(first, drips=drips))

    async def _watch(self, sent: int, *, drips: bool) -> float:
        loop = asyncio.get_running_loop()
        ended = asyncio.ensure_future(self._end())
        while not ended.done():
            await asyncio.wait([ended], timeout=1.0)
            if drips and not ended.done():
                await loop.sock_sendall(self._link.sock, self._frame[sent : sent + 1])
                sent += 1
        return await ended

    async def _end(self) -> float:
        loop = asyncio.get_running_loop()
        try:
            while await loop.sock_recv(self._link.sock, 65536):
                pass  # pings, and the reason at last
        except ConnectionError:
            pass
        return time.monotonic() - self.since

    def lasted(self) -> float:
        """Seconds until the listener ended it."""
        return float(self._watching.result(times.FRAME_REST_S + 30))

    def close(self) -> None:
        self._link.close()
        self._io.close()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    with Guarded() as process:
        yield process


@pytest.fixture(scope="module", autouse=True)
def stalled(guarded: Guarded) -> Iterator[list[Stalled]]:
    """They stall while the other tests of this file run: the ten seconds are real."""
    members = [
        Stalled(guarded, "in-the-header", 2, drips=False),
        Stalled(guarded, "in-the-frame", 30, drips=False),
        Stalled(guarded, "byte-by-byte", 1, drips=True),
    ]
    yield members
    for member in members:
        member.close()


@pytest.fixture
def standing(guarded: Guarded) -> Iterator[Standing]:
    links = Standing(guarded)
    yield links
    links.close()


@pytest.mark.parametrize("mode", MODES)
def test_two_thousand_strangers_slow_nobody_down_and_touch_no_link(
    guarded: Guarded, standing: Standing, mode: str
) -> None:
    quiet = run(handshakes(guarded, 20))
    before = guarded.facts()
    assert before["pending"] == 0
    with flood(guarded, mode) as strangers:
        under = run(handshakes(guarded, 40), limit_s=60)
        standing.ping()
        during = guarded.facts()
        assert strangers.ask("end")["opened"] >= STRANGERS
    assert statistics.median(under) < 10 * statistics.median(quiet) + 0.5
    assert during["pending"] <= POOL_SIZE
    assert during["counts"]["evicted"] > STRANGERS // 2  # the oldest silent ones made room
    assert not standing.changes
    names = [f"standing-{n}" for n in range(STANDING)]
    assert set(names) <= set(during["links"])
    since = during["states"][len(before["states"]) :]
    assert not [said for said in since if said.startswith(tuple(names))]
    assert until(lambda: guarded.facts()["pending"] == 0, seconds=20)
    assert until(lambda: guarded.facts()["fds"] <= before["fds"], seconds=20), (guarded.facts(), before)
    assert guarded.facts()["rss"] - before["rss"] < GROWTH_BYTES


@contextmanager
def all_at_once(guarded: Guarded, count: int) -> Iterator[list[Link]]:
    """Links of so many peers that dial at the same moment, once the listener has them all."""

    async def dial_all() -> list[Link]:
        return list(await asyncio.gather(*(dial(*guarded.peer(f"at-once-{n}")) for n in range(count))))

    links = run(dial_all())
    try:
        names = {f"at-once-{n}" for n in range(count)}
        assert until(lambda: names <= set(guarded.facts()["links"]))
        yield links
    finally:
        for link in links:
            link.close()


def test_sixty_four_peers_at_once_get_in(guarded: Guarded) -> None:
    with all_at_once(guarded, 64) as links:
        assert len(links) == 64


def test_sixty_four_peers_at_once_from_one_other_host_get_in() -> None:
    """Of that address only eight may be half-open at a time: the others are turned away, and try again."""
    with hosts(2) as (near, far), Guarded(near.address, start=near.popen) as guarded:
        with far.inside(), all_at_once(guarded, 64) as links:
            assert {link.peer.address[0] for link in links} == {near.address}
        assert guarded.facts()["counts"]["established"] == 64


def test_strangers_of_one_host_leave_room_for_those_of_another() -> None:
    """Eight places are all that one address can hold, however many sockets it opens."""
    with (
        hosts(3) as (near, far, other),
        Guarded(near.address, start=near.popen) as guarded,
        flood(guarded, "silent", 200, start=far.popen),
    ):
        assert guarded.facts()["pending"] <= PER_ADDRESS
        with other.inside():
            took = run(handshakes(guarded, 20))
        assert len(took) == 20
        assert guarded.facts()["counts"].get("evicted", 0) == 0


def test_places_of_links_that_stand_are_not_those_of_strangers(guarded: Guarded, standing: Standing) -> None:
    """The two limits are counted apart: members come in while the pool is full."""
    assert POOL_SIZE < ESTABLISHED_LIMIT
    with flood(guarded, "silent", 2 * POOL_SIZE), all_at_once(guarded, 2 * POOL_SIZE):
        assert guarded.facts()["pending"] <= POOL_SIZE
        assert guarded.facts()["admitted"] >= 2 * POOL_SIZE + STANDING
        standing.ping()


def test_a_frame_that_has_begun_is_cut_when_its_rest_does_not_come(guarded: Guarded, stalled: list[Stalled]) -> None:
    """In its header, in its body, and byte by byte: ten seconds from its first byte, and the member hears why."""
    for member in stalled:
        assert times.FRAME_REST_S - 0.1 < member.lasted() < times.FRAME_REST_S + 15
    said = " ".join(guarded.facts()["states"])
    for member in stalled:
        assert f"{member.name}: dead: the rest of a frame did not come within {times.FRAME_REST_S:g} s" in said
