"""The model of a shaped link, against times that the test gives."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.cluster.shape import parse_link
from mlxcel_nb.net.shaping.pipe import BUFFER_BYTES, MOST_BYTES, RETRY_S, SEGMENT, TAIL_S, UNLIMITED_BYTES, Pipe


def draws(*values: float):
    """Chance that says these, then that nothing is lost."""
    return itertools.chain(values, itertools.repeat(1.0)).__next__


def all_of(pipe: Pipe) -> list[tuple[float, bytes]]:
    """When each piece comes out, were it taken at once."""
    out, now = [], 0.0
    while pipe.due < math.inf:
        now = max(now, pipe.due)
        data = bytes(pipe.head())
        pipe.took(len(data))
        out.append((now, data))
    return out


def test_a_piece_arrives_one_latency_after_its_last_byte_has_left() -> None:
    pipe = Pipe(parse_link("5ms,8Mbit"))  # a byte a microsecond
    pipe.put(10.0, bytes(1000))
    pipe.put(10.0, bytes(1000))
    pipe.put(10.5, b"x")
    pipe.put(10.5, b"")
    assert [at for at, _ in all_of(pipe)] == pytest.approx([10.006, 10.007, 10.505001, 10.505001])


def test_without_a_rate_only_the_latency_counts() -> None:
    pipe = Pipe(parse_link("5ms"))
    for _ in range(10):
        pipe.put(1.0, bytes(60_000))
    assert {at for at, _ in all_of(pipe)} == {1.005}


def test_a_pipe_holds_what_is_on_its_way_and_a_buffer_and_then_no_more() -> None:
    pipe = Pipe(parse_link("10ms,1Gbit"))
    count = 0
    while not pipe.full:
        pipe.put(0.0, bytes(pipe.piece_bytes))
        count += pipe.piece_bytes
    on_its_way = 0.010 * 125e6
    assert on_its_way + BUFFER_BYTES <= count < on_its_way + BUFFER_BYTES + pipe.piece_bytes
    pipe.took(len(pipe.head()))
    assert not pipe.full
    assert Pipe(parse_link("2s,100Gbit"))._capacity == MOST_BYTES
    assert Pipe(parse_link("2s"))._capacity == UNLIMITED_BYTES


@pytest.mark.parametrize(("rate", "size"), [("8kbit", SEGMENT), ("100Mbit", 12_500), ("100Gbit", 64 << 10)])
def test_pieces_are_what_is_sent_in_a_millisecond(rate: str, size: int) -> None:
    assert Pipe(parse_link(rate)).piece_bytes == size


def test_a_lost_segment_with_more_behind_it_costs_a_round_trip_and_holds_up_what_follows() -> None:
    pipe = Pipe(parse_link("5ms,1%"), draws(0.0, 0.0))  # of ten segments, the first
    pipe.put(0.0, bytes(10 * SEGMENT))
    pipe.put(0.001, b"next")
    assert [at for at, _ in all_of(pipe)] == pytest.approx([0.015, 0.015])


def test_a_loss_is_told_by_what_is_sent_later() -> None:
    pipe = Pipe(parse_link("5ms,1%"), draws(0.0, 0.99))
    pipe.put(0.0, b"lost")
    pipe.put(0.007, b"next")  # arrives at 0.012, and the news of it takes a round trip
    assert [at for at, _ in all_of(pipe)] == pytest.approx([0.022, 0.022])


def test_a_lost_tail_waits_for_a_probe() -> None:
    pipe = Pipe(parse_link("5ms,1%"), draws(0.0, 0.99))
    pipe.put(0.0, b"lost")
    assert pipe.due == pytest.approx(0.005 + 2 * 0.010 + TAIL_S)


def test_what_is_sent_again_may_be_lost_again_and_the_pause_doubles() -> None:
    pipe = Pipe(parse_link("5ms,10%"), draws(0.0, 0.99, 0.0, 0.0))
    pipe.put(0.0, b"lost three times")
    assert pipe.due == pytest.approx(0.005 + 2 * 0.010 + TAIL_S + 3 * RETRY_S + 2 * 0.010)


@pytest.mark.parametrize("loss", [0.001, 0.02])
def test_as_many_are_lost_as_the_shape_says(loss: float) -> None:
    pipe = Pipe(parse_link(f"5ms,{loss:%}"), random.Random(1).random)
    late = 0
    for _ in range(20_000):
        pipe.put(0.0, b"x")
        late += pipe._pieces[-1].due > 0.006
        pipe.clear()
    assert 0.7 * loss < late / 20_000 < 1.3 * loss


@given(
    st.lists(st.tuples(st.integers(0, 50), st.binary(min_size=1, max_size=5000)), max_size=30),
    st.sampled_from(["1ms", "1ms,1Mbit", "200us,1Gbit,20%", "0ms,50%", "2s,8kbit,1%"]),
    st.integers(0, 2**32),
)
def test_nothing_is_lost_repeated_or_overtaken(sends: list[tuple[int, bytes]], text: str, seed: int) -> None:
    pipe, shape = Pipe(parse_link(text), random.Random(seed).random), parse_link(text)
    now, least = 0.0, []
    for pause, data in sends:
        now += pause / 1000
        pipe.put(now, data)
        least.append(now + shape.latency_s)
    out = all_of(pipe)
    assert b"".join(data for _, data in out) == b"".join(data for _, data in sends)
    assert all(at >= soonest for (at, _), soonest in zip(out, least, strict=True))
    assert pipe.due == math.inf and not pipe.full
