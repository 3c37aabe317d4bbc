"""How a figure is made: alternating pairs, medians, and the machine it was made on.

A benchmark compares two sides, A and B. Each side is a process of its own that stays up and does one run whenever it is
told; the two never run at the same time. Runs alternate A B A B, so that what drifts drifts for both, and the ratio
is taken pair by pair.
"""

from __future__ import annotations

import json
import math
import os
import platform
import selectors
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PAIRS = 5
"""Fewer leave the median to chance."""

RARE = 0.03
"""A smaller share of the runs than this is no mode but a disturbance."""

REPO = Path(__file__).parents[1]


class Side:
    """A process that runs `module` and answers each line on its standard input with one JSON object.

    Args:
        deadline_s: a run that takes longer than this ends the benchmark.
        greets: whether the process says something of itself before it is told anything.
    """

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], *, deadline_s: float, greets: bool = True
    ) -> None:
        self.name = name
        self.deadline_s = deadline_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        try:
            self.about: dict[str, Any] = self._answer() if greets else {}
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, **order: Any) -> dict[str, Any]:
        """One measurement."""
        return self.ask(order)

    def ask(self, what: Any) -> dict[str, Any]:
        """Say something, as JSON, and hear the answer."""
        self.say(what)
        return self.hear()

    def say(self, what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(self.deadline_s):
                raise TimeoutError(f"{self.name} gave no answer within {self.deadline_s:g} s")
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


class Ranks:
    """A side of several processes, which all run at once: each runs `module` with its rank and how many there are.

    Args:
        meet: brings the processes together once they are there; gets all of them.
    """

    def __init__(
        self, name: str, module: str, size: int, arguments: Sequence[str], meet: Callable[[list[Side]], None],
        *, deadline_s: float,
    ) -> None:  # fmt: skip
        self.name = name
        self.sides: list[Side] = []
        try:
            for rank in range(size):
                told = [str(rank), str(size), *arguments]
                self.sides.append(Side(f"{name} {rank}", module, told, deadline_s=deadline_s, greets=False))
            meet(self.sides)
        except BaseException:
            self.close()
            raise

    def run(self, **order: Any) -> dict[str, Any]:
        """One measurement, as rank 0 saw it."""
        for side in self.sides:
            side.say(order)
        answers = [side.hear() for side in self.sides]
        return answers[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for side in self.sides:
            side.close()


def serve(about: dict[str, Any], run: Callable[..., dict[str, Any]]) -> None:
    """The other end of `Side`: what a side's module calls once it is ready."""
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


def compare(
    figure: str, names: tuple[str, str], pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]
) -> dict[str, Any]:
    """One row: medians of `figure` under the sides' `names`, and median and range of the pairs' ratios."""
    first, second = ([run[figure] for run in side] for side in zip(*pairs, strict=True))
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    return {
        "figure": figure,
        names[0]: statistics.median(first),
        names[1]: statistics.median(second),
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
    }


def found(row: dict[str, Any]) -> dict[str, Any]:
    """A row as it is found, on standard error: a benchmark of many minutes shows how far it is, and loses nothing."""
    cells = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    print("found: " + ", ".join(cells), file=sys.stderr, flush=True)
    return row


def modes(values: Sequence[float]) -> list[tuple[float, float]]:
    """Median and share of each of the two groups that `values` fall into, by the cut that parts their logarithms best
    (Otsu's); one group where the two lie less than a factor of 2 apart or one of them is next to nothing.
    """
    logs = [math.log(value) for value in sorted(values)]
    count, total = len(logs), sum(logs)
    best, cut, below = 0.0, 0, 0.0
    for n in range(1, count):
        below += logs[n - 1]
        apart = below / n - (total - below) / (count - n)
        if n * (count - n) * apart * apart > best:
            best, cut = n * (count - n) * apart * apart, n
    low, high = logs[:cut], logs[cut:]
    rare = min(len(low), len(high)) < count * RARE
    if not low or rare or statistics.median(high) - statistics.median(low) < math.log(2):
        return [(statistics.median(values), 1.0)]
    return [(math.exp(statistics.median(group)), len(group) / count) for group in (low, high)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]


def environment() -> dict[str, Any]:
    """What a figure depends on and a reader cannot see."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return {
        "cores": len(cores),
        "pinned": len(cores) < (os.cpu_count() or 1),
        "machine": platform.machine(),
        "system": platform.system(),
        "processor": _processor(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("mlxcel_nb", "mlx", "mlx-lm", "ipyparallel", "ipykernel")},
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def goal(value: float, *, at_most: float | None = None, at_least: float | None = None) -> dict[str, Any]:
    """The columns that say what was asked for and whether it is so."""
    if at_most is not None:
        return {"goal": f"<= {at_most:g}", "met": "yes" if value <= at_most else "NO"}
    if at_least is not None:
        return {"goal": f">= {at_least:g}", "met": "yes" if value >= at_least else "NO"}
    return {"goal": "", "met": ""}
