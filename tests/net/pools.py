"""Nodes that are nothing but a listener and a pool, on the test's own loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.membership import Change, State
from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.cluster.secret import Secret, Secrets
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.links.dial import Dialler
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.links.listener import Listener
from mlxcel_nb.net.pool.pool import Pool
from tests.net.helpers import SECRET, identity

WAIT_S = 15.0


class Party:
    """One node: answers `status` with its id, keeps what else it hears."""

    def __init__(self, node_id: str, *, secrets: Sequence[Secret] = (SECRET,), **more: Any) -> None:
        self.node_id = node_id
        self.me = identity(node_id)
        self.changes: list[Change] = []
        self.heard: list[dict[str, Any]] = []
        self.asked = 0
        self.mute = False
        self.listener = Listener(self.me, secrets, on_link=self._on_link, **more)
        self.dialler = Dialler(identity=lambda: self.me, secrets=Secrets(*secrets))
        self.pool = Pool(
            self.dialler,
            on_message=self._on_message,
            on_change=self.changes.append,
            admit=self.listener.admit,
        )
        self.address = Address("127.0.0.1", 1)

    def _on_link(self, link: Link) -> None:
        if not self.pool.take(link):
            link.close()

    def _on_message(self, link: ControlLink, message: dict[str, Any]) -> None:
        if message.get("type") != "heartbeat":
            self.heard.append(message)
        if message.get("type") == "status":
            self.asked += 1
            if not self.mute:
                link.send({"type": "reply", "id": message["id"], "status": self.node_id})

    def states(self, node_id: str) -> list[State]:
        return [change.state for change in self.changes if change.node_id == node_id]

    def state(self, node_id: str) -> State:
        return self.pool.membership.members[node_id].state

    def links(self, node_id: str) -> list[ControlLink]:
        peer = self.pool._peers.get(node_id)
        return [link for link in peer.links if link.open] if peer else []

    @property
    def guests(self) -> list[ControlLink]:
        """Connections of nodes that are no peers here."""
        return list(self.pool._guests)

    async def ask(self, node_id: str, **more: Any) -> str:
        answer = await self.pool.request(node_id, {"type": "status"}, **more)
        return str(answer["status"])

    def restart(self) -> None:
        """From its next connection on it is another process."""
        self.me = identity(self.node_id, incarnation=new_incarnation())


async def until(condition: Callable[[], Any], seconds: float = WAIT_S) -> None:
    """Wait on the loop until `condition` holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def party(node_id: str, **more: Any) -> AsyncIterator[Party]:
    """A node that listens and has no peers yet."""
    made = Party(node_id, **more)
    made.address = await made.listener.start()
    try:
        yield made
    finally:
        await made.pool.close()
        await made.listener.close()


@contextlib.asynccontextmanager
async def acquainted(**more: Any) -> AsyncIterator[tuple[Party, Party]]:
    """Two nodes, "a" and "b", each among the other's peers and connected."""
    async with party("a", **more) as a, party("b", **more) as b:
        a.pool.add("b", [b.address])
        b.pool.add("a", [a.address])
        await until(lambda: a.links("b") and b.links("a"))
        yield a, b
