"""One rank of MLX's own ring: all-reduces of float32 between MLX arrays, in plaintext."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import serve

WARM = 20


def main(rank: int) -> None:
    told = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder) / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in told["ports"]]))
        os.environ["MLX_HOSTFILE"], os.environ["MLX_RANK"] = str(hosts), str(rank)

        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        ring = mx.distributed.init(strict=True, backend="ring")

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
