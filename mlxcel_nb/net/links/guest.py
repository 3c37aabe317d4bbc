"""One connection to a member, as whoever admits members keeps it until it ends. On the listener's loop.

When another process asks for the node id of a member, that member has a second to show that it lives. Here is how it
does so, and how it is sent away.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from typing import Any

from mlxcel_nb.net.links.link import Link
from mlxcel_nb.util import times

PEEK_BYTES = 64 * 1024


class Guest:
    """What the listener keeps of a connection.

    Args:
        visit: the task that waits for the first control frame, where that is still due.
    """

    def __init__(self, visit: asyncio.Task[Any] | None = None) -> None:
        self._visit = visit
        self._link: Link | None = None
        self._settled = asyncio.Event()
        self._probe: asyncio.Task[bool] | None = None

    def settle(self, link: Link) -> None:
        """The first control frame is here, and `link` made of it."""
        self._link = link
        self._settled.set()

    def probe(self) -> asyncio.Task[bool]:
        """Whether it shows life within `times.PROBE_S`; those who ask at the same time share the answer."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().create_task(self._shows_life())
        return self._probe

    def dismiss(self, reason: str) -> None:
        """Send it away; whoever drives its link hears of it as of any other end."""
        if self._link is None:
            if self._visit is not None:
                self._visit.cancel()
        elif self._link.driver is not None:
            self._link.driver.give_up(reason)
        else:
            self._link.hang_up()

    async def _shows_life(self) -> bool:
        """A pong; the first control frame, where that is due; any bytes, where nobody on this loop can ping."""
        link = self._link
        if link is None:
            try:
                async with asyncio.timeout(times.PROBE_S):
                    await self._settled.wait()
            except TimeoutError:
                return False
            return True
        if link.driver is not None:
            return await link.driver.probe()
        before = _received(link)
        await asyncio.sleep(times.PROBE_S)
        return _received(link) > before


def _received(link: Link) -> int:
    """Bytes the peer has sent so far, read or not; -1 when the connection has ended."""
    try:
        waiting = link.sock.recv(PEEK_BYTES, socket.MSG_PEEK)
    except BlockingIOError:
        return link.reader.total
    except OSError:
        return -1
    return link.reader.total + len(waiting) if waiting else -1


async def any_alive(guests: Collection[Guest]) -> bool:
    """Whether one of `guests` shows life, as soon as one does."""
    probes = {guest.probe() for guest in guests}
    while probes:
        done, probes = await asyncio.wait(probes, return_when=asyncio.FIRST_COMPLETED)
        if any(probe.result() for probe in done):
            return True
    return False
