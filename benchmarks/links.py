"""One encrypted link of ours over loopback against TLS 1.3 through Python's `ssl`, and against plain sockets."""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from typing import Any

from benchmarks.harness import PAIRS, Ranks, goal
from benchmarks.sides.meeting import by_dialling, by_ports

BULK = 64 << 20
SMALL = 8 << 10
TRIPS = 1000
MEMORY = "shared-memory"
RUN_S = 120.0


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians and ratios round by round, each round running all three."""
    rounds = PAIRS + 2 if not arguments.quick else 2
    with ExitStack() as stack:
        sides = {
            kind: stack.enter_context(
                Ranks(
                    kind,
                    "benchmarks.sides.link_end",
                    2,
                    [kind],
                    by_dialling if kind in ("ours", MEMORY) else by_ports,
                    deadline_s=RUN_S,
                )
            )
            for kind in ("ours", MEMORY, "tls", "plain")
        }
        bulk = [
            {kind: side.run(what="bulk", size=BULK, count=3)["gb_s"] for kind, side in sides.items()}
            for _ in range(rounds)
        ]
        figures = [
            _row("64 MiB, one way, GB/s", bulk, "ours", "tls", at_least=2.5),
            _row("64 MiB, one way, GB/s", bulk, "ours", "plain", at_least=0.65),
            _row("64 MiB, one way, GB/s", bulk, MEMORY, "tls"),
        ]
        for how, limit in (("as commonly used", 0.4), ("polling", 0.8)):
            order = {"what": "round_trip", "size": SMALL, "count": TRIPS, "poll": how == "polling"}
            trips = [{kind: side.run(**order)["us"] for kind, side in sides.items()} for _ in range(rounds)]
            figures += [
                _row(f"8 KiB and back, us, {how}", trips, "ours", "tls", at_most=limit),
                _row(f"8 KiB and back, us, {how}", trips, "ours", "plain"),
                _row(f"8 KiB and back, us, {how}", trips, MEMORY, "tls", at_most=limit),
            ]
        about = {kind: side.sides[0].about for kind, side in sides.items()}
    return {
        "what": "a link on one host: ours, encrypted, over TCP and in shared memory, TLS 1.3 through Python's ssl, and"
        " plain sockets",
        "rounds": rounds,
        "pinned": "nothing; each end a process",
        "as_commonly_used": "ours polls for 150 us before it blocks; TLS and plain sockets block",
        "polling": "none of them ever blocks",
        "ours": f"{about['ours']['suite']}, frames of 512 KiB",
        "tls": f"{about['tls']['version']} {about['tls']['cipher']}, {about['tls']['openssl']}",
        "figures": figures,
    }


def _row(figure: str, rounds: list[dict[str, float]], first: str, second: str, **limit: float | None) -> dict[str, Any]:
    ratios = [values[first] / values[second] for values in rounds]
    return {
        "figure": figure,
        "of": "ours over TCP" if first == "ours" else "ours in shared memory",
        "against": second,
        "value": statistics.median(values[first] for values in rounds),
        "theirs": statistics.median(values[second] for values in rounds),
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        **goal(statistics.median(ratios), **limit),
    }
