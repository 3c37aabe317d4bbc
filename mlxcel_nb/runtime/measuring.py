"""What a node does when it is asked how fast its way to another is, and when another measures the way to it.

On the node's loop; the measuring itself blocks on a thread of its own for each link. Only a router and a visitor of
the command line may order one, a node makes one at a time, and `net.measuring.pair` bounds what each costs.
"""

from __future__ import annotations

import asyncio
from typing import Any

from mlxcel_nb import errors
from mlxcel_nb.cluster.address import Address, parse_address
from mlxcel_nb.errors import Busy, ConfigError, WireError
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.links.dial import Dialler
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.measuring import pair as measuring
from mlxcel_nb.runtime.protocol import field
from mlxcel_nb.util.log import get_logger

log = get_logger("runtime.measuring")

ASKERS = frozenset({"router", "visitor"})
"""Roles whose orders are obeyed."""

MAX_ANSWERED = 8
"""Measurements by others that are answered at a time; each has a thread."""

MAX_ADDRESSES = 8


class Measuring:
    """The measurements of one node.

    Args:
        dialler: makes the node's connections.
    """

    def __init__(self, dialler: Dialler) -> None:
        self._dialler = dialler
        self._links: set[Link] = set()
        self._answered = 0
        self._task: asyncio.Task[None] | None = None
        self._asker: ControlLink | None = None

    def order(self, asker: ControlLink, message: dict[str, Any]) -> None:
        """Measure the way to the node that `message` names, and reply with it and both ends' IP addresses.

        Raises:
            Busy: another one is under way. WireError: the asker may not, or the message is not one.
        """
        if asker.peer.role not in ASKERS:
            raise WireError(f"{asker.peer.node_id} ({asker.peer.role}) may not order a measurement")
        if self._task is not None and not self._task.done():
            raise Busy("a measurement is under way on this node", advice="Try again in a moment.")
        request_id, node = field(message, "id", str), field(message, "node", str)
        addresses = _read_addresses(field(message, "addresses", list))
        pings, seconds = field(message, "pings", int), float(field(message, "seconds", (int, float)))
        if pings < 1 or not 0 < seconds <= measuring.MAX_SECONDS:
            raise WireError(f"an order to measure with {pings} pings for {seconds} s")
        work = self._measure(node, addresses, pings, seconds)
        self._asker = asker
        self._task = asyncio.get_running_loop().create_task(self._reply(asker, request_id, work))

    def arrived(self, link: Link) -> None:
        """Answer the measurements of somebody else; called with what its listener has let in."""
        if self._answered >= MAX_ANSWERED:
            link.close()
            return
        self._answered += 1
        self._links.add(link)
        answering = measuring.on_thread(lambda: measuring.answer(link), "measured")

        def done(future: asyncio.Future[None]) -> None:
            self._answered -= 1
            self._links.discard(link)
            if not future.cancelled() and isinstance(error := future.exception(), Exception):
                log.info("a measurement by %s ended early: %s", link.peer.node_id, error)

        answering.add_done_callback(done)

    def left(self, asker: ControlLink) -> None:
        """The connection of somebody who may have asked has ended: nobody waits for the answer."""
        if self._task is not None and self._asker is asker:
            self._task.cancel()

    def close(self) -> None:
        """Break off what is under way."""
        if self._task is not None:
            self._task.cancel()
        for link in list(self._links):
            link.hang_up()

    # -- one measurement --------------------------------------------------------------------------

    async def _reply(self, asker: ControlLink, request_id: str, work: Any) -> None:
        me = self._dialler.identity().node_id
        try:
            asker.send({"type": "reply", "id": request_id, **await work})
        except Exception as error:  # noqa: BLE001  # whatever went wrong, somebody waits for an answer
            asker.send({"type": "error", "id": request_id, "error": errors.wrap(error, me).to_dict()})

    async def _measure(self, node: str, addresses: list[Address], pings: int, seconds: float) -> dict[str, Any]:
        link = await self._dialler.dial_node(node, addresses, {"link": measuring.LINK})
        self._links.add(link)
        peer = link.peer.address[0]
        ours = measuring.source_of(peer)
        try:
            found = await measuring.measured(link, pings, seconds)
        finally:
            self._links.discard(link)
        return {"measured": found.to_dict(), "used": [ours, peer]}


def _read_addresses(texts: list[Any]) -> list[Address]:
    try:
        return [parse_address(str(text)) for text in texts[:MAX_ADDRESSES]]
    except ConfigError as error:
        raise WireError(f"an order to measure: {error.cause}") from None
