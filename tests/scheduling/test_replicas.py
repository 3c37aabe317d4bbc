"""Where a request goes: to whoever has least to do, or has read its beginning and is not much busier."""

from __future__ import annotations

from collections import Counter

import pytest

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.scheduling.replicas import (
    CHARACTERS,
    MORE,
    MOST_BLOCKS,
    MUCH,
    POLICIES,
    Prefixes,
    Standing,
    check_policy,
    choose,
    keys_of,
)
from mlxcel_nb.scheduling.step_plan import BLOCK

IDLE = Standing()


def busy(requests: int, tokens: int = 0, turn: int = 0) -> Standing:
    return Standing(requests=requests, tokens=tokens, turn=turn)


def test_other_policies_choose_by_turn_load_or_memory() -> None:
    standings = {
        0: Standing(requests=3, turn=1, memory=0.11), 1: Standing(requests=1, turn=3, memory=0.74),
        2: Standing(requests=2, turn=2, memory=0.17),
    }  # fmt: skip
    read = {1: 0, 0: 8}
    assert [choose(standings, read, 8, policy) for policy in POLICIES] == [0, 1, 2, 0]
    with pytest.raises(ConfigError, match="route 'best'"):
        check_policy("best")


def test_least_requests_then_least_tokens_then_whoever_has_waited_longest() -> None:
    assert choose({0: busy(2), 1: busy(1, tokens=9999)}, {}, 0) == 1
    assert choose({0: busy(1, tokens=500), 1: busy(1, tokens=20)}, {}, 0) == 1
    assert choose({0: busy(0, turn=5), 1: busy(0, turn=4)}, {}, 0) == 1
    assert choose({0: IDLE, 1: IDLE}, {}, 0) == 0
    assert choose({3: busy(70)}, {}, 0) == 3


def test_idle_replicas_take_turns() -> None:
    turns: dict[int, int] = dict.fromkeys(range(3), 0)
    order = []
    for turn in range(1, 10):
        chosen = choose({n: Standing(turn=t) for n, t in turns.items()}, {}, 0)
        turns[chosen] = turn
        order.append(chosen)
    assert order == [0, 1, 2] * 3


def test_a_prompt_that_begins_like_one_before_goes_where_that_was_read() -> None:
    prefixes = Prefixes()
    system = list(range(10 * BLOCK))
    prefixes.note(keys_of(system + [1] * BLOCK), 1)
    keys = keys_of(system + [2] * 40)
    assert prefixes.matched(keys) == {1: 10}
    assert choose({0: IDLE, 1: busy(MORE, turn=9)}, prefixes.matched(keys), len(keys)) == 1


def test_but_not_where_much_more_is_under_way() -> None:
    for least in (0, 3):
        much = MUCH * least + MORE
        assert choose({0: busy(least), 1: busy(much)}, {1: 10}, 10) == 1
        assert choose({0: busy(least), 1: busy(much + 1)}, {1: 10}, 10) == 0


def test_a_small_part_in_common_does_not_count() -> None:
    standings = {0: IDLE, 1: busy(1)}
    assert choose(standings, {1: 4}, 10) == 0
    assert choose(standings, {1: 5}, 10) == 1
    assert choose(standings, {0: 6, 1: 10}, 10) == 1
    assert choose(standings, {0: 10, 1: 10}, 10) == 0


@pytest.mark.parametrize(
    ("first", "second", "blocks"),
    [
        ("a" * 3 * CHARACTERS, "a" * 2 * CHARACTERS + "b" * CHARACTERS, 2),
        ([1] * 3 * BLOCK, [1] * 3 * BLOCK + [2], 3),
        ([1] * (BLOCK - 1), [1] * (BLOCK - 1), 0),
        ("", "", 0),
        ([], [], 0),
    ],
)
def test_keys_agree_as_far_as_whole_blocks_do(first: str | list[int], second: str | list[int], blocks: int) -> None:
    one, two = keys_of(first), keys_of(second)
    assert sum(a == b for a, b in zip(one, two, strict=False)) == blocks
    assert one[:blocks] == two[:blocks]


def test_a_block_counts_only_together_with_all_before_it() -> None:
    one = keys_of([1] * BLOCK + [7] * BLOCK)
    two = keys_of([2] * BLOCK + [7] * BLOCK)
    assert not set(one) & set(two)


def test_a_conversation_begins_as_its_earlier_turns_did() -> None:
    talk = [{"role": "user", "content": "tell me " * 100}, {"role": "assistant", "content": "so " * 100}]
    longer = [*talk, {"role": "user", "content": "and then? " * 50}]
    one, two = keys_of(talk), keys_of(longer)
    assert len(one) > 3 and one == two[: len(one)]


def test_what_no_leader_would_take_has_keys_too_and_is_refused_elsewhere() -> None:
    assert len(keys_of([2**70, -1] * BLOCK)) == 2
    assert keys_of([{"role": {1: 2}, (3, 4): "x" * 2 * CHARACTERS}])
    assert len(keys_of("\ud800" * CHARACTERS)) == 3


def test_a_prompt_of_any_length_costs_a_bounded_number_of_keys() -> None:
    assert len(keys_of("x" * 10_000_000)) == MOST_BLOCKS


def test_what_is_remembered_is_bounded_and_forgotten_from_its_end() -> None:
    prefixes = Prefixes(most=10)
    first, second = keys_of([1] * 8 * BLOCK), keys_of([2] * 6 * BLOCK)
    prefixes.note(first, 0)
    prefixes.note(second, 1)
    assert len(prefixes) == 10
    assert prefixes.matched(first) == {0: 4}
    assert prefixes.matched(second) == {1: 6}


def test_several_replicas_may_have_read_the_same() -> None:
    prefixes = Prefixes()
    prefixes.note(keys_of([1] * 5 * BLOCK), 0)
    prefixes.note(keys_of([1] * 3 * BLOCK), 2)
    assert prefixes.matched(keys_of([1] * 9 * BLOCK)) == {0: 5, 2: 3}


def test_many_prompts_of_a_few_kinds_each_stay_where_they_were_and_all_replicas_work() -> None:
    prefixes, under_way, turns = Prefixes(), Counter[int](), Counter[int]()
    went: dict[int, set[int]] = {kind: set() for kind in range(4)}
    for turn in range(1, 81):
        kind = turn % 4
        keys = keys_of([kind] * 20 * BLOCK + [100 + turn] * 3)
        standings = {n: Standing(requests=under_way[n], turn=turns[n]) for n in range(2)}
        chosen = choose(standings, prefixes.matched(keys), len(keys))
        prefixes.note(keys, chosen)
        went[kind].add(chosen)
        turns[chosen] = turn
        under_way[chosen] += 1
        if turn % 4 == 0:
            under_way.clear()
    assert all(len(each) == 1 for each in went.values())
    assert set.union(*went.values()) == {0, 1}
