"""`mlxcel-nb node` as processes: started, listened to, and stopped, with deadlines."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.waiting import until

WAIT_S = 45.0
"""For a line that comes within a second or two on an idle machine."""

NODE = [sys.executable, "-m", "mlxcel_nb", "node"]

Start = Callable[..., "Running"]


class Running:
    """One `mlxcel-nb node`, and every line it has said so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((process.stdout, self.out), (process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(pipe: Any, lines: list[str]) -> None:
        with contextlib.suppress(ValueError):  # closed by whoever ends the test
            for line in pipe:
                lines.append(line.rstrip("\n"))  # noqa: PERF401 - each is looked at as it comes

    @property
    def said(self) -> str:
        return "\n".join([*self.out, *self.err])

    def line(self, text: str, *, after: int = 0) -> int:
        """The number of the first line of its output, from `after` on, that holds `text`; waits for it."""

        def find() -> int | None:
            return next((k for k in range(after, len(self.out)) if text in self.out[k]), None)

        assert until(lambda: find() is not None or self.process.poll() is not None, WAIT_S), self.said
        found = find()
        assert found is not None, f"no line with {text!r} in:\n{self.said}"
        return found

    def listens(self) -> str:
        """The address it listens on, as soon as it does."""
        line = self.out[self.line("listening on ")]
        return line.removeprefix("listening on ").partition(": ")[0]

    def stop(self, signum: int = signal.SIGINT) -> int:
        """Its exit status after a signal."""
        self.process.send_signal(signum)
        return self.end()

    def end(self) -> int:
        """Its exit status, once it has ended and all it said has been read."""
        status = self.process.wait(WAIT_S)
        for reader in self._readers:
            reader.join(WAIT_S)
        return status


@contextlib.contextmanager
def nodes() -> Iterator[Start]:
    """Starts nodes; those that still run at the end are killed."""
    running: list[Running] = []

    def start(*words: str, popen: Callable[..., Any] = subprocess.Popen, **environment: str) -> Running:
        process = popen(
            [*NODE, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        )
        running.append(Running(process))
        return running[-1]

    try:
        yield start
    finally:
        for each in running:
            if each.process.poll() is None:
                each.process.kill()
        for each in running:
            each.end()
            for pipe in (each.process.stdout, each.process.stderr):
                if pipe is not None:
                    pipe.close()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below those that the system gives out by itself; each worker has its own share,
    for it takes a while until they are listened on.
    """
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randint(12000 + 2000 * share, 13999 + 2000 * share)
        if port in found:
            continue
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found


def secret_file(folder: Path, name: str = "secret", value: str = "a secret of the test, long enough") -> Path:
    file = folder / name
    file.write_text(f"{value}\n")
    file.chmod(0o600)
    return file
