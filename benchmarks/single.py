"""SmolLM2 in float32 in one process of ours, against mlx-lm as pip installs it, on the same cores.

Both sides read the same folder, take the same prompt ids, and choose greedily; that they choose the same tokens is
part of the result.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.harness import PAIRS, Side, compare

MODEL = "smollm2-135m"
PREFILL = 512
DECODE = 16
RUN_S = 300.0


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians and ratios of prefill and decode, in tokens a second."""
    from mlxcel_nb.models.store import resolve

    prefill = 128 if arguments.quick else PREFILL
    options = [str(resolve(MODEL)), str(prefill), str(DECODE)]
    with (
        Side("ours", "benchmarks.sides.ours", options, deadline_s=RUN_S) as ours,
        Side("mlx-lm", "benchmarks.sides.mlx_lm_plain", options, deadline_s=RUN_S) as peer,
    ):
        pairs: list[tuple[Any, Any]] = [(ours.run(), peer.run()) for _ in range(PAIRS)]
        return {
            "what": f"{MODEL}, float32, one process: ours against mlx-lm as pip installs it; tokens a second",
            "prompt_tokens": prefill,
            "decoded_tokens": DECODE,
            "pairs": PAIRS,
            "ours": ours.about,
            "mlx_lm": peer.about,
            "same_tokens": all(a["tokens"] == b["tokens"] for a, b in pairs),
            "figures": [compare(figure, ("ours", "mlx_lm"), pairs) for figure in ("prefill", "decode")],
        }
