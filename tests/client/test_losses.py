"""A lost connection is told as the end of a process where it was one, however late the news of that come."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel_nb.client import losses
from mlxcel_nb.client.exits import Exits
from mlxcel_nb.cluster.address import Address
from mlxcel_nb.errors import EngineLost, PeerLost
from mlxcel_nb.launch.local import EngineInfo
from mlxcel_nb.launch.process import is_ending

LIMIT_S = 20.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """One that goes on until it is killed, and that nobody waits for meanwhile."""
    code = "print('up', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # before, in the middle of its exec, it has no command line yet
        yield process
        process.kill()


def engine(process: subprocess.Popen[bytes]) -> EngineInfo:
    return EngineInfo(
        node_id="engine-1", pid=process.pid, host="here", address=Address("127.0.0.1", 1), log=Path("log"), blas={}
    )


def explained(process: subprocess.Popen[bytes], exits: Exits) -> Exception:
    error = PeerLost("connection to host 127.0.0.1 lost", node="engine-1")
    return losses.explain(error, None, [engine(process)], exits, loaded=False)


def test_news_of_an_end_that_has_begun_is_waited_for(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that is so busy that the thread which waits for the process comes late."""
    monkeypatch.setattr(losses, "GOODBYE_S", 0.05)
    exits = Exits()
    process.kill()
    end = time.monotonic() + LIMIT_S
    while not is_ending(process.pid):
        assert time.monotonic() < end
    late = threading.Timer(0.5, exits.tell, ("engine-1", "was killed by SIGKILL"))
    late.start()
    error = explained(process, exits)
    late.join()
    assert isinstance(error, EngineLost) and "was killed by SIGKILL" in str(error)


def test_a_process_that_goes_on_is_a_lost_connection_and_costs_no_long_wait(process: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    error = explained(process, Exits())
    assert type(error) is PeerLost and error.cause == "connection to host 127.0.0.1 lost"
    assert time.monotonic() - began < losses.ENDING_S


def test_of_many_answers_that_a_node_gave_the_first_alone_waits(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "GOODBYE_S", 1.5)
    exits, took = Exits(), []
    for _ in range(8):
        began = time.monotonic()
        assert type(explained(process, exits)) is PeerLost
        took.append(time.monotonic() - began)
    assert took[0] > 1.5 > statistics.median(took[1:])


def test_news_that_are_there_are_told_at_once(process: subprocess.Popen[bytes]) -> None:
    exits = Exits()
    exits.tell("engine-1", "ended with exit code 3")
    assert str(explained(process, exits)).startswith("engine-1: ended with exit code 3")


def test_a_process_is_ending_when_it_is_killed_or_gone(process: subprocess.Popen[bytes]) -> None:
    assert not is_ending(process.pid)
    process.kill()
    process.wait(LIMIT_S)
    assert is_ending(process.pid)
