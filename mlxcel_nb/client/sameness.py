"""Whether all nodes have the same model: the hashes of its files, asked for and compared before anything is loaded.

`difference` is pure; `check_same` asks, and may be called from any thread. A node's word is checked for its form.
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from mlxcel_nb import errors
from mlxcel_nb.client.report import LoadProgress
from mlxcel_nb.client.router import Router, new_id
from mlxcel_nb.errors import MlxcelError, ModelError, StepTimeout, WireError
from mlxcel_nb.models.digest import whole_sha256
from mlxcel_nb.runtime.protocol import LoadOrder, field

Digests = Mapping[str, str]
"""Hex SHA-256 by file name."""

SHOWN = 16
"""Hex digits of a hash that an error quotes: enough to look it up by, and to fit two into a line."""

POLL_S = 0.2

_AGAIN = "Copy the model's folder from one to the other, or get it again, so that all nodes have the same files."


def difference(digests: Mapping[str, Digests]) -> ModelError | None:
    """What the first node that differs from most has otherwise, with both hashes; None where all are equal.

    Args:
        digests: of each node. Of several kinds that are as common, the first one's is taken for right.
    """
    kinds = {node: whole_sha256(found) for node, found in digests.items()}
    usual = Counter(kinds.values()).most_common(1)[0][0]
    other = next((node for node, kind in kinds.items() if kind != usual), None)
    if other is None:
        return None
    model = next(node for node, kind in kinds.items() if kind == usual)
    here, there = digests[other], digests[model]
    name = next(name for name in sorted({*here, *there}) if here.get(name) != there.get(name))
    if name not in here:
        what = f"has no {name}, which {model} has with sha256 {there[name][:SHOWN]}"
    elif name not in there:
        what = f"has a {name} with sha256 {here[name][:SHOWN]}, which {model} has not"
    else:
        what = f"has another {name} than {model}: sha256 {here[name][:SHOWN]}, not {there[name][:SHOWN]}"
    return ModelError(f"{what}; nothing was loaded", node=other, advice=_AGAIN)


def check_same(
    router: Router,
    order: LoadOrder,
    on_progress: Callable[[LoadProgress], None] | None,
    explain: Callable[[MlxcelError], MlxcelError],
    *,
    stall_s: float,
) -> None:
    """Have every member of `order` hash its files, all at once, and compare.

    Raises:
        ModelError: a member has other files, or none. MlxcelError: a member is gone or has said nothing for `stall_s`.
    """
    if len(order.members) == 1:
        return
    inbox: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
    request_id = new_id()
    router.open_inbox(request_id, lambda node, message: inbox.put((node, message)))
    members = {member.node_id for member in order.members}
    found: dict[str, Digests] = {}
    heard = time.monotonic()
    try:
        for node in members:
            router.send(node, {"type": "digest", "id": request_id, "model": order.model})
        while len(found) < len(members):
            try:
                node, message = inbox.get(timeout=POLL_S)
            except queue.Empty:
                if time.monotonic() - heard > stall_s:
                    silent = next(m.node_id for m in order.members if m.node_id not in found)
                    raise StepTimeout(f"no progress for {stall_s:g} s with hashes of files", node=silent) from None
                continue
            heard = time.monotonic()
            kind = message.get("type")
            if kind == "reply":
                found[node] = _read(message, node)
            elif kind == "progress" and on_progress is not None:
                on_progress(progress_of(node, message, comparing=True))
            elif kind == "error" or (kind == "lost" and node in members):
                raise explain(errors.from_dict(field(message, "error", dict)))
    finally:
        router.close_inbox(request_id)
    if error := difference({member.node_id: found[member.node_id] for member in order.members}):
        raise error


def progress_of(node: str, message: dict[str, Any], *, comparing: bool = False) -> LoadProgress:
    """How far a node says it is."""
    return LoadProgress(
        node_id=node,
        what=field(message, "what", str),
        done_bytes=field(message, "done_bytes", int),
        total_bytes=field(message, "total_bytes", int),
        comparing=comparing,
    )


def _read(message: dict[str, Any], node: str) -> Digests:
    told = message.get("digests")
    if (
        not isinstance(told, dict)
        or not told
        or not all(isinstance(digest, str) and len(digest) == 64 for digest in told.values())
    ):
        raise WireError("the hashes of its files are none", node=node)
    return told
