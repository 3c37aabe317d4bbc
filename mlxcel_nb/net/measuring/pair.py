"""What a link carries and how fast it answers: both ends of one measurement, on a hot link of its own.

Each end is one blocking call for a thread that has nothing else to do, with the kind of link that activations travel
on. The one that measures is the source; the other answers, and counts what it is sent in bulk, because only the
receiver knows what has arrived. Both are members; what the source asks for is bounded here whatever it says.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mlxcel_nb.errors import MlxcelError, StepTimeout, WireError
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.hot.tag import Tag
from mlxcel_nb.net.hot.waiting import Patience, wait
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.wire.credits import INITIAL

T = TypeVar("T")

LINK = "measure"
"""What such a link says it is for, in its first message."""

PINGS, MAX_PINGS = 20, 1000
SECONDS, MAX_SECONDS = 0.5, 10.0
"""How many round trips, and for how long bulk is counted."""

WARM_S, MAX_WARM_S, WARM_TRIPS = 0.15, 2.5, 12
"""Bulk runs before it is counted, for so many round trips: TCP begins slowly, and so do we."""

SMALL, LARGE = 1024, 512 * 1024
"""Bytes of a piece: a slow link is measured by small ones, and a fast one is not held up by them. The largest fills a
frame."""

PIECE_S = 10e-3
"""Pieces grow until each takes so long, if they can."""

CREDITS, TRIPS_SENT = INITIAL, 8
"""So many pieces may be on their way, and hold at least what so many round trips carry: no link waits for credit."""

MAX_GROWTH = 8
"""What pieces grow by at once at most: what was held up somewhere, and comes in a burst, looks like a fast link."""

STALL_S = 10.0
"""A move that makes no progress for this long ends the measurement."""

LEAVE_S = 5.0
"""For the source to leave, once it has been told what arrived."""

PATIENCE_S = 10.0
"""For a first countable piece on a slow link, above the time that was asked for."""

CUT = "The path may be all but cut."

_ECHO_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a link does from its source to the other end.

    Args:
        rtt_s: the median of `pings` round trips of a small tensor.
        least_s, most_s: the extremes.
        bytes_per_s: what arrived in bulk at the other end, each second.
    """

    rtt_s: float
    least_s: float
    most_s: float
    bytes_per_s: float
    pings: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "rtt_s": self.rtt_s,
            "least_s": self.least_s,
            "most_s": self.most_s,
            "bytes_per_s": self.bytes_per_s,
            "pings": self.pings,
        }

    @classmethod
    def from_dict(cls, told: Any) -> Measured:
        """What a node reports.

        Raises:
            WireError: it is no such report.
        """
        try:
            numbers = {name: float(told[name]) for name in ("rtt_s", "least_s", "most_s", "bytes_per_s")}
            pings = int(told["pings"])
        except (KeyError, TypeError, ValueError):
            raise WireError("a report of a measurement that cannot be read") from None
        if not all(math.isfinite(value) and value >= 0 for value in numbers.values()):
            raise WireError("a report of a measurement with figures that cannot be")
        return cls(**numbers, pings=pings)


async def measured(link: Link, pings: int, seconds: float) -> Measured:
    """`measure`, on a thread of its own; the caller's loop goes on.

    Raises:
        StepTimeout: it took longer than it may. MlxcelError: as `measure`.
    """
    limit = longest_s(pings, seconds) + STALL_S
    try:
        async with asyncio.timeout(limit):
            return await on_thread(lambda: measure(link, pings=pings, seconds=seconds), "measure")
    except TimeoutError:
        what = f"a measurement took longer than {limit:.0f} s"
        raise StepTimeout(what, node=link.peer.node_id, advice=CUT) from None
    finally:
        link.hang_up()


def longest_s(pings: int, seconds: float) -> float:
    """What a whole measurement may take: above the deadlines inside, so that those tell what went wrong."""
    return min(seconds, MAX_SECONDS) + MAX_WARM_S + PATIENCE_S + 2 * STALL_S + min(pings, MAX_PINGS) * 0.1


def measure(link: Link, *, pings: int = PINGS, seconds: float = SECONDS) -> Measured:
    """Measure `link`, which leads to somebody who calls `answer`; the link is used up.

    Raises:
        StepTimeout: no progress, or the end did not come in time. PeerLost, WireError: as for any hot link.
    """
    pings, seconds = max(1, min(pings, MAX_PINGS)), min(seconds, MAX_SECONDS)
    end = time.monotonic() + longest_s(pings, seconds)
    hot = HotLink(link)
    try:
        trips = _trips(hot, pings, end)
        median = statistics.median(trips)
        warm = min(MAX_WARM_S, max(WARM_S, WARM_TRIPS * median))
        hot.send_control({"type": "count", "warm_s": warm, "seconds": seconds}, deadline=_soon())
        rate = _flood(hot, median, warm + seconds + STALL_S, end)
    finally:
        # What still lies in the buffers is of no use to anybody, and would be in the way of the next measurement.
        with contextlib.suppress(OSError):
            link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        hot.close("measured")
    return Measured(rtt_s=median, least_s=min(trips), most_s=max(trips), bytes_per_s=rate, pings=pings)


def _trips(hot: HotLink, pings: int, end: float) -> list[float]:
    """Round trips of a small tensor; the first few are not counted."""
    extra = 3
    hot.send_control({"type": "echo", "count": pings + extra}, deadline=_soon())
    trips = []
    for number in range(pings + extra):
        _check(hot, end)
        began = time.perf_counter()
        hot.send_tensor(Tag(0, number, 0), "uint8", (_ECHO_BYTES,), bytes(_ECHO_BYTES), deadline=_soon())
        hot.recv_tensor(Tag(0, number, 0), deadline=_soon())
        trips.append(time.perf_counter() - began)
    return trips[extra:]


