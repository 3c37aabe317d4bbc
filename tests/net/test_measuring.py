"""Both ends of a measurement over real connections: right figures, bent requests, peers that vanish."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mlxcel_nb.cluster.shape import parse_link
from mlxcel_nb.commands.arguments import net as arguments
from mlxcel_nb.errors import MlxcelError, PeerLost, StepTimeout, WireError
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.hot.tag import Tag
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.measuring import pair as measuring
from tests.net.helpers import SECRET, identity, listening, run


def both(source: Callable[[Link], Any], other: Callable[[Link], Any], link: str | None = None) -> tuple[Any, Any]:
    """What the two ends of a connection return or raise, each on a thread; `link` shapes what both send."""
    shapes = (lambda _: parse_link(link)) if link else None

    async def body() -> tuple[Any, Any]:
        async with listening(shapes=shapes) as (_, address, links):
            ours = await dial(identity("client"), SECRET, address, shapes=shapes)
            theirs = await links.get()
            ends = (measuring.on_thread(lambda: source(ours), "a"), measuring.on_thread(lambda: other(theirs), "b"))
            answers = await asyncio.gather(*ends, return_exceptions=True)
            ours.close()
            return answers[0], answers[1]

    result: tuple[Any, Any] = run(body(), 50)
    return result


def test_a_link_s_own_figures_come_out() -> None:
    found, answered = both(measuring.measure, measuring.answer, "10ms,20Mbit")
    assert answered is None
    assert 20e-3 <= found.least_s <= found.rtt_s <= found.most_s
    assert 2.5e6 / 10 < found.bytes_per_s < 2.5e6 * 3, "on a busy machine what was held up comes in a burst"
    assert found.pings == measuring.PINGS


def test_a_slow_link_is_measured_and_not_given_up() -> None:
    found, _ = both(lambda link: measuring.measure(link, pings=2, seconds=0.2), measuring.answer, "3Mbit")
    assert 375e3 / 10 < found.bytes_per_s < 375e3 * 3


def test_a_link_slower_than_any_is_measured_within_seconds() -> None:
    ends: list[Link] = []

    def source(link: Link) -> Any:
        found, took = measuring.measure(link, pings=1), time.monotonic()
        ends[0].hang_up()  # what lies in the link's buffers would take it a minute
        return found, took - began

    def other(link: Link) -> None:
        ends.append(link)
        measuring.answer(link)

    began = time.monotonic()
    (found, took), _ = both(source, other, "20ms,8kbit")
    assert 1000 / 10 < found.bytes_per_s < 1000 * 3
    assert took < 25, "a quarter of a minute on an idle machine is far too much as well, but this one may be busy"


@pytest.mark.parametrize("link", ["20ms", "40ms"])
def test_a_distant_link_carries_more_than_small_pieces_that_wait_for_credit(link: str) -> None:
    found, _ = both(lambda link: measuring.measure(link, pings=3), measuring.answer, link)
    in_flight = found.bytes_per_s * found.rtt_s
    assert in_flight > 1.5e6, "64 pieces of 16 KiB are 1 MB, whatever the link could carry"


def far(rate: float, trip_s: float, seconds: float) -> tuple[int, float, float]:
    """A source on a link of `rate` bytes a second: its last size, what arrived a second in the end, and the backlog.

    The other end grants half a window whenever it has taken as much, as ours does.
    """
    pace, now, size, free_at = measuring.Pace(trip_s, 0.0), 0.0, measuring.SMALL, 0.0
    granted_at, taken = [0.0] * measuring.CREDITS, []
    arrivals: list[tuple[float, int]] = []
    while now < seconds:
        now = max(now + 20e-6, granted_at[len(arrivals)])  # no processor sends more than so many pieces a second
        free_at = max(now, free_at) + size / rate
        taken.append(free_at + trip_s / 2)
        arrivals.append((taken[-1], size))
        if len(taken) % (measuring.CREDITS // 2) == 0:
            granted_at += [taken[-1] + trip_s / 2] * (measuring.CREDITS // 2)
        size = pace.sent(size, now)
    late = sum(size for at, size in arrivals if seconds * 0.7 < at <= seconds) / (0.3 * seconds)
    return size, late, max(0.0, free_at - now)


HALF = measuring.CREDITS // 2 * measuring.LARGE
"""Credit comes for half of what may be on its way, so that no link is sure to carry more in a round trip."""


@pytest.mark.parametrize(
    ("rate", "trip_s"),
    [
        (rate, trip_s)
        for rate in (1e3, 10e3, 125e3, 1.25e6, 12.5e6, 125e6)
        for trip_s in (100e-6, 1e-3, 10e-3, 80e-3, 200e-3)
        if rate * trip_s < HALF
    ],
)
def test_pieces_grow_until_a_link_is_full_and_no_further(rate: float, trip_s: float) -> None:
    warm = min(measuring.MAX_WARM_S, max(measuring.WARM_S, measuring.WARM_TRIPS * trip_s))
    size, late, backlog = far(rate, trip_s, max(warm / 0.7, 20 * measuring.SMALL / rate))
    assert 0.85 * rate < late < 1.15 * rate
    assert size <= max(measuring.SMALL, 2 * rate * max(measuring.PIECE_S, trip_s / 8)), "as large as it need be"
    assert size * measuring.CREDITS >= 2 * rate * trip_s, "two round trips' worth may be on their way"
    assert backlog < max(measuring.CREDITS * measuring.SMALL / rate, 2.0 + 16 * trip_s)


def test_what_was_held_up_and_comes_in_a_burst_is_no_fast_link() -> None:
    pace, now = measuring.Pace(1e-3, 0.0), 0.0
    for _ in range(2 * measuring.CREDITS):
        assert pace.sent(measuring.SMALL, now) <= measuring.MAX_GROWTH * measuring.SMALL
        now += 1e-6
    sizes = {pace.sent(measuring.SMALL, now := now + 1e-6) for _ in range(10**5)}
    assert sizes == {measuring.SMALL, measuring.MAX_GROWTH * measuring.SMALL}


def test_loopback_is_fast_and_both_ends_are_done_at_once() -> None:
    began = time.monotonic()
    found, answered = both(lambda link: measuring.measure(link, pings=5, seconds=0.1), measuring.answer)
    assert answered is None
    assert found.bytes_per_s > 1e6
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    "message",
    [
        {"type": "echo"}, {"type": "echo", "count": "1"}, {"type": "echo", "count": -1}, {"type": "count"},
        {"type": "echo", "count": measuring.MAX_PINGS + 100}, {"type": "echo", "count": True},
    ],
    ids=str,
)  # fmt: skip
def test_bent_requests_end_the_link(message: dict[str, Any]) -> None:
    _, answered = both(lambda link: HotLink(link).send_control(message), measuring.answer)
    assert isinstance(answered, WireError)


@pytest.mark.parametrize(
    "bent", [{"warm_s": float("nan")}, {"seconds": -1.0}, {"seconds": "1"}, {"warm_s": None}], ids=str
)
def test_a_bent_request_to_count_ends_the_link(bent: dict[str, Any]) -> None:
    def source(link: Link) -> None:
        hot = HotLink(link)
        hot.send_control({"type": "echo", "count": 1})
        hot.send_tensor(Tag(0, 0, 0), "uint8", (1,), b"x")
        hot.recv_tensor(Tag(0, 0, 0))
        hot.send_control({"type": "count", "warm_s": 0.0, "seconds": 0.1, **bent})

    _, answered = both(source, measuring.answer)
    assert isinstance(answered, WireError)


@pytest.mark.parametrize("count", [{}, {"bytes": 1, "seconds": 0.0}, {"bytes": "1", "seconds": 1.0}], ids=str)
def test_a_bent_count_is_no_measurement(count: dict[str, Any]) -> None:
    def other(link: Link) -> None:
        hot = HotLink(link)
        for number in range(hot.recv_control()["count"]):
            tensor = hot.recv_tensor(Tag(0, number, 0))
            hot.send_tensor(tensor.tag, "uint8", (8,), bytes(tensor.data))
        hot.recv_control()
        hot.send_control({"type": "counted", **count})
        with pytest.raises(MlxcelError):
            for number in range(10**6):
                hot.recv_tensor(Tag(1, number, 0))

    found, answered = both(lambda link: measuring.measure(link, pings=1), other)
    assert isinstance(found, WireError) and answered is None


def test_a_peer_that_leaves_is_an_error_on_the_other_end() -> None:
    found, _ = both(measuring.measure, lambda link: HotLink(link).close("gone"))
    assert isinstance(found, PeerLost)
    _, answered = both(lambda link: HotLink(link).close("gone"), measuring.answer)
    assert isinstance(answered, PeerLost)


def test_a_peer_that_does_nothing_is_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "STALL_S", 0.3)
    done = threading.Event()

    def source(link: Link) -> Any:
        try:
            return measuring.measure(link)
        finally:
            done.set()

    found, _ = both(source, lambda _: done.wait(20))
    assert isinstance(found, StepTimeout)


def test_the_command_line_knows_the_same_figures() -> None:
    assert (arguments.PINGS, arguments.SECONDS, arguments.MAX_SECONDS) == (
        measuring.PINGS,
        measuring.SECONDS,
        measuring.MAX_SECONDS,
    )


def test_the_address_of_this_host_on_a_way() -> None:
    assert measuring.source_of("127.0.0.1") == "127.0.0.1"
    assert measuring.source_of("no such address") == ""
