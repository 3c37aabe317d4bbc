"""A cluster on this machine: a controller and n engines, started, watched and ended.

`LocalCluster` is used by `client.Cluster` from any thread; every call is synchronous and bounded by a deadline. The
start itself runs on a thread of its own, where no interrupt can land between making a process and noting that it was
made; the caller waits and may leave at any moment. Whatever ends a start early, all it began is ended too.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.errors import ClusterError, ConfigError
from mlxcel_nb.launch.environment import threads_for
from mlxcel_nb.launch.parts import ASK_S, CONTROLLER, KILL_S, TERM_S, Parts
from mlxcel_nb.launch.startup import CONNECT_S, TAIL_LINES, EngineInfo, Plan, Startup
from mlxcel_nb.util import interrupts

__all__ = ["CONTROLLER", "EngineInfo", "LocalCluster"]

Events = queue.SimpleQueue[str | BaseException | list[EngineInfo]]

_running: weakref.WeakSet[LocalCluster] = weakref.WeakSet()


class LocalCluster:
    """One cluster at a time: `start`, `stop`, and `start` again.

    Args:
        engine_module: what an engine runs with `python -m`; another one wraps `launch.engine.main`.
    """

    def __init__(self, *, engine_module: str = "mlxcel_nb.launch.engine") -> None:
        self._engine_module = engine_module
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._parts: Parts | None = None
        self._starter: threading.Thread | None = None
        self._cancel = threading.Event()
        self._callbacks: list[Callable[[str, str], None]] = []
        self._exits: list[tuple[str, str]] = []

    @property
    def client(self) -> Any:
        """The ipyparallel client: the control plane."""
        parts = self._parts
        if parts is None or parts.client is None:
            raise ClusterError("the cluster is not running")
        return parts.client

    @property
    def pids(self) -> dict[str, int]:
        """Engines whose process lives, by node id."""
        parts = self._parts
        return {name: pid for name, pid in parts.pids.items() if name != CONTROLLER} if parts else {}

    @property
    def controller_pid(self) -> int | None:
        """The hub's process, while it lives."""
        parts = self._parts
        return parts.pids.get(CONTROLLER) if parts else None

    @property
    def folder(self) -> Path | None:
        """The private folder: logs, connection files, sockets. Removed by `stop`."""
        parts = self._parts
        return parts.folder if parts and parts.record else None

    def log_tail(self, node_id: str, lines: int = TAIL_LINES) -> str:
        """The last lines of a process's log; "" when there are none."""
        parts = self._parts
        return parts.log_tail(node_id, lines) if parts else ""

    def on_exit(self, callback: Callable[[str, str], None]) -> None:
        """Call `callback(node_id, description)` when a process ends that nobody stopped, or has ended so already.

        It runs on a thread that only waits for that process. The hub's node id is `CONTROLLER`.
        """
        with self._lock:
            self._callbacks.append(callback)
            missed = list(self._exits)
        for node_id, description in missed:
            callback(node_id, description)

    def start(
        self,
        n: int,
        *,
        name: str,
        secret: Secret,
        threads_per_engine: int | None = None,
        links: Sequence[str] = (),
        deadline_s: float = 60.0,
        progress: Callable[[str], None] | None = None,
    ) -> list[EngineInfo]:
        """Start the controller and `n` engines and hand each the secret.

        Args:
            n: how many engines; their node ids are engine-0, engine-1 and so on.
            name: the cluster's, part of every handshake.
            secret: handed to each engine sealed to its own key.
            threads_per_engine: for BLAS; None shares the cores out.
            links: what links are made to be like, as `cluster.shape.parse_links` reads it.
            deadline_s: for all of it.
            progress: told what is waited for, on the caller's thread.

        Raises:
            EngineLost: a process ended during the start; it names which, how, and its last words.
            ClusterError: the deadline passed; it says what was waited for and for whom.
            BaseException: any interrupt of the caller, once all that was begun has been ended.
        """
        if n < 1:
            raise ConfigError(f"a cluster needs at least one engine, not {n}")
        if not sys.executable:
            raise ConfigError("this Python does not know its own program", advice="Start it from a file.")
        plan = Plan(
            n=n,
            name=name,
            secret=secret,
            threads=threads_per_engine or threads_for(n),
            engine_module=self._engine_module,
            owner_pid=os.getpid(),
            links=tuple(links),
            seconds=deadline_s,
            deadline=time.monotonic() + deadline_s,
        )
        events: Events = queue.SimpleQueue()
        with self._lock:
            if self._parts is not None:
                raise ClusterError("the cluster is running already", advice="Stop it first.")
            parts = self._parts = Parts(self._on_child_exit)
            self._owner_pid = plan.owner_pid
            self._exits.clear()
            self._cancel.clear()
            self._starter = threading.Thread(
                target=self._run, args=(plan, parts, events), name="mlxcel-start", daemon=True
            )
            _running.add(self)
        with interrupts.handed_to(lambda: events.put(KeyboardInterrupt())):
            try:
                self._starter.start()
                while not isinstance(event := events.get(), list):
                    if isinstance(event, BaseException):
                        raise event
                    if progress:
                        progress(event)
            except BaseException:
                self._end(ask=False)
                raise
        return event

    def _run(self, plan: Plan, parts: Parts, events: Events) -> None:
        """The starter's main."""
        try:
            events.put(Startup(plan, parts, self._cancel, events.put).run())
        except BaseException as error:  # noqa: BLE001  # raised again on the caller's thread
            parts.end(ask=False)
            events.put(error)

    def stop(self, deadline_s: float = 5.0) -> None:
        """End every process and remove the private folder. Harmless when nothing runs.

        A process that is stopped or stuck is killed. An interrupt is raised when all is done. From another thread
        than the one that starts, it also breaks the start off.
        """
        interrupted = threading.Event()
        with interrupts.handed_to(interrupted.set):
            self._end(ask=True, patience=max(0.0, min(ASK_S, deadline_s - TERM_S - KILL_S)))
        if interrupted.is_set():
            raise KeyboardInterrupt

    def _end(self, *, ask: bool, patience: float = ASK_S) -> None:
        if os.getpid() != self._owner_pid:
            return  # a forked copy of the owner: the cluster is not its to end
        starter, parts = self._starter, self._parts
        self._cancel.set()
        if starter is not None and starter.ident is not None:
            starter.join(CONNECT_S + TERM_S + KILL_S)
        if parts is not None:
            parts.end(ask, patience)
        with self._lock:
            if self._parts is parts:
                self._starter = self._parts = None
                _running.discard(self)

    def _on_child_exit(self, name: str, description: str) -> None:
        with self._lock:
            self._exits.append((name, description))
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback(name, description)


@atexit.register
def _stop_all() -> None:
    """The interpreter leaves: so do its clusters. A killed one relies on the orphan guards."""
    for cluster in list(_running):
        cluster.stop()
