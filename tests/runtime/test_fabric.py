"""Logits put side by side on the rank that samples, and sums that are ended late, over two ranks' own link."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import mlx.core as mx
import pytest

from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.errors import WireError
from mlxcel_nb.net.hot.hot_link import Interrupt
from mlxcel_nb.runtime.fabric import Fabric
from tests.net.helpers import both, hot_pair

WIDTHS = (3, 2)


@pytest.fixture
def ranks() -> Iterator[list[Fabric]]:
    with hot_pair() as ends, closing(Interrupt()) as one, closing(Interrupt()) as other:
        layout, interrupts = make_layout(4, tp=2), (one, other)
        made = [Fabric(layout, me, {1 - me: ends[me]}, interrupts[me], 20.0) for me in range(2)]
        for fabric in made:
            fabric.begin_step(1, 0)
        yield made


def columns(width: int, first: int, dtype: mx.Dtype) -> mx.array:
    """(1, 2, width), every figure another."""
    return (mx.arange(first, first + 2 * width).reshape(1, 2, width)).astype(dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_rank_0_has_the_columns_of_all_and_the_others_their_shape(ranks: list[Fabric], dtype: mx.Dtype) -> None:
    def rank_0() -> Any:
        whole = ranks[0].gather_columns(columns(3, 0, dtype), WIDTHS)
        assert whole.dtype == dtype
        return whole.astype(mx.float32)[0].tolist()

    def rank_1() -> tuple[int, ...]:
        return tuple(ranks[1].gather_columns(columns(2, 10, dtype), WIDTHS).shape)

    assert both(rank_0, rank_1) == [[[0, 1, 2, 10, 11], [3, 4, 5, 12, 13]], (1, 2, 5)]


@pytest.mark.parametrize(("width", "dtype"), [(1, mx.float32), (2, mx.float16)])
def test_other_columns_than_were_due_are_refused(ranks: list[Fabric], width: int, dtype: mx.Dtype) -> None:
    def rank_0() -> None:
        with pytest.raises(WireError, match="where logits were due"):
            ranks[0].gather_columns(columns(3, 0, mx.float32), WIDTHS)

    both(rank_0, lambda: ranks[1].gather_columns(columns(width, 0, dtype), WIDTHS))


def test_a_step_that_was_left_is_told_apart(ranks: list[Fabric]) -> None:
    """Rank 1 sent what rank 0 never asked for; the next step's columns come after it."""

    def rank_0() -> Any:
        ranks[0].begin_step(2, 0)
        return ranks[0].gather_columns(columns(3, 0, mx.float32), WIDTHS)[0].tolist()

    def rank_1() -> None:
        ranks[1].gather_columns(columns(2, 90, mx.float32), WIDTHS)
        ranks[1].begin_step(2, 0)
        ranks[1].gather_columns(columns(2, 10, mx.float32), WIDTHS)

    assert both(rank_0, rank_1)[0] == [[0, 1, 2, 10, 11], [3, 4, 5, 12, 13]]


def chained(fabric: Fabric, length: int, dtype: mx.Dtype) -> mx.array:
    """Three sums, each built on the one before, and columns of the last."""
    x = mx.full((1, 1, length), fabric.rank + 1.0, dtype)
    for _ in range(3):
        x = fabric.all_reduce(x * 2 + fabric.rank)
    return fabric.gather_columns(x[..., :2] + 1, (2, 2))


@pytest.mark.parametrize("length", [3, 100_000])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_sum_that_is_still_on_its_way_can_be_built_upon(ranks: list[Fabric], length: int, dtype: mx.Dtype) -> None:
    def late(fabric: Fabric) -> Any:
        with fabric.deferring():
            found = chained(fabric, length, dtype)
        return found.astype(mx.float32).tolist()

    def at_once(fabric: Fabric) -> Any:
        fabric.begin_step(1, 1)
        return chained(fabric, length, dtype).astype(mx.float32).tolist()

    for how in (late, at_once):
        assert both(lambda: how(ranks[0]), lambda: how(ranks[1]))[0] == [[[118.0] * 4]]  # noqa: B023
    assert ranks[0].exchanges == ranks[1].exchanges == 8


def test_a_sum_of_a_step_that_fails_is_not_waited_for(ranks: list[Fabric]) -> None:
    def rank(fabric: Fabric) -> Any:
        with pytest.raises(ZeroDivisionError), fabric.deferring():
            fabric.all_reduce(mx.array([1.0, fabric.rank]))
            raise ZeroDivisionError
        fabric.begin_step(2, 0)
        with fabric.deferring():
            total = fabric.all_reduce(mx.array([4.0, fabric.rank]))
        return total.tolist()

    assert both(lambda: rank(ranks[0]), lambda: rank(ranks[1])) == [[8.0, 1.0]] * 2
