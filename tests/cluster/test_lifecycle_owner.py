"""A cluster dies with its owner, however that one goes, and leaves nothing for the next start to trip over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.leftovers import nothing_left, processes_of
from tests.waiting import until

SCRIPT = Path(__file__).with_name("lifecycle_owner.py")
GONE_S = 15.0
"""What the product promises; it takes one to two seconds."""

Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start an owner in a notebook's way of doing things: no main guard, `python FILE` or `python -c`."""
    owners = []

    def start(deed: str, *, inline: bool = False) -> subprocess.Popen[str]:
        program = ["-c", SCRIPT.read_text()] if inline else [str(SCRIPT)]
        env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": str(SCRIPT.parents[2])}
        owner = subprocess.Popen(
            [sys.executable, *program, deed], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        owners.append(owner)
        return owner

    yield start
    for owner in owners:
        owner.kill()
        owner.communicate()


def read_until(owner: subprocess.Popen[str], start: str) -> str:
    assert owner.stdout is not None
    for line in owner.stdout:
        if line.startswith(start):
            return line.strip()
    raise AssertionError(f"the owner ended before it said {start!r}")


def started(owner: subprocess.Popen[str]) -> dict[str, Any]:
    found = json.loads(read_until(owner, "{"))
    assert len(processes_of(Path(found["folder"]))) == 3
    return found


def say(owner: subprocess.Popen[str], order: str) -> None:
    assert owner.stdin is not None
    owner.stdin.write(order + "\n")
    owner.stdin.flush()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_that_kills_the_owner_ends_the_cluster(launch: Launch, signum: int) -> None:
    """Cases 55 and 61."""
    owner = launch("waits", inline=signum == signal.SIGKILL)
    folder = Path(started(owner)["folder"])
    owner.send_signal(signum)
    assert until(lambda: nothing_left(folder), GONE_S)


@pytest.mark.parametrize("order", ["os._exit", "raise", "end of the program"])
def test_an_owner_that_leaves_ends_the_cluster(launch: Launch, order: str) -> None:
    """Cases 55 and 61."""
    owner = launch("waits")
    folder = Path(started(owner)["folder"])
    say(owner, order)
    assert until(lambda: nothing_left(folder), GONE_S)
    owner.wait(5)


def test_a_forked_child_that_outlives_the_owner_does_not_keep_the_cluster(launch: Launch) -> None:
    owner = launch("forks")
    folder = Path(started(owner)["folder"])
    assert owner.stdout is not None
    forked = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    assert until(lambda: nothing_left(folder), GONE_S)
    assert forked.is_running()
    forked.kill()


def test_an_engine_that_is_stopped_when_the_owner_is_killed_goes_too(launch: Launch) -> None:
    owner = launch("waits")
    found = started(owner)
    os.kill(found["engines"][1], signal.SIGSTOP)
    owner.kill()
    assert until(lambda: nothing_left(Path(found["folder"])), GONE_S)


@pytest.mark.parametrize("phase", ["starting processes", "waiting for the controller", "waiting for engines"])
def test_an_interrupt_in_the_middle_of_the_start_leaves_nothing_and_the_next_start_works(
    launch: Launch, tmp_path: Path, phase: str
) -> None:
    owner = launch("interrupted")
    read_until(owner, phase)
    owner.send_signal(signal.SIGINT)
    owner.send_signal(signal.SIGINT)
    read_until(owner, "interrupted")
    assert psutil.Process(owner.pid).children() == []
    assert list((tmp_path / "mlxcel_nb").iterdir()) == []
    say(owner, "go on")
    read_until(owner, "{")
    read_until(owner, "stopped")
    owner.wait(5)
