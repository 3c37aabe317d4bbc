"""Arguments of `net`. Pure."""

from __future__ import annotations

from mlxcel_nb.cluster.config import DEFAULT_CLUSTER
from mlxcel_nb.commands.arguments import shared
from mlxcel_nb.commands.parser import Kind, Tree, Where
from mlxcel_nb.wire import hello

SUITES = tuple(hello.SUITES.values())

PINGS, SECONDS, MAX_SECONDS = 20, 0.5, 10.0
"""As in `net.measuring.pair`, which is too heavy to be imported for a command line; a test holds them together."""


def add(tree: Tree) -> None:
    group = tree.group("net", "try and measure the encrypted data plane")
    detail = (
        "Every peer that is turned away is a line on standard error. Exit status at the end: 1 when peers came with "
        "another secret, version, cipher suite or cluster and nobody else did, else 0. SIGHUP has it read the secret "
        "again; one that gives way to a new one stays good until the next SIGHUP."
    )
    listen = group.leaf("listen", "answer pings until stopped", "net:listen", where=Where.SHELL, detail=detail)
    listen.add("--bind", metavar="HOST[:PORT]", default="127.0.0.1:0", help="where to listen (default 127.0.0.1:0)")
    _peer(listen)
    detail = "When the node is lost on the way, what was measured by then is shown before the error."
    if group.here is Where.SHELL:
        detail += " Exit status 1 then; `lost` in the JSON object says why there is no more, and is null otherwise."
    ping = group.leaf("ping", "measure round trips and bandwidth to a node", "net:ping", detail=detail)
    ping.add("address", metavar="HOST:PORT", help="where the node listens")
    _peer(ping)
    ping.add("--count", type=shared.count, default=10, metavar="N", help="how many pings (default 10)")
    ping.add("--size", type=shared.size, default=64, metavar="BYTES", help="filler of a ping, up to 1 MiB (default 64)")
    ping.add("--json", where=Where.SHELL, action="store_true", help="print one JSON object")
    _test(group)
    what = "this host's interfaces, and what its links can be"
    here = group.leaf("interfaces", what, "interfaces:interfaces")
    here.add("--json", where=Where.SHELL, action="store_true", help="print one JSON object")


def _test(group: Tree) -> None:
    notebook = group.here is Where.MAGIC
    detail = (
        "Every node measures its way to every other, one pair after the other, over encrypted links like those that "
        "carry activations. Exit status 1 when a pair could not be measured. Of bare nodes "
        "that were started with --link nothing tells the shape: a slow one is told as slow."
    )
    test = group.leaf(
        "test", "latency and bandwidth of every pair of nodes, as a heat map", "nettest:test", detail=detail
    )
    file = "test the bare nodes of this cluster file" + (" (default: this notebook's cluster)" if notebook else "")
    test.add("--config", metavar="FILE", required=not notebook, completes=Kind.PATH, help=file)
    shared.secret_file(test, "the cluster secret, for --config (default: as in the file)")
    older = "an older secret that is still good while it is replaced"
    test.add("--previous-secret-file", metavar="FILE", completes=Kind.PATH, help=older)
    test.add("--suite", choices=SUITES, default=SUITES[0], help="cipher suite of the nodes (default aes-256-gcm)")
    test.add("--pings", type=shared.count, default=PINGS, metavar="N", help=f"round trips a pair (default {PINGS})")
    bulk = f"how long bulk is counted for each pair (default {SECONDS:g}, at most {MAX_SECONDS:g})"
    test.add("--seconds", type=shared.seconds, default=SECONDS, metavar="S", help=bulk)
    if notebook:
        shared.on(test)
    test.add("--json", where=Where.SHELL, action="store_true", help="print one JSON object")


def _peer(leaf: Tree) -> None:
    shared.secret_file(leaf, "the cluster secret both sides share")
    older = "an older secret that is still good while it is replaced"
    leaf.add("--previous-secret-file", metavar="FILE", completes=Kind.PATH, help=older)
    leaf.add(
        "--cluster", metavar="NAME", default=DEFAULT_CLUSTER, help=f"name of the cluster (default {DEFAULT_CLUSTER})"
    )
    leaf.add("--node-id", metavar="ID", help="what this side calls itself (default: made up)")
    leaf.add("--suite", choices=SUITES, default=SUITES[0], help="cipher suite (default aes-256-gcm)")
    slower = "send as over a link like this one, as in 5ms,1Gbit: one-way latency, rate, loss"
    leaf.add("--link", type=shared.shape, metavar="SHAPE", help=slower)
    leaf.add("--rekey-every", type=shared.count, metavar="N", help="change keys after N frames")
