"""Loads one rank's part of a model: only its slices leave the disk, and only its share stays in memory.

The model is mlx-lm's own, built lazily; `stages` and `sharding` say what of it this rank keeps, and every weight that
is kept is read, cut, converted and put in place, layer by layer, each after asking whether it fits. A weight that no
file provides is an error: nothing is ever left as it was initialised. For the MLX thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxcel_nb.errors import ConfigError, ModelError, OutOfMemory
from mlxcel_nb.models import (
    architecture,
    batching_rows,
    device,
    mixing,
    quantisation,
    sharding,
    stages,
    stand_ins,
    untested,
)
from mlxcel_nb.models.memory import MemoryRoom, resident, room
from mlxcel_nb.models.mixing_table import LAZY
from mlxcel_nb.models.part import LoadedPart
from mlxcel_nb.models.safetensors_index import weight_files
from mlxcel_nb.models.sharding import expert_parallel, vocabulary
from mlxcel_nb.models.slices import SliceReader
from mlxcel_nb.models.weights import Weights
from mlxcel_nb.plan.part import Part, whole
from mlxcel_nb.plan.shards import check_tp
from mlxcel_nb.util.units import bytes_text

__all__ = ["LoadProgress", "LoadedPart", "Part", "give_back", "load_part", "whole"]

DTYPES = ("auto", "native", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class LoadProgress:
    """How far loading is. `what` is the piece just put in place, e.g. "layer 7"; `layer` its index, if it is one."""

    done_bytes: int
    total_bytes: int
    what: str
    layer: int | None = None


@dataclass(frozen=True)
class Block:
    """Weights that are loaded together: an embedding, a layer, or the final norm and head."""

    what: str
    layer: int | None
    names: tuple[str, ...]


def load_part(
    path: str | Path,
    part: Part,
    *,
    dtype: str = "auto",
    all_reduce: sharding.AllReduce | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
    check: Callable[[], None] | None = None,
    memory: Callable[[], MemoryRoom] = room,
    allow_code: bool = False,
    experts: str = "cut",
    exchange: expert_parallel.Exchange | None = None,
    names: Sequence[str] = (),
    gather: vocabulary.Gather | None = None,
) -> LoadedPart:
    """Load `part` of the model folder `path`.

    Args:
        dtype: of floating weights and activations. "native" keeps what the files hold, quantised weights included;
            "auto" is that on a GPU, and float32 on a CPU, where MLX's other products are scalar loops. A dtype
            by name undoes the quantisation too.
        all_reduce: sums an array over the tensor ranks; needed when there is more than one.
        progress: called after each block of weights.
        check: called between reads; what it raises ends the loading.
        memory: how much room there is, asked before each block.
        allow_code: run the folder's own model file, if its config names one.
        experts: how tensor ranks share a mixture: "cut", some hidden units of every expert each, or "spread", some
            experts whole.
        exchange: brings tokens to the experts of other expert-parallel ranks; needed when there are some.
        names: of those ranks, for errors.
        gather: puts the tensor ranks' logits side by side; needed where they share the vocabulary.

    Raises:
        ConfigError: a split this model does not allow. ModelError: files that are not what they should be.
        OutOfMemory: naming the layer, what it needs and what there is.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}", advice=f"Use one of {', '.join(DTYPES)}.")
    folder = Path(path)
    config = architecture.read_config(folder, allow_code=allow_code)
    entries = weight_files(folder)
    model = architecture.build(config, folder)
    angles = stand_ins.stand_in(model)
    if config.get("model_file") and part.tp_size * part.ep_size > 1:
        raise ConfigError(
            "no tensor plan for a model that is Python code of its own", advice="Ask for one rank (tp 1, ep 1)."
        )
    skeleton = stages.find_skeleton(model, part.n_layers)
    if skeleton is None and len(getattr(model, "layers", [None] * part.n_layers)) != part.n_layers:
        raise ConfigError(f"the model has {len(model.layers)} layers, not {part.n_layers}")
    weights = Weights(model, skeleton, entries, quantisation.settings(config), target=_target(dtype))
    name = architecture.module_name(config)
    one_by_one = batching_rows.why_not(model, name)
    mixes = not one_by_one and part.ep_size == 1 and mixing.can_mix(model, name)
    lazy = part.ep_size == 1 and name in LAZY
    remarks = [*stages.check_stages(skeleton, name, part), *untested.of_ranks(name, part)]
    check_tp(config, part.tp_size)
    tensor_plan = sharding.plan(model, config, part, groups=weights.group, experts=experts)
    if part.vocab_parallel and part.tp_size > 1:
        tried = not untested.of_ranks(name, part)
        if not vocabulary.share(tensor_plan, skeleton, part, gather, tried=tried):
            part = replace(part, vocab_parallel=False)
    mixtures = expert_parallel.find(model, config, part, weights.group) if part.ep_size > 1 else []
    weights.cuts = tensor_plan.cuts | expert_parallel.cuts(mixtures)
    sharding.apply(model, tensor_plan)
    if skeleton is not None:
        stages.prune(skeleton, part)

    blocks = _blocks(model, skeleton, part)
    sizes = [sum(weights.size(name) for name in block.names) for block in blocks]
    done = 0
    limit = mx.set_cache_limit(0)  # what was only needed to convert goes back at once
    try:
        with SliceReader(check) as reader:
            for block, size in zip(blocks, sizes, strict=True):
                _check_room(block, size + max(map(weights.extra, block.names), default=0), memory())
                for name in block.names:
                    weights.place(name, reader)
                done += size
                if progress is not None:
                    progress(LoadProgress(done, sum(sizes), block.what, block.layer))
            if part.samples:
                weights.compare_tied_head(reader)
    finally:
        mx.set_cache_limit(limit)
    switches, dtype = stages.Switches(), weights.activations(blocks[-1].names)
    sharding.join(model, tensor_plan, all_reduce)
    dispatch = None
    if mixtures:
        if exchange is None:
            raise ConfigError("expert-parallel ranks need an exchange")
        dispatch = expert_parallel.Dispatch(part.ep_rank, part.ep_size, exchange, names)
        expert_parallel.join(model, mixtures, dispatch)
    if skeleton is not None:
        stages.join(skeleton, part, switches, dtype)
    give_back()
    return LoadedPart(
        model=model,
        part=part,
        skeleton=skeleton,
        switches=switches,
        vocab_size=_vocabulary(config, model),
        dtype=dtype,
        planned_bytes=sum(sizes),
        warnings=[*_of_code(config), *remarks, *weights.warnings, *tensor_plan.remarks()],
        dispatch=dispatch,
        one_by_one=one_by_one,
        mixes=mixes,
        lazy=lazy,
        angles=angles,
        kv_heads=tensor_plan.kv_heads,
        states=tensor_plan.states,
    )


