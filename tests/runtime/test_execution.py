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
from mlxcel_nb.runtime.outcomes import Outcome
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


def test_what_is_read_beside_others_is_what_it_would_be_alone(execution: Execution) -> None:
    """Two sequences decode; of two more one is read to its end beside them and one in part; then all four go on."""

    def token(outcome: Outcome, sequence: int) -> int:
        sampled = outcome[sequence]
        assert isinstance(sampled, Sampled)
        return sampled.token

    def opened(*sequences: int) -> tuple[Open, ...]:
        return tuple(Open(each, SamplingParams().to_dict(), (), 0) for each in sequences)

    prompts = {number: tuple(range(number, 3 * number + 4)) for number in (1, 2, 3, 4)}
    texts: dict[int, list[int]] = {}
    for number, ids in prompts.items():  # each by itself
        run = [StepPlan(0, open=opened(number), work=(Work(0, -1, (), (Chunk(number, len(ids), True),), ids),))]
        texts[number] = [token(execution.run(run[0]), number)]
        for _ in range(3):
            work = Work(0, 0, (number,), tokens=(texts[number][-1],))
            texts[number].append(token(execution.run(StepPlan(0, work=(work,))), number))
        execution.run(StepPlan(0, drop=(number,)))
    first = Work(0, -1, (), tuple(Chunk(each, len(prompts[each]), True) for each in (1, 2)), prompts[1] + prompts[2])
    seen = execution.run(StepPlan(0, open=opened(1, 2), work=(first,)))
    assert [token(seen, each) for each in (1, 2)] == [texts[1][0], texts[2][0]]
    chunks = (Chunk(3, len(prompts[3]), True), Chunk(4, 5, False))
    beside = Work(0, 0, (1, 2), chunks, (texts[1][0], texts[2][0], *prompts[3], *prompts[4][:5]))
    seen = execution.run(StepPlan(0, open=opened(3, 4), work=(beside,)))
    assert {each: token(seen, each) for each in seen} == {1: texts[1][1], 2: texts[2][1], 3: texts[3][0]}
    rest = Chunk(4, len(prompts[4]) - 5, True)
    last = Work(0, 0, (1, 2, 3), (rest,), (texts[1][1], texts[2][1], texts[3][0], *prompts[4][5:]))
    seen = execution.run(StepPlan(0, work=(last,)))
    assert [token(seen, each) for each in (1, 2, 3, 4)] == [texts[1][2], texts[2][2], texts[3][1], texts[4][0]]
    everybody = Work(0, 0, (1, 2, 3, 4), tokens=(texts[1][2], texts[2][2], texts[3][1], texts[4][0]))
    seen = execution.run(StepPlan(0, work=(everybody,)))
    assert [token(seen, each) for each in (1, 2, 3, 4)] == [texts[1][3], texts[2][3], texts[3][2], texts[4][1]]


def test_caches_of_a_long_prompt_grow_once_to_what_it_takes(execution: Execution) -> None:
    ids = tuple(each % 50 for each in range(700))

    def run(length: int) -> tuple[int, list[int]]:
        """The token after it, and what is held after each of seven chunks."""
        held, opened = [], (Open(1, SamplingParams().to_dict(), (), 0, 0, length),)
        for at in range(0, 700, 100):
            chunk = Chunk(1, 100, at == 600)
            work = Work(0, -1, (), (chunk,), ids[at : at + 100])
            seen = execution.run(StepPlan(at, open=opened if at == 0 else (), work=(work,)))
            held.append(execution.nbytes)
        execution.run(StepPlan(700, drop=(1,)))
        sampled = seen[1]
        assert isinstance(sampled, Sampled)
        return sampled.token, held

    token, held = run(700)
    other, grown = run(0)
    assert token == other
    assert held == [held[0]] + [3 * held[0]] * 6, "256 columns, then 768"
    assert len(set(grown)) > 2


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
