"""Whether all nodes have the same model: the hashes of its files, asked for and compared before anything is loaded.

`check_same` asks, and may be called from any thread; `client.differences` judges. Of a node's word the form is checked.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mlxcel_nb import errors
from mlxcel_nb.client.differences import Found, difference
from mlxcel_nb.client.report import LoadProgress
from mlxcel_nb.client.router import Router, new_id
from mlxcel_nb.errors import MlxcelError, StepTimeout, WireError
from mlxcel_nb.models.digest import whole_sha256
from mlxcel_nb.runtime.protocol import LoadOrder, field

POLL_S = 0.2

GRACE_S = 20.0
"""Once a load is sure to be refused, so long are the other nodes heard to the end: hashes that are remembered, or of a
few files, come within it; nobody should wait minutes for gigabytes that will not be loaded."""

LONGEST_PATH = 1000
"""Characters of a path that are shown."""


def check_same(
    router: Router,
    orders: Sequence[LoadOrder],
    on_progress: Callable[[LoadProgress], None] | None,
    explain: Callable[[MlxcelError], MlxcelError],
    *,
    stall_s: float,
) -> str:
    """Have every member of all `orders`, which are of one model, hash its files, all at once, and compare.

    Returns:
        Hex SHA-256 of the model; "" of one that a single node has, which compares with nobody.

    Args:
        stall_s: a member that says nothing for so long counts as one that does not answer.

    Raises:
        ModelError: members have other files, or none; its table has a row for every member. MlxcelError: a member is
            gone or silent.
    """
    members = [member.node_id for order in orders for member in order.members]
    if len(members) == 1:
        return ""
    found = _ask(router, members, orders[0].model, on_progress, stall_s)
    explained = [replace(each, error=explain(each.error)) if each.error else each for each in found]
    if error := difference(explained):
        raise error
    return whole_sha256(found[0].digests or {})


def _ask(
    router: Router,
    members: Sequence[str],
    model: str,
    on_progress: Callable[[LoadProgress], None] | None,
    stall_s: float,
) -> list[Found]:
    """What each member says, in their order. Ends when all have answered, one is gone, or `GRACE_S` after bad news."""
    inbox: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
    request_id = new_id()
    router.open_inbox(request_id, lambda node, message: inbox.put((node, message)))
    found = {node: Found(node=node) for node in members}
    heard = dict.fromkeys(found, time.monotonic())
    """When each that has yet to answer said something last."""
    end = float("inf")
    try:
        for node in found:
            router.send(node, {"type": "digest", "id": request_id, "model": model})
        while heard and time.monotonic() < end:
            try:
                node, message = inbox.get(timeout=POLL_S)
            except queue.Empty:
                for node in [each for each, last in heard.items() if time.monotonic() - last > stall_s]:
                    silent = StepTimeout(f"no progress for {stall_s:g} s with hashes of files", node=node)
                    found[node] = Found(node=node, error=silent)
                    del heard[node]
                    end = min(end, time.monotonic() + GRACE_S)
                continue
            if node not in heard:
                continue
            heard[node] = time.monotonic()
            kind = message.get("type")
            if kind == "progress" and on_progress is not None:
                on_progress(progress_of(node, message, comparing=True))
            elif kind in ("reply", "error", "lost"):
                del heard[node]
                found[node] = _read(message, node)
                if kind != "reply":
                    grace = 0.0 if kind == "lost" else GRACE_S
                    end = min(end, time.monotonic() + grace)
    finally:
        router.close_inbox(request_id)
    return list(found.values())


def progress_of(node: str, message: dict[str, Any], *, comparing: bool = False) -> LoadProgress:
    """How far a node says it is."""
    return LoadProgress(
        node_id=node,
        what=field(message, "what", str),
        done_bytes=field(message, "done_bytes", int),
        total_bytes=field(message, "total_bytes", int),
        comparing=comparing,
    )


def _read(message: dict[str, Any], node: str) -> Found:
    """A node's answer. Of one that has no hashes to tell, what is known of its folder may be missing.

    Raises:
        WireError: a reply without hashes.
    """
    size = message.get("bytes")
    known = Found(
        node=node,
        host=errors.printable(str(message.get("host") or ""))[:LONGEST_PATH],
        path=errors.printable(str(message.get("path") or ""))[:LONGEST_PATH],
        size=size if type(size) is int and size >= 0 else None,
    )
    if message.get("type") != "reply":
        return replace(known, error=errors.from_dict(field(message, "error", dict)).at(node))
    told = message.get("digests")
    if (
        not isinstance(told, dict)
        or not told
        or not all(isinstance(digest, str) and len(digest) == 64 for digest in told.values())
    ):
        raise WireError("the hashes of its files are none", node=node)
    return replace(known, digests={errors.printable(str(name)): digest for name, digest in told.items()})
