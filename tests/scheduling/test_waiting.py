"""Who is asked in next."""

from __future__ import annotations

from mlxcel_nb.scheduling.sequence import Request, Sequence
from mlxcel_nb.scheduling.waiting import Waiting


def sequence(number: int, owner: str = "a") -> Sequence:
    return Sequence(number, Request(prompt=(1,) * (number + 1), max_tokens=1, owner=owner), 1, 0.0, [1] * (number + 1))


def order(waiting: Waiting) -> list[int]:
    """All of them, each taken as soon as it may be."""
    taken = []
    while len(waiting):
        first = next(waiting.first())
        waiting.take(first)
        taken.append(first.number)
    return taken


def test_owners_take_turns_and_each_ones_requests_keep_their_order() -> None:
    waiting = Waiting()
    for number, owner in enumerate("aaaabbc"):
        waiting.add(sequence(number, owner))
    assert order(waiting) == [0, 4, 6, 1, 5, 2, 3]


def test_those_put_back_come_first_by_arrival_and_cost_their_owner_no_turn() -> None:
    waiting = Waiting()
    for number, owner in ((5, "a"), (6, "a"), (7, "b")):
        waiting.add(sequence(number, owner))
    for number in (3, 1, 2):
        waiting.put_back(sequence(number, "a"))
    assert order(waiting) == [1, 2, 3, 5, 7, 6]


def test_numbers_and_tokens_are_counted() -> None:
    waiting = Waiting()
    first, second, third = (sequence(number) for number in range(3))
    waiting.add(first)
    waiting.add(second)
    waiting.put_back(third)
    assert (len(waiting), waiting.tokens) == (3, 6)
    assert waiting.everybody() == [third, first, second]
    waiting.remove(third)
    waiting.remove(first)
    assert (len(waiting), waiting.tokens) == (1, 2)
    waiting.take(second)
    assert (len(waiting), waiting.tokens, list(waiting.first())) == (0, 0, [])
