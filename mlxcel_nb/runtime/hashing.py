"""What a node says of a model folder before it loads from it: where it lies, and each file's hash. On the node's loop.

Reading gigabytes takes a while the first time, so it is done on a thread, with progress; asking again, the model being
unwanted, or the asker gone ends it within a piece. Only a router is answered; the node has checked that.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxcel_nb import errors
from mlxcel_nb.errors import Cancelled
from mlxcel_nb.models.digest import folder_bytes, folder_digests
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.runtime.protocol import field

TOLD_EVERY_S = 0.1


class Hashing:
    """One folder at a time for each who asks; what one of them gives up is nothing to the others.

    Args:
        soon: calls a function on the loop, from any thread.
    """

    def __init__(self, node_id: str, soon: Callable[..., None]) -> None:
        self._node_id = node_id
        self._soon = soon
        self._stops: dict[ControlLink, threading.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def order(self, asker: ControlLink, message: dict[str, Any]) -> None:
        """Hash the folder `model` and reply; what was under way for `asker` is given up."""
        request_id, model = field(message, "id", str), field(message, "model", str)
        self.left(asker)
        stop = self._stops[asker] = threading.Event()
        task = asyncio.get_running_loop().create_task(self._answer(asker, request_id, Path(model), stop))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def left(self, asker: ControlLink) -> None:
        """`asker` does not want to know any more, or its connection has ended."""
        if stop := self._stops.pop(asker, None):
            stop.set()

    def close(self) -> None:
        """Nobody wants to know any more."""
        for asker in list(self._stops):
            self.left(asker)

    async def _answer(self, asker: ControlLink, request_id: str, folder: Path, stop: threading.Event) -> None:
        told = 0.0

        def progress(name: str, done: int, total: int) -> None:
            nonlocal told
            if stop.is_set():
                raise Cancelled("its files need not be compared any more")
            if (now := time.monotonic()) - told >= TOLD_EVERY_S:
                told = now
                self._soon(asker.send, {
                    "type": "progress", "id": request_id, "node": self._node_id, "what": name,
                    "done_bytes": done, "total_bytes": total,
                })  # fmt: skip

        try:
            answer = await asyncio.to_thread(_look, folder, progress, self._node_id)
            asker.send({"id": request_id, **answer})
        finally:
            if self._stops.get(asker) is stop:
                del self._stops[asker]


def _look(folder: Path, progress: Callable[[str, int, int], None], node_id: str) -> dict[str, Any]:
    """The answer: the hashes, or why there are none; where `folder` lies, links followed, and how much is in it."""
    path = os.fsencode(os.path.realpath(folder)).decode("utf-8", "replace")
    about = {"host": socket.gethostname(), "path": path, "bytes": folder_bytes(folder)}
    try:
        return {"type": "reply", "digests": folder_digests(folder, progress), **about}
    except Exception as error:  # noqa: BLE001  # whatever went wrong, somebody waits for an answer
        return {"type": "error", "error": errors.wrap(error, node_id).to_dict(), **about}
