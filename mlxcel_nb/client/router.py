"""The notebook's place on the data plane: a node without a model, in the role `router`.

`Router` keeps one control link to each node and matches answers with questions. Its methods may be called from
any thread but its own loop's; every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import queue
import uuid
from collections.abc import Callable
from typing import Any

from mlxcel_nb import errors
from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.names import new_incarnation, router_id
from mlxcel_nb.cluster.paths import way
from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.cluster.shape import LinkPlan
from mlxcel_nb.errors import ClusterError, PeerLost, StepTimeout
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.interfaces.probe import probe
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.net.links.link import Link, local_address
from mlxcel_nb.runtime.protocol import field
from mlxcel_nb.util import times
from mlxcel_nb.util.loop import LoopThread
from mlxcel_nb.wire import messages
from mlxcel_nb.wire.handshake import Identity

Message = dict[str, Any]
Inbox = Callable[[str, Message], None]
"""Takes the node's id and a message of it; called on the router's loop, must not block."""

CALL_S = 10.0
"""A small question, such as status, is answered within this."""


def new_id() -> str:
    """Names a request; unguessable and unique."""
    return uuid.uuid4().hex[:16]


class Router:
    """Links to all nodes of a cluster.

    Args:
        links: what they are made to be like.
    """

    def __init__(self, cluster: str, secret: Secret, links: LinkPlan | None = None) -> None:
        self.node_id = router_id()
        self._shapes = links.seen_from(self.node_id) if links else None
        self._identity = Identity(cluster=cluster, node_id=self.node_id, role="router", incarnation=new_incarnation())
        self._secret = secret
        self._io = LoopThread("router-io")
        self._links: dict[str, ControlLink] = {}
        self._states: dict[str, tuple[str, str]] = {}
        self._inboxes: dict[str, Inbox] = {}
        self._asking: set[asyncio.Task[None]] = set()

    # -- any thread -------------------------------------------------------------------------------

    def connect(self, nodes: dict[str, Address], deadline_s: float = times.HANDSHAKE_S) -> None:
        """Dial every node at once.

        Raises:
            MlxcelError: the first node that cannot be reached or refuses.
        """
        self._io.call(self._connect(nodes), timeout=2 * deadline_s, what=f"links to {', '.join(nodes)}")

    def open_inbox(self, request_id: str, inbox: Inbox) -> None:
        """Messages that carry `request_id` go to `inbox`, until `close_inbox`."""
        self._inboxes[request_id] = inbox

    def close_inbox(self, request_id: str) -> None:
        self._inboxes.pop(request_id, None)

    def send(self, node_id: str, message: Message) -> None:
        """Queue a control message.

        Raises:
            PeerLost: there is no link to `node_id` any more. WireError: `message` cannot travel.
        """
        if node_id not in self._links:
            state, reason = self._states.get(node_id, ("unknown", "never connected"))
            raise PeerLost(f"{state}: {reason}", node=node_id)
        self._io.soon(self._send, node_id, message.get("id"), messages.pack(message))

    def ask(self, node_id: str, message: Message, *, timeout: float = CALL_S) -> Message:
        """Send `message` with a fresh id and wait for the answer to it.

        Raises:
            StepTimeout: no answer in time. PeerLost: the node went away. MlxcelError: what the node answered.
        """
        answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        request_id = new_id()
        self.open_inbox(request_id, lambda node, answer: answers.put(answer) if node == node_id else None)
        try:
            self.send(node_id, {**message, "id": request_id})
            answer = answers.get(timeout=timeout)
        except queue.Empty:
            raise StepTimeout(f"no answer to {message['type']!r} within {timeout:g} s", node=node_id) from None
        finally:
            self.close_inbox(request_id)
        if answer.get("type") in ("error", "lost"):
            raise errors.from_dict(field(answer, "error", dict))
        return answer

    def state(self, node_id: str) -> tuple[str, str]:
        """("alive" | "suspect" | "dead", why)."""
        return self._states.get(node_id, ("dead", "never connected"))

    def alive(self) -> list[str]:
        """Ids of the nodes that are not dead, in the order they were connected."""
        return [node for node, (state, _) in self._states.items() if state != "dead"]

    def link_info(self, node_id: str) -> Message:
        """Cipher, round trip and so on of the link to a node, or {}."""
        link = self._links.get(node_id)
        return link.info() if link else {}

    def versions(self, node_id: str) -> dict[str, str]:
        """Library versions the node named in its first frame."""
        link = self._links.get(node_id)
        versions = link.peer.hello.get("versions") if link else None
        return {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}

    def close(self) -> None:
        """Close every link politely and end the loop."""
        try:
            self._io.call(self._close(), timeout=times.HANDSHAKE_S, what="the router's links to close")
        except StepTimeout:
            pass
        finally:
            self._io.close()

    # -- the loop ---------------------------------------------------------------------------------

    async def _connect(self, nodes: dict[str, Address]) -> None:
        await asyncio.gather(*(self._dial(node_id, address) for node_id, address in nodes.items()))
        self._states = {node_id: self._states[node_id] for node_id in nodes}

    async def _dial(self, node_id: str, address: Address) -> None:
        link = await dial(self._identity, self._secret, address, expect_node_id=node_id, shapes=self._shapes)
        self._describe(link)
        self._states[node_id] = ("alive", "")
        self._links[node_id] = ControlLink(
            link, on_message=self._on_message, on_stream=self._on_message, on_state=self._on_state, measure=True
        )

    def _describe(self, link: Link) -> None:
        """Say which way `link` takes: at once of loopback, else when the system has been asked for its interfaces."""
        here, there = local_address(link.sock), link.peer.address[0]
        link.path = way(here, there, ())
        if link.path:
            return

        async def ask() -> None:
            facts = await asyncio.to_thread(probe)
            link.path = way(here, there, facts.interfaces)

        task = asyncio.get_running_loop().create_task(ask())
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    def _send(self, node_id: str, request_id: str | None, packed: bytes) -> None:
        link = self._links.get(node_id)
        if link is not None:
            link.send_packed(packed)
        elif request_id is not None:
            state, reason = self.state(node_id)
            self._deliver(node_id, self._lost(node_id, f"{state}: {reason}", request_id))

    def _on_message(self, link: ControlLink, message: Message) -> None:
        self._deliver(link.peer.node_id, message)

    def _deliver(self, node_id: str, message: Message) -> None:
        inbox = self._inboxes.get(str(message.get("id")))
        if inbox is not None:
            inbox(node_id, message)

    def _on_state(self, link: ControlLink, state: str, reason: str) -> None:
        node_id = link.peer.node_id
        if self._links.get(node_id) is not link:
            return
        if state == "closed":
            state = "dead"
        self._states[node_id] = (state, reason)
        if state != "dead":
            return
        del self._links[node_id]
        for request_id in list(self._inboxes):
            self._deliver(node_id, self._lost(node_id, reason, request_id))

    @staticmethod
    def _lost(node_id: str, reason: str, request_id: str) -> Message:
        error = PeerLost(reason, node=node_id).to_dict()
        return {"type": "lost", "id": request_id, "error": error}

    async def _close(self) -> None:
        for task in self._asking:
            task.cancel()
        links, self._links = self._links, {}
        for link in links.values():
            link.close("the router leaves")
        await asyncio.sleep(0)


def closed_error() -> ClusterError:
    """What every call on a stopped cluster says."""
    return ClusterError("the cluster is not running", advice="Start it first.")
