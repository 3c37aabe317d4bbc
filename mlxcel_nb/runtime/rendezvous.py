"""Where the links of one model instance meet: some are dialled by this node, some arrive.

Runs on the node's loop. A link may arrive before this node has its own load order; it waits here for a while.
"""

from __future__ import annotations

import asyncio
import contextlib

from mlxcel_nb.errors import PeerLost
from mlxcel_nb.net.link import Link

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
        try:
            link = await asyncio.wait_for(asyncio.shield(self._future(key)), deadline_s)
        except TimeoutError:
            raise PeerLost(f"did not open its {key[2]} link within {deadline_s:g} s", node=key[1]) from None
        finally:
            future = self._futures.pop(key, None)
            if future is not None and not future.done():
                future.cancel()
        return link

    def close(self) -> None:
        for future in self._futures.values():
            if future.done():
                with contextlib.suppress(Exception):
                    future.result().close()
            else:
                future.cancel()
        self._futures.clear()
