"""Who may be which node: ties node ids to addresses and incarnations. Pure.

Every member knows the cluster secret, so a good proof says "a member", not "this member". What is checked beyond it
is that one id is one process at one address at a time, whoever of the two has dialled. The listener asks after a good
proof and before its verdict, from its loop; a decision that is contested it asks for again, once it knows whether the
other process is alive.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from mlxcel_nb.net.links.addresses import normal_ip
from mlxcel_nb.wire.hello import VerdictCode

ESTABLISHED_LIMIT = 512
"""Established connections of one listener, of their own: no pending one can use them up."""

MAX_ANNOUNCED = 32
"""Further addresses that are taken from one process's word."""

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Decision:
    """The verdict, and why.

    Args:
        contested: another incarnation holds the id, and the verdict stands only if that one is alive.
    """

    verdict: VerdictCode
    detail: str = ""
    contested: bool = False


@dataclass(frozen=True)
class _Holder:
    """Who a connection belongs to, where from, and whether this side has dialled it."""

    node_id: str
    incarnation: bytes
    address: str
    dialled: bool


class Admission(Generic[K]):
    """The ids in use at one listener, by connection. All connections of an id belong to one incarnation.

    Args:
        configured: per node id the addresses and host names the configuration has for it; other ids take the first
            address seen. Where the names lead, `learn` is told.

    `allow` names further addresses for either kind: those that the plan of a model instance has agreed on. `announce`
    takes those that a process says of itself, where the configuration names none for it.
    """

    def __init__(
        self, configured: Mapping[str, Collection[str]] | None = None, *, limit: int = ESTABLISHED_LIMIT
    ) -> None:
        self.limit = limit
        self._configured = {node_id: {normal_ip(ip) for ip in ips} for node_id, ips in (configured or {}).items()}
        self._learned: dict[str, frozenset[str]] = {}
        self._further: dict[str, frozenset[str]] = {}
        self._announced: dict[str, frozenset[str]] = {}
        self._holders: dict[K, _Holder] = {}

    def __len__(self) -> int:
        """Connections that came in and are not yet gone."""
        return sum(not holder.dialled for holder in self._holders.values())

    def learn(self, node_id: str, ips: Collection[str]) -> None:
        """The names that the configuration has for `node_id` lead to these addresses now."""
        self._learned[node_id] = frozenset(normal_ip(ip) for ip in ips)

    def allow(self, further: Mapping[str, Collection[str]]) -> None:
        """From now on these ids may come from these addresses too, in place of what was allowed before."""
        self._further = {node_id: frozenset(normal_ip(ip) for ip in ips) for node_id, ips in further.items()}

    def announce(self, node_id: str, incarnation: bytes, further: Sequence[object]) -> None:
        """A process that holds connections here says which addresses it has besides; its last word counts.

        Another process of that id, or one without a connection here, changes nothing, and what is no text is none.
        """
        if any((holder.node_id, holder.incarnation) == (node_id, incarnation) for holder in self._holders.values()):
            self._announced[node_id] = frozenset(normal_ip(ip) for ip in further[:MAX_ANNOUNCED] if isinstance(ip, str))

    def ask(self, node_id: str, incarnation: bytes, source: str) -> Decision:
        """May `incarnation` at the address `source` be `node_id`? Changes nothing."""
        ip = normal_ip(source)
        named = self._configured.get(node_id)
        agreed = ip in self._further.get(node_id, ())
        if named and ip not in named and ip not in self._learned.get(node_id, ()) and not agreed:
            return _identity(f"{node_id} is configured at {', '.join(sorted(named))}, not at {ip}")
        holder = next((holder for holder in self._holders.values() if holder.node_id == node_id), None)
        if holder is not None:
            other = holder.incarnation != incarnation
            if not named and ip != holder.address and not agreed and ip not in self._announced.get(node_id, ()):
                return _identity(f"{node_id} is known at {holder.address}, not at {ip}", contested=other)
            if other:
                return Decision(VerdictCode.DUPLICATE, f"{node_id} is connected from another process", contested=True)
        if len(self) >= self.limit:
            return Decision(VerdictCode.CAPACITY, f"{self.limit} connections are the limit")
        return Decision(VerdictCode.ACCEPTED)

    def enter(self, connection: K, node_id: str, incarnation: bytes, source: str, *, dialled: bool = False) -> None:
        """Record `connection`, after `ask` accepted it. One that this side has `dialled` takes nobody's room."""
        self._holders[connection] = _Holder(node_id, incarnation, normal_ip(source), dialled)

    def holding(self, node_id: str) -> frozenset[K]:
        """The connections by which `node_id` is held now."""
        return frozenset(key for key, holder in self._holders.items() if holder.node_id == node_id)

    def leave(self, connection: K) -> None:
        """`connection` has ended; with its last one an incarnation gives up its id and address."""
        left = self._holders.pop(connection, None)
        if left is not None and not self.holding(left.node_id):
            self._announced.pop(left.node_id, None)


def _identity(detail: str, *, contested: bool = False) -> Decision:
    return Decision(VerdictCode.IDENTITY, detail, contested)
