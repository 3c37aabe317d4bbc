"""What a pool keeps of one peer: its addresses, its connections, and the attempt under way. On the pool's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.pool.backoff import Backoff


class Peer:
    """One peer.

    Args:
        dials_first: this side has the lower id, so of two connections the one that it dialled stays.
    """

    def __init__(self, node_id: str, addresses: Sequence[Address], dials_first: bool) -> None:
        self.node_id = node_id
        self.addresses = addresses
        self.dials_first = dials_first
        self.links: list[ControlLink] = []
        self.backoff = Backoff()
        self.attempt: asyncio.Task[None] | None = None
        self.linked_at = 0.0
        self.complaint = ""
        """What was said last of why it cannot be let in, or does not let us in."""
        self.told: set[str] = set()
        """Why it is unseen, as far as that was said."""
        self._linked = asyncio.Event()
        self._lost = asyncio.Event()
        self._last: ControlLink | None = None

    @property
    def best(self) -> ControlLink | None:
        """The connection to use; the first of `links`."""
        return next((link for link in self.links if link.open), None)

    def join(self, link: ControlLink, now: float) -> ControlLink | None:
        """One connection more; returns the one that is too many now, if any."""
        if not self.links:
            self.linked_at = now
        spare = None
        if self.links and self._preferred(self.links[0], link) is self.links[0]:
            self.links.append(link)
            spare = link
        else:
            spare = self.links[0] if self.links else None
            self.links.insert(0, link)
        self._linked.set()
        self._lost.clear()
        return spare

    def _preferred(self, older: ControlLink, newer: ControlLink) -> ControlLink:
        """Of two that are open, the one that the lower id dialled; of two that the same side dialled, the newer."""
        if older.open and older.link.dialled != newer.link.dialled and older.link.dialled is self.dials_first:
            return older
        return newer

    def leave(self, link: ControlLink) -> None:
        """A connection has ended."""
        if link in self.links:
            self.links.remove(link)
            self._last = link
        if not self.links:
            self._linked.clear()
            self._lost.set()

    async def linked_within(self, seconds: float) -> bool:
        """Wait until there is a connection; False when there is none after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._linked.wait()
        except TimeoutError:
            return False
        return True

    async def lost(self) -> ControlLink:
        """Wait until there is no connection any more; the one that ended last."""
        await self._lost.wait()
        assert self._last is not None
        return self._last

    def cancel(self) -> None:
        """Give up the attempt under way."""
        if self.attempt is not None:
            self.attempt.cancel()
