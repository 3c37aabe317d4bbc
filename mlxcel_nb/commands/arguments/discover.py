"""Arguments of `discover`. Pure."""

from __future__ import annotations

from mlxcel_nb.commands.arguments import shared
from mlxcel_nb.commands.parser import Kind, Tree, Where

SECONDS = 5.0


def add(tree: Tree) -> None:
    here = "the cluster of this notebook, or mlxcel" if tree.here is Where.MAGIC else "mlxcel"
    leaf = tree.leaf(
        "discover",
        "listen for nodes that announce themselves on this network",
        "discover:discover",
        detail="Nodes announce themselves where that was asked for, every 2 s, on UDP port 49555 of every interface. "
        "Exit status 1 when nobody was heard.",
    )
    wait = f"how long to listen (default {SECONDS:g})"
    leaf.add("--seconds", type=shared.seconds, default=SECONDS, metavar="S", help=wait)
    leaf.add("--cluster", metavar="NAME", completes=Kind.CLUSTER, help=f"name of the cluster (default: {here})")
    shared.secret_file(leaf, "the cluster secret that the nodes share")
    older = "an older secret that is still good while it is replaced"
    leaf.add("--previous-secret-file", metavar="FILE", completes=Kind.PATH, help=older)
    leaf.add("--announce", action="store_true", help="send beacons too, so that a discover elsewhere hears this host")
    leaf.add("--json", where=Where.SHELL, action="store_true", help="print one JSON object")
