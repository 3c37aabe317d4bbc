"""Who a node is and where it listens. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.shape import LinkPlan
from mlxcel_nb.wire.hello import SUITES


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Who a node is and where it listens.

    Args:
        port: 0 lets the system choose; the address published is what was bound.
        orphan_guard: end the process when no router has been connected for `times.ORPHAN_S`.
        threads: cores for MLX on this node.
        blas: what `load_fast_blas` reported, for status.
        links: what its links are made to be like.
        peers: other nodes and where they listen, the best address first; a connection to each is kept.
        strangers: where further peers listen whose ids are not known; they are asked for them.
        sources: addresses that a node of an id may come from, where they are configured.
        discover: announce this node by beacons, and take those it hears of as peers.
        suite: the cipher suite of all its links.
        transport: what links may be, one of `places.TRANSPORTS`.
    """

    cluster: str
    node_id: str
    role: str = "hybrid"
    bind: str = "127.0.0.1"
    port: int = 0
    port_range: tuple[int, int] | None = None
    orphan_guard: bool = True
    threads: int = 1
    blas: str = ""
    links: LinkPlan = field(default_factory=LinkPlan)
    peers: Mapping[str, Sequence[Address]] = field(default_factory=dict)
    strangers: Sequence[Address] = ()
    sources: Mapping[str, Collection[str]] = field(default_factory=dict)
    discover: bool = False
    suite: str = SUITES[1]
    transport: str = "auto"
