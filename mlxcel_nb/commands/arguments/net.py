"""Arguments of `net`. Pure."""

from __future__ import annotations

from mlxcel_nb.commands.arguments import shared
from mlxcel_nb.commands.parser import Kind, Tree, Where
from mlxcel_nb.wire import hello

SUITES = tuple(hello.SUITES.values())


def add(tree: Tree) -> None:
    group = tree.group("net", "try the encrypted data plane between two hosts")
    detail = (
        "Every peer that is turned away is a line on standard error. Exit status at the end: 1 when peers came with "
        "another secret, version, cipher suite or cluster and nobody else did, else 0."
    )
    listen = group.leaf("listen", "answer pings until stopped", "net:listen", where=Where.SHELL, detail=detail)
    listen.add("--bind", metavar="HOST:PORT", default="127.0.0.1:0", help="where to listen (default 127.0.0.1:0)")
    _peer(listen)
    ping = group.leaf("ping", "measure round trips and bandwidth to a node", "net:ping")
    ping.add("address", metavar="HOST:PORT", help="where the node listens")
    _peer(ping)
    ping.add("--count", type=shared.count, default=10, metavar="N", help="how many pings (default 10)")
    ping.add("--size", type=shared.size, default=64, metavar="BYTES", help="filler of a ping, up to 1 MiB (default 64)")
    ping.add("--json", where=Where.SHELL, action="store_true", help="print one JSON object")


def _peer(leaf: Tree) -> None:
    shared.secret_file(leaf, "the cluster secret both sides share")
    older = "an older secret that is still good while it is replaced"
    leaf.add("--previous-secret-file", metavar="FILE", completes=Kind.PATH, help=older)
    leaf.add("--cluster", metavar="NAME", default="mlxcel", help="name of the cluster (default mlxcel)")
    leaf.add("--node-id", metavar="ID", help="what this side calls itself (default: made up)")
    leaf.add("--suite", choices=SUITES, default=SUITES[0], help="cipher suite (default aes-256-gcm)")
    slower = "send as over a link like this one, as in 5ms,1Gbit: one-way latency, rate, loss"
    leaf.add("--link", type=shared.shape, metavar="SHAPE", help=slower)
    leaf.add("--rekey-every", type=shared.count, metavar="N", help="change keys after N frames")
