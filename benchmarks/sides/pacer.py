"""Runs inside an engine: answers leave at a set pace, each piece of text numbered and its moment noted.

The request is real, and so is all that a piece passes once it leaves the MLX thread: frames, sockets, the router, the
cell. Only what is said and when is replaced, so that the figure does not depend on how fast the model is.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]

_sent: list[float] = []
_gaps: list[float] = []


def install() -> None:
    """Put the pacer in front of this engine's outgoing answers. Called once, over the control plane."""
    from mlxcel_nb.runtime.worker import Worker

    worker = next(thing for thing in gc.get_objects() if isinstance(thing, Worker))
    stream = worker.outbox.stream

    def hold(message: Message) -> None:
        if not _gaps:
            stream(message)
        elif message["type"] == "end":
            threading.Thread(target=release, args=(stream, message), name="pacer", daemon=True).start()

    worker.outbox = dataclasses.replace(worker.outbox, stream=hold)


def plan(gaps: Sequence[float]) -> None:
    """The next answers consist of one numbered piece after each of these gaps, in seconds; none: as the model says."""
    _gaps[:] = gaps
    _sent.clear()


def sent() -> list[float]:
    """When each piece left, by the clock that all processes of this machine share."""
    return list(_sent)


def release(stream: Callable[[Message], None], end: Message) -> None:
    """Send the planned pieces, then `end`."""
    for number, gap in enumerate(_gaps):
        time.sleep(gap)
        _sent.append(time.monotonic())
        stream({"type": "delta", "id": end["id"], "seq": number, "text": f"#{number} ", "tokens": []})
    stream({**end, "seq": len(_gaps), "text": "", "tokens": []})
