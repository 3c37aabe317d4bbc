"""What each engine's resident memory grows by when it loads its part, against the bytes the plan assigns to it."""

from __future__ import annotations

import argparse
from typing import Any

import psutil

MODEL = "smollm2-135m"
LAYOUTS = ((1, 2), (2, 1))
"""Tensor ranks and pipeline stages."""


def run(_arguments: argparse.Namespace) -> dict[str, Any]:
    """Growth over plan, per engine and layout. Each layout gets engines that have never loaded anything."""
    return {
        "what": f"resident growth of each engine over the bytes of its plan, {MODEL}, float32",
        "goal": "ratio under 1.15",
        "figures": [row for tp, pp in LAYOUTS for row in _measure(tp, pp)],
    }


def _measure(tp: int, pp: int) -> list[dict[str, Any]]:
    from mlxcel_nb import Cluster

    with Cluster(tp * pp) as cluster:
        processes = {node.node_id: psutil.Process(node.pid) for node in cluster.nodes}
        before = {node_id: process.memory_info().rss for node_id, process in processes.items()}
        report = cluster.load(MODEL, tp=tp, pp=pp, dtype="float32")
        rows = []
        for part in report.parts:
            grown = processes[part.node_id].memory_info().rss - before[part.node_id]
            rows.append({
                "figure": f"{report.layout} {part.node_id}",
                "planned_mb": part.planned_bytes / 1e6,
                "grown_mb": grown / 1e6,
                "ratio": grown / part.planned_bytes,
            })  # fmt: skip
        return rows
