"""Spans: what is recorded of a step, what a full ring forgets, what a reader gets meanwhile, and what shares are."""

from __future__ import annotations

import threading
import time
import tracemalloc

import pytest

from mlxcel_nb.errors import WireError
from mlxcel_nb.runtime.spans import Kind, Span, Spans, busy_share, read_spans


def spans_of(spans: Spans, since: int = 0) -> list[Span]:
    return list(read_spans(spans.read(since).data))


def test_a_step_is_what_it_computed_and_one_record_for_each_kind_of_exchange() -> None:
    spans = Spans()
    spans.begin(3, 17, rows=2, tokens=2, prefill=False)
    for _ in range(60):
        spans.note(Kind.TRANSFER, time.monotonic() - 0.001)
    spans.note(Kind.WAIT_HIDDEN, time.monotonic() - 0.5)
    spans.finish()
    compute, hidden, transfer = spans_of(spans)
    assert [each.kind for each in (compute, hidden, transfer)] == [Kind.COMPUTE, Kind.WAIT_HIDDEN, Kind.TRANSFER]
    assert all((x.epoch, x.step, x.rows, x.tokens, x.prefill) == (3, 17, 2, 2, False) for x in (compute, transfer))
    assert transfer.intervals == 60 and transfer.seconds == pytest.approx(0.06, rel=0.5)
    assert hidden.intervals == 1 and hidden.seconds == pytest.approx(hidden.end - hidden.start, rel=1e-6)
    assert 0 <= compute.seconds < 0.5, "what was waited for is no computation"
    assert spans.totals[Kind.TRANSFER] == pytest.approx(transfer.seconds, rel=1e-6)


def test_what_was_noted_of_a_step_that_failed_is_not_the_next_ones() -> None:
    spans = Spans()
    spans.begin(1, 0)
    spans.note(Kind.TRANSFER, time.monotonic() - 30)
    spans.begin(2, 0)
    spans.finish()
    assert [(each.kind, each.epoch) for each in spans_of(spans)] == [(Kind.COMPUTE, 2)]


def test_a_full_ring_forgets_its_oldest_and_says_from_where_it_knows() -> None:
    spans = Spans(capacity=8)
    for step in range(20):
        spans.add(Kind.STEP, 0.0, 1.0, 1, step)
    reading = spans.read(0)
    assert (reading.first, reading.next) == (13, 20)
    assert [each.step for each in read_spans(reading.data)] == list(range(13, 20))
    assert [each.step for each in read_spans(spans.read(15, most=2).data)] == [15, 16]
    assert spans.read(20).data == spans.read(99).data == b""
    assert spans.read(99).next == 20


def test_a_reader_never_gets_a_record_that_is_half_another() -> None:
    spans, stop = Spans(capacity=64), threading.Event()

    def write() -> None:
        step = 0
        while not stop.is_set():
            spans.add(Kind.STEP, float(step), float(step), step % 1000, step)
            step += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        since = 0
        for _ in range(2000):
            reading = spans.read(since)
            for number, each in enumerate(read_spans(reading.data), reading.first):
                assert (each.step, each.start, each.epoch) == (number, float(number), number % 1000)
            since = reading.next
    finally:
        stop.set()
        writer.join()


def test_hours_of_steps_take_no_more_memory() -> None:
    spans = Spans(capacity=256)

    def work(steps: int) -> None:
        for step in range(steps):
            spans.begin(1, step, rows=1, tokens=1)
            spans.note(Kind.TRANSFER, 0.0)
            spans.finish()

    work(500)
    tracemalloc.start()
    try:
        work(500)
        before = tracemalloc.get_traced_memory()[0]
        work(5000)
        assert tracemalloc.get_traced_memory()[0] - before < 4096
    finally:
        tracemalloc.stop()


def test_a_span_costs_so_little_that_nobody_switches_it_off() -> None:
    spans, best = Spans(), 1.0
    for _ in range(20):  # the least of several, as a busy machine only ever adds
        began = time.perf_counter()
        for _ in range(1000):
            spans.note(Kind.TRANSFER, 0.0)
        best = min(best, (time.perf_counter() - began) / 1000)
    assert best < 20e-6, f"{best * 1e6:.1f} us"


def test_shares_are_of_the_latest_steps() -> None:
    spans = Spans()
    for step in range(400):
        spans.add(Kind.COMPUTE, 0.0, 1.0 if step < 300 else 0.2, 1, step)
        spans.add(Kind.STEP, 0.0, 0.5, 1, step)
    shares = spans.shares(steps=100)
    assert (shares["steps"], shares["results"]) == (100, 100)
    assert shares["seconds"] == {"compute": pytest.approx(20, rel=1e-5), "step": pytest.approx(50, rel=1e-5)}


def test_busy_is_computing_while_the_engine_has_work() -> None:
    assert busy_share(20.0, 100, 50.0, 100) == pytest.approx(0.4)
    assert busy_share(20.0, 100, 49.0, 98) == pytest.approx(0.4), "steps on their way have no result yet"
    assert busy_share(2.0, 2, 1.0, 2) == 1.0
    assert busy_share(0.0, 0, 50.0, 100) is None and busy_share(1.0, 1, 0.0, 0) is None


def test_bytes_that_are_no_spans_are_refused() -> None:
    with pytest.raises(WireError, match="no whole number"):
        list(read_spans(b"\0" * 45))
