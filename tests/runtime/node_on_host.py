"""A node on a host of `tests.hosts`: `python -m tests.runtime.node_on_host NODE_ID BIND [SETTINGS]`.

SETTINGS are further ones of a `NodeConfig`, as JSON. The secret comes on standard input, in hexadecimal; the address
goes out; when standard input ends, so does the node. Its probe is the product's, but for the interface tb0, which is
presented as the Thunderbolt one that it stands for.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from mlxcel_nb.cluster.address import parse_address
from mlxcel_nb.cluster.secret import Secret, Secrets
from mlxcel_nb.cluster.transports import HostFacts
from mlxcel_nb.models.blas import load_fast_blas
from mlxcel_nb.net.interfaces.probe import probe


def as_thunderbolt() -> HostFacts:
    found = probe()
    interfaces = [dataclasses.replace(i, kind="thunderbolt") if i.name == "tb0" else i for i in found.interfaces]
    return dataclasses.replace(found, thunderbolt=3, cable=True, driver=True, interfaces=tuple(interfaces))


def main(node_id: str, bind: str, settings: str = "{}") -> None:
    load_fast_blas(1)
    from mlxcel_nb.runtime.node import Node  # MLX comes after its BLAS
    from mlxcel_nb.runtime.node_config import NodeConfig

    secret = Secret(bytes.fromhex(sys.stdin.readline().strip()))
    more = json.loads(settings)
    more["peers"] = {peer: [parse_address(text)] for peer, text in more.get("peers", {}).items()}
    config = NodeConfig(cluster="test", node_id=node_id, bind=bind, port=9000, orphan_guard=False, **more)
    node = Node(config, Secrets(secret), probe=as_thunderbolt)
    print(node.start(), flush=True)
    sys.stdin.read()
    node.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
