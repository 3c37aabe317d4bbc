"""Arguments of `cluster` and `status`. Pure."""

from __future__ import annotations

from mlxcel_nb.commands.arguments import shared
from mlxcel_nb.commands.parser import Kind, Tree, Where


def add(tree: Tree) -> None:
    group = tree.group("cluster", "start, stop and list clusters" if tree.here is Where.MAGIC else "look for clusters")
    start = group.leaf("start", "start engines on this machine and join them", "cluster:start", where=Where.MAGIC)
    start.add("-n", "--engines", type=shared.count, default=2, metavar="N", help="how many engines (default 2)")
    start.add("--name", metavar="NAME", help="name of the cluster; a second one needs it (--cluster elsewhere)")
    start.add("--threads", type=shared.count, metavar="N", help="CPU threads an engine (default: cores / engines)")
    start.add("--deadline", type=shared.seconds, default=60.0, metavar="S", help="seconds to be ready in (default 60)")
    shared.link(start, "what links are like: 5ms,1Gbit for all, 0-3:40ms for that of two engines; repeatable")
    shared.secret_file(start, "use this cluster secret instead of a random one")
    _status(group)
    stop = group.leaf("stop", "stop the cluster and its engines", "cluster:stop", where=Where.MAGIC)
    stop.add("--all", action="store_true", help="stop every cluster this notebook started")
    shared.on(stop)
    group.leaf("list", "clusters that run on this machine", "cluster:list_clusters")
    _status(tree)


def _status(tree: Tree) -> None:
    status = tree.leaf("status", "who holds what, and over which links", "cluster:status", where=Where.MAGIC)
    status.add("node", metavar="NODE", nargs="?", completes=Kind.NODE, help="all there is to say of this one")
    shared.on(status)
