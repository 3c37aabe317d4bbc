"""A model behind the HTTP API, as `mlxcel-nb serve` has it, in a process that says on demand what its engines hold.

A line on standard input is a JSON order: first what to load, then `{"do": "facts"}`, then `{"do": "end"}`, after which
everything has been stopped. Answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.scheduling.step_plan import BLOCK
from mlxcel_nb.serve.served import Served
from mlxcel_nb.serve.server import ApiServer


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def order() -> dict[str, Any]:
    line = sys.stdin.readline()
    told: dict[str, Any] = json.loads(line) if line else {"do": "end"}
    return told


def facts_of(cluster: Cluster) -> dict[str, Any]:
    """What the leader's engine has to do and holds, in its own words, and what the arrays of each node take."""
    nodes = cluster.status().nodes
    facts: dict[str, Any] = next(node.work["engine"] for node in nodes if node.work.get("engine"))
    return {**facts, "arrays": {node.node_id: node.arrays_bytes for node in nodes}}


def main() -> None:
    told = order()
    with Cluster(told["engines"]) as cluster:
        report = cluster.load(told["model"], **told["split"])
        with ApiServer(Served(cluster, names=["soaked"]), port=0, max_wait_s=told["max_wait_s"]) as server:
            pids = {"server": os.getpid(), **{node.node_id: node.pid for node in cluster.nodes}}
            most = max(part.kv_per_token for part in report.parts)
            shares = {part.node_id: part.kv_per_token / most for part in report.parts}
            say(url=server.url, pids=pids, block_bytes=BLOCK * most, kv_shares=shares, folder=report.path)
            while order()["do"] != "end":
                say(**facts_of(cluster))
    say(ended=True)


if __name__ == "__main__":
    main()
