"""One rank of MLX's own ring: all-reduces of float32 between MLX arrays, in plaintext."""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.harness import serve
from benchmarks.sides.peers import join_ring

WARM = 20


def main(rank: int) -> None:
    ring = join_ring(rank)

    import mlx.core as mx

    def run(nbytes: int, count: int, between: str) -> dict[str, Any]:
        x = mx.ones((nbytes // 4,))
        mx.eval(x)
        times = []
        for n in range(WARM + count):
            began = time.perf_counter()
            y = x * 0.5 if between == "MLX arrays" else x
            mx.eval(mx.distributed.all_sum(y, group=ring))
            if n >= WARM:
                times.append((time.perf_counter() - began) * 1e6)
        return {"times": times if rank == 0 else []}

    serve({"rank": ring.rank()}, run)


main(int(sys.argv[1]))
