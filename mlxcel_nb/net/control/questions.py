"""Questions that were asked over control links, until their answers come. On the loop of the links.

An answer has the id of its question, and counts only when it comes from the node that was asked. It is a member's word.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

from mlxcel_nb import errors
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.net.control.control_link import ControlLink

Message = dict[str, Any]


class Questions:
    """Those of one asker, over any number of links."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[str, asyncio.Future[Message]]] = {}
        """By their ids: the node that was asked, and its answer."""

    @contextlib.contextmanager
    def ask(self, link: ControlLink, message: Message) -> Iterator[asyncio.Future[Message]]:
        """Send `message`, which gets an id; within the block its answer is waited for."""
        question = uuid.uuid4().hex
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[question] = link.peer.node_id, answer
        try:
            link.send({**message, "id": question})
            yield answer
        finally:
            del self._asked[question]

    def take(self, link: ControlLink, message: Message) -> bool:
        """Whether `message`, which came over `link`, is an answer that somebody waits for."""
        asked, answer = self._asked.get(str(message.get("id")), ("", None))
        if answer is None or asked != link.peer.node_id or message.get("type") not in ("reply", "error"):
            return False
        if not answer.done():
            answer.set_result(message)
        return True

    def fail(self, error: MlxcelError, node_id: str | None = None) -> None:
        """No answer will come any more: from `node_id`, or from anybody."""
        for asked, answer in self._asked.values():
            if node_id in (None, asked) and not answer.done():
                answer.set_exception(error)


def unless_error(answer: Message) -> Message:
    """`answer`, unless it is an error: then that is raised."""
    if answer.get("type") == "error":
        details = answer.get("error")
        raise errors.from_dict(details if isinstance(details, dict) else {})
    return answer
