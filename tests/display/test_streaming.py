"""When text is written, with a clock that the test turns."""

from __future__ import annotations

import itertools
import signal
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.client.report import Completion, Delta
from mlxcel_nb.display.streaming import UPDATES_PER_S, Coalescer, pump, show_stream
from mlxcel_nb.errors import MlxcelError, PeerLost


class Script:
    """A stream of pieces with the time at which each comes; its clock moves only while somebody waits for it."""

    def __init__(self, arrivals: list[tuple[float, str]], error: MlxcelError | None = None) -> None:
        self.now = 0.0
        self.text = ""
        self.token_ids: tuple[int, ...] = ()
        self.completion: Completion | None = None
        self.error: MlxcelError | None = None
        self.prefill: tuple[int, int] | None = None
        self.writes: list[tuple[float, str]] = []
        self._arrivals = [*arrivals]
        self._error = error

    @property
    def done(self) -> bool:
        return self.completion is not None

    def next(self, timeout: float) -> Delta | None:
        assert 0 <= timeout <= 0.1
        if not self._arrivals:
            self._finish("error" if self._error else "stop")
            return None
        at, text = self._arrivals[0]
        if at > self.now + timeout:
            self.now += timeout
            return None
        self.now = max(self.now, at)
        self._arrivals.pop(0)
        self.text += text
        return Delta(text)

    def cancel(self) -> None:
        self._finish("cancelled")

    def _finish(self, reason: str) -> None:
        self.error = self._error
        self.completion = Completion(text=self.text, token_ids=(), finish_reason=reason)

    def write(self, text: str) -> None:
        self.writes.append((self.now, text))

    def run(self, deadline: float = float("inf")) -> None:
        pump(self, self.write, deadline=deadline, clock=lambda: self.now)


def test_a_long_prompt_shows_how_far_it_is_until_the_text_begins() -> None:
    told: list[tuple[int, int] | None] = []

    class Reading(Script):
        def next(self, timeout: float) -> Delta | None:
            delta = super().next(timeout)
            self.prefill = (256, 600) if self.now < 0.2 else (512, 600) if not self.text else None
            return delta

    script = Reading([(0.3, "Par"), (0.31, "is")])
    pump(script, lambda text: told.append((0, 0)), notice=told.append, clock=lambda: script.now)
    assert told == [(256, 600), (512, 600), None, (0, 0), (0, 0)]


def test_the_first_piece_is_written_at_once() -> None:
    coalescer = Coalescer()
    assert coalescer.add("a", 100.0) == "a"
    assert coalescer.wait_s(100.0) is None


def test_pieces_within_the_interval_are_joined() -> None:
    coalescer = Coalescer(0.04)
    assert [coalescer.add(c, t) for c, t in [("a", 0.0), ("b", 0.01), ("c", 0.03), ("d", 0.05)]] == ["a", "", "", "bcd"]


def test_held_text_is_due_without_another_piece() -> None:
    coalescer = Coalescer(0.04)
    coalescer.add("a", 0.0)
    coalescer.add("b", 0.01)
    assert coalescer.wait_s(0.01) == pytest.approx(0.03)
    assert coalescer.due(0.02) == ""
    assert coalescer.due(0.05) == "b"


def test_five_thousand_tokens_at_full_speed_are_a_few_writes_a_second() -> None:
    script = Script([(i / 5000, f"{i} ") for i in range(5000)])
    script.run()
    assert len(script.writes) <= UPDATES_PER_S + 1
    assert "".join(text for _, text in script.writes) == "".join(f"{i} " for i in range(5000))


def test_slow_tokens_are_written_when_they_come() -> None:
    script = Script([(i / 10, f"{i}") for i in range(20)])
    script.run()
    assert [text for _, text in script.writes] == [f"{i}" for i in range(20)]
    assert [at for at, _ in script.writes] == pytest.approx([i / 10 for i in range(20)])


def test_a_token_close_behind_another_waits_for_the_interval_not_for_the_next_token() -> None:
    script = Script([(0.0, "a"), (0.005, "b"), (9.0, "c")])
    script.run()
    assert [(round(at, 3), text) for at, text in script.writes] == [
        (0.0, "a"),
        (round(1 / UPDATES_PER_S, 3), "b"),
        (9.0, "c"),
    ]


@given(st.lists(st.tuples(st.floats(0, 0.2), st.text(max_size=5)), max_size=60))
def test_nothing_is_lost_or_reordered_and_writes_keep_their_distance(gaps: list[tuple[float, str]]) -> None:
    at, arrivals = 0.0, []
    for gap, text in gaps:
        at += gap
        arrivals.append((at, text))
    script = Script(arrivals)
    script.run()
    assert "".join(text for _, text in script.writes) == "".join(text for _, text in arrivals)
    times = [at for at, _ in script.writes[:-1]]  # the last flush may come early
    assert all(b - a >= 1 / UPDATES_PER_S - 1e-9 for a, b in itertools.pairwise(times))


def test_what_came_before_an_error_is_written_and_the_error_raised() -> None:
    script = Script([(0.0, "a"), (0.001, "b")], PeerLost("connection reset", node="engine-1"))
    with pytest.raises(PeerLost, match="engine-1"):
        script.run()
    assert "".join(text for _, text in script.writes) == "ab"


def test_a_deadline_ends_the_wait() -> None:
    script = Script([(0.0, "a"), (50.0, "b")])
    script.run(deadline=1.0)
    assert script.now == pytest.approx(1.0) and not script.done


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_cancels_and_keeps_the_text_so_far() -> None:
    script, written = Script([(0.0, "so"), (0.001, " far"), (60.0, "never")]), []

    def write(text: str) -> None:
        written.append(text)
        interrupt()

    completion, interrupted = show_stream(script, write)
    assert interrupted and completion.finish_reason == "cancelled"
    assert completion.text == "".join(written) == "so"
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_an_interrupt_after_the_end_changes_nothing() -> None:
    script = Script([(0.0, "all")])

    def write(text: str) -> None:
        script.cancel()
        interrupt()

    completion, _ = show_stream(script, write)
    assert completion.text == "all"


class Deaf(Script):
    """Never hears its cancel."""

    def cancel(self) -> None:
        self.cancels = getattr(self, "cancels", 0) + 1


def test_a_stream_that_does_not_end_after_its_cancel_is_left_after_the_drain() -> None:
    script = Deaf([(0.0, "x"), (1e9, "y")])
    completion, interrupted = show_stream(script, lambda text: interrupt(), drain_s=0.05)
    assert interrupted and (completion.text, completion.finish_reason) == ("x", "cancelled")
    assert script.cancels == 1


def test_a_second_interrupt_is_raised_and_cancels_too() -> None:
    script = Deaf([(i / 10, f"{i}") for i in range(100)])
    with pytest.raises(KeyboardInterrupt):
        show_stream(script, lambda text: interrupt())
    assert script.cancels == 2


def test_off_the_main_thread_signals_are_let_be() -> None:
    before, script = signal.getsignal(signal.SIGINT), Script([(0.0, "a")])
    during: list[object] = []
    thread = threading.Thread(
        target=show_stream, args=(script, lambda text: during.append(signal.getsignal(signal.SIGINT)))
    )
    thread.start()
    thread.join(10)
    assert during == [before] and script.done
