"""Token buckets: never more than the burst and the rate allow, and no memory for ever more sources."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.net.discovery.budget import Budget, Sources


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=200))
def test_no_more_than_rate_and_burst_get_through(pauses: list[float]) -> None:
    budget, now, passed = Budget(10.0, 5.0, 0.0), 0.0, 0
    for pause in pauses:
        now += pause
        passed += budget.take(now)
    assert passed <= 5 + 10 * now + 1e-6


def test_a_budget_comes_back_and_a_clock_that_stands_still_gives_nothing() -> None:
    budget = Budget(10.0, 2.0, 0.0)
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    assert budget.take(0.1) and not budget.take(0.1)
    assert [budget.take(9.0) for _ in range(3)] == [True, True, False]


def test_one_source_does_not_use_up_another_s_and_the_oldest_is_forgotten() -> None:
    sources = Sources(1.0, 2.0, limit=100)
    assert [sources.take("loud", 0.0) for _ in range(4)] == [True, True, False, False]
    assert sources.take("quiet", 0.0)
    for number in range(1000):
        sources.take(f"s{number}", 0.0)
    assert len(sources) == 100
