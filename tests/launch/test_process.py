"""Supervised processes: how they end is told, and what they started goes with them."""

from __future__ import annotations

import os
import queue
import signal
import sys
from pathlib import Path

import pytest

from mlxcel_nb.launch.environment import child_environment, threads_for
from mlxcel_nb.launch.process import Child, is_alive, started, tail
from tests.waiting import until

GUARDED = """
import os, sys, threading
from mlxcel_nb.launch.orphan import OrphanGuard
guard = OrphanGuard(int(sys.argv[1]))
guard.before_end(lambda: print("asked" if guard.asked else "alone", flush=True))
guard.start()
print(guard.line(10), flush=True)
print(guard.line(10), flush=True)
threading.Event().wait(60)
"""


@pytest.fixture
def exits() -> queue.SimpleQueue[Child]:
    return queue.SimpleQueue()


def run(code: str, tmp_path: Path, exits: queue.SimpleQueue[Child], *arguments: str) -> Child:
    argv = [sys.executable, "-c", code, *arguments]
    return Child("worker", argv, log=tmp_path / "log", env=child_environment(os.environ, 1), on_exit=exits.put)


def test_an_exit_code_is_told_with_the_last_words(tmp_path: Path, exits: queue.SimpleQueue[Child]) -> None:
    run("print('so long'); raise SystemExit(3)", tmp_path, exits)
    assert exits.get(timeout=10).describe() == "ended with exit code 3: so long"


def test_a_signal_is_told_by_name(tmp_path: Path, exits: queue.SimpleQueue[Child]) -> None:
    child = run("input()", tmp_path, exits)
    child.signal_group(signal.SIGABRT)
    assert exits.get(timeout=10).describe() == "was killed by SIGABRT"


def test_what_a_process_leaves_running_is_killed_with_it(tmp_path: Path, exits: queue.SimpleQueue[Child]) -> None:
    code = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']).pid)"
    )
    run(code, tmp_path, exits)
    exits.get(timeout=10)
    grandchild = int(tail(tmp_path / "log"))
    assert until(lambda: started(grandchild) is None)


def test_a_guarded_process_gets_lines_and_ends_with_the_pipe(tmp_path: Path, exits: queue.SimpleQueue[Child]) -> None:
    child = run(GUARDED, tmp_path, exits, str(os.getpid()))
    child.write_line("one")
    child.write_line("two")
    assert until(lambda: tail(tmp_path / "log", 9) == "one\ntwo")
    assert not child.ended
    child._close_input()
    assert child.wait(20)
    assert tail(tmp_path / "log", 9) == "one\ntwo\nalone"


def test_a_guarded_process_knows_that_it_was_asked(tmp_path: Path, exits: queue.SimpleQueue[Child]) -> None:
    child = run(GUARDED, tmp_path, exits, str(os.getpid()))
    child.ask_to_end()
    assert child.wait(20)
    assert tail(tmp_path / "log", 9) == "asked"


def test_a_process_whose_owner_is_another_one_ends_itself(tmp_path: Path, exits: queue.SimpleQueue[Child]) -> None:
    assert run(GUARDED, tmp_path, exits, "1").wait(20)


def test_a_process_is_known_by_pid_and_start_time(tmp_path: Path, exits: queue.SimpleQueue[Child]) -> None:
    child = run("input()", tmp_path, exits)
    assert is_alive(child.pid, child.started)
    assert not is_alive(child.pid, child.started + 1)
    child.signal_group(signal.SIGKILL)
    assert child.wait(20)
    assert started(child.pid) is None and not is_alive(child.pid, child.started)


def test_a_log_is_private(tmp_path: Path, exits: queue.SimpleQueue[Child]) -> None:
    assert run("", tmp_path, exits).wait(20)
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_the_tail_of_a_log_skips_empty_lines_and_survives_anything(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_bytes(b"one\ntwo \n\xff\xfe\n\n  \n")
    assert tail(log, 2) == "two\n\ufffd\ufffd"


def test_the_cores_are_shared_out() -> None:
    """Case 64."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert threads_for(1) == cores
    assert threads_for(2) == max(1, cores // 2)
    assert threads_for(10 * cores) == 1


def test_a_child_inherits_no_secret_and_no_steering() -> None:
    given = {"PATH": "/bin", "MLXCEL_CLUSTER_SECRET": "x", "IPP_CONNECTION_INFO": "y", "OMP_NUM_THREADS": "64"}
    env = child_environment(given, 3)
    assert env["PATH"] == "/bin" and env["OMP_NUM_THREADS"] == env["OPENBLAS_NUM_THREADS"] == "3"
    assert not {"MLXCEL_CLUSTER_SECRET", "IPP_CONNECTION_INFO"} & set(env)
