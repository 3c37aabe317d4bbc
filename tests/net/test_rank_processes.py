"""Three ranks in a loop of exchanges, one of which is killed, closed, reset, or stopped (cases 23 and 24)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.net.ranks import Rank, start


def start_three(patience_s: float, end: str = "") -> list[Rank]:
    return start("tests.net.rank", 3, str(patience_s), "", last=(str(patience_s), end))


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    started = start_three(*request.param)
    yield started
    for rank in started:
        rank.close()


def survivors_name_rank_2(ranks: list[Rank], code: str, words: str) -> list[dict[str, Any]]:
    told = [rank.hear("error") for rank in ranks[:2]]
    for said in told:
        assert said["error"] == code
        # Even when it was stopped between its two sends, and so holds up one survivor, who then holds up the other.
        assert said["node"] == "rank-2"
        assert words in said["text"]
        assert "host 127.0.0.1" in said["text"]
    assert [rank.hear("again")["again"] for rank in ranks[:2]] == [[0, 1], [0, 1]]
    return told


@pytest.mark.parametrize("ranks", [(10.0,)], indirect=True)
def test_a_killed_rank_is_named_by_the_survivors_who_go_on(ranks):
    ranks[2].hear("step")
    ranks[2].send(signal.SIGKILL)
    for said in survivors_name_rank_2(ranks, "peer-lost", "connection to host"):
        assert said["waited_s"] < 5


@pytest.mark.parametrize("ranks", [(10.0, "close")], indirect=True)
def test_a_rank_that_closes_is_named_with_its_reason(ranks):
    survivors_name_rank_2(ranks, "peer-lost", "rank leaves")


@pytest.mark.parametrize("ranks", [(10.0, "reset")], indirect=True)
def test_a_rank_that_resets_is_named(ranks):
    survivors_name_rank_2(ranks, "peer-lost", "connection to host")


@pytest.mark.parametrize("ranks", [(10.0,)], indirect=True)
def test_a_rank_stopped_for_three_seconds_resumes_and_the_others_waited_idly(ranks):
    ranks[2].hear("step")
    ranks[2].send(signal.SIGSTOP)
    try:
        time.sleep(0.5)  # let the others run into their wait
        watched = [psutil.Process(rank.process.pid) for rank in ranks[:2]]
        before, began = [sum(p.cpu_times()[:2]) for p in watched], time.monotonic()
        time.sleep(2.5)  # the time the case asks for
        elapsed = time.monotonic() - began
        used = [sum(p.cpu_times()[:2]) - b for p, b in zip(watched, before, strict=True)]
        assert max(used) / elapsed < 0.2
        reached = ranks[0].steps()
    finally:
        ranks[2].send(signal.SIGCONT)
    assert ranks[0].hear("step")["step"] > reached
    assert ranks[1].hear("step")["step"] > 0
    assert all(rank.process.poll() is None for rank in ranks)


@pytest.mark.parametrize("ranks", [(1.5,)], indirect=True)
def test_a_rank_stopped_for_longer_than_the_deadline_is_named_and_the_others_go_on(ranks):
    ranks[2].hear("step")
    ranks[2].send(signal.SIGSTOP)
    for said in survivors_name_rank_2(ranks, "timeout", "no progress for 1.5 s while waiting for exchange 1."):
        assert 1.4 < said["waited_s"] < 5
        assert said["busy"] < 0.2
