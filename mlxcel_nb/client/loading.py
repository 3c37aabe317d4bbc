"""Splitting a model over nodes, from the router's side: orders out, progress in, a report or one error."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from mlxcel_nb import errors
from mlxcel_nb.client.report import LoadProgress, LoadReport, PartReport
from mlxcel_nb.client.router import Router
from mlxcel_nb.errors import MlxcelError, PeerLost, StepTimeout
from mlxcel_nb.runtime.protocol import LoadOrder, field

STALL_S = 60.0
"""Loading fails when no node reports progress for this long."""

POLL_S = 0.2

Loaded = dict[str, dict[str, Any]]
"""What each node said it loaded."""


def load_parts(
    router: Router,
    order: LoadOrder,
    on_progress: Callable[[LoadProgress], None] | None,
    explain: Callable[[MlxcelError], MlxcelError],
) -> Loaded:
    """Send `order` to every member and wait until all have loaded.

    Raises:
        MlxcelError: the first thing that went wrong, with what that node was doing.
    """
    inbox: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
    router.open_inbox(order.id, lambda node, message: inbox.put((node, message)))
    doing = dict.fromkeys((member.node_id for member in order.members), "starting to load")
    loaded: Loaded = {}
    heard = time.monotonic()
    try:
        for member in order.members:
            router.send(member.node_id, order.to_dict())
        while len(loaded) < len(doing):
            try:
                node, message = inbox.get(timeout=POLL_S)
            except queue.Empty:
                if time.monotonic() - heard > STALL_S:
                    stuck = next(node for node in doing if node not in loaded)
                    raise StepTimeout(f"no progress for {STALL_S:g} s while {doing[stuck]}", node=stuck) from None
                continue
            heard = time.monotonic()
            kind = message.get("type")
            if kind == "loaded":
                loaded[node] = _checked(message)
            elif kind == "progress":
                news = LoadProgress(
                    node_id=node,
                    what=field(message, "what", str),
                    done_bytes=field(message, "done_bytes", int),
                    total_bytes=field(message, "total_bytes", int),
                )
                doing[node] = f"loading {news.what}"
                if on_progress is not None:
                    on_progress(news)
            elif kind == "lost" and node in doing:
                error = explain(errors.from_dict(field(message, "error", dict)))
                raise type(error)(f"{error.cause} while {doing[node]}", node=node, advice=error.advice)
            elif kind == "error":
                raise explain(errors.from_dict(field(message, "error", dict)))
    finally:
        router.close_inbox(order.id)
    return loaded


def _checked(loaded: dict[str, Any]) -> dict[str, Any]:
    """What a node says it loaded, when it says it in full."""
    for name, kind in (("planned_bytes", int), ("resident_bytes", int), ("dtype", str), ("warnings", list)):
        field(loaded, name, kind)
    return loaded


def drop_parts(router: Router, instance: str, timeout: float) -> None:
    """Make every node that is there and holds part of `instance` free again.

    Raises:
        MlxcelError: the first node that did not do so, after all have been asked. A node that is lost holds nothing.
    """
    first: MlxcelError | None = None
    for node_id in router.alive():
        try:
            router.ask(node_id, {"type": "unload", "instance": instance}, timeout=timeout)
        except PeerLost:
            continue
        except MlxcelError as error:
            first = first or error
    if first is not None:
        raise first


def report(model: str, order: LoadOrder, loaded: Loaded, load_s: float) -> LoadReport:
    """What the user sees of a finished load."""
    layout = order.layout
    parts = tuple(
        PartReport(
            node_id=member.node_id,
            stage=layout.stage_of(index),
            rank=layout.rank_of(index),
            layers=layout.stages[layout.stage_of(index)],
            planned_bytes=loaded[member.node_id]["planned_bytes"],
            resident_bytes=loaded[member.node_id]["resident_bytes"],
        )
        for index, member in enumerate(order.members)
    )
    warnings = [warning for facts in loaded.values() for warning in facts["warnings"]]
    return LoadReport(
        model=model,
        path=order.model,
        layout=layout.name,
        dtype=loaded[order.members[0].node_id]["dtype"],
        parts=parts,
        load_s=load_s,
        warnings=tuple(dict.fromkeys(warnings)),
    )
