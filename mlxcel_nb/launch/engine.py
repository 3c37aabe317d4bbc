"""`python -m mlxcel_nb.launch.engine FOLDER OWNER_PID NODE_ID RANK THREADS`: one engine of a local cluster.

Started by `LocalCluster` and by nobody else, as a fresh interpreter. It prepares itself while the controller comes
up, reads the connection from standard input (one line of JSON), registers, and becomes a node when it is told
the cluster secret (`handover`). It ends when its owner does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.secret import Secret, Secrets
from mlxcel_nb.cluster.shape import parse_links
from mlxcel_nb.launch.handover import EngineSide, JoinRequest, StartNode
from mlxcel_nb.launch.orphan import OrphanGuard
from mlxcel_nb.models.blas import load_fast_blas
from mlxcel_nb.util import log

CONNECTION_S = 120.0
"""The owner has its own, shorter deadline; this one ends an engine that was forgotten."""

REGISTER_S = 60
"""For the hub's answer, likewise."""


NODE_MODULES = (
    "mlxcel_nb.runtime.node",
    "mlxcel_nb.runtime.engine",
    "mlxcel_nb.runtime.loading",
    "tokenizers",
    "jinja2.sandbox",
)
"""What a node and its first load import."""


def _run_node(guard: OrphanGuard, blas: str) -> StartNode:
    for module in NODE_MODULES:  # now, while the controller comes up, rather than while somebody waits for a load
        importlib.import_module(module)

    def start(request: JoinRequest, secret: Secret) -> Address:
        from mlxcel_nb.runtime.node import Node  # not at the top: MLX comes after its BLAS
        from mlxcel_nb.runtime.node_config import NodeConfig

        told = {**asdict(request), "links": parse_links(request.links)}
        node = Node(NodeConfig(**told, blas=blas), Secrets(secret))
        if request.links:
            relay = importlib.import_module("mlxcel_nb.net.shaping.relay")
            guard.before_end(relay.settle)  # after the node's farewells
        guard.before_end(node.stop)
        return node.start()

    return start


def main(argv: list[str], start_node: StartNode | None = None, log_level: str = "ERROR") -> int:
    """Serve until the owner is gone. `start_node` is what a join starts: the runtime's node unless given.

    At WARN, ipykernel says of every engine that it has no debugger, and that would be its last words.
    """
    folder, owner_pid, node_id, rank, threads = Path(argv[0]), int(argv[1]), argv[2], int(argv[3]), int(argv[4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard = OrphanGuard(owner_pid)
    guard.start()
    log.configure(node_id)
    blas = load_fast_blas(threads)  # before anything can import MLX
    with contextlib.suppress(ImportError):
        # A namespace: a file mlx.py that is found anywhere later would win over it, were it not known before.
        importlib.import_module("mlx")

    from traitlets.config import Config

    from mlxcel_nb.launch.compat import engine_class

    handover = EngineSide(node_id, asdict(blas), start_node or _run_node(guard, str(blas)))
    engine_type = engine_class(handover.install)
    config = Config()
    config.ProfileDir.location = str(folder / "engines" / node_id)
    config.BaseIPythonApplication.ipython_dir = str(folder / "ipython")
    config.BaseIPythonApplication.auto_create = True
    config.Session.session = node_id  # the name the hub and the client know this engine by
    config.IPEngine.id = rank
    config.IPEngine.enable_nanny = False
    config.IPEngine.max_heartbeat_misses = 0  # the guard sees sooner that the owner is gone
    config.IPEngine.timeout = REGISTER_S
    config.Application.log_level = log_level
    try:
        connection = guard.line(CONNECTION_S)
    except queue.Empty:
        print(f"no connection came within {CONNECTION_S:g} s", file=sys.stderr)
        return 1
    return _serve(engine_type(config=config, connection_info_env=connection))


def _serve(engine: Any) -> int:
    engine.initialize([])
    engine.start()
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # no thread of a library's can hold a finished engine back
