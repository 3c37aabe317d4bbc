"""How fast this machine is at what a model does: run as `python -m mlxcel_nb.models.speed`, it prints one JSON object.

Reading weights (a matrix too large for caches by one row), products (two square matrices), and the fixed cost of a
layer (a step of a model whose matrices are next to nothing). Medians of a few runs; about two seconds. With the BLAS
that engines use, so it wants a process in which MLX was not imported before.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from mlxcel_nb.models.blas import load_fast_blas
from mlxcel_nb.util.cores import usable_cores

RUNS = 5
ROWS, COLUMNS = 16384, 4096
"""256 MiB of float32."""
SIDE = 1024
LAYERS = 8


def measure() -> dict[str, float]:
    """`bandwidth` in bytes a second, `flops` a second, `per_layer` in seconds; on MLX's default device."""
    load_fast_blas(usable_cores())
    import mlx.core as mx

    dtype = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
    weight, row = mx.ones((ROWS, COLUMNS), dtype), mx.ones((1, COLUMNS), dtype)
    one, other = mx.ones((SIDE, SIDE), dtype), mx.ones((SIDE, SIDE), dtype)
    mx.eval(weight, row, one, other)
    read_s = _median_s(lambda: mx.eval(row @ weight.T))
    product_s = _median_s(lambda: mx.eval(one @ other))
    return {
        "bandwidth": weight.nbytes / read_s,
        "flops": 2.0 * SIDE**3 / product_s,
        "per_layer": _median_s(_steps()) / LAYERS,
    }


def _steps() -> Callable[[], None]:
    """A step of decoding of a model of next to nothing."""
    import mlx.core as mx

    from mlxcel_nb.models import architecture

    sizes: dict[str, Any] = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_hidden_layers": LAYERS, "vocab_size": 64, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    model = architecture.build(sizes)
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    token = mx.zeros((1, 1), mx.int32)

    def step() -> None:
        mx.eval(model(token, cache=cache))

    return step


def _median_s(work: Callable[[], None]) -> float:
    """The first run, which may compile, is not counted."""
    work()
    taken = []
    for _ in range(RUNS):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    print(json.dumps(measure()))
