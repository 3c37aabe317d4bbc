"""Blocks that come from elsewhere: kept as far as there is room, and blocks that are held while they are taken away."""

from __future__ import annotations

import random

import pytest

from mlxcel_nb.scheduling.adoption import Adoption
from mlxcel_nb.scheduling.limits import Limits
from mlxcel_nb.scheduling.scheduler import Scheduler
from mlxcel_nb.scheduling.sequence import Request
from mlxcel_nb.scheduling.step_plan import BLOCK, Adopt
from tests.scheduling.ranks import plain
from tests.scheduling.simulator import Simulation, Trouble

TEXT = [1 + n % 150 for n in range(5 * BLOCK)]


def scheduler(room: int = 10_000, **more: object) -> Scheduler:
    return Scheduler(Limits(**{"rooms": ((plain(room),),), "kept": 1.0, **more}))


def test_what_has_come_is_kept_and_the_next_request_begins_with_it() -> None:
    one = scheduler()
    one.adopt(adoption := Adoption(9, TEXT[: 3 * BLOCK], 0))
    assert not one.idle and adoption.kept is None
    plan = one.next(0.0)
    assert plan is not None and plan.adopt == tuple(Adopt(9, n, n) for n in range(3)) and not plan.work
    assert adoption.kept == 3 and one.blocks == 3
    one.took(plan.step, {})
    assert one.idle
    sequence = one.add(Request(prompt=tuple(TEXT), max_tokens=1), 0.0)
    plan = one.next(0.0)
    assert plan is not None and plan.restore[0].blocks == (0, 1, 2) and sequence.reused == 3 * BLOCK


def test_what_is_kept_already_is_not_kept_twice() -> None:
    one = scheduler()
    one.adopt(Adoption(9, TEXT[: 2 * BLOCK], 0))
    one.next(0.0)
    one.took(0, {})
    one.adopt(again := Adoption(9, TEXT[: 3 * BLOCK], 1))
    plan = one.next(0.0)
    assert plan is not None and plan.adopt == (Adopt(9, 2, 2),) and again.kept == 3
    one.took(1, {})
    one.adopt(same := Adoption(9, TEXT[: 3 * BLOCK], 3))
    assert one.next(0.0) is None and same.kept == 3 and one.idle


def test_without_what_comes_before_it_nothing_is_kept() -> None:
    one = scheduler()
    one.adopt(adoption := Adoption(9, TEXT[: 3 * BLOCK], 1))
    assert one.next(0.0) is None and adoption.kept == 0 and one.idle


def test_no_more_is_kept_than_there_is_room_for() -> None:
    one = scheduler(room=2 * BLOCK + 5)
    one.adopt(adoption := Adoption(9, TEXT, 0))
    plan = one.next(0.0)
    assert plan is not None and len(plan.adopt) == adoption.kept == 2


def test_what_must_make_room_in_the_same_plan_is_not_even_made() -> None:
    """A sequence that has come needs what the blocks would take."""
    one = scheduler(room=3 * BLOCK)
    one.add(Request(prompt=(7,) * BLOCK, max_tokens=BLOCK), 0.0)
    one.adopt(Adoption(9, TEXT, 0))
    plan = one.next(0.0)
    assert plan is not None and plan.work and len(plan.adopt) <= 1 and not plan.free


def test_models_that_keep_nothing_adopt_nothing() -> None:
    one = scheduler(reusable=False)
    one.adopt(adoption := Adoption(9, TEXT, 0))
    assert one.next(0.0) is None and adoption.kept == 0


def test_the_home_that_knows_most_takes_it() -> None:
    one = scheduler(rooms=((plain(10_000),), (plain(10_000),)))
    assert one.knows_best(TEXT) == 0
    one.adopt(Adoption(9, TEXT[:BLOCK], 0, home=1))
    plan = one.next(0.0)
    assert plan is not None and plan.adopt == (Adopt(9, 0, 0, 1),) and one.knows_best(TEXT) == 1


def test_held_blocks_stay_until_they_are_let_go() -> None:
    one = scheduler(room=4 * BLOCK)
    one.adopt(Adoption(9, TEXT[: 3 * BLOCK], 0))
    one.next(0.0)
    one.took(0, {})
    blocks, held = one.hold([*TEXT[: 2 * BLOCK], 199], 0)
    assert blocks == [0, 1]
    one.add(Request(prompt=(7,) * 2 * BLOCK, max_tokens=BLOCK), 0.0)
    assert one.next(0.0) is None and one.blocks == 3
    held.close()
    plan = one.next(0.0)
    assert plan is not None and plan.work and plan.free


@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_come_while_requests_do_are_like_those_that_were_read(seed: int) -> None:
    """Members object to a plan that they cannot run, and answers stay what they are alone."""
    drawn = random.Random(seed)
    simulation = Simulation(Limits(rooms=((plain(300), plain(300)),), stages=2, chunk=16), seed, Trouble(3, 3))
    own = simulation.turn
    came = 0

    def turn() -> None:
        nonlocal came
        if drawn.randrange(20) == 0:
            came += 1
            count = drawn.randrange(1, 5)
            for home in simulation.ranks:
                for rank in home:
                    rank.sent |= {(came, n): TEXT[n * BLOCK : (n + 1) * BLOCK] for n in range(count)}
            simulation.scheduler.adopt(Adoption(came, TEXT[: count * BLOCK], 0))
        own()

    simulation.turn = turn  # type: ignore[method-assign]
    simulation.fail = lambda own=simulation.fail: _fail(simulation, own)  # type: ignore[method-assign, assignment, misc]
    prompts = [tuple(TEXT[: drawn.randrange(1, 120)]) for _ in range(40)]
    simulation.run([Request(prompt=each, max_tokens=drawn.randrange(1, 30)) for each in prompts])
    adopted = sum(len(plan.adopt) for plan in simulation.plans)
    assert came and adopted and any(plan.restore for plan in simulation.plans)


def _fail(simulation: Simulation, own: object) -> None:
    """Members forget their caches, not what has been sent to them."""
    sent = [[rank.sent for rank in home] for home in simulation.ranks]
    own()  # type: ignore[operator]
    for home, each in zip(simulation.ranks, sent, strict=True):
        for rank, had in zip(home, each, strict=True):
            rank.sent = had
