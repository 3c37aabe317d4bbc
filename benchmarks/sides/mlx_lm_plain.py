"""mlx-lm as pip installs it: its own loader, its own `generate_step`, MLX's own BLAS. Nothing of ours is imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import dequantize_model, load_model

from benchmarks.harness import serve
from benchmarks.sides.peers import generated
from benchmarks.sides.prompt import prompt_ids


def main(folder: str, prefill: int, decode: int) -> None:
    model, config = load_model(Path(folder), lazy=False)
    if config.get("quantization"):
        model = dequantize_model(model)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    prompt = mx.array(prompt_ids(prefill, config["vocab_size"]))

    def run() -> dict[str, Any]:
        return generated(model, prompt, decode)

    generated(model, prompt[:4], 1)  # compiles what is compiled once
    serve({"blas": "MLX's own", "dtype": "float32"}, run)


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
