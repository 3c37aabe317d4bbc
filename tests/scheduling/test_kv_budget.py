"""What fits beside what."""

from __future__ import annotations

from mlxcel_nb.plan.capacity import Room
from mlxcel_nb.plan.facts import Growth
from mlxcel_nb.scheduling.kv_budget import Batch, KvBudget, Use
from mlxcel_nb.scheduling.step_plan import BLOCK

PER_TOKEN = 10


def budget(*tokens: int, kept: float = 1.0, step: int = 1) -> KvBudget:
    return KvBudget([Room({Growth(PER_TOKEN, step=step): 1}, PER_TOKEN * each) for each in tokens], kept)


def test_a_batch_takes_its_rows_times_the_longest() -> None:
    assert budget(100).beside([Batch(4, 25)]) == 0
    assert budget(99).beside([Batch(4, 25)]) < 0
    assert budget(100).beside([Batch(2, 25), Batch(1, 50)]) == 0


def test_the_node_with_least_room_decides() -> None:
    assert budget(1000, 100).beside([Batch(1, 101)]) < 0
    assert budget(1000, 100).longest == 100
    assert budget(1000, 100).fullest([Batch(1, 50)], 1) == Use((50 + BLOCK) * PER_TOKEN, 1000)


def test_caches_are_allocated_in_steps() -> None:
    assert budget(512, step=256).beside([Batch(2, 1)]) == 0
    assert budget(511, step=256).beside([Batch(2, 1)]) < 0
    assert budget(511, step=256).longest == 256


def test_blocks_take_what_is_left_and_no_more_than_their_share() -> None:
    assert budget(10 * BLOCK).beside([Batch(1, 3 * BLOCK)]) == 7
    assert budget(10 * BLOCK).beside([Batch(1, 3 * BLOCK + 1)]) == 6
    assert budget(10 * BLOCK, kept=0.5).beside([]) == 5
    assert budget(10 * BLOCK, kept=0.5).beside([Batch(1, 8 * BLOCK)]) == 2


def test_a_state_takes_the_same_whatever_the_length() -> None:
    states = KvBudget([Room({Growth(fixed=100): 2}, 1000)], 1.0)
    assert states.beside([Batch(5, 10**6)]) >= 0
    assert states.beside([Batch(6, 1)]) < 0
