"""Places that rows have left in a batch are counted for as long as a group may keep them."""

from __future__ import annotations

from mlxcel_nb.scheduling.places import Places


def test_a_place_is_kept_until_somebody_takes_it() -> None:
    places = Places(2)
    places.left(1, tokens=90, rows=6)
    assert places.beside(1) == (1, 90), "and the batch is as long as it was"
    places.stepped(1, rows=6, joined=0)
    assert places.beside(1) == (1, 0)
    places.stepped(1, rows=7, joined=1)
    assert places.beside(1) == places.beside(0) == (0, 0)


def test_many_are_kept_until_the_next_step_and_then_no_more_than_a_third() -> None:
    places = Places(1)
    for rows in (6, 5, 4):
        places.left(0, tokens=10, rows=rows)
    assert places.beside(0) == (3, 10)
    places.stepped(0, rows=4, joined=0)
    assert places.beside(0) == (1, 0)


def test_after_as_many_steps_as_there_are_rows_all_have_been_copied() -> None:
    places = Places(1)
    places.left(0, tokens=10, rows=6)
    for _ in range(6):
        places.stepped(0, rows=6, joined=0)
        assert places.beside(0) == (1, 0)
    places.stepped(0, rows=6, joined=0)
    assert places.beside(0) == (0, 0)


def test_one_row_alone_is_no_batch() -> None:
    places = Places(1)
    places.left(0, tokens=10, rows=2)
    places.left(0, tokens=10, rows=1)
    assert places.beside(0) == (0, 0)
