"""Pauses between attempts grow, are never the same for two, have a cap and may have an end."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mlxcel_nb.net.pool.backoff import CAP_S, FIRST_S, Backoff


def delays(backoff: Backoff, count: int) -> list[float]:
    return [delay for _ in range(count) if (delay := backoff.next_s()) is not None]


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=40, max_size=40))
def test_they_grow_to_the_cap_whatever_chance_says(draws: list[float]) -> None:
    """Case 34."""
    drawn = iter(draws)
    made = delays(Backoff(chance=lambda: next(drawn)), 40)
    below = [delay for n, delay in enumerate(made) if FIRST_S * 2.0**n <= CAP_S]
    assert below == sorted(below)
    assert min(made) >= FIRST_S / 2 and max(made) <= CAP_S
    assert min(made[20:]) >= CAP_S / 2


def test_two_that_begin_together_do_not_stay_together() -> None:
    first, second = delays(Backoff(), 10), delays(Backoff(), 10)
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_a_row_with_an_end_ends() -> None:
    """Case 34."""
    backoff = Backoff(attempts=3)
    assert len(delays(backoff, 10)) == 3
    assert backoff.next_s() is None


def test_a_success_begins_a_new_row() -> None:
    backoff = Backoff(chance=lambda: 0.0)
    delays(backoff, 8)
    backoff.reset()
    assert backoff.failed == 0
    assert backoff.next_s() == pytest.approx(FIRST_S / 2)


def test_a_row_of_years_does_not_overflow() -> None:
    assert delays(Backoff(), 5000)[-1] <= CAP_S
