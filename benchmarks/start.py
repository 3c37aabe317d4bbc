"""From `Cluster(2).start()` to a model that has made its first token, and what of it is not loading the model."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks.harness import PAIRS

MODEL = "smollm2-135m"


def run(_arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians over whole life cycles: start, load, stop."""
    from mlxcel_nb import Cluster

    rows = []
    for _ in range(PAIRS):
        cluster = Cluster(2)
        began = time.monotonic()
        try:
            cluster.start()
            started = time.monotonic()
            report = cluster.load(MODEL, pp=2)
            ready = time.monotonic()
        finally:
            stopping = time.monotonic()
            cluster.stop()
        rows.append({
            "start_s": started - began,
            "load_s": report.load_s,
            "ready_beyond_load_s": ready - began - report.load_s,
            "stop_s": time.monotonic() - stopping,
        })  # fmt: skip
    return {
        "what": f"two engines from nothing to a loaded {MODEL} as pp2, seconds",
        "runs": PAIRS,
        "goal": "ready_beyond_load_s under 4",
        "figures": [
            {"figure": key, "median": statistics.median(values), "low": min(values), "high": max(values)}
            for key in rows[0]
            if (values := [row[key] for row in rows])
        ],
    }
