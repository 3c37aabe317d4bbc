"""Control messages that have arrived on a hot link and wait to be read, and the aborts among them.

Belongs to the thread that owns the link; no I/O. The peer is a member: what it can make us hold is bounded.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple

from mlxcel_nb.errors import MlxcelError, PeerAborted, WireError, from_dict
from mlxcel_nb.net.hot.tag import Tag

MAX_BYTES = 16 << 20
"""Messages that wait to be read: a leader is ahead of its followers by the steps of one prompt at most."""

MESSAGE_BYTES = 256
"""What the smallest message takes in memory."""


class Abort(NamedTuple):
    """A peer left a step.

    Attributes:
        error: what it said, as this side raises it; names the node that failed.
        code: of the peer's own error.
        collective: the peer left a collective that this side may be in; it is still there and can be asked.
    """

    error: MlxcelError
    code: str
    collective: bool


class Controls:
    """Messages in order of arrival."""

    def __init__(self) -> None:
        self.kept: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self.kept)

    def keep(self, message: dict[str, Any], size: int) -> None:
        """Hold a message that took `size` bytes on the wire.

        Raises:
            WireError: more than can be kept.
        """
        self.kept.append((size + MESSAGE_BYTES, message))
        self._bytes += size + MESSAGE_BYTES
        if self._bytes > MAX_BYTES:
            raise WireError("more messages than can be kept")

    def next(self) -> dict[str, Any]:
        """The oldest message, which is no longer kept."""
        size, message = self.kept.popleft()
        self._bytes -= size
        return message

    def abort(self, tag: Tag, node: str) -> Abort | None:
        """An abort by `node` that concerns the step of `tag`, if there is one; aborts of what is over are forgotten.

        Raises:
            WireError: an abort without epoch and step.
        """
        for kept in list(self.kept):
            size, message = kept
            if message.get("type") != "abort":
                continue
            epoch, step = message.get("epoch"), message.get("step", -1)
            if not isinstance(epoch, int) or not isinstance(step, int):
                raise WireError("an abort without epoch and step")
            self.kept.remove(kept)
            self._bytes -= size
            # A rank that has left a collective does not come back in the same epoch: a step behind or not, it matters.
            if epoch > tag.epoch or (epoch == tag.epoch and (step < 0 or step >= tag.step or "seq" in message)):
                return _read(message, node)
        return None


def abort_message(tag: Tag, error: MlxcelError) -> dict[str, Any]:
    """What a rank tells the others when it leaves the collective of `tag`."""
    return {"type": "abort", "epoch": tag.epoch, "step": tag.step, "seq": tag.seq, "error": error.to_dict()}


def _read(message: Mapping[str, Any], node: str) -> Abort:
    details = message.get("error")
    told = from_dict(details if isinstance(details, dict) else {"cause": "the step was given up"})
    error = PeerAborted(told.cause, node=told.node or node, advice=told.advice)
    return Abort(error, told.code, "seq" in message)
