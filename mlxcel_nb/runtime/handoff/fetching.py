"""The links from a leader to the leaders of instances that read for it, and what is asked on them. On the node's loop.

To those it is like a router: it asks for text of one token, and hears of it on a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxcel_nb.errors import MlxcelError, PeerLost
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.runtime.protocol import failed_end

Message = dict[str, Any]


class Fetching:
    """Of one node.

    Args:
        heard: takes what comes of what was asked.
    """

    def __init__(self, heard: Callable[[Message], None]) -> None:
        self._heard = heard
        self._links: dict[str, ControlLink] = {}
        self._asked: dict[str, str] = {}

    def open(self, instance: str, link: Link) -> None:
        """Ask the leader of `instance` by this link."""
        self._links[instance] = ControlLink(
            link, on_message=self._message, on_stream=self._stream, on_state=self._state, measure=True
        )

    def ask(self, message: Message) -> None:
        """Send what the MLX thread has for the leader of an instance: a request, or its end."""
        instance, request = str(message.get("instance")), str(message.get("id"))
        link = self._links.get(instance)
        if message["type"] == "cancel":
            self._asked.pop(request, None)
            if link is not None:
                link.send({"type": "cancel", "id": request})
            return
        if link is None:
            error: MlxcelError = PeerLost("whoever reads prompts is lost")
            self._heard(failed_end(request, error.to_dict()))
            return
        self._asked[request] = instance
        link.send(message)

    def close(self) -> None:
        """Nobody asks any more."""
        links, self._links = self._links, {}
        self._asked.clear()
        for link in links.values():
            link.close("the model is unloaded")

    def info(self) -> list[Message]:
        return [link.info() for link in self._links.values()]

    def _stream(self, _link: ControlLink, message: Message) -> None:
        request = str(message.get("id"))
        if request not in self._asked:
            return
        if message.get("type") == "end":
            del self._asked[request]
        self._heard(message)

    def _message(self, _link: ControlLink, message: Message) -> None:
        """What is said in answer to a message that was refused."""
        request = str(message.get("id"))
        if message.get("type") == "error" and self._asked.pop(request, None) is not None:
            self._heard(failed_end(request, message.get("error") or {}))

    def _state(self, link: ControlLink, state: str, reason: str) -> None:
        if state not in ("dead", "closed"):
            return
        gone = [instance for instance, each in self._links.items() if each is link]
        for instance in gone:
            del self._links[instance]
            error = PeerLost(reason, node=link.peer.node_id).to_dict()
            for request in [request for request, asked in self._asked.items() if asked == instance]:
                del self._asked[request]
                self._heard(failed_end(request, error))
