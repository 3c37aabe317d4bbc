"""A whole node in the test's own process, and somebody who knows the secret and talks to it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from mlxcel_nb.cluster.secret import Secret, Secrets
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.runtime.node import Node
from mlxcel_nb.runtime.node_config import NodeConfig
from tests.net.helpers import SECRET, Heard, identity


@contextlib.contextmanager
def running(node_id: str) -> Iterator[Node]:
    node = Node(NodeConfig(cluster="test", node_id=node_id, orphan_guard=False), Secrets(SECRET))
    node.start()
    try:
        yield node
    finally:
        node.stop()


@contextlib.asynccontextmanager
async def linked(node: Node, node_id: str, role: str, *, secret: Secret = SECRET, **hello: Any) -> AsyncIterator[Heard]:
    """`node_id`'s link to `node`."""
    assert node._address is not None
    heard = Heard(await dial(identity(node_id, role=role), secret, node._address, hello=hello))
    try:
        yield heard
    finally:
        heard.link.close("the test is over")


async def answer(heard: Heard, message: dict[str, Any]) -> dict[str, Any]:
    """What the node says to `message` in the end."""
    heard.link.send(message)
    while (reply := await heard.messages.get())["type"] == "progress":
        pass
    return reply
