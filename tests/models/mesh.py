"""Runs every member of a mesh in one process, for tests: a thread a tensor rank, one stage after the other.

All-reduces meet at a barrier and add in rank order, as the data plane does. MLX arrays stay in their thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_nb.cluster.layout import Layout, make_layout
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.models.part import LoadedPart
from mlxcel_nb.plan.part import Part, part_of


class Sum:
    """An all-reduce over threads: `rank(r)` is what rank r calls."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=120)
        self._parts: list[Any] = [None] * size

    def rank(self, index: int) -> Any:
        def all_reduce(x: mx.array) -> mx.array:
            self._parts[index] = np.array(x.astype(mx.float32))
            self._barrier.wait()
            total = self._parts[0]
            for part in self._parts[1:]:
                total = total + part
            self._barrier.wait()
            return mx.array(total).astype(x.dtype)

        return all_reduce

    def gather(self, index: int) -> Any:
        def side_by_side(x: mx.array, widths: Sequence[int]) -> mx.array:
            assert x.shape[-1] == widths[index]
            self._parts[index] = np.array(x.astype(mx.float32))
            self._barrier.wait()
            every = np.concatenate(self._parts, axis=-1) if index == 0 else np.zeros((*x.shape[:-1], sum(widths)))
            self._barrier.wait()
            return mx.array(every).astype(x.dtype)

        return side_by_side

    def share(self, index: int, value: Any) -> Any:
        """Rank 0's value, on every rank: it alone has logits."""
        self._parts[index] = value
        self._barrier.wait()
        first = self._parts[0]
        self._barrier.wait()
        return first

    def abort(self) -> None:
        self._barrier.abort()


@dataclass
class Run:
    """Logits of every position of the prompt, of each step, and greedy tokens, with one rank's parts and caches.

    Shapes are (L, V), (V,) and a number for one prompt, (B, L, V), (B, V) and B numbers for several.
    """

    prompt_logits: Any = None
    step_logits: list[Any] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)
    offsets: list[list[int]] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    parts: list[LoadedPart] = field(default_factory=list)


def parts_of(layout: Layout, rank: int, *, vocab_parallel: bool = False) -> list[Part]:
    return [part_of(layout, stage, rank, vocab_parallel=vocab_parallel) for stage in range(layout.pp)]


def run_mesh(
    folder: Path,
    prompt: list[int] | list[list[int]],
    *,
    n_layers: int = 5,
    tp: int = 1,
    pp: int = 1,
    layers: str | None = None,
    chunk: int = 512,
    steps: int = 0,
    dtype: str = "auto",
    experts: str = "cut",
    vocab_parallel: bool = False,
) -> list[Run]:
    """Prefill `prompt`, or several of one length, in chunks, make `steps` greedy tokens, and give each rank's view."""
    layout = make_layout(n_layers, tp=tp, pp=pp, layers=layers)
    parts = [parts_of(layout, rank, vocab_parallel=vocab_parallel) for rank in range(tp)]
    reduce = Sum(tp)
    runs = [Run() for _ in range(tp)]
    errors: list[BaseException] = []

    def member(rank: int) -> None:
        try:
            _run_rank(folder, prompt, parts[rank], rank, reduce, runs[rank], chunk, steps, dtype, experts)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            reduce.abort()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return runs


def _run_rank(
    folder: Path,
    prompt: list[int] | list[list[int]],
    held: list[Part],
    rank: int,
    reduce: Sum,
    run: Run,
    chunk: int,
    steps: int,
    dtype: str,
    experts: str,
) -> None:
    parts = [
        load_part(folder, part, dtype=dtype, all_reduce=reduce.rank(rank), experts=experts, gather=reduce.gather(rank))
        for part in held
    ]
    caches = [part.make_cache() for part in parts]
    prompts = np.array(prompt, np.int32)
    one = prompts.ndim == 1
    prompts = prompts.reshape(-1, prompts.shape[-1])

    def through(ids: Any, *, all_logits: bool) -> Any:
        x: Any = mx.array(ids)
        for lap in range(parts[0].laps):
            for part, cache in zip(parts, caches, strict=True):
                x = part.forward(x, cache, all_logits=all_logits, lap=lap)
        if isinstance(x, dict):  # another rank samples, but this one takes part in all that leads to it
            mx.eval(x)
            return reduce.share(rank, None)
        return reduce.share(rank, np.array(x.astype(mx.float32)))

    starts = range(0, prompts.shape[1], chunk)
    logits = np.concatenate([through(prompts[:, at : at + chunk], all_logits=True) for at in starts], axis=1)
    run.prompt_logits = logits[0] if one else logits
    run.offsets = [[entry.offset for entry in cache if hasattr(entry, "offset")] for cache in caches]
    rows = logits[:, -1]
    for _ in range(steps):
        tokens = rows.argmax(-1).astype(np.int32)
        run.tokens.append(int(tokens[0]) if one else tokens.tolist())
        rows = through(tokens[:, None], all_logits=False)[:, -1]
        run.step_logits.append(rows[0] if one else rows)
    run.planned = [part.planned_bytes for part in parts]
    run.resident = [part.resident_bytes for part in parts]
    run.warnings = [warning for part in parts for warning in part.warnings]
    run.parts = parts


def largest_difference(run: Run, reference: Run) -> float:
    """Max |difference of logits| over the prompt and over every decode step."""
    pairs = [(run.prompt_logits, reference.prompt_logits)]
    pairs += zip(run.step_logits, reference.step_logits, strict=True)
    found = [0.0]
    for one, other in pairs:
        given = np.isfinite(other)  # a token that a model never gives has minus infinity
        assert np.array_equal(given, np.isfinite(one))
        found.append(float(np.abs(one[given] - other[given]).max()))
    return max(found)


def assert_equal(runs: list[Run], reference: Run) -> None:
    """The cases' *equal*: logits within 1e-4 and the same greedy tokens, on every rank."""
    for run in runs:
        assert run.tokens == reference.tokens
        assert largest_difference(run, reference) <= 1e-4
