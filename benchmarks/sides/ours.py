"""One process of ours with the whole model: our loader, our step loop, our sampler, OpenBLAS under MLX."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import serve
from benchmarks.sides.prompt import prompt_ids
from mlxcel_nb.models.blas import load_fast_blas


def main(folder: str, prefill: int, decode: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    blas = load_fast_blas(cores)

    import mlx.core as mx

    from mlxcel_nb.models.info import model_info
    from mlxcel_nb.models.loading import Part, load_part
    from mlxcel_nb.models.params import SamplingParams
    from mlxcel_nb.models.sampling import Sampler
    from mlxcel_nb.runtime.active import PREFILL_CHUNK

    info = model_info(Path(folder))
    whole = Part(layers=(0, info.layers), n_layers=info.layers, stage=0, n_stages=1, tp_rank=0, tp_size=1)
    part = load_part(Path(folder), whole, dtype="float32")
    prompt = prompt_ids(prefill, info.vocab)

    def step(ids: list[int], cache: Any) -> mx.array:
        return part.forward(mx.array([ids], dtype=mx.int32), cache).reshape(-1)

    def run() -> dict[str, Any]:
        cache, sampler = part.make_cache(), Sampler(SamplingParams(), prompt)
        logits = None
        started = time.perf_counter()
        for start in range(0, prefill, PREFILL_CHUNK):
            logits = step(prompt[start : start + PREFILL_CHUNK], cache)
            mx.eval(logits)
        assert logits is not None
        tokens = [sampler.sample(logits).token]
        first = time.perf_counter()
        while len(tokens) <= decode:
            tokens.append(sampler.sample(step([tokens[-1]], cache)).token)
        ended = time.perf_counter()
        return {"prefill": prefill / (first - started), "decode": decode / (ended - first), "tokens": tokens}

    step(prompt[:4], part.make_cache())
    serve({"blas": blas.name, "threads": blas.threads, "dtype": "float32"}, run)


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
