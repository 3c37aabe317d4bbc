"""One decision at a time."""

from __future__ import annotations

import itertools

import pytest

from mlxcel_nb.errors import Busy, RequestError
from mlxcel_nb.scheduling.home import READERS
from mlxcel_nb.scheduling.limits import Limits
from mlxcel_nb.scheduling.pace import SETTLED
from mlxcel_nb.scheduling.sequence import Request, State
from mlxcel_nb.scheduling.step_plan import Chunk, StepPlan, Work
from tests.scheduling.ranks import plain
from tests.scheduling.simulator import Simulation
from tests.scheduling.steps import LARGE, answer, decoding, long, plan, request, scheduler, work

# -- a request's life


def test_a_prompt_is_read_in_chunks_and_the_last_one_samples() -> None:
    one = scheduler(chunk=4)
    sequence = one.add(request(*range(1, 11), params={"seed": 3}, recent=3), 0.0)
    first = plan(one)
    (opened,) = first.open
    assert (opened.params, opened.context, opened.position) == ({"seed": 3}, (8, 9, 10), 0)
    assert first.work == (Work(0, -1, (), (Chunk(0, 4, False),), (1, 2, 3, 4)),)
    assert one.next(0.0) is None
    one.took(first.step, {})
    second = plan(one)
    assert second.work == (Work(0, -1, (), (Chunk(0, 4, False),), (5, 6, 7, 8)),)
    one.took(second.step, {})
    third = plan(one)
    assert third.work == (Work(0, -1, (), (Chunk(0, 2, True),), (9, 10)),)
    one.took(third.step, {0: 5})
    assert sequence.tokens[-1] == 5 and sequence.position == 1
    assert work(one) == Work(0, 0, (0,), tokens=(5,))


def test_the_end_is_a_plan_without_work_and_then_there_is_none() -> None:
    one = scheduler()
    (sequence,) = decoding(one, request(1, 2, 3))
    one.finish(sequence)
    assert not one.running and not one.idle
    last = plan(one)
    assert (last.drop, last.work) == ((0,), ())
    one.took(last.step, {})
    assert one.next(0.0) is None and one.idle and sequence.state is State.ENDED


def test_several_decode_as_one_batch_in_the_order_in_which_they_came() -> None:
    one = scheduler()
    decoding(one, request(1), request(2), request(3))
    assert work(one) == Work(0, 0, (0, 1, 2), tokens=(7, 7, 7))


def test_results_come_in_the_order_of_steps() -> None:
    one = scheduler(stages=2, chunk=2)
    one.add(request(1, 2, 3, 4), 0.0)
    first, second = plan(one), plan(one)
    with pytest.raises(ValueError, match=f"step {second.step} is not the next"):
        one.took(second.step, {0: 1})
    one.took(first.step, {})
    one.took(second.step, {0: 1})
    with pytest.raises(ValueError, match="not the next"):
        one.took(second.step, {0: 1})


def test_the_result_of_one_that_was_cancelled_meanwhile_is_passed_over() -> None:
    one = scheduler()
    sequence, other = decoding(one, request(1), request(2))
    under_way = plan(one)
    one.cancel(sequence)
    assert one.next(0.0) is None
    tokens = list(sequence.tokens)
    one.took(under_way.step, {0: 9, 1: 9})
    assert sequence.tokens == tokens and other.tokens[-1] == 9
    after = plan(one)
    assert after.drop == (0,) and after.work[0].sequences == (1,)


def test_one_that_waits_is_cancelled_without_a_plan() -> None:
    one = scheduler()
    one.cancel(one.add(request(1), 0.0))
    assert one.next(0.0) is None and one.idle and not one.waiting_tokens


def test_a_second_end_changes_nothing() -> None:
    one = scheduler()
    (sequence,) = decoding(one, request(1))
    one.finish(sequence)
    one.cancel(sequence)
    answer(one, plan(one))
    one.cancel(sequence)
    one.finish(sequence)
    assert one.next(0.0) is None


def test_whoever_is_past_its_deadline_ends_wherever_it_is() -> None:
    one = scheduler(max_rows=1)
    (running,) = decoding(one, request(1, deadline=5.0))
    waiting = one.add(request(2, deadline=6.0), 0.0)
    patient = one.add(request(3), 0.0)
    assert one.expire(4.9) == []
    assert one.expire(6.0) == [running, waiting]
    assert one.expire(7.0) == []
    last = plan(one)
    assert last.drop == (0,) and [each.sequence for each in last.open] == [patient.number]


# -- limits


@pytest.mark.parametrize(("length", "tokens"), [(99, 2), (100, 1), (101, None), (1000, None)])
@pytest.mark.parametrize("why", ["context", "room"])
def test_what_can_never_run_is_refused_before_any_rank_hears_of_it(why: str, length: int, tokens: int | None) -> None:
    """Case 20: prompts of max - 1, max, max + 1 and 10 x max tokens."""
    one = scheduler(context=100) if why == "context" else scheduler(rooms=((plain(5000), plain(100)),))
    asked = request(*[1] * length)
    if tokens is None:
        words = "the model's context is 100" if why == "context" else "the nodes have room for 100"
        with pytest.raises(RequestError, match=f"the prompt has {length} tokens, .*{words}.*[Ss]horten"):
            one.add(asked, 0.0)
        assert one.idle and one.next(0.0) is None
    else:
        assert one.add(asked, 0.0).limit == tokens


