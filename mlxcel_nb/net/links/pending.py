"""The waiting room of a listener: which half-open connections may stay. Pure.

Whoever can reach the port can fill it, so nothing here trusts anybody: a connection is in the pool from accept
until its verdict, and what it may cost is bounded in number and per address. The listener owns one pool and calls it
from its loop; the pool decides, the listener closes sockets and keeps the time.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field

from mlxcel_nb.cluster.address import Address

POOL_SIZE = 64
"""Half-open connections in all."""

PER_ADDRESS = 8
"""Half-open connections from one address that is neither loopback nor configured."""


@functools.lru_cache(1024)
def _is_loopback(ip: str) -> bool:
    return Address(ip, 0).is_loopback


@dataclass(eq=False)
class Waiting:
    """One connection in the pool."""

    key: Hashable
    ip: str
    whole_hello: bool = False


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What to do with a newcomer: let it in or not, and whom to close for it."""

    admitted: bool
    evicted: Waiting | None = None
    reason: str = ""


@dataclass
class PendingPool:
    """Connections whose handshake is not done, oldest first.

    Args:
        trusted: addresses of configured peers, which the per-address limit does not apply to.
    """

    trusted: frozenset[str] = frozenset()
    size: int = POOL_SIZE
    per_address: int = PER_ADDRESS
    _members: dict[Hashable, Waiting] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._members)

    def arrive(self, key: Hashable, ip: str) -> Arrival:
        """Place the connection `key` that comes from `ip`, or say why not."""
        exempt = _is_loopback(ip) or ip in self.trusted
        if not exempt and sum(w.ip == ip for w in self._members.values()) >= self.per_address:
            return Arrival(admitted=False, reason=f"{self.per_address} handshakes from {ip} already pending")
        evicted = None
        if len(self._members) >= self.size:
            # One who has sent a whole hello has shown more good will than a silent one, however old.
            evicted = next((w for w in self._members.values() if not w.whole_hello), None)
            if evicted is None:
                return Arrival(admitted=False, reason=f"{self.size} handshakes already pending")
            del self._members[evicted.key]
        self._members[key] = Waiting(key, ip)
        return Arrival(admitted=True, evicted=evicted)

    def hello_received(self, key: Hashable) -> None:
        """`key` has sent its whole ClientHello and can no longer be asked to give way."""
        if key in self._members:
            self._members[key].whole_hello = True

    def leave(self, key: Hashable) -> None:
        """`key` is established, or closed."""
        self._members.pop(key, None)
