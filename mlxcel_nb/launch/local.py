"""A cluster on this machine: a controller and n engines, started, watched and ended.

`LocalCluster` is used by `client.Cluster` from any thread; every call is synchronous and bounded by a deadline. The
start itself runs on a thread of its own: an interrupt of the caller can land anywhere in Python code, and must not
land between making a process and noting that it was made. Whatever ends a start early, all it began is ended too.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.errors import ClusterError, ConfigError, EngineLost, MlxcelError
from mlxcel_nb.launch import compat, controller, handover, registry
from mlxcel_nb.launch.environment import child_environment, threads_for
from mlxcel_nb.launch.process import Child, tail

T = TypeVar("T")
Progress = Callable[[str], None]
ExitCallback = Callable[[str, str], None]

CONTROLLER = "controller"
"""The name under which the hub's exit is reported; engines have node ids."""

POLL_S = 0.01
"""Between two looks at what a start waits for."""

CONNECT_S = 2.0
"""One try to connect to the hub; it cannot be broken off, so a cancelled start may last this much longer."""

ASK_S, TERM_S, KILL_S = 1.5, 0.3, 2.0
"""What a stop grants: to leave when asked, to leave on SIGTERM, and to the system to clear away what was killed."""

TAIL_LINES = 20

_running: weakref.WeakSet[LocalCluster] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """An engine that has joined."""

    node_id: str
    pid: int
    host: str
    address: Address
    """Where its node listens on the data plane."""
    log: Path
    versions: dict[str, str]
    blas: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    n: int
    name: str
    secret: Secret
    threads: int
    deadline: float
    seconds: float
    progress: Progress

    @property
    def node_ids(self) -> list[str]:
        return [f"engine-{rank}" for rank in range(self.n)]


class _Cancelled(Exception):
    """The caller of a start went away."""


