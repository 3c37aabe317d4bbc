"""Where the links of one model instance meet: some are dialled by this node, some arrive.

Runs on the node's loop. A link may arrive before this node has its own load order; it waits here for a while.
"""

from __future__ import annotations

import asyncio

from mlxcel_nb.errors import PeerLost
from mlxcel_nb.net.links.link import Link

Key = tuple[str, str, str]
"""Instance, peer's node id, kind of link ("hot" or "witness")."""

KEEP_S = 60.0
"""An arrived link nobody asks for is closed after this."""


class Rendezvous:
    """Matches arrived links with those that wait for them."""

    def __init__(self) -> None:
        self._futures: dict[Key, asyncio.Future[Link]] = {}

    def _future(self, key: Key) -> asyncio.Future[Link]:
        if key not in self._futures:
            self._futures[key] = asyncio.get_running_loop().create_future()
        return self._futures[key]

    def arrived(self, key: Key, link: Link) -> None:
        future = self._future(key)
        if future.done():
            link.close()
            return
        future.set_result(link)
        asyncio.get_running_loop().call_later(KEEP_S, self._expire, key, future)

    def _expire(self, key: Key, future: asyncio.Future[Link]) -> None:
        if self._futures.get(key) is future:
            del self._futures[key]
            future.result().close()

    async def wait(self, key: Key, deadline_s: float) -> Link:
        """The link of `key`.

        Raises:
            PeerLost: it did not arrive in time.
        """
        future = self._future(key)
        try:
            async with asyncio.timeout(deadline_s):
                link = await asyncio.shield(future)
        except TimeoutError:
            self._give_up(key)
            raise PeerLost(f"did not open its {key[2]} link within {deadline_s:g} s", node=key[1]) from None
        except asyncio.CancelledError:
            self._give_up(key)
            raise
        self._futures.pop(key, None)
        return link

    def _give_up(self, key: Key) -> None:
        """Nobody waits for `key` any more; a link that arrived at this very moment is closed."""
        future = self._futures.pop(key, None)
        if future is None:
            return
        if future.done() and not future.cancelled():
            future.result().close()
        else:
            future.cancel()

    def drop(self, instance: str) -> None:
        """Forget what there is of `instance`."""
        for key in [key for key in self._futures if key[0] == instance]:
            self._give_up(key)

    def close(self) -> None:
        for key in list(self._futures):
            self._give_up(key)
