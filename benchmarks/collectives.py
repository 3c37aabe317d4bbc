"""Our encrypted all-reduce of float32 against the plaintext ring that comes with MLX, over loopback."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.harness import PAIRS, Ranks, goal, modes
from benchmarks.sides.meeting import by_dialling, by_ports

KIB = 1 << 10
COUNTS = {8 * KIB: 1000, 64 * KIB: 600, 1024 * KIB: 60}
"""All-reduces of each size in a run: a run of any of them takes some tenths of a second."""

GOALS = {
    ("buffers", 8 * KIB): 0.25,
    ("buffers", 64 * KIB): 0.45,
    ("MLX arrays", 8 * KIB): 0.8,
    ("MLX arrays", 1024 * KIB): 0.35,
}
FOUR = {8 * KIB: 40, 256 * KIB: 20}
MEMORY = "shared-memory"
RUN_S = 120.0
STOPPED_S = 2.0
"""The deadline with which a stopped peer is waited for."""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians in microseconds, and ratios pair by pair: below 1, ours is faster."""
    pairs = PAIRS if not arguments.quick else 2
    pair, profile = two_ranks(pairs)
    pair += over_tcp(pairs)
    figures = [*pair, *four_ranks(pairs)]
    lost = failures(pairs)
    return {
        "what": "all-reduce of float32 over loopback: ours, encrypted, against MLX's ring, in plaintext; microseconds",
        "pairs": pairs,
        "pinned": "nothing",
        "ours_goes_over": f"{MEMORY}, as engines of one host do; over TCP where it says so",
        "oversubscribed": "four ranks on two cores are" if _cores() < 4 else "no",
        "ours_from_arrays": "mx.eval of x * 0.5, the sum in its memory; the ring: mx.eval(all_sum(x * 0.5))",
        **lost,
        **{f"profile_of_{size}_in_us": steps for size, steps in profile.items()},
        "figures": figures,
    }


def two_ranks(pairs: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows, and where the time of ours goes."""
    spin = _spin(2)
    rows = []
    with (
        Ranks("ours", "benchmarks.sides.all_reduce_ours", 2, [spin, MEMORY], by_dialling, deadline_s=RUN_S) as ours,
        Ranks("ring", "benchmarks.sides.all_reduce_ring", 2, [], by_ports, deadline_s=RUN_S) as ring,
    ):
        for between in ("buffers", "MLX arrays"):
            for nbytes, count in COUNTS.items():
                rows.append(_compare(f"2 ranks, {between}", ours, ring, nbytes, count, between, pairs))
        profile = {
            f"{nbytes // KIB} KiB": ", ".join(
                f"{step} {took:.1f}"
                for step, took in ours.run(do="profile", nbytes=nbytes, count=COUNTS[nbytes])["steps"].items()
            )
            for nbytes in (8 * KIB, 64 * KIB)
        }
    return rows, profile


def over_tcp(pairs: int) -> list[dict[str, Any]]:
    """As between hosts, on one: without goals of its own."""
    with (
        Ranks("ours", "benchmarks.sides.all_reduce_ours", 2, [_spin(2)], by_dialling, deadline_s=RUN_S) as ours,
        Ranks("ring", "benchmarks.sides.all_reduce_ring", 2, [], by_ports, deadline_s=RUN_S) as ring,
    ):
        return [
            _compare("2 ranks over TCP, buffers", ours, ring, size, count, "buffers", pairs, goals={})
            for size, count in COUNTS.items()
        ]


def four_ranks(pairs: int) -> list[dict[str, Any]]:
    spin = _spin(4)
    with (
        Ranks("ours", "benchmarks.sides.all_reduce_ours", 4, [spin, MEMORY], by_dialling, deadline_s=RUN_S) as ours,
        Ranks("ring", "benchmarks.sides.all_reduce_ring", 4, [], by_ports, deadline_s=RUN_S) as ring,
    ):
        return [_compare("4 ranks, buffers", ours, ring, size, count, "buffers", pairs) for size, count in FOUR.items()]


def _compare(
    figure: str, ours: Ranks, ring: Ranks, nbytes: int, count: int, between: str, pairs: int,
    goals: Mapping[tuple[str, int], float] = GOALS,
) -> dict[str, Any]:  # fmt: skip
    a, b, every = [], [], []
    for _ in range(pairs):
        a.append(statistics.median(ours.run(nbytes=nbytes, count=count, between=between)["times"]))
        times = ring.run(nbytes=nbytes, count=count, between=between)["times"]
        b.append(statistics.median(times))
        every += times
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    limit = goals.get((between, nbytes)) if figure.startswith("2") else 1.0
    return {
        "figure": f"{figure}, {nbytes // KIB} KiB",
        "ours_us": statistics.median(a),
        "ring_us": statistics.median(b),
        "ring_modes": " and ".join(f"{median:.0f} ({share:.0%})" for median, share in modes(every)),
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        **goal(statistics.median(ratios), at_most=limit),
    }


def failures(pairs: int) -> dict[str, Any]:
    """How long after its end a killed peer is noticed, and how long a stopped one is waited for."""
    killed: list[float] = []
    stopped: list[float] = []
    for number, into in ((signal.SIGKILL, killed), (signal.SIGSTOP, stopped)):
        for _ in range(pairs):
            with Ranks(
                "ours", "benchmarks.sides.all_reduce_ours", 2, ["spin", MEMORY], by_dialling, deadline_s=RUN_S
            ) as ours:
                for side in ours.sides:
                    side.say({"do": "until_lost"})
                time.sleep(0.3)  # well into their exchanges
                ended = time.monotonic()
                os.kill(ours.sides[1].pid, number)
                told = ours.sides[0].hear()
                assert told["named"] == "rank-1"
                into.append((told["noticed"] - ended) * 1000)
    return {
        "killed_peer_noticed_ms": f"median {statistics.median(killed):.2f}, most {max(killed):.2f}; goal 20"
        f" {goal(max(killed), at_most=20)['met']}",
        "stopped_peer_noticed_ms": f"median {statistics.median(stopped):.0f}, most {max(stopped):.0f};"
        f" its deadline was {STOPPED_S * 1000:.0f}",
    }


def _spin(ranks: int) -> str:
    return "spin" if _cores() >= ranks else "block"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
