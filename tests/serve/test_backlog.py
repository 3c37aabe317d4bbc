"""Who is told to come again: not who finds many waiting, but who would wait long."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mlxcel_nb.serve import app
from mlxcel_nb.serve import backlog as module
from mlxcel_nb.serve.backlog import FEW, LATEST, MAX_RETRY_S, UNKNOWN, Backlog
from mlxcel_nb.serve.requests import Ask
from mlxcel_nb.serve.server import ApiServer
from tests.serve.callers import ask

SHORT = {"prompt": "x", "max_tokens": 3, "temperature": 0, "ignore_eos": True}


def busy(waiting: int, gap: float, max_wait_s: float = 60.0) -> tuple[Backlog, float]:
    """So many of one caller wait, and one of them has had its first text every `gap` seconds."""
    backlog, now = Backlog(max_wait_s), 1000.0
    for _ in range(waiting + LATEST):
        backlog.come("a", now)
    for _ in range(LATEST):
        now += gap
        backlog.served("a", now)
    return backlog, now


def test_the_wait_is_what_waits_at_the_rate_of_the_latest() -> None:
    backlog, now = busy(20, 0.5)
    assert backlog.wait_s("a", now) == backlog.drain_s(now) == pytest.approx(10.0)
    assert backlog.retry_s("a", now) is None


def test_who_asks_a_hundred_times_is_refused_and_who_asks_once_beside_him_is_not() -> None:
    backlog, now = busy(100, 2.0)
    assert backlog.retry_s("a", now) == MAX_RETRY_S
    assert backlog.ahead("b") == 1 and backlog.wait_s("b", now) == pytest.approx(2.0)
    for own in range(FEW):
        assert backlog.ahead("b") == 2 * own + 1, "in turn"
        backlog.come("b", now)
    assert backlog.retry_s("b", now) is None
    assert backlog.ahead("a") == 100 + FEW
    for _ in range(FEW):
        backlog.leave("b")
    assert set(backlog.waiting) == {"a"}, "who has none waiting is not kept in mind"


def test_of_many_callers_each_is_one_that_goes_before() -> None:
    backlog, now = busy(1, 2.0)
    for caller in range(39):
        backlog.come(f"c{caller}", now)
    assert backlog.ahead("new") == 40
    assert backlog.retry_s("new", now) == pytest.approx(20.0)


def test_a_slow_machine_says_busy_with_few_that_wait_and_a_fast_one_with_many() -> None:
    slow, now = busy(40, 2.0)
    assert slow.retry_s("a", now) == pytest.approx(20.0)
    fast, now = busy(200, 0.01)
    assert fast.retry_s("a", now) is None


def test_a_few_may_always_wait() -> None:
    backlog, now = busy(FEW - 1, 100.0)
    assert backlog.wait_s("a", now) > 60 and backlog.retry_s("a", now) is None
    backlog.come("a", now)
    assert backlog.retry_s("a", now) == MAX_RETRY_S


def test_of_a_burst_on_a_machine_that_nobody_knows_yet_not_all_are_let_in() -> None:
    backlog = Backlog()
    for _ in range(UNKNOWN):
        assert backlog.retry_s("a", 5.0) is None
        backlog.come("a", 5.0)
    assert backlog.retry_s("a", 5.0) == 1.0
    for each in range(FEW):
        backlog.served("a", 5.1 + each / 10)
    assert backlog.retry_s("a", 6.0) is None, "now a rate is known, and it is high"


def test_silence_counts_and_an_idle_time_does_not() -> None:
    backlog, now = busy(20, 0.5)
    assert backlog.retry_s("a", now + 300) is not None
    for _ in range(20):
        backlog.leave("a")
    assert backlog.wait_s("a", now + 300) == 0.0
    for _ in range(20):
        backlog.come("a", now + 300)
    assert backlog.wait_s("a", now + 300) == pytest.approx(10.0), "the rate is remembered"


def test_those_who_come_one_by_one_do_not_make_the_next_burst_wait() -> None:
    backlog, now = Backlog(), 1000.0
    for _ in range(LATEST):
        backlog.come("a", now)
        backlog.served("a", now := now + 3.0)
    for _ in range(UNKNOWN):
        assert backlog.retry_s("a", now) is None, "three seconds alone are not 96 for 32 that are read together"
        backlog.come("a", now)


def test_whoever_comes_first_is_let_in_and_counts() -> None:
    backlog = Backlog()
    assert backlog.retry_s("a", 5.0) is None
    for _ in range(FEW):
        backlog.come("a", 5.0)
    assert backlog.retry_s("a", 5.0) is None, "nothing is known yet"
    assert backlog.retry_s("a", 50.0) is not None, "nobody has been served for 45 seconds"


def test_the_hint_is_how_long_the_queue_is_too_long() -> None:
    backlog, now = busy(31, 2.0)
    assert backlog.retry_s("a", now) == pytest.approx(2.0)
    backlog.served("a", now)
    assert backlog.retry_s("a", now) is None, "one less, and a shorter gap"


def test_a_caller_is_told_when_to_come_again(tiny_server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(tiny_server, "POST", "/v1/completions", SHORT)[0] == 200
    monkeypatch.setattr(module, "FEW", 0)
    monkeypatch.setattr(tiny_server._api.backlog, "_max_wait_s", -7.5)
    status, headers, body = ask(tiny_server, "POST", "/v1/completions", SHORT)
    assert (status, headers["retry-after"]) == (429, "8")
    assert body["error"]["code"] == "busy" and "wait for its first token" in body["error"]["message"]
    monkeypatch.undo()
    assert tiny_server._api.backlog.waiting.total() == 0
    assert "mlxcel_expected_wait_seconds 0.0" in ask(tiny_server, "GET", "/metrics")[2]
    assert ask(tiny_server, "POST", "/v1/completions", SHORT)[0] == 200


def test_of_a_burst_that_is_read_at_the_same_time_no_more_are_let_in_than_there_are_places(
    tiny_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All eight have been read before the first is begun, as when the tokenizer is loaded for the first of them."""
    served, read, all_read = tiny_server.served, [], asyncio.Event()
    prepare = served.prepare

    async def together(ask: Ask) -> Any:
        found = await prepare(ask)
        read.append(ask)
        if len(read) == 8:
            all_read.set()
        await asyncio.wait_for(all_read.wait(), 20)
        return found

    monkeypatch.setattr(served, "prepare", together)
    monkeypatch.setattr(app, "MAX_IN_FLIGHT", 4)
    body = {**SHORT, "max_tokens": 200}
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, tiny_server, "POST", "/v1/completions", body) for _ in range(8)]
        statuses = sorted(each.result()[0] for each in asked)
    assert statuses == [200] * 3 + [429] * 5
    assert tiny_server._api.backlog.waiting.total() == 0 and not tiny_server._api.live
