"""Many requests at once: their order, how many are under way, a leader that is busy, and how all of it ends."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mlxcel_nb.client import bar, batch
from mlxcel_nb.client.batch import Ask, asks, run
from mlxcel_nb.client.report import BatchProgress
from mlxcel_nb.client.stream import Inbox, Line, Stream
from mlxcel_nb.errors import Busy, Cancelled, MlxcelError, NodeFailed, RequestError
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.runtime.protocol import failed_end

GREEDY = SamplingParams()


class Leader:
    """Real streams, whose frames a test writes, from one thread of its own as the router's loop is.

    `obey` is called for each request with its stream's inbox, in the order in which they were begun.
    """

    def __init__(self, obey: Callable[[Ask, Inbox], None]) -> None:
        self._obey = obey
        self.begun: list[Any] = []
        self.cancelled: list[Any] = []
        self.open = 0
        self.most = 0

    def begin(self, ask: Ask) -> Stream:
        self.begun.append(ask.prompt)
        self.open += 1
        self.most = max(self.most, self.open)
        inbox = Inbox("engine-0", self._closed)
        line = Line(
            inbox,
            cancel=lambda: self.cancelled.append(ask.prompt),
            progress=lambda: 0,
            explain=lambda error: error,
            ended=lambda _: None,
        )
        stream = Stream(line, stall_s=30.0)
        self._obey(ask, inbox)
        return stream

    def _closed(self) -> None:
        self.open -= 1


def say(inbox: Inbox, text: str) -> None:
    inbox.put("engine-0", {"type": "delta", "seq": 0, "text": text, "tokens": [1, 2]})
    inbox.put("engine-0", {"type": "end", "seq": 1, "text": "", "tokens": [3], "finish_reason": "length"})


def fail(inbox: Inbox, error: MlxcelError) -> None:
    inbox.put("engine-0", failed_end("x", error.to_dict()))


def test_answers_come_in_the_order_of_the_prompts_whatever_the_order_they_end_in() -> None:
    held: list[tuple[str, Inbox]] = []

    def obey(ask: Ask, inbox: Inbox) -> None:
        held.append((str(ask.prompt), inbox))
        if len(held) == 5:
            for text, each in reversed(held):
                say(each, text)
            held.clear()

    news: list[BatchProgress] = []
    leader = Leader(obey)
    done = run(asks([f"p{i}" for i in range(20)], GREEDY), leader.begin, most=5, on_progress=news.append)
    assert [each.text for each in done] == [f"p{i}" for i in range(20)]
    assert leader.most == 5
    assert (news[-1].done, news[-1].total, news[-1].tokens) == (20, 20, 60)
    assert [each.done for each in news] == sorted(each.done for each in news)
    assert not leader.cancelled


def test_a_leader_that_is_busy_is_asked_again_and_the_order_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "FIRST_PAUSE_S", 0.001)
    seen: dict[str, int] = {}

    def obey(ask: Ask, inbox: Inbox) -> None:
        times = seen[str(ask.prompt)] = seen.get(str(ask.prompt), 0) + 1
        if times < 3 and ask.prompt in ("p1", "p3"):
            fail(inbox, Busy("256 requests are waiting already"))
        else:
            say(inbox, str(ask.prompt))

    done = run(asks([f"p{i}" for i in range(6)], GREEDY), Leader(obey).begin, most=2)
    assert [each.text for each in done] == [f"p{i}" for i in range(6)]
    assert (seen["p1"], seen["p3"]) == (3, 3)


def test_a_leader_that_stays_busy_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "BUSY_S", 0.05)
    leader = Leader(lambda _, inbox: fail(inbox, Busy("256 requests are waiting already", node="engine-0")))
    with pytest.raises(Busy, match="engine-0: 256 requests are waiting already, and none of these was taken"):
        run(asks(["a", "b"], GREEDY), leader.begin)


def test_the_first_failure_names_its_prompt_by_number_and_ends_the_others() -> None:
    def obey(ask: Ask, inbox: Inbox) -> None:
        if ask.prompt == "secret words":
            fail(inbox, NodeFailed("ZeroDivisionError: struck", node="engine-1"))

    leader = Leader(obey)
    with pytest.raises(NodeFailed) as caught:
        run(asks(["a", "b", "secret words", "d"], GREEDY), leader.begin)
    assert str(caught.value) == "engine-1: prompt 3 of 4: ZeroDivisionError: struck"
    assert set(leader.cancelled) >= {"a", "b"}
    with pytest.raises(NodeFailed, match=r"^engine-1: ZeroDivisionError: struck$"):
        run(asks(["secret words"], GREEDY), Leader(obey).begin)


def test_of_several_answers_to_a_prompt_the_prompt_is_counted() -> None:
    def obey(ask: Ask, inbox: Inbox) -> None:
        fail(inbox, NodeFailed("struck")) if ask.prompt == "b" else say(inbox, "x")

    with pytest.raises(NodeFailed, match=r"^prompt 2 of 3: struck$"):
        run(asks(["a", "b", "c"], GREEDY, n=2), Leader(obey).begin, n=2)


def test_who_no_longer_waits_cancels_all_that_are_under_way() -> None:
    left = threading.Event()
    leader = Leader(lambda ask, _: left.set() if ask.prompt == "c" else None)
    began = time.monotonic()
    with pytest.raises(Cancelled):
        run(asks(["a", "b", "c"], GREEDY), leader.begin, stopped=left.is_set)
    assert sorted(leader.cancelled) == ["a", "b", "c"]
    assert time.monotonic() - began < 10


def test_an_interrupt_while_waiting_cancels_all_that_are_under_way() -> None:
    def interrupted(_: BatchProgress) -> None:
        raise KeyboardInterrupt

    leader = Leader(lambda ask, inbox: say(inbox, "x") if ask.prompt == "b" else None)
    with pytest.raises(KeyboardInterrupt):
        run(asks(["a", "b", "c"], GREEDY), leader.begin, on_progress=interrupted)
    assert sorted(leader.cancelled) == ["a", "c"]


def test_what_is_asked_is_checked_before_anything_is_sent() -> None:
    hot = SamplingParams(temperature=1.0, seed=7)
    assert [ask.params.seed for ask in asks(["a", "b"], hot)] == [7, 7]
    first, second, third = asks(["a"], hot, n=3)
    assert first.params.seed == 7 and len({7, second.params.seed, third.params.seed}) == 3
    assert [ask.params for ask in asks(["a", "b"], [hot, GREEDY])] == [hot, GREEDY]
    assert asks([], None) == []
    for bad in (0, -1, True, 1.5):
        with pytest.raises(RequestError, match="n must be a whole number from 1"):
            asks(["a"], None, n=bad)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="1 sets of parameters for 2 prompts"):
        asks(["a", "b"], [hot])
    with pytest.raises(RequestError, match="one of the two"):
        asks(None, None)
    with pytest.raises(RequestError, match="the list of messages is empty"):
        asks(None, None, conversations=[[]])
    assert "secret" not in repr(asks(["secret"], None))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(out: io.StringIO, total: int, *, wanted: bool = True) -> str:
        monkeypatch.setattr(sys, "stderr", out)
        with bar.shown(total, wanted=wanted) as tell:
            if tell is not None:
                tell(BatchProgress(done=2, total=total, tokens=50, seconds=2.0))
        return out.getvalue()

    before = set(threading.enumerate())
    text = drawn(Terminal(), 2)
    assert "Generating" in text and "2/2" in text and "25 tokens/s" in text
    assert set(threading.enumerate()) == before
    assert drawn(io.StringIO(), 2) == ""
    assert drawn(Terminal(), 2, wanted=False) == ""
    assert drawn(Terminal(), 1) == ""
