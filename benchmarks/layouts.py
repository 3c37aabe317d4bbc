"""What layouts do for speed on two cores: a pipeline with several requests in it, tensor ranks against MLX's ring.

Every engine is on a core of its own, all its threads; clusters that are compared are up at once and work in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import PAIRS, Ranks, compare, found, goal
from benchmarks.sides.meeting import by_ports
from benchmarks.sides.prompt import prompt_ids
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.models.params import SamplingParams
from tests.tiny import make_tiny

MODEL = "smollm2-135m"
LAYERS = "0-17,18-29"
"""Of SmolLM2 on two cores: its head costs as much as five layers."""

RUN_S = 600.0
LLAMAS: dict[str, dict[str, Any]] = {
    "56 M": {
        "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "intermediate_size": 1376,
    },
    "254 M": {
        "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 2816,
    },
}  # fmt: skip
"""Random weights; the head is not tied to the embedding, and the vocabulary has 32000 rows."""

_seen = itertools.count(1)


@contextlib.contextmanager
def engines(cores: Sequence[Sequence[int]], model: str, **split: Any) -> Any:
    """A cluster whose engines have so many cores each, with `model` on it."""
    with Cluster(len(cores), threads=len(cores[0])) as cluster:
        for node, own in zip(cluster.nodes, cores, strict=True):
            for thread in Path(f"/proc/{node.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), own)
        cluster.load(model, **split)
        yield cluster


def prompt(length: int, vocabulary: int) -> list[int]:
    """Ids that no other prompt of this run begins with."""
    number = next(_seen)
    return [100 + number, *prompt_ids(length - 1, vocabulary)]


def together(cluster: Cluster, count: int, length: int, output: int, vocabulary: int = 49152) -> dict[str, Any]:
    """`count` requests at once; tokens a second of all: of the output, from the last first token on, and over all."""
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    began = time.perf_counter()
    streams = [cluster.stream(prompt(length, vocabulary), params) for _ in range(count)]
    done = [stream.result() for stream in streams]
    took = time.perf_counter() - began
    rates = [each.timings.tokens_per_s for each in done if each.timings.tokens_per_s]
    prefills = [each.timings.prefill_tokens_per_s for each in done if each.timings.prefill_tokens_per_s]
    return {"decode": sum(rates), "output": count * output / took, "prefill": statistics.median(prefills)}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rows of tokens a second and their ratios."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        return {"what": "the layouts need two cores", "failed": "too few cores", "figures": [{"figure": "none"}]}
    pairs = 1 if arguments.quick else PAIRS
    figures = [*pipelines(cores, pairs), *against_the_ring(cores, pairs)]
    return {
        "what": "tokens a second on two cores, a core an engine; float32, encrypted; no row is over HTTP",
        "pairs": pairs,
        "layers_of_pp_2": LAYERS,
        "figures": figures,
    }


def pipelines(cores: list[int], pairs: int) -> list[dict[str, Any]]:
    """SmolLM2 in two stages, beside one process at the same number of requests."""
    rows = []
    with (
        engines([[cores[0]], [cores[1]]], MODEL, layers=LAYERS) as staged,
        engines([[cores[0]]], MODEL) as one,
        engines([cores], MODEL) as both,
    ):
        for cluster in (staged, one, both):
            together(cluster, 2, 32, 4)
        runs = [(together(staged, 2, 32, 64), together(one, 1, 32, 64)) for _ in range(pairs)]
        row = compare("decode", ("ours", "other"), runs)
        rows.append(found({**row, "figure": "2 requests on pp 2 : 1 on one core", **goal(row["ratio"], at_least=1.5)}))
        for name, cluster in (("one core", one), ("two cores", both)):
            runs = [(together(staged, 32, 32, 32), together(cluster, 32, 32, 32)) for _ in range(pairs)]
            row = compare("output", ("ours", "other"), runs)
            rows.append(found({**row, "figure": f"32 requests on pp 2 : one process on {name}", **goal(0)}))
    return rows


def against_the_ring(cores: list[int], pairs: int) -> list[dict[str, Any]]:
    """Two tensor ranks that share the vocabulary against mlx-lm's own over MLX's ring, one request."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size, config in LLAMAS.items():
            model = make_tiny(
                Path(folder) / size.replace(" ", ""), vocab_size=32000, tie_word_embeddings=False, **config
            )
            with (
                engines([[core] for core in cores], str(model), tp=2, vocab_parallel=True) as ours,
                Ranks("ring", "benchmarks.sides.mlx_lm_ring", 2, [str(model)], by_ports, deadline_s=RUN_S) as ring,
            ):
                together(ours, 1, 32, 4, 32000)
                runs = [(together(ours, 1, 512, 64, 32000), ring.run(prefill=512, decode=64)) for _ in range(pairs)]
            for figure, least in (("decode", 1.15), ("prefill", 1.0)):
                row = compare(figure, ("ours", "other"), runs)
                what = f"{size}, tp 2 with a shared vocabulary : mlx-lm's ring, {figure}"
                rows.append(found({**row, "figure": what, **goal(row["ratio"], at_least=least)}))
    return rows
