"""The orphan guard: a process that serves an owner ends when the owner does, or when it says so.

Runs in the controller and in every engine, on a thread of its own, so that it works while the main thread is in
native code. Two signs are watched: the end of standard input, whose other end only the owner holds, and the
parent's pid, because a child that the owner forked may hold the pipe open beyond the owner's death.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import threading
from collections.abc import Callable

END = b"end"
"""The owner's last line."""

CHECK_S = 1.0
"""The parent's pid is looked at this often."""

GRACE_S = 1.0
"""What is to be done before the end may take this long."""


class OrphanGuard:
    """Owns standard input: hands over its lines, and ends the process at the line `END` or at its end."""

    def __init__(self, owner_pid: int, *, fd: int = 0) -> None:
        self._owner_pid = owner_pid
        self._fd = fd
        self._last_acts: list[Callable[[], None]] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.asked = False
        """Whether the owner said that this is the end, and so still lives."""

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._watch, name="mlxcel-orphan-guard", daemon=True).start()

    def before_end(self, act: Callable[[], None]) -> None:
        """Do `act` before the process ends, newest first, all of them within `GRACE_S`."""
        self._last_acts.append(act)

    def line(self, timeout: float) -> str:
        """The next line that the owner wrote.

        Raises:
            queue.Empty: nothing came within `timeout` seconds.
        """
        return self._lines.get(timeout=timeout)

    def _watch(self) -> None:
        try:
            self._follow()
        finally:
            self._end()  # a guard that fails must not leave an unguarded process behind

    def _follow(self) -> None:
        """Hand over the owner's lines until there is a sign of its end."""
        rest = b""
        while os.getppid() == self._owner_pid and not self.asked:
            readable, _, _ = select.select([self._fd], [], [], CHECK_S)
            if not readable:
                continue
            data = os.read(self._fd, 65536)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line == END:
                    self.asked = True
                else:
                    self._lines.put(line.decode())

    def _end(self) -> None:
        try:
            worker = threading.Thread(target=self._act, daemon=True)
            worker.start()
            worker.join(GRACE_S)
            if os.getpgrp() == os.getpid():
                os.killpg(0, signal.SIGKILL)  # what this process started goes with it
        finally:
            os._exit(0)

    def _act(self) -> None:
        for act in reversed(self._last_acts):
            with contextlib.suppress(Exception):  # the end does not wait for a tidy one
                act()
