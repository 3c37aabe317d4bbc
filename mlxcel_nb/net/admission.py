"""Who may be which node: ties node ids to source addresses and incarnations. Pure.

Every member knows the cluster secret, so a good proof says "a member", not "this member". What is checked beyond it
is that one id is one process at one address at a time. The listener asks after a good proof and before its verdict,
from its loop; it does the pinging and closing that the answer asks for.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field

from mlxcel_nb.net.addresses import normal_ip

ESTABLISHED_LIMIT = 512
"""Established connections of one listener, of their own: no pending one can use them up."""

PROBE_S = 1.0
"""A living incarnation answers a ping within this time, or its place goes to the newcomer."""


class Answer(enum.Enum):
    """What the listener does next."""

    ADMIT = "admit"
    CAPACITY = "at capacity"  # verdict 1
    IDENTITY = "identity refused"  # verdict 2
    PROBE = "probe"  # another incarnation holds the id: ping it, then verdict 3 or close it and ask again


@dataclass(frozen=True)
class Decision:
    answer: Answer
    detail: str = ""


@dataclass
class _Holder:
    """The incarnation that has a node id, and the connections it has it by."""

    incarnation: bytes
    addresses: set[str]
    connections: set[Hashable] = field(default_factory=set)


@dataclass
class Admission:
    """The ids in use at one listener.

    Args:
        configured: per node id the addresses the configuration names for it; other ids take the first address seen.
    """

    configured: Mapping[str, Collection[str]] = field(default_factory=dict)
    limit: int = ESTABLISHED_LIMIT
    _holders: dict[str, _Holder] = field(default_factory=dict)

    def __len__(self) -> int:
        """Connections admitted and not yet gone."""
        return sum(len(holder.connections) for holder in self._holders.values())

    def ask(self, node_id: str, incarnation: bytes, source: str) -> Decision:
        """May `incarnation` at the address `source` be `node_id`? Changes nothing."""
        ip = normal_ip(source)
        named = self.configured.get(node_id)
        if named and ip not in {normal_ip(address) for address in named}:
            return Decision(Answer.IDENTITY, f"{node_id} is configured at {', '.join(sorted(named))}, not at {ip}")
        holder = self._holders.get(node_id)
        if holder is not None:
            if holder.incarnation != incarnation:
                return Decision(Answer.PROBE, f"{node_id} is already connected from another process")
            if not named and ip not in holder.addresses:
                known = ", ".join(sorted(holder.addresses))
                return Decision(Answer.IDENTITY, f"{node_id} is known at {known}, not at {ip}")
        if len(self) >= self.limit:
            return Decision(Answer.CAPACITY, f"{self.limit} connections are the limit")
        return Decision(Answer.ADMIT)

    def enter(self, key: Hashable, node_id: str, incarnation: bytes, source: str) -> None:
        """Record the connection `key`, after `ask` said ADMIT."""
        holder = self._holders.get(node_id)
        if holder is None or holder.incarnation != incarnation:
            holder = self._holders[node_id] = _Holder(incarnation, {normal_ip(source)})
        holder.connections.add(key)

    def announce(self, node_id: str, addresses: Collection[str]) -> None:
        """Further addresses that `node_id` told of on an established connection: a second interface, a new lease."""
        if holder := self._holders.get(node_id):
            holder.addresses |= {normal_ip(address) for address in addresses}

    def holding(self, node_id: str) -> frozenset[Hashable]:
        """The connections by which `node_id` is held now."""
        holder = self._holders.get(node_id)
        return frozenset(holder.connections) if holder else frozenset()

    def leave(self, key: Hashable, node_id: str) -> None:
        """The connection `key` has ended; with its last one an incarnation gives up its id and address."""
        holder = self._holders.get(node_id)
        if holder is None:
            return
        holder.connections.discard(key)
        if not holder.connections:
            del self._holders[node_id]
