"""Runs an entry of the catalogue whole, and as tensor ranks in threads that meet at each sum."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_nb.models import architecture, catalogue, sharding
from mlxcel_nb.models.catalogue import Entry
from mlxcel_nb.models.stages import named_arrays
from mlxcel_nb.plan.part import Part
from tests.models.mesh import Sum

PREFILL, DECODE = 17, 8


def ids(batch: int) -> Any:
    return np.random.default_rng(1).integers(0, 257, (batch, PREFILL + DECODE)).astype(np.int32)


def run(model: Any, tokens: Any) -> Any:
    """Logits of all positions (B, L, V): the prompt at once, then a token at a time."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    parts = []
    for start, stop in [(0, PREFILL), *((i, i + 1) for i in range(PREFILL, PREFILL + DECODE))]:
        logits = model(mx.array(tokens[:, start:stop]), cache=cache)
        parts.append(np.array(logits.astype(mx.float32)))
    return np.concatenate(parts, axis=1)


@functools.lru_cache(maxsize=2)
def weights_of(name: str) -> dict[str, Any]:
    """Every weight of the whole, as the model names it."""
    entry = catalogue.entry(name)
    assert entry is not None
    return {path: np.array(array) for path, array in named_arrays(catalogue.build(entry))}


@functools.lru_cache(maxsize=4)
def whole(name: str, batch: int) -> Any:
    entry = catalogue.entry(name)
    assert entry is not None
    return run(catalogue.build(entry), ids(batch))


def cut_array(array: Any, cut: Any) -> Any:
    if cut is None:
        return array
    return np.concatenate([array.take(range(*span), cut.axis) for span in cut.ranges], cut.axis)


def load(entry: Entry, part: Part, weights: dict[str, Any], all_reduce: Any, **how: Any) -> tuple[Any, Any]:
    """One rank's model with its share of `weights`, and the plan it was cut by."""
    model = architecture.build(copy.deepcopy(entry.config))
    if hasattr(model, "sanitize"):
        model.sanitize({name: mx.array(array) for name, array in weights.items()})  # which may drop a head
    made = sharding.plan(model, entry.config, part, **how)
    sharding.apply(model, made)
    own = {}
    for name, _ in named_arrays(model):
        own[name] = mx.array(cut_array(weights[name], made.cuts.get(name)))
    model.load_weights(list(own.items()), strict=False)
    sharding.join(model, made, all_reduce)
    return model, made


def on_ranks(name: str, tp: int, batches: tuple[int, ...] = (1,), **how: Any) -> list[list[Any]]:
    """Logits of each rank for each batch size; index [rank][batch]."""
    return across(tp, lambda rank, all_reduce: _rank(name, tp, rank, all_reduce, batches, how))


def _rank(name: str, tp: int, rank: int, all_reduce: Any, batches: tuple[int, ...], how: Any) -> list[Any]:
    entry = catalogue.entry(name)
    assert entry is not None
    n = entry.n_layers
    model, _ = load(entry, Part((0, n), n, 0, 1, rank, tp), weights_of(name), all_reduce, **how)
    return [run(model, ids(batch)) for batch in batches]


def across(tp: int, member: Callable[[int, Any], Any]) -> list[Any]:
    """What `member(rank, all_reduce)` gives on each of `tp` threads; the first error of any of them is raised."""
    reduce = Sum(tp)
    found: list[Any] = [None] * tp
    errors: list[BaseException] = []

    def thread(rank: int) -> None:
        try:
            found[rank] = member(rank, reduce.rank(rank))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            reduce.abort()

    threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(tp)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if errors:
        raise errors[0]
    return found
