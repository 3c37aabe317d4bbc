"""Step plans on the wire."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.errors import WireError
from mlxcel_nb.scheduling.step_plan import Adopt, Chunk, Keep, Open, Restore, StepPlan, Work

PLAN = StepPlan(
    step=7,
    keep=(Keep(1, 32, 9), Keep(2, 0, 10, home=1)),
    drop=(1, 2),
    free=(3, 4),
    adopt=(Adopt(2**52, 0, 11), Adopt(1, 3, 12, home=1)),
    restore=(Restore(5, (6, 8)),),
    open=(Open(5, {"seed": 1, "stop": ["x"]}, (1, 2, 3), 2, 0, 40),),
    work=(Work(0, -1, (), (Chunk(5, 3, False),), (4, 5, 6)), Work(1, 0, (6, 4), (Chunk(8, 2, True),), (7, 8, 9, 10))),
)


def test_a_plan_comes_back_as_it_went_and_an_envelope_is_passed_over() -> None:
    assert StepPlan.from_dict({**PLAN.to_dict(), "epoch": 3}) == PLAN


def test_what_is_empty_is_not_sent() -> None:
    assert StepPlan(3, drop=(1,)).to_dict() == {"type": "plan", "step": 3, "drop": [1]}


def test_tokens_go_only_to_those_who_read_them() -> None:
    told = PLAN.to_dict(with_tokens=False)
    assert [work.tokens for work in StepPlan.from_dict(told).work] == [(), ()]
    assert all(work[-1] == [] for work in told["work"])


def test_neither_prompts_nor_parameters_are_in_a_repr() -> None:
    shown = repr(PLAN)
    assert "tokens" not in shown and "context" not in shown and "seed" not in shown


WRONG: list[tuple[str, Any]] = [
    ("step", None),
    ("step", True),
    ("step", -1),
    ("step", 2**60),
    ("keep", [[1, 2, 3]]),
    ("keep", [[1, 2, "3", 0]]),
    ("keep", {}),
    ("adopt", [[1, 2, 3]]),
    ("adopt", [[2**53, 2, 3, 0]]),
    ("drop", 5),
    ("drop", [-1]),
    ("free", [1.0]),
    ("restore", [[1, 2, 0]]),
    ("restore", [1]),
    ("open", [[1, [], [1], 0, 0]]),
    ("open", [[1, {1: 2}, [1], 0, 0]]),
    ("open", [[1, {}, ["a"], 0, 0]]),
    ("work", [[0, -1, [], [[5, 3, 1]], []]]),
    ("work", [[0, -1, [], [[5, 3]], []]]),
    ("work", [[0, -1, [], [[5, 0, True]], []]]),
    ("work", [[0, -1, [], [5], []]]),
    ("work", [[0, -1, [], 5, []]]),
    ("work", [[0, -1, [], [], []]]),
    ("work", [[0, -2, [5], [], []]]),
    ("work", [[0, -1, [5], [], []]]),
    ("work", [[0, 0, [], [[5, 3, True]], []]]),
    ("work", [[0, 0, [5, 5], [], []]]),
    ("work", [[0, 0, [5], [[5, 3, True]], []]]),
    ("work", [[0, 0, [5, 6], [], [1]]]),
    ("work", [[0, 0, [5], [[6, 3, True]], [1, 2, 3]]]),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_field_of_another_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(WireError, match=f"step plan: its {name} "):
        StepPlan.from_dict({**PLAN.to_dict(), name: value})


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3), st.lists, max_leaves=6
)


@given(st.data())
def test_whatever_is_sent_is_a_plan_or_an_error_of_ours(data: st.DataObject) -> None:
    message = copy.deepcopy(PLAN.to_dict())
    name = data.draw(st.sampled_from(sorted(message)))
    place = message[name]
    if isinstance(place, list) and data.draw(st.booleans()):
        if isinstance(place[0], list) and data.draw(st.booleans()):
            place = place[0]
        place[data.draw(st.integers(0, len(place) - 1))] = data.draw(junk)
    else:
        message[name] = data.draw(junk)
    try:
        plan = StepPlan.from_dict(message)
    except WireError:
        return
    assert StepPlan.from_dict(plan.to_dict()) == plan
