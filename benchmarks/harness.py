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

REPO = Path(__file__).parents[1]


class Side:
    """A process that runs `module` and answers each line on its standard input with one JSON object.

    Args:
        deadline_s: a run that takes longer than this ends the benchmark.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], *, deadline_s: float) -> None:
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
            self.about = self._answer()
        except BaseException:
            self.close()
            raise

    def run(self) -> dict[str, float]:
        """One measurement."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
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


def serve(about: dict[str, Any], run: Callable[[], dict[str, float]]) -> None:
    """The other end of `Side`: what a side's module calls once it is ready."""
    print(json.dumps(about), flush=True)
    for _ in sys.stdin:
        print(json.dumps(run()), flush=True)


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
