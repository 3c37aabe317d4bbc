"""Whoever comes finds room, however much the others ask for."""

from __future__ import annotations

import pytest

from mlxcel_nb.util.shares import has_room


@pytest.mark.parametrize("greedy", [1, 2, 3])
def test_those_who_ask_for_all_leave_room_for_one_that_asks_once(greedy: int) -> None:
    bound, held = 256, [0] * greedy
    while any(room := [has_room(own, sum(held), bound) for own in held]):
        held[room.index(True)] += 1
    assert sum(held) < bound and max(held) <= 192
    assert sum(held) >= 192, "most of what there is is used"
    assert has_room(0, sum(held), bound)


def test_what_there_is_is_never_exceeded() -> None:
    assert not has_room(0, 256, 256)
    assert not has_room(0, 250, 256, more=7)
    assert has_room(0, 250, 256, more=6)
    assert has_room(0, 0, 1), "the only place there is"
