"""What is left is told in tokens and in requests, and what a peer tells is not believed blindly."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcel_nb.plan.capacity import LONGEST, Room, counted, shared
from mlxcel_nb.plan.facts import Growth

PLAIN = Growth(100, step=256, group=4)
WINDOW = Growth(1000, most=500, step=256)
STATE = Growth(fixed=5000)


def test_room_is_the_longest_request_and_the_number_of_equal_ones() -> None:
    room = Room(counted([PLAIN, PLAIN, STATE]), 5000 + 200 * 1024)
    assert room.per_token == 200
    assert room.tokens() == 1024
    assert room.at(1024) == room.available < room.at(1025)
    assert room.tokens(most=300) == 300
    assert room.sequences(1024) == 1
    assert room.sequences(256) == (5000 + 200 * 1024) // (5000 + 200 * 256)
    assert room.sequences(1025) == 0


def test_a_window_or_a_state_has_no_end() -> None:
    room = Room(counted([WINDOW, STATE]), 505_000)
    assert room.tokens() == LONGEST
    assert Room(counted([WINDOW]), 499_000).tokens() == 256
    assert Room({}, 0).sequences(10) == LONGEST


def test_nodes_of_a_host_share_what_the_last_of_them_saw() -> None:
    rooms = [Room(counted([PLAIN]), each) for each in (900, 600, 5000)]
    assert [r and r.available for r in shared([*rooms, None], ["a", "a", "b", "b"])] == [300, 300, 2500, None]


def test_it_travels() -> None:
    room = Room(counted([PLAIN, PLAIN, WINDOW, STATE]), 12345)
    assert Room.from_dict(room.to_dict()) == room


@pytest.mark.parametrize(
    "wrong",
    [None, 5, {}, {"caches": 3}, {"caches": [], "available": -1}, {"caches": [], "available": "much"},
     {"caches": [[1, 2, 3]], "available": 1}, {"caches": [[1, 2, 3, 4, 0]], "available": 1},
     {"caches": [[1, 2.5, 3, 4, 1]], "available": 1}, {"caches": [[True, 2, 3, 4, 1]], "available": 1}],
)  # fmt: skip
def test_what_is_no_room_is_none(wrong: Any) -> None:
    assert Room.from_dict(wrong) is None
