"""Where the host names of configured nodes lead at present. On a listener's loop.

The configuration may name a node's host by name; the listener compares addresses. Names are looked up when the listener
starts, and again when a node comes from an address that its name did not lead to a while ago: leases change. The
look-ups run on threads, so a slow resolver delays that one verdict and nothing else. Who runs the resolver decides who
may be which node, among members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from mlxcel_nb.net.links.addresses import is_numeric
from mlxcel_nb.net.links.resolver import addresses_of

LOOKUP_S = 2.0
"""For a name, while a node waits for its verdict."""

FRESH_S = 5.0
"""What was looked up within this is not asked again: a node that is refused may knock often."""


class KnownNames:
    """The names of each node, and the addresses behind them.

    Args:
        configured: addresses and names per node id.
    """

    def __init__(self, configured: Mapping[str, Collection[str]]) -> None:
        self._names = {
            node_id: names
            for node_id, hosts in configured.items()
            if (names := tuple(host for host in hosts if not is_numeric(host)))
        }
        self._asked: dict[str, asyncio.Task[frozenset[str]]] = {}
        self._done_at: dict[str, float] = {}

    @property
    def nodes(self) -> frozenset[str]:
        """The ids of nodes that have names."""
        return frozenset(self._names)

    async def addresses(self, node_id: str) -> frozenset[str]:
        """Where the names of `node_id` lead now; those who ask at the same time share the answer."""
        now = asyncio.get_running_loop().time()
        task = self._asked.get(node_id)
        if task is None or (task.done() and now - self._done_at.get(node_id, now) >= FRESH_S):
            task = self._asked[node_id] = asyncio.get_running_loop().create_task(self._look_up(node_id))
        return await asyncio.shield(task)

    async def _look_up(self, node_id: str) -> frozenset[str]:
        found = await asyncio.gather(*(addresses_of(name, LOOKUP_S) for name in self._names.get(node_id, ())))
        self._done_at[node_id] = asyncio.get_running_loop().time()
        return frozenset().union(*found)

    def close(self) -> None:
        """Nobody wants to know any more."""
        for task in self._asked.values():
            task.cancel()
