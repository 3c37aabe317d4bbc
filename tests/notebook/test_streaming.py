"""When text is written, with a clock that the test turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.client.report import Completion, Delta
from mlxcel_nb.errors import PeerLost
from mlxcel_nb.notebook.streaming import Coalescer, End, pump, show_stream


class Script:
    """Pieces with the time at which each comes; its clock moves only while somebody waits for it."""

    def __init__(self, arrivals: list[tuple[float, str]], end: BaseException | None = None) -> None:
        self.now = 0.0
        self.arrivals = [*arrivals]
        self.end = End(end)
        self.writes: list[tuple[float, str]] = []

    def poll(self, timeout_s: float) -> str | End | None:
        assert 0 <= timeout_s <= 0.1
        if not self.arrivals:
            return self.end
        at, text = self.arrivals[0]
        if at > self.now + timeout_s:
            self.now += timeout_s
            return None
        self.now = max(self.now, at)
        self.arrivals.pop(0)
        return text

    def write(self, text: str) -> None:
        self.writes.append((self.now, text))

    def run(self, deadline: float = float("inf")) -> bool:
        return pump(self.poll, self.write, deadline=deadline, clock=lambda: self.now)


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
    assert script.run()
    assert len(script.writes) <= 27
    assert "".join(text for _, text in script.writes) == "".join(f"{i} " for i in range(5000))


def test_slow_tokens_are_written_when_they_come() -> None:
    script = Script([(i / 10, f"{i}") for i in range(20)])
    script.run()
    assert script.writes == [(pytest.approx(i / 10), f"{i}") for i in range(20)]


def test_a_token_close_behind_another_waits_for_the_interval_not_for_the_next_token() -> None:
    script = Script([(0.0, "a"), (0.005, "b"), (9.0, "c")])
    script.run()
    assert [(round(at, 3), text) for at, text in script.writes] == [(0.0, "a"), (0.04, "b"), (9.0, "c")]


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
    assert all(b - a >= 0.04 - 1e-9 for a, b in zip(times, times[1:], strict=False))


def test_what_came_before_an_error_is_written_and_the_error_raised() -> None:
    script = Script([(0.0, "a"), (0.001, "b")], PeerLost("connection reset", node="engine-1"))
    with pytest.raises(PeerLost, match="engine-1"):
        script.run()
    assert "".join(text for _, text in script.writes) == "ab"


def test_a_deadline_ends_the_wait() -> None:
    script = Script([(0.0, "a"), (50.0, "b")])
    assert script.run(deadline=1.0) is False
    assert script.now == pytest.approx(1.0)


class Answer:
    """A stream that says `text`, then waits to be cancelled."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.cancelled = threading.Event()

    def __iter__(self) -> Iterator[Delta]:
        yield Delta(self.text)
        assert self.cancelled.wait(10)
        yield Delta(" tail")

    def cancel(self) -> None:
        self.cancelled.set()

    def result(self) -> Completion:
        return Completion(text=self.text, token_ids=(), finish_reason="cancelled")


def test_an_interrupt_cancels_drains_and_gives_the_result() -> None:
    answer, written = Answer("so far"), []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 1:
            raise KeyboardInterrupt

    completion, interrupted = show_stream(answer, write)
    assert interrupted and completion.finish_reason == "cancelled"
    assert written == ["so far", " tail"]


def test_a_stream_that_does_not_end_after_its_cancel_is_left_after_the_drain() -> None:
    class Deaf(Answer):
        def cancel(self) -> None:
            pass

    def write(text: str) -> None:
        raise KeyboardInterrupt

    answer = Deaf("x")
    completion, interrupted = show_stream(answer, write, drain_s=0.05)
    assert interrupted and completion.text == "x"
    answer.cancelled.set()


def test_the_reader_thread_hands_over_what_ends_a_stream() -> None:
    def broken() -> Iterator[Delta]:
        yield Delta("a")
        raise PeerLost("gone", node="engine-0")

    class Broken(Answer):
        __iter__: Callable[[Answer], Iterator[Delta]] = lambda self: broken()  # noqa: E731

    written: list[str] = []
    with pytest.raises(PeerLost, match="engine-0"):
        show_stream(Broken(""), written.append)
    assert written == ["a"]