def _of_code(config: dict[str, Any]) -> list[str]:
    return [f"the model runs Python code of its own ({name})"] if (name := config.get("model_file")) else []


def _target(dtype: str) -> mx.Dtype | None:
    """The dtype floating weights are converted to; None keeps the files' own."""
    dtype = device.settled(dtype, device.kind())
    return None if dtype == "native" else getattr(mx, dtype)


def _blocks(model: Any, skeleton: stages.Skeleton | None, part: Part) -> list[Block]:
    """Every weight the pruned model wants, in the order it is loaded."""
    names = [name for name, _ in stages.named_arrays(model)]
    if skeleton is None:
        return [Block("the model", None, tuple(names))]
    embedding = [n for n in names if n.startswith(skeleton.embedding_path + ".")]
    blocks = [Block("the embedding", None, tuple(embedding))] if embedding else []
    taken = set(embedding)
    for layer in range(*part.layers):
        own = tuple(name for name in names if name.startswith(skeleton.prefixes_of(layer)))
        taken.update(own)
        blocks.append(Block(f"layer {layer}", layer, own))
    rest = tuple(name for name in names if name not in taken)
    if rest:
        blocks.append(Block("the final norm and head", None, rest))
    return blocks


def _check_room(block: Block, needed: int, left: MemoryRoom) -> None:
    if needed > left.available:
        raise OutOfMemory(
            f"out of memory loading {block.what}, needs {bytes_text(needed)}, "
            f"has {bytes_text(left.available)} within {left.limit}",
            advice="Use more engines, or a smaller or quantised model with dtype native.",
        )


def _vocabulary(config: dict[str, Any], model: Any) -> int:
    inner = config.get("text_config")
    value = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    value = architecture.vocabulary(model) or None if value is None else value
    if not isinstance(value, int):
        raise ModelError(f"config.json: vocab_size is {value!r}, not a whole number")
    return value


def slack() -> int:
    """Bytes that this process has beside MLX's arrays; 0 where the system does not say."""
    held = resident()
    return 0 if held is None else held - mx.get_active_memory()


def give_back() -> None:
    """Return what conversion and Python's allocator hold on to, so that resident memory is what the weights take."""
    gc.collect()
    trim()


def trim() -> None:
    """Return what MLX's and C's allocators hold on to."""
    mx.clear_cache()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # musl has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
