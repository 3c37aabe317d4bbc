"""What a part of a model takes on its node, before anything is loaded: weights once, and keys and values a token. Pure.

Counted from the names, shapes and dtypes of the tensors in the model's files, cut as the tensor plan cuts them.
Nothing asks at run time yet: the loader counts the same bytes from the module tree, and tests hold the two together.
The planner of a later release, which decides before it builds any model, is what this is for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxcel_nb.plan.elements import ITEM_SIZE
from mlxcel_nb.plan.part import Part
from mlxcel_nb.plan.shards import LayerShape, Range, layer_shape, split_evenly, split_heads

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_ROWS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
_COLUMNS = {"o_proj", "down_proj"}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a model's files: dtype by safetensors' name, and shape."""

    dtype: str
    shape: Sequence[int]


@dataclass(frozen=True)
class PartMemory:
    """Bytes of one part: `weights` from loading to unloading, `kv_per_token` for each token of context."""

    weights: int
    kv_per_token: int

    def at(self, tokens: int) -> int:
        """Weights and a cache of `tokens` tokens."""
        return self.weights + tokens * self.kv_per_token


def part_memory(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], part: Part, *, float_bytes: int | None = None
) -> PartMemory:
    """Memory of `part`.

    Args:
        tensors: all tensors of the model, by name.
        float_bytes: bytes of a weight once loaded, 4 for float32, which also undoes quantisation; None keeps what
            the files hold.
    """
    shape = layer_shape(config)
    tied = bool(config.get("tie_word_embeddings", "lm_head.weight" not in tensors))
    weights = 0
    for name, tensor in tensors.items():
        if _is_held(name, part, tied=tied):
            weights += _bytes(name, tensor, tensors, shape, part, float_bytes)
    layers = part.layers[1] - part.layers[0]
    keys = shape.kv_heads
    if part.tp_size > 1:
        keys = split_heads(shape.heads, keys, part.tp_size, shape.head_unit)[part.tp_rank].n_keys
    element = float_bytes or min((ITEM_SIZE[t.dtype] for t in tensors.values() if t.dtype in FLOATS), default=4)
    return PartMemory(weights, 2 * layers * keys * shape.head_dim * element)


def _is_held(name: str, part: Part, *, tied: bool) -> bool:
    if match := _LAYER.search(name):
        return part.holds(int(match[1])) and "rotary_emb.inv_freq" not in name
    if "embed" in name or "wte" in name:
        return part.is_first or (part.samples and tied)
    return part.samples and not (tied and name.startswith("lm_head."))


def _bytes(
    name: str, tensor: Tensor, tensors: Mapping[str, Tensor], shape: LayerShape, part: Part, float_bytes: int | None
) -> int:
    """Bytes of the rank's share of one tensor; none for the scales of a weight that is unpacked."""
    module, _, leaf = name.rpartition(".")
    packed = f"{module}.scales" in tensors
    count, element = math.prod(tensor.shape), ITEM_SIZE[tensor.dtype]
    if float_bytes is not None and packed:
        if leaf in ("scales", "biases"):
            return 0
        if leaf == "weight":
            count, element = _unpacked(module, tensor, shape), float_bytes
    elif float_bytes is not None and tensor.dtype in FLOATS:
        element = float_bytes
    part_count, whole = _share(module.rpartition(".")[2], leaf, shape, part)
    return count * element * part_count // whole


def _unpacked(module: str, weight: Tensor, shape: LayerShape) -> int:
    """Number of weights in a packed tensor: its rows by the input features of the module it belongs to."""
    rows = math.prod(weight.shape[:-1])
    kind = module.rpartition(".")[2]
    return rows * {"o_proj": shape.heads * shape.head_dim, "down_proj": shape.ffn}.get(kind, shape.hidden)


def _share(kind: str, leaf: str, shape: LayerShape, part: Part) -> tuple[int, int]:
    """(rank's share, whole), in heads or feed-forward units."""
    if part.tp_size == 1 or kind not in _ROWS | _COLUMNS or (kind in _COLUMNS and leaf == "bias"):
        return 1, 1
    if kind in ("gate_proj", "up_proj", "down_proj"):
        return _length(split_evenly(shape.ffn, part.tp_size, shape.down_group)[part.tp_rank]), shape.ffn
    heads = split_heads(shape.heads, shape.kv_heads, part.tp_size, shape.head_unit)[part.tp_rank]
    return (heads.n_queries, shape.heads) if kind in ("q_proj", "o_proj") else (heads.n_keys, shape.kv_heads)


def _length(span: Range) -> int:
    return span[1] - span[0]
