"""One member's side of step plans, on a model that it holds alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.models.sampling import Sampled
from mlxcel_nb.net.hot.interrupt import Interrupt
from mlxcel_nb.plan.part import whole
from mlxcel_nb.runtime.collectives import Own
from mlxcel_nb.runtime.execution import Execution
from mlxcel_nb.runtime.fabric import Fabric
from mlxcel_nb.runtime.instance import Instance
from mlxcel_nb.runtime.protocol import LoadOrder, Member
from mlxcel_nb.runtime.recording import Recording
from mlxcel_nb.scheduling.step_plan import Chunk, Open, StepPlan, Work
from tests.tiny import make_tiny

PROMPT = (3, 1, 4, 1, 5)


@pytest.fixture
def execution(tmp_path: Path) -> Iterator[Execution]:
    folder, interrupt = make_tiny(tmp_path / "tiny"), Interrupt()
    layout = make_layout(5)
    order = LoadOrder(
        id="l", instance="i", model=str(folder), layout=layout, dtype="auto", step_s=5.0,
        members=(Member(node_id="n0", address="127.0.0.1:1"),),
    )  # fmt: skip
    fabric = Fabric(layout, 0, {}, interrupt, order.step_s)
    yield Execution(Instance(order, 0, load_part(folder, whole(5)), fabric, Own(fabric)), 1, lambda: None)
    interrupt.close()


def begins(step: int, sequence: int, **more: tuple[int, ...]) -> StepPlan:
    """A plan in which a sequence comes and its whole prompt is read."""
    opened = Open(sequence, SamplingParams().to_dict(), (), 0)
    return StepPlan(
        step, open=(opened,), work=(Work(0, -1, (), (Chunk(sequence, len(PROMPT), True),), PROMPT),), **more
    )


def test_a_prompt_is_read_and_decodes_and_nothing_of_it_stays(execution: Execution) -> None:
    first = execution.run(begins(0, 7))[7]
    assert isinstance(first, Sampled) and execution.nbytes > 0
    after = execution.run(StepPlan(1, work=(Work(0, 0, (7,), tokens=(first.token,)),)))
    assert after.keys() == {7}
    assert execution.run(StepPlan(2, drop=(7,))) == {} and execution.nbytes == 0


def test_who_is_noted_may_come_with_the_plan_in_which_another_that_was_noted_goes(execution: Execution) -> None:
    """Its logits were lost then, since what goes ends what is noted."""
    execution.run(begins(0, 1), Recording("one"))
    recording = Recording("two")
    execution.run(begins(1, 2, drop=(1,)), recording)
    assert execution.recording is recording
    recording.finish()
    assert recording.piece("logits", 0) and recording.piece("layer", 4)
    execution.run(StepPlan(2, drop=(2,)))
    assert execution.recording is None
