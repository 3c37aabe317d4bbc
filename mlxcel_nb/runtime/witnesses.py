"""The witnesses of the instance a node holds: whether the other members live. On the node's loop.

A witness that is closed politely, or falls silent, is the end of its member. One that is reset or breaks off may be the
network's doing: it is made once more, by the side that had dialled it, and only when that fails the member is dead.
The port of a process that was killed refuses at once, so its death is known as soon as before. The side that was
dialled does not make the witness itself; it knocks, to learn whether anybody is still there to do so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mlxcel_nb.cluster.address import Address, parse_address
from mlxcel_nb.errors import MlxcelError, PeerLost
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.runtime.rendezvous import Rendezvous
from mlxcel_nb.util import times
from mlxcel_nb.util.log import get_logger

log = get_logger("runtime.witnesses")

Message = dict[str, Any]
Dial = Callable[[str, Address, Mapping[str, Any]], Awaitable[Link]]
"""To a node, at an address, saying this first."""

KEPT = 64
"""Messages that wait for a witness which is being made again."""


class Witnesses:
    """One to each member that this one talks to.

    Args:
        drive: makes a control link of a connection.
        lost: told of a member that is dead.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        dial: Dial,
        drive: Callable[[Link], ControlLink],
        lost: Callable[[str, PeerLost], None],
    ) -> None:
        self.links: dict[str, ControlLink] = {}
        self._rendezvous = rendezvous
        self._dial = dial
        self._drive = drive
        self._lost = lost
        self._instance = ""
        self._mending: dict[str, asyncio.Task[None]] = {}
        self._unsent: dict[str, list[Message]] = {}

    def open(self, instance: str, links: Mapping[str, Link]) -> None:
        """The witnesses of `instance` have been made."""
        self._instance = instance
        self.links = {node_id: self._drive(link) for node_id, link in links.items()}

    def close(self, reason: str) -> None:
        """Nobody needs them any more; the other members are told why."""
        for task in self._mending.values():
            task.cancel()
        self._mending.clear()
        self._unsent.clear()
        links, self.links = self.links, {}
        for link in links.values():
            link.close(reason)
        if self._instance:
            self._rendezvous.drop(self._instance)
            self._instance = ""

    def tell(self, node_id: str, message: Message) -> None:
        """Send `message`, if `node_id` lives: at once, or as soon as its witness is made again."""
        if link := self.links.get(node_id):
            link.send(message)
        elif (unsent := self._unsent.get(node_id)) is not None and len(unsent) < KEPT:
            unsent.append(message)

    def ended(self, link: ControlLink, reason: str) -> None:
        """A control link of this node's has ended; it may be a witness."""
        node_id = link.peer.node_id
        if self.links.get(node_id) is not link:
            return
        del self.links[node_id]
        if not link.cut:
            self._lost(self._instance, PeerLost(reason, node=node_id))
            return
        self._unsent[node_id] = []
        self._mending[node_id] = asyncio.get_running_loop().create_task(self._mend(link, reason))

    async def _mend(self, old: ControlLink, reason: str) -> None:
        node_id = old.peer.node_id
        try:
            async with asyncio.timeout(times.SUSPECT_S):
                again = await self._again(old)
        except (MlxcelError, TimeoutError) as error:
            log.info("%s is lost: %s; %s", node_id, reason, error)
            self._unsent.pop(node_id, None)
            self._mending.pop(node_id, None)
            self._lost(self._instance, PeerLost(reason, node=node_id))
            return
        log.info("the witness of %s was made again: %s", node_id, reason)
        self._mending.pop(node_id, None)
        self.links[node_id] = self._drive(again)
        for message in self._unsent.pop(node_id, ()):
            self.tell(node_id, message)

    async def _again(self, old: ControlLink) -> Link:
        """The witness, made once more; of the same process, or it is none."""
        peer = old.peer
        if old.link.dialled:
            hello = {"link": "witness", "instance": self._instance}
            link = await self._dial(peer.node_id, Address(*peer.address), hello)
        else:
            knock = await self._dial(peer.node_id, _listens_at(old), {"link": "knock"})
            same = knock.peer.incarnation == peer.incarnation
            self._drive(knock).close("only asked whether anybody is there")
            if not same:
                raise PeerLost("another process has its place", node=peer.node_id)
            link = await self._rendezvous.wait((self._instance, peer.node_id, "witness"), times.SUSPECT_S)
        if link.peer.incarnation != peer.incarnation:
            link.close()
            raise PeerLost("another process has its place", node=peer.node_id)
        return link


def _listens_at(link: ControlLink) -> Address:
    """Where the peer of a link that it dialled can be reached: its host as it came, with the port it says it has."""
    return Address(link.peer.address[0], parse_address(link.peer.data_addr, default_port=0).port)