class Pace:
    """How large the next piece is, by what has arrived at the other end. Pure.

    A piece that is sent after the first `CREDITS` says that an older one was taken there: nothing that only lies in the
    buffers on the way is counted.

    Args:
        trip_s: a round trip of the link.
        now: when the first piece is sent.
    """

    def __init__(self, trip_s: float, now: float) -> None:
        self._piece_s = max(PIECE_S, TRIPS_SENT * trip_s / CREDITS)
        self._window_s = max(PIECE_S, trip_s)
        self._under_way: collections.deque[int] = collections.deque()
        self._since, self._arrived = now, 0

    def sent(self, size: int, now: float) -> int:
        """A piece of `size` bytes went at `now`; the size of the next."""
        self._under_way.append(size)
        if len(self._under_way) <= CREDITS:
            return size
        self._arrived += self._under_way.popleft()
        if now - self._since < self._window_s:
            return size
        rate = self._arrived / (now - self._since)
        self._since, self._arrived = now, 0
        wanted = 1 << math.ceil(math.log2(max(1.0, rate * self._piece_s)))
        return max(size, min(wanted, MAX_GROWTH * size, LARGE))


def _flood(hot: HotLink, trip_s: float, patience_s: float, end: float) -> float:
    """Send until the other end has counted enough; bytes a second. It may say nothing for `patience_s` before."""
    block, size, number = memoryview(os.urandom(LARGE)), SMALL, 0
    pace = Pace(trip_s, time.monotonic())
    while (told := _told(hot)) is None:
        _check(hot, end)
        if not hot.credit:  # a slow link would have us wait for more of it long after the count has come
            wait([hot], None, Patience(time.monotonic() + patience_s), f"{hot.node} to count what it is sent")
            continue
        hot.send_tensor(Tag(1, number, 0), "uint8", (size,), block[:size], deadline=_soon())
        number += 1
        size = pace.sent(size, time.monotonic())
    count, seconds = told.get("bytes"), told.get("seconds")
    if told.get("type") != "counted" or not isinstance(count, int) or not isinstance(seconds, float) or seconds <= 0:
        raise WireError("a count that cannot be read", node=hot.node)
    return count / seconds


def _told(hot: HotLink) -> dict[str, Any] | None:
    """What the other end has said, if it has."""
    try:
        return hot.recv_control(deadline=time.monotonic())
    except StepTimeout:
        return None


def answer(link: Link) -> None:
    """The other end of `measure`, to its end. The link is used up.

    Raises:
        MlxcelError: the source is gone, asks for what is not done, or takes too long.
    """
    hot = HotLink(link)
    end = time.monotonic() + longest_s(MAX_PINGS, MAX_SECONDS)
    try:
        for number in range(_number(hot, "echo", "count", MAX_PINGS + 10)):
            _check(hot, end)
            tensor = hot.recv_tensor(Tag(0, number, 0), deadline=_soon())
            hot.send_tensor(tensor.tag, tensor.dtype, tensor.dims, bytes(tensor.data), deadline=_soon())
        asked = hot.recv_control(deadline=_soon(), what="how long to count")
        warm: Any = asked.get("warm_s")
        seconds: Any = asked.get("seconds")
        if asked.get("type") != "count" or not _time(warm) or not _time(seconds):
            raise WireError("a request to count that cannot be read", node=hot.node)
        _count(hot, min(warm, MAX_WARM_S), min(seconds, MAX_SECONDS), end)
    finally:
        hot.close("measured")


def _count(hot: HotLink, warm: float, seconds: float, end: float) -> None:
    """Count what arrives, tell it, and read on until the source leaves: it may be in the middle of a piece.

    What a slow link still holds is not waited for.
    """
    number, count = 0, 0
    began = since = time.monotonic()
    while True:
        _check(hot, end)
        size = len(hot.recv_tensor(Tag(1, number, 0), deadline=_soon()).data)
        number += 1
        now = time.monotonic()
        if now - began < warm or number == 1:
            since = now
            continue
        count += size
        if now - since >= seconds:
            break
    hot.send_control({"type": "counted", "bytes": count, "seconds": now - since}, deadline=_soon())
    end = min(end, time.monotonic() + LEAVE_S)
    with contextlib.suppress(MlxcelError):
        while time.monotonic() < end:
            hot.recv_tensor(Tag(1, number, 0), deadline=_soon())
            number += 1


def _number(hot: HotLink, kind: str, name: str, most: int) -> int:
    message = hot.recv_control(deadline=_soon(), what="what to measure")
    value = message.get(name)
    if message.get("type") != kind or type(value) is not int or not 0 <= value <= most:
        raise WireError(f"a request to {kind} that cannot be read", node=hot.node)
    return value


def _time(value: object) -> bool:
    return isinstance(value, float) and value >= 0  # which a NaN is not


def _soon() -> float:
    return time.monotonic() + STALL_S


def _check(hot: HotLink, end: float) -> None:
    if time.monotonic() > end:
        raise StepTimeout("the measurement took too long", node=hot.node, advice=CUT)


def source_of(peer: str) -> str:
    """This host's address on the way to the address `peer`; "" when there is no way. Nothing is sent."""
    try:
        family, kind, _, _, to = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe_sock:
            probe_sock.connect(to)
            return str(probe_sock.getsockname()[0])
    except OSError:
        return ""


def on_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `work` on a daemon thread: one that hangs in the system holds up no exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None only where T is None

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as caught:  # noqa: BLE001  # told to whoever awaits
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=f"mlxcel-{name}", daemon=True).start()
    return future
