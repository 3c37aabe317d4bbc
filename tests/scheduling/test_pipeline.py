"""Groups of a pipeline, and the bubble that they leave."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.scheduling.limits import Limits
from mlxcel_nb.scheduling.pipeline import MOST, bubble, check_micro_batches, micro_batches
from tests.scheduling.ranks import plain


@pytest.mark.parametrize(
    ("stages", "rows", "asked", "chosen"),
    [(1, 64, 0, 1), (2, 64, 0, 2), (3, 64, 0, 3), (3, 2, 0, 2), (2, 64, 6, 6), (2, 4, 6, 4), (4, 1, 0, 1)],
)
def test_one_group_a_stage_unless_asked_never_more_than_rows(stages: int, rows: int, asked: int, chosen: int) -> None:
    assert micro_batches(stages, rows, asked) == chosen
    limits = Limits(rooms=((plain(10),),), stages=stages, max_rows=rows, micro_batches=asked)
    assert limits.groups == chosen
    assert limits.flights == stages


@pytest.mark.parametrize(
    ("stages", "groups", "share"), [(1, 1, 0), (2, 1, 1 / 2), (2, 2, 1 / 3), (3, 3, 2 / 5), (4, 8, 3 / 11)]
)
def test_the_bubble_is_gpipes(stages: int, groups: int, share: float) -> None:
    assert bubble(stages, groups) == pytest.approx(share)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_the_bubble_is_what_a_drawing_of_the_schedule_shows(stages: int, groups: int) -> None:
    """Stage s works on micro-batch m at time s + m: the empty squares of the drawing, of all of them."""
    busy = {(stage, stage + group) for stage in range(stages) for group in range(groups)}
    squares = stages * (1 + max(time for _, time in busy))
    assert bubble(stages, groups) == pytest.approx(1 - len(busy) / squares)


@pytest.mark.parametrize(
    ("asked", "stages", "why"),
    [
        (2, 1, "2 micro-batches for a model in one stage"),
        (-1, 2, "Ask for 1 to 64"),
        (MOST + 1, 2, "65 micro-batches"),
        ("2", 2, "is not a whole number"),
        (True, 2, "is not a whole number"),
        (1.5, 2, "is not a whole number"),
    ],
)
def test_numbers_of_groups_that_cannot_be_are_refused_with_what_can(asked: Any, stages: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_micro_batches(asked, stages)


def test_what_can_be_is_not_refused() -> None:
    for asked, stages in ((0, 1), (0, 4), (1, 1), (1, 2), (2, 3), (MOST, 2)):
        check_micro_batches(asked, stages)
