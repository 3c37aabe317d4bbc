"""The nodes a plan is made for: listed, out of a cluster file, the engines of this notebook, or this machine."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlxcel_nb.cluster.config import ClusterConfig, Mesh, NodeEntry, load_config
from mlxcel_nb.cluster.roles import GROUP_ROLES
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.parser import UsageProblem
from mlxcel_nb.errors import ClusterError, ConfigError
from mlxcel_nb.plan.adviser import Given
from mlxcel_nb.plan.nodes import Node
from mlxcel_nb.util.units import bytes_text

if TYPE_CHECKING:
    from mlxcel_nb.client.cluster import Cluster


@dataclass(frozen=True)
class Asked:
    """Nodes to plan for together.

    Args:
        notes: where they and their memory come from.
        sharing: so many of them share this machine, its memory's bandwidth and its cores; 1 where each is a machine.
        mesh: name of the mesh of a cluster file that they are, or names of its replicas; "" for any others.
        places: of a cluster file's nodes: id, role, stage, rank.
        given: how that file lays a model over them.
        device: what MLX computes on there, "cpu" or "gpu", a CPU among others counting for all; "" where nobody knows.
    """

    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = ()
    sharing: int = 1
    mesh: str = ""
    places: tuple[NodeEntry, ...] = ()
    given: Given | None = None
    device: str = ""


def asked_for(args: argparse.Namespace, context: Context) -> list[Asked]:
    """What the command line names, each mesh of a cluster file for itself; else what runs here.

    Raises:
        UsageProblem, ConfigError: nodes that contradict each other, or whose memory is not known.
    """
    if args.config is not None and args.nodes:
        raise UsageProblem("--config and --nodes both say which nodes there are", advice="Give one of the two.")
    if args.config is not None:
        return from_config(load_config(args.config), args.config)
    if args.nodes:
        return [Asked(args.nodes)]
    try:
        cluster = context.session.get().cluster
    except ClusterError:
        left = _free_here()
        return [
            Asked(
                (Node("this machine", left, "here"),),
                (f"Planned for what this machine has free: {bytes_text(left)}.",),
                device=_device_here(),
            )
        ]
    return [_engines(cluster)]


def _free_here() -> int:
    from mlxcel_nb.models.memory import room

    return room().available


def _device_here() -> str:
    from mlxcel_nb.models import device

    return device.kind()


def _worst(devices: Collection[str]) -> str:
    """Of several devices that a model is spread over: a CPU's needs count; nothing is known where one is not."""
    return "" if "" in devices else min(devices)


def _engines(cluster: Cluster) -> Asked:
    """The engines of a cluster, by what each says its host has free now."""
    status = cluster.status()
    found = [node for node in status.nodes if node.state != "dead"]
    if silent := [node.node_id for node in found if not node.free_bytes]:
        raise UsageProblem(
            f"{', '.join(silent)} did not say how much memory is free", advice="Say it: --nodes 16GB,16GB."
        )
    if not found:
        raise ClusterError(f"no engine of {cluster.name} lives", advice="Stop the cluster and start it again.")
    hosts = Counter(node.host for node in found)
    free = {host: min(node.free_bytes for node in found if node.host == host) for host in hosts}
    nodes = tuple(Node(node.node_id, free[node.host] // hosts[node.host], node.host) for node in found)
    each = ", ".join(f"{bytes_text(size)} on {host}" for host, size in free.items())
    who = "one engine" if len(nodes) == 1 else f"{len(nodes)} engines"
    notes = [f"Planned for the {who} of {cluster.name} and what is free: {each}, shared by its engines."]
    if status.model is not None:
        notes.append(f"{status.model.model} is loaded, and what it takes is not free.")
    return Asked(nodes, tuple(notes), max(hosts.values()), device=_worst({node.device for node in found}))


def from_config(config: ClusterConfig, source: str) -> list[Asked]:
    """The nodes of a cluster file, mesh by mesh; hybrid nodes that serve alone together, for whatever suits them.

    Raises:
        ConfigError: a node of another host whose memory the file does not say.
    """
    working = [node for node in config.nodes if not node.spare]
    here = [node for node in working if node.address.is_loopback]
    nodes = {node.id: _node(node, len(here), source) for node in working}
    notes = []
    if any(not node.memory_bytes for node in working):
        free = f"an equal part of what this machine has free, {bytes_text(_free_here())}"
        notes.append(f"A node of which {source} says no memory_bytes is planned with {free}.")
    if config.spares:
        notes.append(f"Spares hold nothing and are left out: {', '.join(node.id for node in config.spares)}.")
    device = _device_here() if len(here) == len(working) else ""
    if not config.meshes:
        return [Asked(tuple(nodes.values()), tuple(notes), max(1, len(here)), "", tuple(working), device=device)]
    meshes = [[mesh] for mesh in config.meshes]
    if config.expert_parallel:  # then a model lies over all replicas, which are of one node each
        apart = [mesh for mesh in config.meshes if mesh.role in GROUP_ROLES]
        meshes = [[mesh for mesh in config.meshes if mesh not in apart], *([mesh] for mesh in apart)]
        notes.append("The file spreads experts over its replicas, which are planned as one.")
    found = [_mesh(config, each, nodes, notes, max(1, len(here))) for each in meshes]
    return [replace(asked, device=device) for asked in found]


def _mesh(
    config: ClusterConfig, meshes: Sequence[Mesh], nodes: dict[str, Node], notes: Sequence[str], sharing: int
) -> Asked:
    """A mesh of the file, or its replicas as expert-parallel ranks of one model."""
    names = [name for mesh in meshes for name in mesh.members]
    members = tuple(nodes[name] for name in names)
    if len(meshes) > 1:
        given, title = Given(1, 1, members, ep=len(members)), f"{meshes[0].name} to {meshes[-1].name}"
    else:
        tp = config.tensor_parallel_size if len(members) > 1 else 1
        given, title = Given(tp, len(members) // tp, members, meshes[0].layers), meshes[0].name
    return Asked(members, tuple(notes), sharing, title, tuple(config.node(name) for name in names), given)


def _node(entry: NodeEntry, here: int, source: str) -> Node:
    memory = entry.memory_bytes
    if not memory and not entry.address.is_loopback:
        raise ConfigError(
            f"{source} does not say how much memory node {entry.id} has, which is not this machine",
            advice="Write memory_bytes below its [nodes.resources], or give --nodes instead.",
        )
    return Node(entry.id, memory or _free_here() // here, "here" if entry.address.is_loopback else entry.address.host)