class LocalCluster:
    """One cluster at a time: `start`, `stop`, and `start` again.

    Args:
        engine_module: what an engine runs with `python -m`; another one wraps `launch.engine.main`.
    """

    def __init__(self, *, engine_module: str = "mlxcel_nb.launch.engine") -> None:
        self._engine_module = engine_module
        self._owner_pid = os.getpid()
        self._lock = threading.RLock()
        self._children: dict[str, Child] = {}
        self._record: registry.ClusterRecord | None = None
        self._client: Any = None
        self._cancel = threading.Event()
        self._starter: threading.Thread | None = None
        self._stopping = False
        self._callbacks: list[ExitCallback] = []
        self._exits: list[tuple[str, str]] = []

    # What a user of a running cluster sees

    @property
    def client(self) -> Any:
        """The ipyparallel client: the control plane."""
        if self._client is None:
            raise ClusterError("the cluster is not running")
        return self._client

    @property
    def pids(self) -> dict[str, int]:
        """Engines whose process lives."""
        with self._lock:
            return {name: child.pid for name, child in self._children.items() if name != CONTROLLER and not child.ended}

    @property
    def controller_pid(self) -> int | None:
        child = self._children.get(CONTROLLER)
        return None if child is None or child.ended else child.pid

    @property
    def folder(self) -> Path | None:
        """The private folder: logs, connection files, sockets. Removed by `stop`."""
        return Path(self._record.folder) if self._record else None

    def log_tail(self, node_id: str, lines: int = TAIL_LINES) -> str:
        """The last lines of a process's log; "" when there is none."""
        child = self._children.get(node_id)
        return tail(child.log, lines) if child else ""

    def on_exit(self, callback: ExitCallback) -> None:
        """Call `callback(node_id, description)` when a process ends that nobody stopped, or has ended so already.

        It runs on a thread that only waits for that process. The hub's node id is `CONTROLLER`.
        """
        with self._lock:
            self._callbacks.append(callback)
            missed = list(self._exits)
        for node_id, description in missed:
            callback(node_id, description)

    # Start

    def start(
        self,
        n: int,
        *,
        name: str,
        secret: Secret,
        threads_per_engine: int | None = None,
        deadline_s: float = 60.0,
        progress: Progress | None = None,
    ) -> list[EngineInfo]:
        """Start the controller and `n` engines and hand each the secret.

        Args:
            n: how many engines; their node ids are engine-0, engine-1 and so on.
            name: the cluster's, part of every handshake.
            secret: handed to each engine sealed to its own key.
            threads_per_engine: for BLAS; None shares the cores out.
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
        events: queue.SimpleQueue[str | BaseException | list[EngineInfo]] = queue.SimpleQueue()
        plan = _Plan(
            n=n,
            name=name,
            secret=secret,
            threads=threads_per_engine or threads_for(n),
            deadline=time.monotonic() + deadline_s,
            seconds=deadline_s,
            progress=events.put,
        )
        with self._lock:
            if self._record is not None or self._starter is not None:
                raise ClusterError("the cluster is running already", advice="Stop it first.")
            self._cancel.clear()
            self._stopping = False
            self._exits.clear()
            self._children.clear()
            self._starter = threading.Thread(target=self._run, args=(plan, events), name="mlxcel-start", daemon=True)
        try:
            self._starter.start()
            while True:
                event = events.get()
                if isinstance(event, str):
                    if progress:
                        progress(event)
                elif isinstance(event, BaseException):
                    raise event
                else:
                    return event
        except BaseException:
            self._until_done(self._abandon)
            raise
        finally:
            self._starter = None

    def _run(self, plan: _Plan, events: queue.SimpleQueue[Any]) -> None:
        """The starter thread's main."""
        try:
            events.put(self._start(plan))
        except _Cancelled:
            self._end(ask=False)
            events.put(ClusterError("the start was cancelled"))
        except BaseException as error:  # noqa: BLE001  # raised again on the caller's thread
            self._end(ask=False)
            events.put(error)

    def _start(self, plan: _Plan) -> list[EngineInfo]:
        plan.progress("starting processes")
        registry.sweep()
        self._record = registry.open_record(plan.name, plan.n)
        _running.add(self)
        self._spawn_all(plan)
        from ipyparallel import Client  # 0.3 s, while the processes import the same

        plan.progress("waiting for the controller")
        folder = Path(self._record.folder)
        files = controller.client_file(folder), controller.engine_file(folder)
        self._until(plan, "the controller to come up", lambda: all(file.exists() for file in files))
        connection = files[1].read_text()
        for node_id in plan.node_ids:
            self._children[node_id].write_line(connection)
        self._client = self._connect(plan, Client, files[0])

        plan.progress("waiting for engines")
        self._until(
            plan,
            "engines to register",
            lambda: set(plan.node_ids) <= set(compat.engine_ids(self._client)),
            missing=lambda: sorted(set(plan.node_ids) - set(compat.engine_ids(self._client))),
        )
        return self._hand_over(plan)

    def _hand_over(self, plan: _Plan) -> list[EngineInfo]:
        plan.progress("handing the secret over")
        hellos = self._ask(plan, handover.HELLO, {node_id: {} for node_id in plan.node_ids})
        greetings = {node_id: handover.read_hello(node_id, content) for node_id, content in hellos.items()}
        requests = {
            node_id: handover.join_request(
                greeting,
                plan.secret,
                handover.JoinRequest(cluster=plan.name, node_id=node_id, threads=plan.threads),
            )
            for node_id, greeting in greetings.items()
        }
        joins = self._ask(plan, handover.JOIN, requests)
        return [
            EngineInfo(
                node_id=node_id,
                pid=self._children[node_id].pid,
                host=greeting.host,
                address=handover.read_join(node_id, joins[node_id]),
                log=self._children[node_id].log,
                versions=greeting.versions,
                blas=greeting.blas,
            )
            for node_id, greeting in greetings.items()
        ]

    def _spawn_all(self, plan: _Plan) -> None:
        assert self._record is not None
        folder = Path(self._record.folder)
        (folder / "logs").mkdir(mode=0o700)
        env = child_environment(os.environ, plan.threads)
        owner = str(self._owner_pid)
        commands = {CONTROLLER: ["mlxcel_nb.launch.controller", str(folder), owner]}
        for node_id in plan.node_ids:
            commands[node_id] = [self._engine_module, str(folder), node_id, str(plan.threads), owner]
        for name, command in commands.items():
            self._check(plan)
            child = Child(
                name,
                [sys.executable, "-P", "-m", *command],
                log=folder / "logs" / f"{name}.log",
                env=env,
                on_exit=self._on_child_exit,
            )
            with self._lock:
                self._children[name] = child
            known = registry.ProcessRecord(name=name, pid=child.pid, started=child.started)
            self._record = dataclasses.replace(self._record, processes=(*self._record.processes, known))
        registry.save(self._record)

    def _connect(self, plan: _Plan, client_type: Any, file: Path) -> Any:
        while True:
            self._check(plan, "the controller to answer")
            try:
                return client_type(str(file), timeout=CONNECT_S)
            except TimeoutError:
                continue

    def _ask(self, plan: _Plan, msg_type: str, contents: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """One request to each engine, all at once; their replies."""
        replies = {
            node_id: compat.control_request(self._client, node_id, f"{msg_type}_request", content)
            for node_id, content in contents.items()
        }
        self._until(
            plan,
            f"engines to answer {msg_type}",
            lambda: all(reply.done() for reply in replies.values()),
            missing=lambda: [node_id for node_id, reply in replies.items() if not reply.done()],
        )
        return {node_id: reply.result() for node_id, reply in replies.items()}

    def _until(
        self, plan: _Plan, what: str, condition: Callable[[], bool], missing: Callable[[], list[str]] = list
    ) -> None:
        while not condition():
            self._check(plan, what, missing)
            time.sleep(POLL_S)

    def _check(self, plan: _Plan, what: str = "processes to start", missing: Callable[[], list[str]] = list) -> None:
        """Raise when there is no point in waiting any longer."""
        if self._cancel.is_set():
            raise _Cancelled
        for name, child in self._children.items():
            if child.ended:
                self._fail(EngineLost(f"the process {child.describe()}", node=name), [name])
        if time.monotonic() > plan.deadline:
            late = missing() or [CONTROLLER]
            self._fail(ClusterError(f"waited {plan.seconds:g} s for {what}; missing: {', '.join(late)}"), late)

    def _fail(self, error: MlxcelError, names: list[str]) -> NoReturn:
        """Raise `error` with the ends of these processes' logs as its notes: the logs are removed with the cluster."""
        tails = {name: self.log_tail(name) for name in names}
        for name, text in tails.items():
            if text:
                error.add_note(f"{name} said last:\n{text}")
        raise error

    # End

    def stop(self, deadline_s: float = 5.0) -> None:
        """End every process, remove the private folder. Harmless when nothing runs.

        A process that is stopped or stuck is killed; an interrupt only shortens the patience. From another thread
        it also breaks off a start.
        """
        if os.getpid() != self._owner_pid:
            return  # a forked copy of the owner; the cluster is not its to stop
        self._cancel.set()
        starter = self._starter
        if starter is not None and starter is not threading.current_thread():
            starter.join(deadline_s + CONNECT_S)
        self._until_done(self._end, deadline_s=deadline_s)

    def _abandon(self, ask: bool = False) -> None:
        """End what an interrupted start began."""
        self._cancel.set()
        starter = self._starter
        if starter is not None and starter.ident is not None:
            starter.join(CONNECT_S + TERM_S + KILL_S)
        self._end(ask=ask)

    def _until_done(self, end: Callable[..., None], **options: Any) -> None:
        """Run `end` to its end through any number of interrupts; the last of them is raised afterwards."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                end(**options)
                break
            except KeyboardInterrupt as error:
                interrupt = error
                options["ask"] = False
        if interrupt is not None:
            raise interrupt

    def _end(self, ask: bool = True, deadline_s: float = ASK_S + TERM_S + KILL_S) -> None:
        with self._lock:
            self._stopping = True
            client, children, record = self._client, list(self._children.values()), self._record
            if ask:
                for child in children:
                    child.close_input()
            until = time.monotonic() + min(ASK_S, deadline_s / 2)
            _wait_for(children, until if ask else 0.0)
            for signum, patience in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
                for child in children:
                    child.signal_group(signum)
                _wait_for(children, time.monotonic() + patience)
            if client is not None:
                with contextlib.suppress(Exception):  # half-made, or closed by the user
                    client.close(linger=0)
                self._client = None
            if record is not None:
                registry.discard(record)
                self._record = None
            _running.discard(self)

    def _on_child_exit(self, child: Child) -> None:
        """On the child's waiter thread."""
        description = child.describe()
        if self._stopping:
            return
        with self._lock:
            if self._stopping:
                return
            self._exits.append((child.name, description))
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback(child.name, description)


def _wait_for(children: list[Child], until: float) -> None:
    for child in children:
        child.wait(max(0.0, until - time.monotonic()))


@atexit.register
def _stop_all() -> None:
    """The interpreter leaves: so do its clusters. A killed one relies on the orphan guards."""
    for cluster in list(_running):
        cluster.stop()
