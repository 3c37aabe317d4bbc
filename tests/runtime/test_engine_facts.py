"""What an engine counts, over a scheduler that knows nothing of it."""

from __future__ import annotations

import pytest

from mlxcel_nb.errors import Busy
from mlxcel_nb.plan.capacity import Room
from mlxcel_nb.plan.facts import Growth
from mlxcel_nb.runtime.engine_facts import EVERY_S, Ledger
from mlxcel_nb.runtime.spans import Kind, Spans, read_spans
from mlxcel_nb.scheduling.limits import Limits
from mlxcel_nb.scheduling.scheduler import Scheduler
from mlxcel_nb.scheduling.sequence import Request

A_TOKEN = Growth(per_token=10)


def made(tokens: int = 10_000, **limits: int) -> tuple[Scheduler, Spans, Ledger]:
    scheduler = Scheduler(Limits(rooms=((Room({A_TOKEN: 1}, 10 * tokens),),), chunk=64, **limits))
    spans = Spans()
    return scheduler, spans, Ledger(scheduler, spans)


def request(tokens: int) -> Request:
    return Request(prompt=tuple(range(tokens)), max_tokens=4)


def test_facts_are_those_of_the_scheduler_and_what_was_counted() -> None:
    scheduler, spans, ledger = made(max_waiting=2)
    ledger.taken(10.0, idle=scheduler.idle)
    first = scheduler.add(request(100), 10.0)
    scheduler.add(request(30), 10.0)
    with pytest.raises(Busy):
        scheduler.add(request(30), 10.0)
    ledger.publish()
    assert (ledger.facts.running, ledger.facts.waiting, ledger.facts.waiting_tokens) == (0, 2, 130)
    plan = scheduler.next(11.0)
    assert plan is not None
    ledger.started(first, 9.5, 11.0, epoch=1, step=plan.step)
    ledger.done(plan, 0, 12.5, epoch=1)
    ledger.publish()
    facts = ledger.facts
    assert (facts.running, facts.waiting, facts.kv_tokens) == (2, 0, 64)
    assert 0 < facts.kv_used_bytes <= facts.kv_available_bytes == 100_000
    assert facts.to_dict()["prefilled_tokens"] == 64 and facts.to_dict()["steps"] == 1
    queue, step = read_spans(spans.read().data)
    assert (queue.kind, queue.start, queue.end, queue.tokens) == (Kind.QUEUE, 9.5, 11.0, 100)
    assert (step.kind, step.start, step.end, step.prefill) == (Kind.STEP, 10.0, 12.5, True), "from when there was work"


def test_steps_on_their_way_together_do_not_count_their_time_twice_and_idle_time_is_nobodys() -> None:
    scheduler, spans, ledger = made(stages=2)
    ledger.taken(0.0, idle=True)
    scheduler.add(request(200), 0.0)
    one, two = scheduler.next(0.0), scheduler.next(0.0)
    assert one is not None and two is not None
    ledger.done(one, 0, 3.0, epoch=1)
    ledger.done(two, 0, 4.0, epoch=1)
    ledger.taken(100.0, idle=True)
    ledger.done(two, 1, 101.0, epoch=1)
    assert [each.seconds for each in read_spans(spans.read().data)] == [3.0, 1.0, 1.0]


def test_facts_are_not_made_at_every_step() -> None:
    _, _, ledger = made()
    ledger.publish(100.0)
    before = ledger.facts
    ledger.publish(100.0 + EVERY_S / 2)
    assert ledger.facts is before
    ledger.publish(100.0 + 2 * EVERY_S)
    assert ledger.facts is not before
