"""What a node says of itself when it is asked, as plain data. Any thread may ask; nobody waits for another."""

from __future__ import annotations

import os
import platform
import socket
from typing import Any

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
    }


def worker_facts(worker: Worker) -> dict[str, Any]:
    """What the MLX thread is at."""
    return {
        "activity": f"stalled: {worker.ended}" if worker.ended else worker.activity,
        "progress": worker.progress,
        "error": str(worker.broken) if worker.broken else None,
    }


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
        "planned_bytes": instance.part.planned_bytes,
        "resident_bytes": instance.part.resident_bytes,
    }
