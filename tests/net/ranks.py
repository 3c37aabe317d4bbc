"""Processes that are the ranks of one group, told over their standard streams."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mlxcel_nb.cluster.secret import random_secret

REPO = Path(__file__).parents[2]


class Rank:
    """A process of `module`, which gets its rank, the number of ranks, and `arguments`, and what it says."""

    def __init__(self, module: str, rank: int, size: int, arguments: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(size), *arguments],
            cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put({})

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def hear(self, key: str, limit_s: float = 20.0) -> dict[str, Any]:
        """The next thing said that holds `key`."""
        end = time.monotonic() + limit_s
        while True:
            said = self._lines.get(timeout=max(0.01, end - time.monotonic()))
            assert said, f"the process ended before it said {key!r}"
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


def start(module: str, size: int, *arguments: str, last: tuple[str, ...] | None = None) -> list[Rank]:
    """Ranks that know each other's addresses; the last one may get arguments of its own."""
    told = [arguments] * (size - 1) + [arguments if last is None else last]
    ranks = [Rank(module, n, size, list(told[n])) for n in range(size)]
    secret = random_secret().reveal().hex()
    for rank in ranks:
        rank.say(secret)
    ports = json.dumps([rank.hear("port")["port"] for rank in ranks])
    for rank in ranks:
        rank.say(ports)
    return ranks
