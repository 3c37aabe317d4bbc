"""What tests of whole clusters share: waiting for conditions, striking engines, looking at what is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import psutil

from mlxcel_nb.client.cluster import Cluster


def wait_until(condition: Callable[[], Any], *, deadline_s: float, what: str) -> Any:
    """The first true value of `condition`."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline_s:g} s for {what}")
        time.sleep(0.01)  # the pace of a poll; the condition above decides
    return value


def pid_of(cluster: Cluster, node_id: str) -> int:
    return next(node.pid for node in cluster.nodes if node.node_id == node_id)


def activity(cluster: Cluster, node_id: str) -> str:
    """What the node says it is doing."""
    return str(cluster._running().ask(node_id, {"type": "status"})["status"]["activity"])


def on_engine(cluster: Cluster, node_id: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run `function` in an engine's process, over the control plane."""
    client = cluster.client
    engine = next(eid for eid, name in client._engines.items() if name == node_id)
    return client[engine].apply_async(function, *args, **options).get(timeout=30)


def this_node() -> Any:
    """On an engine: its node."""
    import gc

    from mlxcel_nb.runtime.node import Node

    return next(o for o in gc.get_objects() if isinstance(o, Node))


def raise_in_layer(index: int, call: int) -> None:
    """On an engine: the feed-forward of the `index`-th layer it holds raises at its `call`-th run from now, once.

    With several ranks the others wait in that layer's second all-reduce by then, whose first is done. The error says
    when that was, by the host's monotonic clock, which all its processes share.
    """
    import time

    from mlxcel_nb.models.stages import Held

    layers: list[Any] = this_node()._worker.instance.part.skeleton.layers
    mlp: Any = [layer for layer in layers if issubclass(type(layer), Held)][index].mlp
    own: Any = type(mlp)
    seen = 0

    class Struck(own):  # type: ignore[misc]
        def __call__(self, x: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == call:
                self.__class__ = own
                raise ZeroDivisionError(f"struck in layer {index + 1} at {time.monotonic():.3f}")
            return super().__call__(x)

    mlp.__class__ = Struck


def raise_for_seed(index: int, seed: int | None) -> None:
    """On an engine: the `index`-th layer it holds raises whenever the request with this seed is in a step; None: no
    more.
    """
    from mlxcel_nb.runtime import execution

    module: Any = execution
    own = getattr(module, "own_run", execution.Execution.run)
    marked: set[int] = set()

    def run(self: Any, plan: Any, recording: Any = None) -> Any:
        for opened in plan.open:
            if opened.params.get("seed") == seed:
                marked.add(opened.sequence)
        if any(row in marked for work in plan.work for row in work.sequences):
            raise_in_layer(index, 1)
        return own(self, plan, recording)

    module.own_run = own
    execution.Execution.run = own if seed is None else run  # type: ignore[method-assign, assignment]


def die_in_step(call: int) -> None:
    """On an engine: the process kills itself at the beginning of its `call`-th step from now."""
    import os
    import signal

    part = this_node()._worker.instance.part
    forward, seen = part.forward, 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(*args, **kwargs)

    part.forward = wrapped


def when_loaded(function: Callable[..., None], *args: Any) -> None:
    """On an engine: call `function` as soon as the next part is loaded, before its first step."""
    import importlib

    loading: Any = importlib.import_module("mlxcel_nb.runtime.loading")
    load = loading.load

    def struck(worker: Any, *arguments: Any) -> Any:
        loading.load = load
        worker.instance = load(worker, *arguments)
        function(*args)
        return worker.instance

    loading.load = struck


def draw(tokens: list[int]) -> None:
    """On an engine: requests draw these tokens in turn, whatever the logits are; none: their own again."""
    from mlxcel_nb.models import sampling
    from mlxcel_nb.runtime import execution

    own, left = sampling.sample_rows, iter(tokens)

    def sample(samplers: Any, logits: Any) -> Any:
        return [each._replace(token=next(left)) for each in own(samplers, logits)]

    module: Any = execution
    module.sample_rows = sample if tokens else own


Recorded = list[tuple[int, float]]
"""Tokens as they were drawn, each with how far the two likeliest logits were apart."""


def record_gaps() -> None:
    """On an engine: note each token that is drawn from now on, and how far the two likeliest logits were apart."""
    import numpy as np

    from mlxcel_nb.runtime import execution

    module: Any = execution
    own = getattr(module, "own_sample_rows", module.sample_rows)

    def sample(samplers: Any, logits: Any) -> Any:
        drawn = own(samplers, logits)
        best = np.partition(np.array(logits, dtype=np.float32), -2)[:, -2:]
        module.gaps += [(each.token, float(row[1] - row[0])) for each, row in zip(drawn, best, strict=True)]
        return drawn

    module.gaps, module.own_sample_rows, module.sample_rows = [], own, sample


def recorded_gaps() -> Recorded:
    """On an engine: what `record_gaps` has noted since it was last asked."""
    from mlxcel_nb.runtime import execution

    module: Any = execution
    found: Recorded = list(module.gaps)
    module.gaps = []
    return found


def note_failures() -> None:
    """On the engine that leads: note what steps fail of from now on, other than by being cancelled."""
    from mlxcel_nb.errors import Cancelled
    from mlxcel_nb.runtime import engine

    module: Any = engine
    own = getattr(module, "own_failed", module.Engine._failed)

    def failed(self: Any, caught: Exception) -> None:
        if not isinstance(caught, Cancelled):
            module.failures.append(f"{type(caught).__name__}: {caught}")
        own(self, caught)

    module.failures, module.own_failed, module.Engine._failed = [], own, failed


def failures() -> list[str]:
    """On the engine that leads: what `note_failures` noted."""
    from mlxcel_nb.runtime import engine

    module: Any = engine
    return list(module.failures)


class Held(NamedTuple):
    """Bytes that an engine has: all of its caches and kept blocks, the caches alone, and all that MLX has."""

    nbytes: int
    caches: int
    active: int


def held() -> Held:
    """On an engine: what there is of keys, values and states."""
    import gc

    import mlx.core as mx

    worker = this_node()._worker
    execution = (worker.engine or worker.follower)._execution
    gc.collect()
    if execution is None:
        return Held(0, 0, mx.get_active_memory())
    for _ in range(100):
        try:
            blocks = sum(block.nbytes for block in list(execution._blocks.values()))
            nbytes = execution.nbytes
        except RuntimeError:  # the MLX thread, whose they are, has changed them meanwhile
            continue
        return Held(nbytes, nbytes - blocks, mx.get_active_memory())
    raise RuntimeError("what is held changes all the time")


def limit_engine(**changes: Any) -> None:
    """On an engine: models that it leads from now on have these `Limits`; nothing: those of their own again.

    Args:
        changes: fields of them; `tokens` is room for one sequence of so many, on every node.
    """
    from dataclasses import replace

    from mlxcel_nb.plan.capacity import Room
    from mlxcel_nb.runtime import engine

    module: Any = engine
    own = getattr(module, "own_limits_of", module.limits_of)
    tokens = changes.pop("tokens", None)

    def limits_of(*args: Any) -> Any:
        limits = own(*args)
        if tokens is not None:
            rooms = tuple(tuple(Room(room.caches, room.at(tokens)) for room in home) for home in limits.rooms)
            limits = replace(limits, rooms=rooms)
        return replace(limits, **changes)

    module.own_limits_of, module.limits_of = own, limits_of


def raise_in_load(call: int) -> None:
    """On an engine: loading raises at its `call`-th look for an abort, once."""
    worker = this_node()._worker
    check, seen = worker.check, 0

    def wrapped() -> None:
        nonlocal seen
        seen += 1
        if seen == call:
            worker.check = check
            raise ZeroDivisionError("struck while loading")
        check()

    worker.check = wrapped


def strike(cluster: Cluster, node_id: str, how: int) -> None:
    """Send an engine a signal."""
    os.kill(pid_of(cluster, node_id), how)


@contextmanager
def nothing_left(cluster: Cluster) -> Iterator[Cluster]:
    """A started cluster whose every process is gone after it has been stopped."""
    before = children()
    cluster.start()
    pids = children() - before
    assert {node.pid for node in cluster.nodes} <= pids
    try:
        yield cluster
    finally:
        for node in cluster.nodes:
            if psutil.pid_exists(node.pid):
                kill_if_there(node.pid, signal.SIGCONT)
        cluster.stop()
    wait_until(lambda: not any(lives(pid) for pid in pids), deadline_s=10, what="every process to be gone")


def children() -> set[int]:
    """Every process below this one."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def kill_if_there(pid: int, how: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, how)


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
