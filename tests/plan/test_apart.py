"""Groups that only read, and what they cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.plan.apart import ANSWER, FELT_S, apart
from mlxcel_nb.plan.estimate import Load, Times

LOAD = Load(4096, sequences=8, prompt=1024)


def times(first: float, token: float = 0.05) -> Times:
    return Times(first=first, token=token, sums=0.0)


def test_not_where_nobody_waits_or_nobody_would_notice() -> None:
    assert apart(times(5.0), LOAD, 2) is not None
    assert apart(times(5.0), LOAD, 1) is None, "one group has to do both"
    assert apart(times(5.0), Load(4096, sequences=1, prompt=1024), 2) is None, "nobody else is answered"
    assert apart(times(0.9 * FELT_S), LOAD, 2) is None


@given(st.floats(FELT_S, 100), st.floats(0.001, 1), st.integers(2, 64), st.integers(2, 12))
def test_groups_are_shared_out(first: float, token: float, sequences: int, groups: int) -> None:
    found = apart(times(first, token), Load(4096, sequences, 1024), groups)
    assert found is not None and found.prefill + found.decode == groups and min(found.prefill, found.decode) > 0
    assert found.read_s == first and found.share > 0


def test_the_more_there_is_to_read_the_more_groups_read() -> None:
    found = [apart(times(first, 0.1), LOAD, 6) for first in (1.0, 4.0, 8.0, 60.0)]
    numbers = [each.prefill for each in found if each is not None]
    assert numbers == sorted(numbers) and numbers[0] < 3 < numbers[-1]


def test_where_reading_and_answering_take_the_same_larger_batches_are_gained() -> None:
    """Four rows a step: an answer takes a quarter of its steps, as long as a prompt. As replicas each has two."""
    found = apart(times(ANSWER * 0.1 / 4, 0.1), Load(4096, sequences=4, prompt=4096), 2)
    assert found is not None and (found.prefill, found.decode) == (1, 1)
    assert found.share == pytest.approx(1.5)
