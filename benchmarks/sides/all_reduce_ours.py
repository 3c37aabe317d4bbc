"""One rank of ours: all-reduces of float32 over encrypted links, between buffers or between MLX arrays."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import serve
from benchmarks.sides.joining import hot_links
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.net.group import Group
from mlxcel_nb.net.interrupt import Interrupt
from mlxcel_nb.net.tag import Tag

DEADLINE_S = 2.0
WARM = 20


def main(rank: int, size: int, spin: bool) -> None:
    links = hot_links(rank, size, spin=spin)
    interrupt = Interrupt()
    group = Group(rank, links, interrupt)
    step = 0

    def buffers(nbytes: int) -> Callable[[], Any]:
        x, out = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)

        def once() -> None:
            nonlocal step
            step += 1
            group.all_reduce(Tag(1, step, 1), x, out=out, deadline=time.monotonic() + DEADLINE_S)

        return once

    def arrays(nbytes: int) -> Callable[[], Any]:
        import mlx.core as mx

        from mlxcel_nb.runtime.fabric import sum_over

        mx.set_default_device(mx.cpu)
        x = mx.ones((nbytes // 4,))
        mx.eval(x)

        def once() -> None:
            nonlocal step
            step += 1
            sum_over(group, Tag(1, step, 1), x * 0.5, deadline=time.monotonic() + DEADLINE_S)

        return once

    def run(nbytes: int, count: int, between: str) -> dict[str, Any]:
        once = buffers(nbytes) if between == "buffers" else arrays(nbytes)
        for _ in range(WARM):
            once()
        times = []
        for _ in range(count):
            began = time.perf_counter()
            once()
            times.append((time.perf_counter() - began) * 1e6)
        return {"times": times if rank == 0 else []}

    def until_lost() -> dict[str, Any]:
        """Exchange until a peer is gone; by the clock all processes share, when that was noticed."""
        once = buffers(8192)
        while True:
            began = time.monotonic()
            try:
                once()
            except MlxcelError as error:
                return {"noticed": time.monotonic(), "waited_s": time.monotonic() - began, "named": error.node}

    def answer(**order: Any) -> dict[str, Any]:
        return until_lost() if order.get("until") == "lost" else run(**order)

    serve({"rank": rank}, answer)


main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "spin")
