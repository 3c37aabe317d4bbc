"""Groups of one home, and what fits."""

from __future__ import annotations

import itertools

import pytest

from mlxcel_nb.scheduling.home import Home
from mlxcel_nb.scheduling.limits import Limits
from mlxcel_nb.scheduling.sequence import Request, Sequence, State
from tests.scheduling.ranks import plain


def home(room: int, *groups: list[int], **more: object) -> Home:
    """Sequences of so many tokens decode in these groups."""
    numbered = itertools.count().__next__
    made = Home(Limits(rooms=((plain(room),),), stages=len(groups), **more), 0, numbered, numbered)
    numbers = itertools.count()
    for group, lengths in enumerate(groups):
        for length in lengths:
            request = Request(prompt=(1,) * length, max_tokens=100)
            tokens = [*request.prompt, 2]
            made.running.append(Sequence(next(numbers), request, 100, 0.0, tokens, State.DECODE, group=group))
    return made


def sizes(of: Home) -> list[int]:
    return [len(of.decoding(group)) for group in range(2)]


def test_a_row_is_handed_on_to_a_group_that_is_smaller_by_two() -> None:
    uneven = home(1000, [60, 5, 60], [5])
    assert [each.number for each in uneven.ready()] == [0, 1]
    assert sizes(uneven) == [2, 2]
    assert [each.number for each in uneven.ready()] == [2, 3]


@pytest.mark.parametrize(("room", "after"), [(243, [3, 1]), (244, [2, 2])])
def test_it_is_not_where_it_would_not_fit(room: int, after: list[int]) -> None:
    """A long row makes the short ones beside it as long: 4 x 61 tokens, instead of 3 x 61 and 6."""
    uneven = home(room, [60, 5, 60], [5])
    uneven.ready()
    assert sizes(uneven) == after


@pytest.mark.parametrize(("room", "after"), [(4 * 61, [4, 0]), (5 * 61, [3, 1])])
def test_one_that_is_handed_on_is_counted_where_it_was_as_well(room: int, after: list[int]) -> None:
    """Its place in the batch stays free until the batch is made anew."""
    uneven = home(room, [60] * 4, [])
    for each in uneven.running:
        each.batch = 0
    uneven.ready()
    assert sizes(uneven) == after and uneven.fits(uneven.running)


def test_a_row_with_a_step_on_its_way_stays_where_it_is() -> None:
    uneven = home(1000, [5, 5, 5], [5])
    for each in uneven.decoding(0):
        each.in_flight = 1
    assert [each.number for each in uneven.ready()] == [3]
    assert sizes(uneven) == [3, 1]


def test_rows_that_are_not_padded_take_their_own() -> None:
    lengths = [60, 5, 60]
    assert not home(182, lengths).fits(home(182, lengths).running)
    alone = home(128, lengths, padded=False)
    assert alone.fits(alone.running)
    alone = home(127, lengths, padded=False)
    assert not alone.fits(alone.running)
