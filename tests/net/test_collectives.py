"""Collectives among processes: the right sums, the same bits everywhere, and one rank's end named by all."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel_nb.net.collectives.blame import culprit
from mlxcel_nb.net.collectives.group import Group, Tag
from mlxcel_nb.net.collectives.summing import narrow, sum_into, widen
from mlxcel_nb.net.collectives.ways import DIRECT_BYTES, SMALL_BYTES, Way, blocks, choose
from mlxcel_nb.net.hot.moulds import SHORT_BYTES
from tests.net.ranks import Rank, start

DTYPES = ("float32", "float16", "bfloat16")
KIB = 1 << 10
EDGES = sorted({SMALL_BYTES, DIRECT_BYTES, SHORT_BYTES, 512 * KIB})
COUNTS = [0, 1, 7, 1000, *(edge // 4 + more for edge in EDGES for more in (0, 1)), 300_001]
"""Elements: on either side of each size at which something changes, for float32."""
FEW = [0, 3, 1001, SMALL_BYTES // 4 + 1, DIRECT_BYTES // 4, DIRECT_BYTES // 4 + 1]

Start = Callable[..., list[Rank]]

IN_MEMORY = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared memory is used on Linux only")


@pytest.fixture
def ranks() -> Iterator[Start]:
    """Starts the ranks of a group; all are gone at the end."""
    started: list[Rank] = []

    def begin(size: int, way: str = "own", *path: str) -> list[Rank]:
        started.extend(start("tests.net.collective_rank", size, way, *path))
        for rank in started:
            rank.hear("joined")
        return started

    yield begin
    for rank in started:
        rank.close()


def all_do(group: list[Rank], do: str, **job: Any) -> list[Any]:
    """What each rank has to say when all have done `do`."""
    for rank in group:
        rank.say(json.dumps({"do": do, **job}))
    return [rank.hear("done", 60)["done"] for rank in group]


def sums_are_right(group: list[Rank], counts: list[int]) -> None:
    """Every rank checks the sum itself; that they all hold the same bits is checked here."""
    for dtype in DTYPES:
        for count in counts:
            bits = all_do(group, "all_reduce", dtype=dtype, count=count, in_place=count % 2 == 1)
            assert len(set(bits)) == 1, (dtype, count)
        all_do(group, "reduce_scatter", dtype=dtype, count=10_001)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_sums_are_right_and_the_same_bits_on_every_rank(size: int, ranks: Start) -> None:
    sums_are_right(ranks(size), COUNTS if size < 4 else FEW)


@pytest.mark.parametrize(("size", "way"), [(3, "halves"), (2, "ring"), (4, "ring")])
def test_every_way_to_sum_gives_them(size: int, way: str, ranks: Start) -> None:
    sums_are_right(ranks(size, way), FEW)


@IN_MEMORY
@pytest.mark.parametrize("way", ["own", "ring"])
def test_sums_in_shared_memory_are_the_same(way: str, ranks: Start) -> None:
    sums_are_right(ranks(3, way, "memory"), FEW)


@pytest.mark.parametrize(("size", "path"), [(2, ()), (4, ()), pytest.param(3, ("memory",), marks=IN_MEMORY)])
def test_what_is_gathered_broadcast_and_passed_on_arrives(size: int, path: tuple[str, ...], ranks: Start) -> None:
    group = ranks(size, "own", *path)
    for counts in ([0] * size, [8] * size, [n * 70_000 for n in range(size)], [700_000, *[5] * (size - 1)]):
        all_do(group, "all_gather", counts=counts)
    for unit in (0, 1, 90_000):
        all_do(group, "all_to_all", counts=[[(a + 2 * b) % 3 * unit for b in range(size)] for a in range(size)])
    for count in (0, 10, 300_000):
        for root in range(size):
            all_do(group, "broadcast", root=root, count=count)
    for count in (0, 10, 200_000):  # as much as buffers hold on any path: all send before they receive
        all_do(group, "pass_on", count=count)
    all_do(group, "barrier")


def test_one_rank_is_a_group_too() -> None:
    alone, x = Group(0, {}), np.arange(5, dtype=np.float32)
    assert np.array_equal(alone.all_reduce(Tag(1, 1, 1), x), x)
    assert np.array_equal(alone.reduce_scatter(Tag(1, 1, 2), x), x)
    assert bytes(alone.broadcast(Tag(1, 1, 3), 0, b"word")) == b"word"
    alone.barrier(Tag(1, 1, 4))
    with pytest.raises(ValueError, match="int64 cannot be summed"):
        alone.all_reduce(Tag(1, 1, 5), np.arange(3))


# -- one rank's end -----------------------------------------------------------------------------------


def survivors_name_the_last(group: list[Rank], code: str) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = [rank.hear("done")["done"] for rank in group[:-1]]
    for said in told:
        assert (said["error"], said["node"]) == (code, f"rank-{len(group) - 1}"), told
    return told


@pytest.mark.parametrize(
    ("way", "path"), [("direct", ()), ("halves", ()), ("ring", ()), pytest.param("ring", ("memory",), marks=IN_MEMORY)]
)
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_rank_that_ends_is_named_by_all_others(way: str, path: tuple[str, ...], end: str, ranks: Start) -> None:
    """Also by those that only heard of it, and by those whom nobody but a survivor held up."""
    group = ranks(4, way, *path)
    patience_s = 20.0 if end == "killed" else 1.5
    for rank in group:
        rank.say(json.dumps({"do": "until", "count": 50_000, "patience_s": patience_s}))
    for rank in group:
        rank.hear("going")
    group[-1].send(signal.SIGKILL if end == "killed" else signal.SIGSTOP)
    for said in survivors_name_the_last(group, "peer-lost" if end == "killed" else "timeout"):
        assert said["waited_s"] < 10
        assert end == "killed" or said["waited_s"] > 1.0


def test_a_rank_that_leaves_without_a_word_is_named_at_the_deadline(ranks: Start) -> None:
    """It is alive and well, and in no collective: those that wait for each other still find out whom they lack."""
    group = ranks(4, "ring")
    for rank in group:
        leave = 7 if rank is group[-1] else 0
        rank.say(json.dumps({"do": "until", "count": 1000, "patience_s": 1.0, "leave_after": leave}))
    survivors_name_the_last(group, "timeout")


@pytest.mark.parametrize("way", ["direct", "halves"])
def test_a_rank_that_brings_something_else_is_named_by_all_others(way: str, ranks: Start) -> None:
    told = all_do(ranks(3, way), "other_shape", count=3001)
    assert [said["node"] for said in told[:2]] == ["rank-2", "rank-2"], told
    assert told[2]["error"] is not None


# -- what is pure -------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_blocks_cover_all_elements_evenly_in_order(count: int, ranks: int) -> None:
    cuts = blocks(count, ranks)
    assert len(cuts) == ranks
    assert [n for cut in cuts for n in range(cut.start, cut.stop)] == list(range(count))
    sizes = [cut.stop - cut.start for cut in cuts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_small_sums_go_directly_large_ones_in_halves_and_those_of_many_ranks_in_a_ring() -> None:
    assert choose(2, 1 << 30) is Way.DIRECT
    assert choose(4, DIRECT_BYTES) is Way.DIRECT
    assert choose(4, DIRECT_BYTES + 1) is Way.HALVES
    assert choose(6, SMALL_BYTES) is Way.DIRECT
    assert choose(6, SMALL_BYTES + 1) is Way.HALVES
    assert choose(9, SMALL_BYTES) is Way.DIRECT
    assert choose(9, SMALL_BYTES + 1) is Way.RING


def test_the_one_at_the_end_of_the_chain_is_to_blame() -> None:
    assert culprit("b", {}) == "b"
    assert culprit("b", {"b": "c", "c": "d"}) == "d"
    assert culprit("b", {"b": "a", "a": "b"}) == "b"


@settings(max_examples=50)
@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=40))
def test_bfloat16_is_rounded_to_the_nearest_ties_to_even(values: list[float]) -> None:
    mx = pytest.importorskip("mlx.core", reason="the reference is MLX, which this host lacks")
    x = np.array(values, np.float32)
    expected = np.array(mx.array(x).astype(mx.bfloat16).astype(mx.float32))
    assert np.array_equal(widen(narrow(x, "bfloat16"), "bfloat16"), expected, equal_nan=True)


def test_half_precision_is_summed_in_float32_and_rounded_once() -> None:
    parts = [np.array([2048], np.float16)] + [np.array([1], np.float16)] * 3
    out = np.empty(1, np.float16)
    sum_into(out, parts, "float16")
    assert out[0] == 2052  # one by one, each 1 would be lost
    sum_into(out, [np.array([60_000], np.float16)] * 2, "float16")
    assert np.isinf(out[0])


@pytest.mark.parametrize("own", range(4))
def test_a_sum_may_take_the_place_of_any_of_its_parts(own: int) -> None:
    parts = [np.full(3, 10.0**n, np.float32) for n in range(4)]
    sum_into(parts[own], parts, "float32")
    assert np.array_equal(parts[own], np.full(3, 1111, np.float32))
