"""What sides that run the peers have in common: the way into MLX's ring, and mlx-lm's own generation, timed."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def join_ring(rank: int) -> Any:
    """The ring of the processes that are told their ports on standard input, as `meeting.by_ports` does."""
    told = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder) / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in told["ports"]]))
        os.environ["MLX_HOSTFILE"], os.environ["MLX_RANK"] = str(hosts), str(rank)

        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        return mx.distributed.init(strict=True, backend="ring")


def generated(model: Any, prompt: Any, decode: int) -> dict[str, Any]:
    """Tokens a second of mlx-lm's `generate_step`, of the prompt and of `decode` tokens after the first."""
    from mlx_lm.generate import generate_step

    tokens: list[int] = []
    started = first = time.perf_counter()
    for token, _ in generate_step(prompt, model, max_tokens=decode + 1):
        tokens.append(int(token))
        if len(tokens) == 1:
            first = time.perf_counter()
    ended = time.perf_counter()
    return {"prefill": prompt.size / (first - started), "decode": decode / (ended - first), "tokens": tokens}
