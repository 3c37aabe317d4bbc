"""What a cluster file says, once it has been read and found sound. Pure data; any thread.

Everything here is frozen and complete: defaults are filled in, roles have their own names, and every node that holds
a part of a model knows its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.layout import LayerRange
from mlxcel_nb.cluster.roles import HYBRID
from mlxcel_nb.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class NodeEntry:
    """One node of a cluster file.

    Args:
        address: where it listens; port 0 where the node chooses and beacons tell.
        role: its own name, never an alias.
        stage: pipeline stage in its mesh; None for a node that holds no place in one.
        rank: tensor rank in its stage; None likewise.
        layers: first layer and one past the last, where the file sets them by hand.
        group: name of its prefill or decode group; None for other roles.
        replica: which copy of the mesh it belongs to; None for a node in no replica.
        spare: waits for the place of a node that is lost.
        memory_bytes: 0 where the node finds out itself.
        compute_units: 0 where the node finds out itself.
    """

    id: str
    address: Address
    role: str = HYBRID
    stage: int | None = None
    rank: int | None = None
    layers: LayerRange | None = None
    group: str | None = None
    replica: int | None = None
    spare: bool = False
    memory_bytes: int = 0
    compute_units: int = 0


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Nodes that hold one whole model together: a replica, or a prefill or decode group.

    Args:
        name: "replica-0", "prefill-0", or the group's name in the file.
        members: node ids in the order of `Layout`: member `stage * tp + rank`.
        layers: a half-open range per stage, where the file sets them by hand.
    """

    name: str
    role: str
    members: tuple[str, ...]
    layers: tuple[LayerRange, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A whole cluster file.

    Args:
        secret_file: path of the cluster secret, already relative to where the reader stands.
        port_range: first and last port nodes may listen on.
        meshes: what the nodes form; hybrid nodes that serve alone and spares are in none.
    """

    name: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    expert_parallel: bool
    secret_file: str | None
    previous_secret_file: str | None
    transport: str
    discovery: str
    collectives: str
    model: str | None
    port_range: tuple[int, int] | None
    elastic: str
    nodes: tuple[NodeEntry, ...]
    meshes: tuple[Mesh, ...] = ()

    def node(self, node_id: str) -> NodeEntry:
        """The node of this id.

        Raises:
            ConfigError: the file lists none.
        """
        for entry in self.nodes:
            if entry.id == node_id:
                return entry
        known = ", ".join(entry.id for entry in self.nodes)
        raise ConfigError(f"the cluster file lists no node {node_id!r}", advice=f"It lists {known}.")

    @property
    def spares(self) -> tuple[NodeEntry, ...]:
        return tuple(entry for entry in self.nodes if entry.spare)

    def others(self, node_id: str) -> Iterator[NodeEntry]:
        """All nodes but the one of this id."""
        return (entry for entry in self.nodes if entry.id != node_id)

    def serves_alone(self, node_id: str) -> bool:
        """Whether this is a hybrid node with nobody beside it: it needs no secret, and none is read for it."""
        return len(self.nodes) == 1 and self.node(node_id).role == HYBRID


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One thing that is wrong with a file, and how to mend it.

    Args:
        where: the node or the table: "node b", "[cluster]", or "" for the file itself.
        line: in the file, from 1; 0 where it is not known.
        hides: others may stand behind it, which cannot be judged before it is mended.
    """

    where: str
    what: str
    mend: str
    line: int = 0
    hides: bool = False

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line else ""
        return f"{place}{f'{self.where}: ' if self.where else ''}{self.what.rstrip('.')}. {self.mend}"
