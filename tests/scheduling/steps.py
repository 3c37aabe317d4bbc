"""A scheduler that is led through its steps by hand."""

from __future__ import annotations

from mlxcel_nb.scheduling.limits import Limits
from mlxcel_nb.scheduling.scheduler import Scheduler
from mlxcel_nb.scheduling.sequence import Request, Sequence, State
from mlxcel_nb.scheduling.step_plan import StepPlan, Work
from tests.scheduling.ranks import plain

LARGE = ((plain(10_000),),)


def scheduler(**more: object) -> Scheduler:
    return Scheduler(Limits(**{"rooms": LARGE, **more}))


def request(*prompt: int, **more: object) -> Request:
    return Request(**{"prompt": prompt, "max_tokens": 10, **more})


def plan(of: Scheduler) -> StepPlan:
    made = of.next(0.0)
    assert made is not None
    return made


def work(of: Scheduler) -> Work:
    (only,) = plan(of).work
    return only


def answer(of: Scheduler, done: StepPlan, token: int = 7) -> None:
    of.took(done.step, {row: token for each in done.work for row in each.sampled})


def decoding(of: Scheduler, *requests: Request) -> list[Sequence]:
    """Sequences of these requests, with a first token each."""
    made = [of.add(each, 0.0) for each in requests]
    while not all(each.state is State.DECODE for each in made):
        answer(of, plan(of))
    return made


def long(count: int, first: int = 1) -> list[int]:
    return [first + each % 150 for each in range(count)]


def run(of: Scheduler, asked: Request) -> tuple[Sequence, list[StepPlan]]:
    """To the end, with tokens 7; all plans of it."""
    sequence, plans = of.add(asked, 0.0), []
    while not of.idle:
        plans.append(plan(of))
        answer(of, plans[-1])
        if sequence.position == sequence.limit and not sequence.over:
            of.finish(sequence)
    return sequence, plans
