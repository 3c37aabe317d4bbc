"""One rank of mlx-lm's own tensor parallelism over MLX's ring, with the BLAS that our engines put behind MLX."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import serve
from benchmarks.sides.prompt import prompt_ids


def main(rank: int, folder: str) -> None:
    from mlxcel_nb.models.blas import load_fast_blas

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    blas = load_fast_blas(1)
    told = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory() as names:
        hosts = Path(names) / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in told["ports"]]))
        os.environ["MLX_HOSTFILE"], os.environ["MLX_RANK"] = str(hosts), str(rank)

        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        ring = mx.distributed.init(strict=True, backend="ring")

    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, config = load_model(Path(folder), lazy=True)
    model.shard(ring)
    mx.eval(model.parameters())

    def run(prefill: int, decode: int) -> dict[str, Any]:
        prompt = mx.array(prompt_ids(prefill, config["vocab_size"]))
        tokens: list[int] = []
        started = first = time.perf_counter()
        for token, _ in generate_step(prompt, model, max_tokens=decode + 1):
            tokens.append(int(token))
            if len(tokens) == 1:
                first = time.perf_counter()
        ended = time.perf_counter()
        return {"prefill": prefill / (first - started), "decode": decode / (ended - first), "tokens": tokens}

    run(8, 2)
    serve({"blas": blas.name, "rank": rank}, run)


main(int(sys.argv[1]), sys.argv[3])
