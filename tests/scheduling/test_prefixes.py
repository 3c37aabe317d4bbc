"""What is kept of sequences, for others that begin alike."""

from __future__ import annotations

import pytest

from mlxcel_nb.scheduling.home import KEPT_AT_ONCE
from mlxcel_nb.scheduling.sequence import State
from mlxcel_nb.scheduling.step_plan import BLOCK
from tests.scheduling.ranks import plain
from tests.scheduling.steps import answer, decoding, long, plan, request, run, scheduler


def test_the_next_turn_of_a_chat_begins_with_the_blocks_of_the_last() -> None:
    one = scheduler()
    first, _ = run(one, request(*long(50), max_tokens=20))
    assert first.reused == 0 and one.blocks == 2  # 69 of 70 tokens were ever read
    second, plans = run(one, request(*first.tokens, *long(20, first=9)))
    assert second.reused == 64
    assert [each.blocks for each in plans[0].restore] == [(0, 1)]
    assert plans[0].work[0].tokens == tuple(second.request.prompt[64:])


def test_the_last_token_of_a_prompt_is_always_run() -> None:
    one = scheduler()
    prompt = long(2 * BLOCK)
    run(one, request(*prompt))
    again, plans = run(one, request(*prompt))
    assert again.reused == BLOCK
    assert plans[0].work[0].read == BLOCK
    longer, plans = run(one, request(*prompt, 3))
    assert longer.reused == 2 * BLOCK
    assert plans[0].work[0].read == 1


def test_several_answers_to_one_prompt_read_it_once() -> None:
    """An owner's prompts are read one at a time, and blocks are kept as soon as one has been read."""
    one = scheduler()
    made = [one.add(request(*long(100), params={"seed": seed}), 0.0) for seed in range(4)]
    read = 0
    while not all(each.state is State.DECODE for each in made):
        step = plan(one)
        read += sum(each.read for each in step.work)
        answer(one, step)
    assert [each.reused for each in made] == [0, 96, 96, 96]
    assert read == 100 + 3 * 4


@pytest.mark.parametrize("reusable", [True, False])
def test_the_count_of_reused_tokens_is_honest(reusable: bool) -> None:
    """Case 43: a prefix that diverges within a block is reused up to that block; where a window slides, not at all."""
    one = scheduler(reusable=reusable)
    run(one, request(*long(100)))
    other = [*long(47), *long(53, first=90)]
    sequence, plans = run(one, request(*other))
    assert sequence.reused == (BLOCK if reusable else 0)
    read = sum(each.read for step in plans for each in step.work)
    assert read + sequence.reused == 100
    moved = any(step.keep or step.restore for step in plans)
    assert moved == bool(one.blocks) == reusable


LONG = [1 + each * each % 150 for each in range(30 * BLOCK)]


@pytest.mark.parametrize("ends", [False, True])
def test_while_somebody_makes_tokens_a_step_keeps_a_few_blocks_of_another(ends: bool) -> None:
    """Copies take time: who has read a long prompt is kept over some steps, and stays until then if it ends."""
    one = scheduler(mixed=True)
    decoding(one, request(3, max_tokens=100))
    (second,) = decoding(one, request(*LONG, max_tokens=100))
    if ends:
        one.finish(second)
    alike, kept = one.add(request(*LONG, 5), 0.0), []
    while sum(kept) < 30:
        step = plan(one)
        kept.append(len(step.keep))
        assert bool(step.restore) == (sum(kept) == 30)
        assert (second.number in step.drop) == (ends and sum(kept) == 30)
        answer(one, step)
    assert kept == [KEPT_AT_ONCE] * 3 + [30 - 3 * KEPT_AT_ONCE]
    assert alike.reused == 30 * BLOCK, "it has waited for the last of them"


def test_when_nobody_waits_all_is_kept_at_once() -> None:
    one = scheduler()
    _, plans = run(one, request(*LONG, max_tokens=1))
    assert max(len(step.keep) for step in plans) == 30


