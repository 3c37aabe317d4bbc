"""What a node says of itself when it is asked, as plain data. Any thread may ask; nobody waits for another."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from typing import Any

from mlxcel_nb.cluster.collectives import BACKENDS, OWN
from mlxcel_nb.models import device
from mlxcel_nb.models.memory import room
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.shared_memory.offer import SharedMemoryOffer
from mlxcel_nb.runtime.protocol import LoadOrder
from mlxcel_nb.runtime.worker import Worker


def host_facts() -> dict[str, Any]:
    """The machine and the process."""
    import psutil

    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "platform": f"{platform.system()} {platform.machine()}",
        "memory_bytes": psutil.Process().memory_info().rss,
        "free_bytes": room().available,
        "device": device.kind(),
        "backends": backends(),
    }


def backends() -> list[str]:
    """MLX's names of its own collectives, as far as this MLX was built with them."""
    import mlx.core as mx

    return [name for name in BACKENDS.values() if mx.distributed.is_available(name)]


def worker_facts(worker: Worker) -> dict[str, Any]:
    """What the MLX thread is at."""
    activity, error = worker.activity, worker.broken and str(worker.broken)
    if worker.ended:
        activity = f"stalled: {worker.ended}"
    elif stuck := worker.stuck:
        activity = error = f"stuck in {worker.inside.where}: {stuck}"
    return {"activity": activity, "progress": worker.progress, "error": error}


def link_facts(witnesses: Mapping[str, ControlLink], worker: Worker) -> dict[str, dict[str, Any]]:
    """By member: what its witness knows, and what the hot link beside it goes by, which may have moved."""
    instance = worker.instance
    hot = {each.node: each.link for each in instance.fabric.links.values()} if instance is not None else {}
    facts = {node: witness.info() for node, witness in witnesses.items()}
    for node in facts.keys() & hot.keys():
        facts[node] |= {"transport": hot[node].transport, "why": hot[node].why}
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
