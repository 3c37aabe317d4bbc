"""Having groups of nodes that read prompts and groups that answer work together, from the router's side."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

from mlxcel_nb import errors
from mlxcel_nb.client.loading import agree_paths
from mlxcel_nb.client.router import Router, new_id
from mlxcel_nb.cluster.roles import DECODE, PREFILL
from mlxcel_nb.errors import MlxcelError, StepTimeout
from mlxcel_nb.runtime.handoff.orders import JoinOrder, Peer, Ways
from mlxcel_nb.runtime.protocol import LoadOrder, field

JOIN_S = 30.0
"""For all members to have their links."""


def join(
    router: Router,
    orders: Sequence[LoadOrder],
    explain: Callable[[MlxcelError], MlxcelError],
    *,
    digest: str,
    encoding: str,
    least: int,
) -> None:
    """Have the groups of `orders` that read work for those that answer.

    Args:
        digest: hex SHA-256 of the model, which is the same for all.
        encoding: how keys and values travel.
        least: prompts with fewer tokens to read are read where they are answered.

    Raises:
        MlxcelError: the first member that could not.
    """
    readers = [order for order in orders if order.role == PREFILL]
    answerers = [order for order in orders if order.role == DECODE]
    ways = _ways(router, readers, answerers)
    made = {
        order.instance: JoinOrder(
            id=new_id(),
            instance=order.instance,
            model=digest,
            serves=tuple(map(_peer, answerers)) if order in readers else (),
            readers=tuple(map(_peer, readers)) if order in answerers else (),
            encoding=encoding,
            least=least,
            ways=ways,
        )
        for order in (*answerers, *readers)  # those that are dialled hear of it before those that dial
    }
    inbox: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
    waiting = {member.node_id for order in (*answerers, *readers) for member in order.members}
    end = time.monotonic() + JOIN_S
    try:
        for each in made.values():
            router.open_inbox(each.id, lambda node, message: inbox.put((node, message)))
        for order in (*answerers, *readers):
            for member in order.members:
                router.send(member.node_id, made[order.instance].to_dict())
        while waiting:
            try:
                node, message = inbox.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                what = f"its links to the groups it works with are not open after {JOIN_S:g} s"
                raise StepTimeout(what, node=min(waiting)) from None
            if message.get("type") == "joined":
                waiting.discard(node)
            elif message.get("type") in ("error", "lost") and node in waiting:
                raise explain(errors.from_dict(field(message, "error", dict)))
    finally:
        for each in made.values():
            router.close_inbox(each.id)


def _peer(order: LoadOrder) -> Peer:
    return Peer(instance=order.instance, members=order.members)


def _ways(router: Router, readers: Sequence[LoadOrder], answerers: Sequence[LoadOrder]) -> Ways:
    """From whoever reads to whoever answers, and from the leaders of those to the leaders of these."""
    reading = [member for order in readers for member in order.members]
    answering = [member for order in answerers for member in order.members]
    members = [*reading, *answering]
    down = agree_paths(
        router, members, [(i, len(reading) + j) for i in range(len(reading)) for j in range(len(answering))]
    )
    found: Ways = {(members[a].node_id, members[b].node_id): ways for (a, b), ways in down.items()}
    leaders = [order.members[0] for order in (*answerers, *readers)]
    edges = [(i, len(answerers) + j) for i in range(len(answerers)) for j in range(len(readers))]
    up = agree_paths(router, leaders, edges)
    return found | {(leaders[a].node_id, leaders[b].node_id): ways for (a, b), ways in up.items()}
