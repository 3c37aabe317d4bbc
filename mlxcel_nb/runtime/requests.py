"""The requests under way on a leader, each with the router that it came from. On the node's loop.

A router is obeyed where it asks for text and where it ends what it has asked for itself; another's request is none
of its business. What may wait is bounded in number and in bytes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from mlxcel_nb.errors import Busy, WireError
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.runtime.commands import Cancel, Generate
from mlxcel_nb.runtime.protocol import GenerateOrder, failed_end
from mlxcel_nb.runtime.worker import Worker

MAX_UNDER_WAY = 256
"""Requests that have not ended, whether they run, wait in the scheduler's queue, or wait to be put in it."""

PATIENCE_S = 0.8
"""A cancelled request may end by itself, after its step, before the step is broken off: which costs the blocks that are
kept. So this is most of the second in which all ranks are to have heard of it."""

MAX_WEIGHT = 1 << 22
"""And this much in prompts: room for the largest request, or for 64 of a long context."""


class Requests:
    """Hands requests to the MLX thread and its answers to those who asked."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.refused = 0
        """Requests that came when as much was waiting as may; its owner sets it back when another model is loaded."""
        self._under_way: dict[str, tuple[Generate, ControlLink]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def take(self, order: GenerateOrder, owner: ControlLink) -> None:
        """Queue a request.

        Raises:
            Busy: as much is waiting as may. WireError: the id is in use.
        """
        waiting = sum(request.order.weight for request, _ in self._under_way.values())
        if len(self) >= MAX_UNDER_WAY or (waiting and waiting + order.weight > MAX_WEIGHT):
            self.refused += 1
            raise Busy(f"{len(self)} requests are waiting already", advice="Try again in a moment.")
        if order.id in self._under_way:
            raise WireError("a request with this id is under way")
        command = Generate(order, owner.peer.node_id)
        self._under_way[order.id] = (command, owner)
        self._worker.post(command)

    def stream(self, message: dict[str, Any]) -> None:
        """Pass a piece of an answer on to whoever asked for it; with the last one the request is over."""
        request = self._under_way.get(message["id"])
        if request is None:
            return
        if message["type"] == "end":
            del self._under_way[message["id"]]
        request[1].send_stream(message)

    def cancel(self, request_id: str, owner: ControlLink) -> None:
        """Stop a request of this owner's; one of somebody else's goes on."""
        command, link = self._under_way.get(request_id, (None, None))
        if command is not None and link is owner:
            self._stop(command)

    def cancel_all(self, owner: ControlLink | None = None) -> None:
        """Stop every request, or every one of this owner's."""
        for command, link in list(self._under_way.values()):
            if owner is None or link is owner:
                self._stop(command)

    def fail_all(self, error: dict[str, Any]) -> None:
        """The MLX thread has ended: no answer will come any more."""
        for request_id, (_, owner) in list(self._under_way.items()):
            del self._under_way[request_id]
            owner.send_stream(failed_end(request_id, error))

    def _stop(self, command: Generate) -> None:
        """End a request after the step under way; if that takes long, and is for nobody else, in its middle."""
        if command.cancelled:
            return
        command.cancelled = True
        self._worker.post(Cancel(command.order.id))
        asyncio.get_running_loop().call_later(PATIENCE_S, self._worker.break_off, command.order.id)
