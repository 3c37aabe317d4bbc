"""What a running local cluster is made of: its processes, its record with the private folder, its client.

`Parts` is filled by one start and emptied by one end. The starter's thread fills it; any thread may end it, at any
state of completion. Processes that end by themselves are told to `on_exit`, on a thread that waited for that one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxcel_nb.launch import registry
from mlxcel_nb.launch.environment import child_environment
from mlxcel_nb.launch.process import Child, tail

CONTROLLER = "controller"
"""The name under which the hub's exit is reported; engines have node ids."""

ASK_S, TERM_S, KILL_S = 1.5, 0.3, 2.0
"""What an end grants: to leave when asked, to leave on SIGTERM, and to the system to clear away what was killed."""


class Parts:
    """The parts of one cluster, from its first process to its last."""

    def __init__(self, on_exit: Callable[[str, str], None]) -> None:
        self.children: dict[str, Child] = {}
        self.record: registry.ClusterRecord | None = None
        self.client: Any = None
        self._on_exit = on_exit
        self._ending = False
        self._lock = threading.RLock()

    @property
    def folder(self) -> Path:
        """The private folder."""
        assert self.record is not None
        return Path(self.record.folder)

    @property
    def pids(self) -> dict[str, int]:
        """Processes that live."""
        return {name: child.pid for name, child in list(self.children.items()) if not child.ended}

    def log_tail(self, name: str, lines: int) -> str:
        """The last lines a process wrote; "" when there are none."""
        child = self.children.get(name)
        return tail(child.log, lines) if child else ""

    def spawn(self, name: str, module: str, arguments: list[str], threads: int) -> None:
        """Start `python -m module FOLDER arguments...` as a fresh interpreter, and note it in the record."""
        assert self.record is not None
        logs = self.folder / "logs"
        logs.mkdir(mode=0o700, exist_ok=True)
        child = Child(
            name,
            # -P: a file of the user's beside the notebook must not stand in for a module.
            [sys.executable, "-P", "-m", module, str(self.folder), *arguments],
            log=logs / f"{name}.log",
            env=child_environment(os.environ, threads),
            on_exit=self._on_child_exit,
        )
        self.children[name] = child
        known = registry.ProcessRecord(name=name, pid=child.pid, started=child.started)
        self.record = dataclasses.replace(self.record, processes=(*self.record.processes, known))
        registry.save(self.record)

    def end(self, ask: bool = True, patience: float = ASK_S) -> None:
        """End every process and remove the folder.

        Args:
            ask: let nodes say goodbye; else they are terminated at once.
            patience: seconds they get for it.
        """
        with self._lock:
            self._ending = True
            children = list(self.children.values())
            if ask:
                for child in children:
                    child.ask_to_end()
                _wait_for(children, patience)
            for signum, seconds in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
                for child in children:
                    child.signal_group(signum)
                _wait_for(children, seconds)
            if self.client is not None:
                with contextlib.suppress(Exception):  # half-made, or closed by the user
                    self.client.close(linger=0)
                self.client = None
            if self.record is not None:
                registry.discard(self.record)
                self.record = None

    def _on_child_exit(self, child: Child) -> None:
        description = child.describe()  # before the log is removed
        if not self._ending:
            self._on_exit(child.name, description)


def _wait_for(children: list[Child], seconds: float) -> None:
    until = time.monotonic() + seconds
    for child in children:
        child.wait(max(0.0, until - time.monotonic()))
