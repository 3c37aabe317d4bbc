"""What the scheduler promises, whatever comes: simulated with members that check every plan (`ranks.py`), requests at
random, cancels and failures."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxcel_nb.plan.capacity import Room
from mlxcel_nb.scheduling.limits import Limits
from mlxcel_nb.scheduling.sequence import Request
from tests.conftest import REPO
from tests.scheduling.ranks import plain
from tests.scheduling.simulator import Simulation, Trouble, requests

SIMULATED = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])

rooms = st.builds(plain, st.sampled_from([130, 200, 300, 1000]), st.sampled_from([1, 8]))


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    homes = draw(st.sampled_from([1, 1, 1, 2, 3]))
    stages = draw(st.integers(1, 3)) if homes == 1 else 1
    return Limits(
        rooms=tuple(tuple(draw(st.lists(rooms, min_size=stages, max_size=stages))) for _ in range(homes)),
        context=draw(st.sampled_from([0, 0, 110])),
        stages=stages,
        micro_batches=draw(st.sampled_from([0, 0, 1, 4])),
        max_rows=draw(st.sampled_from([1, 3, 16])),
        in_flight=draw(st.sampled_from([0, 0, 3])),
        chunk=draw(st.sampled_from([7, 32, 256])),
        reusable=draw(st.booleans()),
        mixed=draw(st.booleans()),
        kept=draw(st.sampled_from([0.5, 1.0])),
    )


@SIMULATED
@given(limits(), st.integers(0, 10**6), st.sampled_from([0, 3]), st.sampled_from([0.0, 0.1]))
def test_everybody_is_answered_with_the_text_it_has_alone_and_nothing_is_left(
    limits: Limits, seed: int, every: int, exclusive: float
) -> None:
    homes = limits.homes if limits.homes > 1 else 0
    simulation = Simulation(limits, seed)
    simulation.run(requests(20, seed=seed, alike=0.9, exclusive=exclusive, homes=homes), every=every)
    assert not simulation.cancelled
    simulation.scheduler.forget_prefixes()
    simulation.settle()
    assert not simulation.scheduler.blocks
    assert not any(rank.bytes() for home in simulation.ranks for rank in home)


@SIMULATED
@given(limits(), st.integers(0, 10**6), st.sampled_from([0, 3]))
def test_cancels_and_failures_change_nobody_elses_text(limits: Limits, seed: int, every: int) -> None:
    simulation = Simulation(limits, seed, Trouble(cancels=20, failures=8))
    simulation.run(requests(20, seed=seed, alike=0.9, exclusive=0.05), every=every)


@SIMULATED
@given(limits(), st.integers(0, 10**6), st.sampled_from([0, 3]), st.sampled_from([0.3, 1.0]))
def test_prompts_that_are_read_elsewhere_give_the_same_texts_whatever_becomes_of_their_readers(
    limits: Limits, seed: int, every: int, remote: float
) -> None:
    homes = limits.homes if limits.homes > 1 else 0
    simulation = Simulation(limits, seed, Trouble(cancels=10, failures=5, losses=0.1))
    asked = requests(20, seed=seed, alike=0.9, exclusive=0.05, homes=homes, remote=remote)
    simulation.run(asked, every=every)


def test_whoever_is_read_elsewhere_takes_room_here_from_the_beginning() -> None:
    """Case 40: room for two, five come: no more than two are asked for, and one that is put back is read again."""
    asked = [Request(prompt=tuple(range(1 + n, 31 + n)), max_tokens=60, remote=True) for n in range(5)]
    simulation = Simulation(tight(130))
    simulation.run(asked, every=0)
    assert simulation.landings > 5 and simulation.scheduler.preemptions, "one was put back, and brought once more"
    coming, most = set(), 0
    for plan in simulation.plans:
        coming -= set(plan.drop)
        coming |= {each.sequence for each in plan.expect}
        most = max(most, len(coming))
        assert all(each.sequence in {land.sequence for land in plan.land} for each in plan.open)
    assert most == 2


def tight(tokens: int = 140, **more: object) -> Limits:
    return Limits(rooms=((plain(tokens),),), **more)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_memory_is_never_over_committed_and_used_to_the_end(seed: int, mixed: bool) -> None:
    simulation = Simulation(tight(mixed=mixed), seed)
    simulation.run(requests(40, seed=seed, answers=(20, 40)), every=0)
    (rank,) = simulation.ranks[0]
    assert 0.9 * rank.room.available < rank.most_bytes <= rank.room.available
    assert simulation.scheduler.preemptions


def test_whoever_makes_room_came_last_also_while_steps_are_under_way() -> None:
    """Three stages with little room, prompts in many chunks: whoever has to go waits for its results, others for it."""
    limits = Limits(rooms=((plain(150), plain(140), plain(150)),), stages=3, chunk=7, in_flight=4)
    put_back = 0
    for seed in range(8):
        simulation = Simulation(limits, seed)
        simulation.run(requests(25, seed=seed, prompts=(20, 90), answers=(20, 40), owners=5), every=0)
        assert simulation.most_flying == 4
        put_back += simulation.scheduler.preemptions
    assert put_back > 10


def test_one_put_back_for_space_resumes_and_its_text_is_equal() -> None:
    """Case 40: memory for two requests, five come: two run, the others wait, all finish."""
    asked = [Request(prompt=tuple(range(1 + n, 31 + n)), max_tokens=60) for n in range(5)]
    simulation = Simulation(tight(130))
    simulation.run(asked, every=0)
    put_back = [each for each in simulation.sequences.values() if each.preemptions]
    assert put_back and len(put_back) < 5 and not simulation.cancelled
    running, most = set(), 0
    for plan in simulation.plans:
        running -= set(plan.drop)
        running |= {each.sequence for each in plan.open}
        most = max(most, len(running))
    assert most == 2


def test_the_first_that_came_is_never_put_back() -> None:
    simulation = Simulation(tight(130))
    simulation.run(requests(30, seed=5, answers=(30, 40)), every=0)
    assert simulation.scheduler.preemptions > 5
    assert not simulation.sequences[0].preemptions


@pytest.mark.parametrize("kind", ["single", "mixed", "stages", "homes"])
def test_the_same_inputs_give_the_same_plans(kind: str) -> None:
    """In another process too, where texts hash to other values."""
    code = f"from tests.scheduling.test_promises import digest; print(digest({kind!r}))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(REPO)},
            cwd=REPO,
            capture_output=True,
            text=True,
            check=True,
            timeout=50,
        ).stdout
        for seed in ("1", "2")
    }
    assert seen == {f"{digest(kind)}\n"}


def digest(kind: str) -> int:
    """Of all plans of a run with everything in it."""
    import zlib

    shape: dict[str, dict[str, object]] = {
        "single": {"rooms": ((plain(200),),)},
        "mixed": {"rooms": ((plain(200),),), "mixed": True},
        "stages": {"rooms": ((plain(200), plain(180)),), "stages": 2},
        "homes": {"rooms": ((plain(200),), (plain(200),))},
    }
    simulation = Simulation(Limits(**shape[kind]), 7, Trouble(cancels=10, failures=3))
    simulation.run(requests(20, seed=7, owners=5))
    return zlib.crc32(repr([plan.to_dict() for plan in simulation.plans]).encode())


def test_all_stages_work_at_once() -> None:
    """On three stages: three steps on their way, and three groups that work alike."""
    simulation = Simulation(Limits(rooms=((plain(5000), plain(5000), plain(5000)),), stages=3, chunk=16))
    simulation.run(requests(12, seed=1, prompts=(50, 90), answers=(40, 40), owners=1), every=0)
    assert simulation.most_flying == 3
    sizes: dict[int, int] = {}
    for plan in simulation.plans:
        for work in plan.work:
            if work.rows:
                sizes[work.group] = len(work.rows)
    assert sorted(sizes) == [0, 1, 2]
    at_work = Counter(work.group for plan in simulation.plans for work in plan.work if work.rows)
    assert max(at_work.values()) < 1.3 * min(at_work.values())


def test_with_expert_ranks_a_step_has_work_for_several_homes() -> None:
    simulation = Simulation(Limits(rooms=((plain(1000),), (plain(1000),))))
    simulation.run(requests(12, seed=2, answers=(30, 40)), every=0)
    assert Counter(each.home for each in simulation.sequences.values()) == {0: 6, 1: 6}
    together = [plan for plan in simulation.plans if len(plan.work) == 2]
    assert len(together) > len(simulation.plans) / 2


def test_after_failures_the_same_text_comes_and_suspects_run_alone() -> None:
    simulation = Simulation(Limits(rooms=((plain(2000), plain(2000)),), stages=2), 3, Trouble(failures=10))
    simulation.run(requests(20, seed=3, prompts=(40, 90)), every=2)
    assert any(each.position > 1 for each in simulation.sequences.values())


def test_who_is_cancelled_while_a_step_is_under_way_goes_with_the_first_plan_after_it() -> None:
    """The simulation asserts it for each of many."""
    simulation = Simulation(Limits(rooms=((plain(2000), plain(2000)),), stages=2), 4, Trouble(cancels=60))
    simulation.run(requests(60, seed=4), every=1)
    assert len(simulation.cancelled) > 20


def test_nobody_starves_behind_one_who_asks_without_end() -> None:
    """An owner with 50 requests and one with a single one: that is among the first two to be read."""
    many = [Request(prompt=(1 + n, 2, 3), max_tokens=5, owner="many") for n in range(50)]
    single = Request(prompt=(4, 5, 6), max_tokens=5, owner="single")
    simulation = Simulation(tight(40, max_rows=4))
    simulation.run([*many, single], every=0)
    opened = [each.sequence for plan in simulation.plans for each in plan.open]
    assert opened.index(50) <= 4


def test_nobody_starves_who_needs_much_room() -> None:
    """A request that needs nearly all memory waits till it is there: small ones that come later do not go before it."""
    small = [Request(prompt=(1 + n, 2, 3), max_tokens=30, owner="small") for n in range(60)]
    large = Request(prompt=tuple(range(1, 101)), max_tokens=10, owner="large")
    simulation = Simulation(tight(130))
    simulation.run([*small[:10], large, *small[10:]], every=2)
    opened = [each.sequence for plan in simulation.plans for each in plan.open]
    assert opened.index(10) < 30


@pytest.mark.parametrize("mixed", [False, True])
def test_texts_go_on_while_a_long_prompt_is_read(mixed: bool) -> None:
    """A stream makes a token at least every second step, and the prompt a chunk."""
    streams = [Request(prompt=(1 + n, 2), max_tokens=300, owner=f"{n}") for n in range(2)]
    simulation = Simulation(Limits(rooms=((plain(5000),),), mixed=mixed), 1)
    for request in streams:
        simulation.ask(request)
    while sum(map(len, simulation.answers.values())) < 20:
        simulation.turn()
    simulation.ask(
        Request(prompt=tuple(random.Random(3).randrange(1, 200) for _ in range(900)), max_tokens=5, owner="x")
    )
    simulation.run([], every=0)
    chunks = [
        n for n, plan in enumerate(simulation.plans) if any(2 in {c.sequence for c in w.chunks} for w in plan.work)
    ]
    steps = [n for n, plan in enumerate(simulation.plans) if any(0 in w.rows for w in plan.work)]
    during = [n for n in steps if chunks[0] < n < chunks[-1]]
    assert during and all(after - before <= 2 for before, after in pairwise(during))


def test_a_room_of_states_alone_has_no_end() -> None:
    """What does not grow is counted by the sequence."""
    from mlxcel_nb.plan.facts import Growth

    room = Room({Growth(fixed=100): 3}, 1000)
    simulation = Simulation(Limits(rooms=((room,),), reusable=False))
    simulation.run(requests(20, seed=6), every=0)
    (rank,) = simulation.ranks[0]
    assert rank.most_bytes == 900
