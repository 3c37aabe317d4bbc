"""Arguments of `node`. Pure."""

from __future__ import annotations

import argparse

from mlxcel_nb.cluster.config import DEFAULT_CLUSTER, parse_port_range
from mlxcel_nb.commands.arguments import shared
from mlxcel_nb.commands.arguments.net import SUITES
from mlxcel_nb.commands.parser import Kind, Tree, Where
from mlxcel_nb.errors import ConfigError


def add(tree: Tree) -> None:
    detail = (
        "From a cluster file, or from flags alone: --node-id, --node-role and --peers. Prints a line when it listens "
        "and one for every change of a peer's state; ends with status 0 on Ctrl-C or SIGTERM. On SIGHUP it reads its "
        "secrets again; one that gives way to a new one stays good until the next SIGHUP."
    )
    about = "be one node of a cluster, without a notebook"
    node = tree.leaf("node", about, "node:node", where=Where.SHELL, detail=detail)
    file = "the cluster file, the same on every host"
    node.add("--cluster-config", "--config", dest="config", metavar="FILE", completes=Kind.PATH, help=file)
    node.add("--node-id", metavar="ID", help="which node this is")
    node.add("--node-role", metavar="ROLE", help="what it does (default hybrid); router is for this option alone")
    peers = "the others: ID=HOST:PORT,... or HOST:PORT,..."
    node.add("--peers", metavar="PEERS", default="", help=peers)
    beacons = "announce this node on its networks and find others (default: as in the cluster file)"
    node.add("--discover", action="store_true", help=beacons)
    bind = "where to listen without a cluster file (default 127.0.0.1, on a port the system chooses)"
    node.add("--bind", metavar="HOST[:PORT]", help=bind)
    node.add("--port-range", type=_ports, metavar="A-B", help="take the first free port of these, where none is given")
    cluster = f"name of the cluster without a cluster file (default {DEFAULT_CLUSTER})"
    node.add("--cluster", metavar="NAME", help=cluster)
    shared.secret_file(node, "the cluster secret; a hybrid node with no peers needs none")
    older = "an older secret that is still good while it is replaced"
    node.add("--previous-secret-file", metavar="FILE", completes=Kind.PATH, help=older)
    node.add("--suite", choices=SUITES, default=SUITES[0], help="cipher suite (default aes-256-gcm)")
    node.add("--threads", type=shared.count, metavar="N", help="CPU threads for MLX (default: as in the file, or all)")
    shared.link(node, "make links like this: 5ms,1Gbit,0.1%%; repeatable; 0-1:40ms or mac1..mac2:40ms for two nodes")


def _ports(text: str) -> tuple[int, int]:
    try:
        return parse_port_range(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
