"""Three ranks in a loop of exchanges, one of which is killed, closed, reset, or stopped (cases 23 and 24)."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxcel_nb.cluster.secret import random_secret

REPO = Path(__file__).parents[2]


class Rank:
    """A process of `tests.net.rank` and what it says."""

    def __init__(self, rank: int, size: int, patience_s: float, end: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.net.rank", str(rank), str(size), str(patience_s), end],
            cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def hear(self, key: str, limit_s: float = 20.0) -> dict[str, Any]:
        """The next thing said that holds `key`."""
        end = time.monotonic() + limit_s
        while True:
            said = self._lines.get(timeout=max(0.01, end - time.monotonic()))
            if key in said:
                return said

    def steps(self) -> int:
        """The last step told of so far."""
        step = 0
        while not self._lines.empty():
            step = self._lines.get().get("step", step)
        return step

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def start(patience_s: float, end: str = "") -> list[Rank]:
    ranks = [Rank(n, 3, patience_s, end if n == 2 else "") for n in range(3)]
    secret = random_secret().reveal().hex()
    for rank in ranks:
        rank.say(secret)
    ports = json.dumps([rank.hear("port")["port"] for rank in ranks])
    for rank in ranks:
        rank.say(ports)
    return ranks


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    started = start(*request.param)
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
