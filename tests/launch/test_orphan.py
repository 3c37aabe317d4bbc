"""The guard's own failure ends the process: better none than one that nobody guards."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

GUARDED = """
import os, sys, threading
from mlxcel_nb.launch.orphan import OrphanGuard
guard = OrphanGuard(os.getppid(), fd=int(sys.argv[1]))
guard.before_end(lambda: print("ended by the guard", flush=True))
guard.start()
print("started", flush=True)
threading.Event().wait(60)
"""


@pytest.mark.parametrize(
    ("fd", "written"),
    [
        pytest.param(0, b"\xff no text\n", id="a line that cannot be read"),
        pytest.param(999, b"", id="a descriptor that is not open"),
        pytest.param(70000, b"", id="a descriptor beyond what can be watched"),
    ],
)
def test_a_guard_that_fails_ends_the_process(fd: int, written: bytes) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", GUARDED, str(fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(written)
        process.stdin.flush()
        assert process.wait(30) is not None
        assert b"ended by the guard" in process.stdout.read()
    finally:
        if process.poll() is None:
            os.kill(process.pid, 9)
            process.wait()
        process.stdin.close()
        process.stdout.close()