def test_of_what_was_read_elsewhere_blocks_are_kept_as_well() -> None:
    one = scheduler()
    decoding(one, request(3, max_tokens=200))
    brought = one.add(request(*LONG, max_tokens=50, remote=True), 0.0)
    step = plan(one)
    assert [each.sequence for each in step.expect] == [brought.number]
    answer(one, step)
    one.made_elsewhere(brought, 7)
    one.landed(brought)
    kept = 0
    while not kept or one.blocks < 30:
        step = plan(one)
        assert len(step.keep) <= KEPT_AT_ONCE
        kept += len(step.keep)
        answer(one, step)
    assert kept == 30 and not brought.over


def test_others_do_not_wait_for_one_that_begins_as_what_is_being_read() -> None:
    """They are read beside it; it has what was read for it as soon as that is there."""
    one = scheduler(chunk=16, mixed=True)
    first = one.add(request(*long(300)), 0.0)
    answer(one, plan(one))
    alike = one.add(request(*long(40), 199), 0.0)
    others = [one.add(request(each, max_tokens=2), 0.0) for each in range(5)]
    while not all(each.position for each in others):
        answer(one, plan(one))
    assert first.to_read and not alike.cached, "it was not read a second time meanwhile"
    while not alike.position:
        answer(one, plan(one))
    assert alike.reused == 32


def test_blocks_get_fresh_numbers_and_their_count_is_as_before() -> None:
    """Case 41."""
    one = scheduler()
    run(one, request(*long(100)))
    before = one.blocks
    seen = set(range(before))
    run(one, request(*long(100)))
    assert one.blocks == before == 3
    one.forget_prefixes()
    last = plan(one)
    assert sorted(last.free) == sorted(seen) and not one.blocks
    answer(one, last)
    _, plans = run(one, request(*long(100)))
    new = [each.block for step in plans for each in step.keep]
    assert len(new) == 3 and not seen & set(new)


def test_blocks_give_way_to_sequences_least_recently_used_first() -> None:
    one = scheduler(rooms=((plain(300),),), kept=1.0)
    run(one, request(*long(96), max_tokens=1))
    run(one, request(*long(96, first=20), max_tokens=1))
    run(one, request(*long(64), 200))  # its first two blocks are used again
    assert one.blocks == 6
    _, plans = run(one, request(*long(140, first=40), max_tokens=1))
    assert plans[0].free == (2,)  # the third block of the first, which was not used again


def test_what_a_plan_restores_from_stays_until_the_next() -> None:
    """Two come with one plan: the second would have room if the blocks went that the first begins with."""
    one = scheduler(rooms=((plain(280),),), kept=1.0)
    run(one, request(*long(96), max_tokens=1))
    one.add(request(*long(96), 200, max_tokens=1, owner="a"), 0.0)
    one.add(request(*long(100, first=40), max_tokens=1, owner="b"), 0.0)
    both = plan(one)
    assert both.restore[0].blocks == (0, 1, 2) and not both.free
    assert len(both.open) == 1


def test_a_failure_takes_all_blocks() -> None:
    one = scheduler()
    run(one, request(*long(100)))
    one.reset()
    sequence, _ = run(one, request(*long(100)))
    assert sequence.reused == 0


@pytest.mark.parametrize(("made", "reused"), [(0, 0), (1, 96)])
def test_the_count_of_reused_tokens_is_that_of_the_reading_that_made_the_first_token(made: int, reused: int) -> None:
    """A failure before it takes the blocks, and all is read; a failure after it changes nothing that was said."""
    one = scheduler()
    run(one, request(*long(100)))
    sequence = one.add(request(*long(100)), 0.0)
    under_way = plan(one)
    assert sequence.reused == 96
    if made:
        answer(one, under_way)
    one.reset()
    answer(one, plan(one))
    assert (sequence.reused, sequence.position) == (reused, made + 1)


def test_kept_blocks_are_bounded_by_their_share() -> None:
    one = scheduler(rooms=((plain(20 * BLOCK),),), kept=0.25)
    for first in range(5):
        run(one, request(*long(3 * BLOCK, first=1 + 9 * first), max_tokens=1))
    assert one.blocks == 5
    assert one.kv_use() == (5 * BLOCK * 20, 20 * BLOCK * 20)
