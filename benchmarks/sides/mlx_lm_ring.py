"""One rank of mlx-lm's own tensor parallelism over MLX's ring, with the BLAS that our engines put behind MLX."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import serve
from benchmarks.sides.peers import generated, join_ring
from benchmarks.sides.prompt import prompt_ids


def main(rank: int, folder: str) -> None:
    from mlxcel_nb.models.blas import load_fast_blas

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    blas = load_fast_blas(1)
    ring = join_ring(rank)

    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, config = load_model(Path(folder), lazy=True)
    model.shard(ring)
    mx.eval(model.parameters())

    def run(prefill: int, decode: int) -> dict[str, Any]:
        prompt = mx.array(prompt_ids(prefill, config["vocab_size"]))
        return generated(model, prompt, decode)

    run(8, 2)
    serve({"blas": blas.name, "rank": rank}, run)


main(int(sys.argv[1]), sys.argv[3])
