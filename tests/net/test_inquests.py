"""What ranks tell each other when a collective has failed, where a link is full or stands still in the middle."""

from __future__ import annotations

import concurrent.futures
import time

import numpy as np
import pytest

from mlxcel_nb.errors import StepTimeout
from mlxcel_nb.net.collectives import exchange, inquest
from mlxcel_nb.net.collectives.group import Group
from mlxcel_nb.net.collectives.ways import Way
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.hot.tag import Tag
from mlxcel_nb.util import times
from mlxcel_nb.wire.frames import Kind
from tests.net.helpers import hot_pair

LIMIT_S = 20.0
TAG = Tag(3, 4, 0)


def fill(hot: HotLink) -> None:
    """Until the peer, which does not read, takes no more; the rest of a frame is left over."""
    with pytest.raises(StepTimeout):
        hot.send_tensor(Tag(3, 3, 0), "uint8", (50_000_000,), bytes(50_000_000), deadline=time.monotonic() + 0.2)
    assert hot.wants_write


def drain(hot: HotLink, until: concurrent.futures.Future[object]) -> None:
    """Read until `until` is done and nothing comes any more."""
    end = time.monotonic() + LIMIT_S
    quiet_since = time.monotonic()
    while not until.done() or time.monotonic() < quiet_since + 0.2:
        assert time.monotonic() < end
        if hot.absorb():
            quiet_since = time.monotonic()
        else:
            time.sleep(0.005)  # nothing to wait for but the other thread


def test_a_rank_whose_link_was_full_is_told_once_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquest, "INQUEST_S", 1.0)
    with hot_pair() as (a, b), concurrent.futures.ThreadPoolExecutor(1) as pool:
        fill(a)
        held = pool.submit(inquest.hold, TAG, StepTimeout("no progress", node="elsewhere"), [a], None)
        while not a._replies and not held.done():
            time.sleep(0.001)  # until it was to be told, and could not be
        drain(b, held)
        assert str(held.result()).startswith("elsewhere: no progress")
        abort = b.abort(TAG)
        assert abort is not None and abort.error.node == "elsewhere"


def test_a_frame_that_stands_still_does_not_take_the_blame_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "FRAME_REST_S", 0.2)
    with hot_pair() as (a, b):
        b.link.sock.send(b._sealer.seal(Kind.CONTROL, 0, b"\x80")[:10])
        error = inquest.hold(TAG, StepTimeout("no progress", node="elsewhere"), [a], None)
        assert isinstance(error, StepTimeout) and error.node == "elsewhere"


def test_what_a_link_without_a_part_in_it_still_had_to_send_goes_on_its_way() -> None:
    with hot_pair() as (a, b), concurrent.futures.ThreadPoolExecutor(1) as pool:
        fill(a)

        def listen() -> None:
            end = time.monotonic() + LIMIT_S
            while a.wants_write and time.monotonic() < end:
                exchange.listen(a, TAG, "")
                time.sleep(0.005)  # as a wait on the others would

        drain(b, pool.submit(listen))
        assert not a.wants_write


@pytest.mark.parametrize("way", [Way.HALVES, Way.RING])
def test_a_sum_is_not_put_where_nobody_would_see_it(way: Way) -> None:
    with hot_pair() as (a, _):
        group = Group(0, {1: a}, way=way)
        with pytest.raises(ValueError, match="not C-contiguous"):
            group.all_reduce(TAG, np.ones((4, 4), np.float32), out=np.ones((4, 4), np.float32).T)
