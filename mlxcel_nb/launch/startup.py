"""The start of a local cluster, step by step, on the starter's thread.

Every wait is the same loop: is what we wait for here, was the start cancelled, did a process end, is the deadline
past? So a process that ends is an error at once, not at the deadline. What has begun is in `Parts`; ending it when
the start fails is the caller's.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.errors import ClusterError, EngineLost
from mlxcel_nb.launch import compat, controller, handover, registry
from mlxcel_nb.launch.parts import CONTROLLER, Parts

POLL_S = 0.01
"""Between two looks at what a start waits for."""

CONNECT_S = 2.0
"""One try to connect to the hub; it cannot be broken off, so a cancelled start may last this much longer."""

TAIL_LINES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """An engine that has joined.

    Args:
        address: where its node listens on the data plane.
        log: what the process wrote on standard output and error; removed with the cluster.
    """

    node_id: str
    pid: int
    host: str
    address: Address
    log: Path
    blas: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be started, and by when."""

    n: int
    name: str
    secret: Secret
    threads: int
    engine_module: str
    owner_pid: int
    links: tuple[str, ...]
    seconds: float
    deadline: float

    @property
    def node_ids(self) -> list[str]:
        return [f"engine-{rank}" for rank in range(self.n)]


MORE_FILES = "Raise the limit of open files, as in: ulimit -n 4096"


class StartCancelled(ClusterError):
    """Whoever waited for the start went away."""


class Startup:
    """One run of the start."""

    def __init__(self, plan: Plan, parts: Parts, cancelled: threading.Event, progress: Callable[[str], None]) -> None:
        self._plan = plan
        self._parts = parts
        self._cancelled = cancelled
        self._progress = progress

    def run(self) -> list[EngineInfo]:
        """The engines, registered and joined."""
        self._progress("starting processes")
        registry.sweep()
        self._parts.record = registry.open_record(self._plan.name, self._plan.n)
        self._spawn()
        from ipyparallel import Client  # 0.3 s, while the processes import the same

        self._progress("waiting for the controller")
        client_file, engine_file = (
            file(self._parts.folder) for file in (controller.client_file, controller.engine_file)
        )
        self._wait("the controller to come up", lambda: client_file.exists() and engine_file.exists())
        connection = engine_file.read_text()
        for node_id in self._plan.node_ids:
            self._parts.children[node_id].write_line(connection)
        self._connect(Client, client_file)
        compat.lend_magics(self._parts.client)

        self._progress("waiting for engines")
        self._wait("engines to register", lambda: not self._unregistered(), self._unregistered)
        return self._hand_over()

    def _spawn(self) -> None:
        plan, spawn = self._plan, self._parts.spawn
        spawn(CONTROLLER, "mlxcel_nb.launch.controller", [str(plan.owner_pid)], threads=1)
        for rank, node_id in enumerate(plan.node_ids):
            self._check("processes to start")
            arguments = [str(plan.owner_pid), node_id, str(rank), str(plan.threads)]
            spawn(node_id, plan.engine_module, arguments, plan.threads)

    def _connect(self, client_type: Any, file: Path) -> None:
        while self._parts.client is None:
            self._check("the controller to answer")
            try:
                self._parts.client = client_type(str(file), timeout=CONNECT_S)
            except TimeoutError:
                continue

    def _unregistered(self) -> list[str]:
        known = compat.engine_ids(self._parts.client)
        return [node_id for node_id in self._plan.node_ids if node_id not in known]

    def _hand_over(self) -> list[EngineInfo]:
        self._progress("handing the secret over")
        plan = self._plan
        hellos = self._ask(handover.HELLO, {node_id: {} for node_id in plan.node_ids})
        greetings = [handover.read_hello(node_id, content) for node_id, content in hellos.items()]
        requests = [
            handover.JoinRequest(cluster=plan.name, node_id=node_id, threads=plan.threads, links=plan.links)
            for node_id in plan.node_ids
        ]
        joins = self._ask(
            handover.JOIN,
            {
                request.node_id: handover.join_content(greeting, plan.secret, request)
                for greeting, request in zip(greetings, requests, strict=True)
            },
        )
        return [
            EngineInfo(
                node_id=greeting.node_id,
                pid=self._parts.children[greeting.node_id].pid,
                host=greeting.host,
                address=handover.read_join(greeting.node_id, joins[greeting.node_id]),
                log=self._parts.children[greeting.node_id].log,
                blas=greeting.blas,
            )
            for greeting in greetings
        ]

    def _ask(self, msg_type: str, contents: dict[str, compat.Content]) -> dict[str, compat.Content]:
        """One request to each engine, all at once; their replies, in the same order."""
        replies = {
            node_id: compat.control_request(self._parts.client, node_id, f"{msg_type}_request", content)
            for node_id, content in contents.items()
        }

        def silent() -> list[str]:
            return [node_id for node_id, reply in replies.items() if not reply.done()]

        self._wait(f"engines to answer {msg_type}", lambda: not silent(), silent)
        return {node_id: reply.result() for node_id, reply in replies.items()}

    def _wait(self, what: str, condition: Callable[[], bool], missing: Callable[[], list[str]] = list) -> None:
        while not condition():
            self._check(what, missing)
            time.sleep(POLL_S)

    def _check(self, what: str, missing: Callable[[], list[str]] = list) -> None:
        """Raise when there is no point in waiting any longer."""
        if self._cancelled.is_set():
            raise StartCancelled("the start was cancelled")
        for name, child in self._parts.children.items():
            if child.ended:
                ended = f"the process {child.describe()}"
                advice = MORE_FILES if "Too many open files" in ended else None
                raise self._with_logs(EngineLost(ended, node=name, advice=advice), [name])
        if time.monotonic() > self._plan.deadline:
            late = missing() or [CONTROLLER]
            waited = f"waited {self._plan.seconds:g} s for {what}; missing: {', '.join(late)}"
            error = ClusterError(waited, advice="A longer deadline gives them more time.")
            raise self._with_logs(error, late)

    def _with_logs(self, error: ClusterError | EngineLost, names: list[str]) -> ClusterError | EngineLost:
        """`error` with the ends of these logs as its notes: the logs go when the cluster does."""
        for name in names:
            if text := self._parts.log_tail(name, TAIL_LINES):
                error.add_note(f"{name} said last:\n{text}")
        return error
