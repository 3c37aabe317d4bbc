"""A node's discovery: it announces itself, and those it hears of become its peers. On the node's loop.

Who is heard has shown with a tag that it is a member, and no more: whether it is who it says is left to the handshake
that the pool makes with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.membership import Change as StateChange
from mlxcel_nb.cluster.membership import State
from mlxcel_nb.cluster.places import PREFERENCE, WIRED
from mlxcel_nb.cluster.secret import Secrets
from mlxcel_nb.net.discovery.beacons import Announcement, Beacons
from mlxcel_nb.net.discovery.sightings import Change, Event, Sighting
from mlxcel_nb.net.pool.pool import Pool
from mlxcel_nb.runtime.surroundings import Surroundings
from mlxcel_nb.util.log import get_logger

log = get_logger("runtime.finding")

MAX_DIALLED = 6
"""Addresses of one peer that are tried; they share the time of one attempt."""

MAX_FOUND = 512
"""Peers that come by discovery: as many as a listener has connections."""


class Finding:
    """Beacons from `start` to `stop`, and the peers they bring to a pool.

    Args:
        static: peers that are configured, with their addresses; they stay, whether they are heard or not.
        surroundings: knows this host's interfaces: what is heard on a better one is dialled first.
    """

    def __init__(
        self,
        pool: Pool,
        cluster: str,
        secrets: Secrets,
        announce: Announcement,
        static: Mapping[str, Sequence[Address]],
        surroundings: Surroundings,
    ) -> None:
        self._pool = pool
        self._me = announce.node_id
        self._static = static
        self._found: set[str] = set()
        self._surroundings = surroundings
        self._beacons = Beacons(cluster, secrets, announce=announce, on_change=self._heard, prefer=self._prefer)

    async def start(self) -> None:
        """Raises `ConfigError` where the port of discovery cannot be shared."""
        await self._beacons.start()

    def stop(self) -> None:
        self._beacons.stop()

    def use(self, secrets: Secrets) -> None:
        """Send and hear beacons with these from now on."""
        self._beacons.use(secrets)

    def info(self) -> dict[str, object]:
        """What has been heard, as plain data for the status."""
        return self._beacons.findings().to_dict()

    def state_changed(self, change: StateChange) -> None:
        """A peer's state is another: one that was found, and is neither heard nor reached any more, is forgotten."""
        if change.state is State.DEAD and change.node_id in self._found and not self._announces(change.node_id):
            # The pool is in the middle of telling everybody.
            asyncio.get_running_loop().call_soon(self._forget, change.node_id)

    def _heard(self, change: Change) -> None:
        node = change.node
        if change.event is not Event.GONE:
            self._add(node)
        elif node.node_id in self._found and self._unreached(node.node_id):
            self._forget(node.node_id)  # while a connection stands, beacons may be silent

    def _add(self, node: Sighting) -> None:
        configured = tuple(self._static.get(node.node_id, ()))
        addresses = list(dict.fromkeys([*configured, *node.addresses]))[:MAX_DIALLED]
        if not addresses or node.node_id == self._me:
            return  # it listens nowhere; or it is another process that goes by this node's name
        if not configured and node.node_id not in self._found:
            if len(self._found) >= MAX_FOUND:
                log.warning("more than %d nodes announce themselves: %s is left out", MAX_FOUND, node.node_id)
                return
            self._found.add(node.node_id)
        self._pool.add(node.node_id, addresses)

    def _prefer(self, name: str) -> int:
        """Thunderbolt before wired, Wi-Fi and VPN; what is not known is in the middle."""
        facts = self._surroundings.facts
        kinds = {each.name: each.kind for each in facts.interfaces} if facts is not None else {}
        kind = kinds.get(name, WIRED)
        return PREFERENCE.index(kind) if kind in PREFERENCE else len(PREFERENCE)

    def _unreached(self, node_id: str) -> bool:
        member = self._pool.membership.members.get(node_id)
        return member is None or member.state in (State.UNSEEN, State.DEAD)

    def _announces(self, node_id: str) -> bool:
        return any(node.node_id == node_id for node in self._beacons.nodes)

    def _forget(self, node_id: str) -> None:
        if node_id in self._found and not self._announces(node_id):
            self._found.discard(node_id)
            self._pool.remove(node_id)