def test_a_sequence_that_fills_all_memory_runs_to_its_limit() -> None:
    simulation = Simulation(Limits(rooms=((plain(50),),)), 0)
    sequence = simulation.ask(request(*range(1, 49), max_tokens=500))
    assert sequence is not None and sequence.limit == 3
    simulation.run([])
    assert simulation.ranks[0][0].most_bytes in range(48 * 20, 50 * 20 + 1)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (request(), "the prompt is empty"),
        (request(1, max_tokens=0), "at least one token"),
        (request(1, home=1), "rank 1 is asked for, and the model has 1"),
        (request(1, home=-1), "rank -1 is asked for"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: Request, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        scheduler().add(asked, 0.0)


def test_the_queue_is_bounded_in_number() -> None:
    one = scheduler(max_waiting=2)
    one.add(request(1), 0.0)
    one.add(request(2), 0.0)
    with pytest.raises(Busy, match=r"2 requests with 2 tokens are waiting already, 2 of them yours\. Ask again"):
        one.add(request(3), 0.0)
    plan(one)
    one.add(request(3), 0.0)


def test_one_owner_does_not_fill_the_queue() -> None:
    one = scheduler(max_waiting=8)
    with pytest.raises(Busy, match=r"6 requests with 6 tokens are waiting already, 6 of them yours"):
        for each in range(8):
            one.add(request(each + 1, owner="greedy"), 0.0)
    one.add(request(9, owner="other"), 0.0)


def test_the_queue_is_bounded_in_tokens_but_one_may_always_wait() -> None:
    one = scheduler(max_waiting_tokens=10)
    one.add(request(*[1] * 50), 0.0)
    with pytest.raises(Busy, match=r"1 requests with 50 tokens"):
        one.add(request(1), 0.0)


def test_no_more_run_than_rows_are_allowed() -> None:
    one = scheduler(max_rows=2)
    made = [one.add(request(each + 1), 0.0) for each in range(3)]
    for _ in range(6):
        answer(one, plan(one))
    assert one.running == made[:2] and one.waiting == 1


def test_one_who_asks_to_be_alone_waits_for_the_others_and_they_for_it() -> None:
    one = scheduler()
    (first,) = decoding(one, request(1))
    alone = one.add(request(2, exclusive=True), 0.0)
    later = one.add(request(3), 0.0)
    answer(one, plan(one))
    assert one.running == [first]
    one.finish(first)
    swap = plan(one)
    assert swap.drop == (0,) and [each.sequence for each in swap.open] == [alone.number]
    answer(one, swap)
    assert work(one).rows == (alone.number,)
    assert later.state is State.WAITING


# -- failures


def test_after_a_failure_all_are_run_again_from_their_tokens() -> None:
    one = scheduler()
    sequences = decoding(one, request(1, 2), request(3))
    answer(one, plan(one))
    under_way = plan(one)
    one.reset()
    with pytest.raises(ValueError, match="not the next"):
        one.took(under_way.step, {0: 1, 1: 1})
    assert not one.running and one.waiting == 2 and not one.preemptions
    again = plan(one)
    opened, _ = again.open
    assert (opened.sequence, opened.position, opened.context) == (0, sequences[0].position, (7,) * opened.position)
    assert again.work[0].tokens == tuple(sequences[0].tokens) and again.work[0].sampled
    assert again.step > under_way.step


def test_who_was_over_when_a_step_failed_does_not_come_back() -> None:
    one = scheduler()
    first, second = decoding(one, request(1), request(2))
    plan(one)
    one.cancel(first)
    one.reset()
    assert first.state is State.ENDED and one.waiting == 1
    assert [each.sequence for each in plan(one).open] == [second.number]


@pytest.mark.parametrize("shape", [{}, {"stages": 2, "rooms": ((plain(9000), plain(9000)),)}])
def test_only_the_request_that_breaks_every_step_it_is_in_is_ended(shape: dict[str, object]) -> None:
    """One of six makes each step fail that makes its fourth token. Whoever fails twice in a row was alone with it."""
    simulation = Simulation(Limits(**{"rooms": LARGE, "chunk": 8, **shape}), 1)
    for owner in range(6):
        simulation.ask(request(*long(12, first=1 + owner), owner=f"{owner}", max_tokens=30))

    def breaks(step: StepPlan) -> bool:
        return any(3 in each.sampled for each in step.work) and len(simulation.answers[3]) == 3

    simulation.breaks = breaks
    while not simulation.scheduler.idle:
        simulation.turn()
        for each in simulation.live():
            if each.failures > 1:
                simulation.cancel(each)
    simulation.settle()
    assert simulation.failures == 2 and simulation.cancelled == {3}
    assert len(simulation.answers[3]) == 3


# -- groups


def test_with_two_stages_two_groups_are_under_way_at_once() -> None:
    one = scheduler(stages=2)
    decoding(one, *[request(each + 1) for each in range(4)])
    for _ in range(2):  # whatever was under way
        for step in list(one.flying):
            one.took(step, {row.number: 7 for row in one.flying[step]})
    first, second = plan(one), plan(one)
    assert {first.work[0].group, second.work[0].group} == {0, 1}
    assert len(first.work[0].rows) == len(second.work[0].rows) == 2
    assert one.next(0.0) is None


def test_the_chunks_of_a_long_prompt_follow_each_other_through_the_stages() -> None:
    one = scheduler(stages=3, chunk=16)
    sequence = one.add(request(*long(100)), 0.0)
    steps = [plan(one) for _ in range(3)]
    assert [step.work[0].tokens for step in steps] == [tuple(long(100)[n : n + 16]) for n in (0, 16, 32)]
    assert sequence.in_flight == 3 and one.next(0.0) is None
    one.took(steps[0].step, {})
    assert work(one).tokens == tuple(long(100)[48:64])


def test_groups_stay_even_when_one_empties() -> None:
    one = scheduler(stages=2, in_flight=1)
    sequences = decoding(one, *[request(each + 1) for each in range(6)])
    gone = [each for each in sequences if each.group == 0]
    for each in gone:
        one.finish(each)
    seen: dict[int, int] = {}
    for _ in range(4):
        step = plan(one)
        seen |= {each.group: len(each.rows) for each in step.work}
        answer(one, step)
    assert sorted(seen.values()) == [1, 2]


def test_homes_take_turns_unless_one_is_asked_for() -> None:
    one = scheduler(rooms=LARGE * 3)
    sequences = decoding(one, *[request(each + 1) for each in range(6)], request(9, home=1))
    assert [each.home for each in sequences].count(1) == 3
    step = plan(one)
    assert [each.home for each in step.work] == [0, 1, 2]
    assert [len(each.rows) for each in step.work] == [2, 3, 2]


def test_one_rank_may_have_all_the_work_and_then_the_other_one_request() -> None:
    """200 requests on one rank, then one on the other: all are answered."""
    simulation = Simulation(Limits(rooms=LARGE * 2, max_rows=16, max_waiting=300), 2)
    for each in range(200):
        simulation.ask(request(1 + each % 190, home=0, max_tokens=3))
    simulation.ask(request(5, home=1, max_tokens=3))
    simulation.run([])
    assert sum(bool(each) for each in simulation.answers.values()) == 201


def test_a_mixed_step_has_a_token_of_each_row_and_chunks_of_several_prompts() -> None:
    one = scheduler(mixed=True, chunk=8)
    first, second = (one.add(request(*ids, max_tokens=99), 0.0) for ids in ((1, 2, 3), (4, 5)))
    together = plan(one)
    assert together.work == (Work(0, -1, (), (Chunk(0, 3, True), Chunk(1, 2, True)), (1, 2, 3, 4, 5)),)
    answer(one, together)
    for _ in range(SETTLED):
        alone = plan(one)
        assert alone.work[0] == Work(0, 0, (0, 1), tokens=(7, 7))
        answer(one, alone)
    third = one.add(request(*range(10, 30)), 0.0)
    mixed = plan(one)
    assert mixed.work[0] == Work(0, 0, (0, 1), (Chunk(2, 8, False),), (7, 7, *range(10, 18)))
    answer(one, mixed)
    assert (first.position, second.position, third.cached) == (SETTLED + 2, SETTLED + 2, 8)


def test_one_that_is_suspected_shares_no_mixed_step() -> None:
    one = scheduler(mixed=True)
    sequences = decoding(one, request(1), request(2))
    one.reset(sequences)
    assert [work(one).sequences] == [(0,)]


@pytest.mark.parametrize("mixed", [False, True])
def test_others_go_on_between_the_chunks_of_one_that_is_suspected(mixed: bool) -> None:
    one = scheduler(mixed=mixed, chunk=16)
    stream, suspect = decoding(one, request(1, max_tokens=900), request(*long(50), owner="b"))
    one.reset([suspect])
    steps = []
    while not suspect.position > 1:
        steps.append(plan(one))
        answer(one, steps[-1])
    read = [[chunk.sequence for work in step.work for chunk in work.chunks] for step in steps]
    alone = [n for n, sequences in enumerate(read) if suspect.number in sequences]
    assert all(not work.rows for n in alone for work in steps[n].work), "it shares no step"
    assert all(b - a >= 2 for a, b in itertools.pairwise(alone)), "and tokens are made in between"
    assert stream.position >= len(alone) - 1


def test_short_prompts_of_one_owner_are_read_as_many_as_a_step_takes_and_long_ones_a_few() -> None:
    one = scheduler(mixed=True, chunk=32)
    for each in range(20):
        one.add(request(each + 1, 7, 7, 7, max_tokens=1), 0.0)
    (work,) = plan(one).work
    assert len(work.chunks) == 32 // 4
    other = scheduler(mixed=True, chunk=32)
    for each in range(20):
        other.add(request(*[each + 1] * 16), 0.0)
    plan(other)
    assert other.waiting == 20 - READERS
