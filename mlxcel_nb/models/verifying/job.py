"""Verifying in a process of its own: it gets the BLAS that engines have, and leaves nothing behind in this one.

The process (`__main__`) is told what to do in one line of JSON on its standard input, says what it is at and what it
has found in lines on its standard output, and ends when its input does. Any thread may call `run_job`; an interrupt of
the wait ends the process. No MLX is brought here.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

from mlxcel_nb import errors
from mlxcel_nb.errors import ClusterError, StepTimeout

SILENCE_S = 900.0
"""Without a line for this long the process is given up: a large model's prefill may take minutes on a processor."""

POLL_S = 0.2
"""How often the wait looks up, so that an interrupt is prompt."""

END_S = 5.0

TOLD = 2000
"""Characters of what the process said last that are kept for an error."""

Said = dict[str, Any]


def run_job(job: Said, on_doing: Callable[[int, int, str], None]) -> Generator[Said]:
    """Run `job` and yield what it finds, as it comes.

    Args:
        job: as `__main__` takes it.
        on_doing: done, total and what the process is at.

    Raises:
        MlxcelError: what the process raised. ClusterError: it ended without a word. StepTimeout: it said nothing more.
    """
    words = [sys.executable, "-m", "mlxcel_nb.models.verifying"]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    last: list[str] = []
    readers = [
        threading.Thread(target=_read, args=(process.stdout, lines.put), daemon=True),
        threading.Thread(target=_read, args=(process.stderr, lambda line: last.append(line or "")), daemon=True),
    ]
    try:
        for reader in readers:
            reader.start()
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already, and says why
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        while (line := _next(lines)) is not None:
            said: Said = json.loads(line)
            if "error" in said:
                raise errors.from_dict(said["error"])
            if "doing" in said:
                on_doing(said["done"], said["total"], said["doing"])
            elif "end" in said:
                return
            else:
                yield said
        readers[1].join(END_S)
        status = process.wait(END_S)
        error = ClusterError(f"the process that verifies ended with status {status}")
        error.add_note("".join(last)[-TOLD:])
        raise error
    finally:
        _end(process)
        for reader in readers:
            reader.join(END_S)


def _read(pipe: Any, put: Callable[[str | None], None]) -> None:
    with pipe:
        for line in pipe:
            put(line)
    put(None)


def _next(lines: queue.SimpleQueue[str | None]) -> str | None:
    for _ in range(int(SILENCE_S / POLL_S)):
        with contextlib.suppress(queue.Empty):
            return lines.get(timeout=POLL_S)
    raise StepTimeout(f"the process that verifies said nothing for {SILENCE_S:g} s")


def _end(process: subprocess.Popen[str]) -> None:
    """Its input ends, and so does it; at once where it does not."""
    with contextlib.suppress(OSError):
        assert process.stdin is not None
        process.stdin.close()
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_S)
