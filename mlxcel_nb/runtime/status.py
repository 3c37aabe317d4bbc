"""What a node says of itself when it is asked, as plain data. Any thread may ask; nobody waits for another."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Mapping
from typing import Any

from mlxcel_nb.cluster.collectives import BACKENDS, OWN
from mlxcel_nb.cluster.membership import stalled
from mlxcel_nb.models import device
from mlxcel_nb.models.memory import room
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.shared_memory.offer import SharedMemoryOffer
from mlxcel_nb.runtime.engine_facts import EngineFacts
from mlxcel_nb.runtime.protocol import LoadOrder
from mlxcel_nb.runtime.spans import BYTES, Kind
from mlxcel_nb.runtime.worker import Worker
from mlxcel_nb.util import times


def host_facts() -> dict[str, Any]:
    """The machine and the process."""
    import psutil

    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "platform": f"{platform.system()} {platform.machine()}",
        "memory_bytes": psutil.Process().memory_info().rss,
        "arrays_bytes": arrays_bytes(),
        "free_bytes": room().available,
        "device": device.kind(),
        "backends": backends(),
    }


def arrays_bytes() -> int:
    """What MLX's arrays take in this process: weights, keys and values, and whatever is being computed."""
    import mlx.core as mx

    return mx.get_active_memory()


def backends() -> list[str]:
    """MLX's names of its own collectives, as far as this MLX was built with them."""
    import mlx.core as mx

    return [name for name in BACKENDS.values() if mx.distributed.is_available(name)]


def worker_facts(worker: Worker) -> dict[str, Any]:
    """What the MLX thread is at."""
    activity, error, why = worker.activity, worker.broken and str(worker.broken), ""
    still_s = time.monotonic() - moved_s(worker)
    if worker.ended:
        why = str(worker.ended)
        activity = f"stalled: {why}"
    elif stuck := worker.stuck:
        activity = error = why = f"stuck in {worker.inside.where}: {stuck}"
    elif stalled(activity != "idle", still_s, step_s(worker)):
        why = f"no progress for {still_s:.0f} s"
        activity = f"stalled: {why} in {activity}"
    return {"activity": activity, "progress": progress(worker), "error": error, "stalled": why}


def progress(worker: Worker) -> int:
    """Grows while anything is done: a step, a layer of a prompt, a frame that comes or goes over a slow link."""
    return worker.progress + sum(link.moves for link in _hot_links(worker))


def moved_s(worker: Worker) -> float:
    """When anything was done last, by the monotonic clock."""
    return max(worker.moved_s, *(link.watched_until for link in _hot_links(worker)), 0.0)


def _hot_links(worker: Worker) -> list[HotLink]:
    instance = worker.instance
    return [] if instance is None else list(instance.fabric.links.values())


def step_s(worker: Worker) -> float:
    """After how long without progress a step of the loaded model fails."""
    instance = worker.instance
    return times.STEP_S if instance is None else instance.order.step_s


def engine_facts(worker: Worker) -> EngineFacts | None:
    """Of the requests, where this node leads."""
    engine = worker.engine
    return None if engine is None else engine.ledger.facts


def load_figures(worker: Worker) -> dict[str, float]:
    """What heartbeats say beside progress."""
    figures = {"step_s": step_s(worker)}
    if (facts := engine_facts(worker)) is not None:
        figures |= {
            "running": facts.running,
            "waiting": facts.waiting,
            "waiting_tokens": facts.waiting_tokens,
            "kv_tokens": facts.kv_tokens,
            "kv_used_bytes": facts.kv_used_bytes,
            "kv_available_bytes": facts.kv_available_bytes,
        }
    return figures


def work_facts(worker: Worker, refused: int) -> dict[str, Any]:
    """What the time went to: in all since the node started, and in the latest steps; and what the leader knows.

    Args:
        refused: requests that never came to the engine, because too much was waiting; they count as its own.
    """
    spans, facts = worker.spans, engine_facts(worker)
    engine = None if facts is None else facts.to_dict()
    if engine is not None:
        engine["refused"] += refused
    return {
        "engine": engine,
        "seconds": {kind.word: spans.totals[kind] for kind in Kind},
        "latest": spans.shares(),
        "spans": spans.written,
        "spans_bytes": BYTES,
    }


def link_facts(witnesses: Mapping[str, ControlLink], worker: Worker) -> dict[str, dict[str, Any]]:
    """By member: what its witness knows, and what the hot link beside it goes by, which may have moved."""
    instance = worker.instance
    hot = {each.node: each.link for each in instance.fabric.links.values()} if instance is not None else {}
    facts = {node: witness.info() for node, witness in witnesses.items()}
    for node in facts.keys() & hot.keys():
        facts[node] |= {"transport": hot[node].transport, "why": hot[node].why}
        facts[node]["hot_received_bytes"] = hot[node].reader.total  # what was sent, its other end received
        if hot[node].transport == SharedMemoryOffer.transport:
            facts[node]["path"] = ""  # which is the witness's
    return facts


def model_facts(worker: Worker, order: LoadOrder | None) -> dict[str, Any] | None:
    """The part of a model that is loaded here, None without one."""
    instance = worker.instance
    if order is None or instance is None:
        return None
    me, layout = instance.me, order.layout
    return {
        "instance": order.instance,
        "path": order.model,
        "layout": layout.name,
        "stage": layout.stage_of(me),
        "rank": layout.rank_of(me),
        "layers": list(layout.stages[layout.stage_of(me)]),
        "dtype": instance.part.dtype,
        "collectives": order.collectives if layout.tp > 1 else OWN,
        "exchanges": instance.fabric.exchanges,
        "planned_bytes": instance.part.planned_bytes,
        "resident_bytes": instance.part.resident_bytes,
    }
