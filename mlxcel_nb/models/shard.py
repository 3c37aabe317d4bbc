"""Tensor plans: how each weight of a layer is cut for one rank, read off the module tree.

Rows of q, k, v, gate and up are cut, and columns of o and down; the partial sums of the latter two are added over the
ranks by an injected all-reduce, after which their biases, if any, are added once. Whatever is named nowhere stays
whole on every rank. Fits any layer of the Llama family's naming. For the MLX thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.plan.part import Part
from mlxcel_nb.plan.shards import LayerShape, Range, check_tp, layer_shape, split_evenly, split_heads

AllReduce = Callable[[mx.array], mx.array]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
QUERY_COUNTS = ("n_heads", "num_heads", "num_attention_heads")
KEY_COUNTS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Cut:
    """A range of a Linear's output features (axis 0) or input features (axis 1)."""

    axis: int
    start: int
    stop: int


def plan_cuts(model: Any, layer_paths: list[str], config: dict[str, Any], part: Part) -> dict[str, Cut]:
    """The cut of every Linear that is not kept whole, by module path, for the layers at `layer_paths`.

    Raises:
        ConfigError: the size does not fit the heads, or the layers are not of a kind a plan is known for.
    """
    if part.tp_size == 1:
        return {}
    check_tp(config, part.tp_size)
    shape = layer_shape(config)
    heads = split_heads(shape.heads, shape.kv_heads, part.tp_size, shape.head_unit)[part.tp_rank]
    units = split_evenly(shape.ffn, part.tp_size, shape.down_group)[part.tp_rank]
    queries = _scaled(heads.queries, shape.head_dim)
    keys = _scaled(heads.keys, shape.head_dim)
    ranges = {"q_proj": (0, queries), "k_proj": (0, keys), "v_proj": (0, keys), "o_proj": (1, queries),
              "gate_proj": (0, units), "up_proj": (0, units), "down_proj": (1, units)}  # fmt: skip
    modules = dict(model.named_modules())
    cuts = {}
    for layer in layer_paths:
        _check_layer(modules, layer, shape, config)
        for path in _linears(modules, layer):
            axis, (start, stop) = ranges[path.rpartition(".")[2]]
            cuts[path] = Cut(axis, start, stop)
    return cuts


def _scaled(heads: Range, head_dim: int) -> Range:
    return heads[0] * head_dim, heads[1] * head_dim


def _linears(modules: dict[str, Any], layer: str) -> Iterator[str]:
    for path, module in modules.items():
        name = path.rpartition(".")[2]
        if path.startswith(f"{layer}.") and name in (*ATTENTION, *FEED_FORWARD) and "weight" in module:
            yield path


def _check_layer(modules: dict[str, Any], layer: str, shape: LayerShape, config: dict[str, Any]) -> None:
    """Every weight of the layer is cut by the plan or is a norm that works on a rank's share as it is."""
    found = {path.rpartition(".")[2] for path in _linears(modules, layer)}
    odd = sorted({*ATTENTION, *FEED_FORWARD} - found)
    for path, module in modules.items():
        name = path.rpartition(".")[2]
        if path.startswith(f"{layer}.") and "weight" in module and name not in found:
            per_head = name in ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
            size = shape.head_dim if per_head else config.get("hidden_size")
            if not isinstance(module, (nn.RMSNorm, nn.LayerNorm)) or module.weight.shape != (size,):
                odd.append(name)
    if odd:
        raise ConfigError(
            f"no tensor plan for model type {config['model_type']} (its layers differ in {', '.join(odd)})",
            advice="Use pipeline stages (pp) instead.",
        )


def apply_counts(model: Any, layer_paths: list[str], config: dict[str, Any], part: Part) -> None:
    """Tell each attention how many heads its rank has.

    Raises:
        ConfigError: the attention does not say its counts by a known name.
    """
    if part.tp_size == 1:
        return
    shape = layer_shape(config)
    heads = split_heads(shape.heads, shape.kv_heads, part.tp_size, shape.head_unit)[part.tp_rank]
    modules = dict(model.named_modules())
    for layer in layer_paths:
        for path, module in modules.items():
            if path.startswith(f"{layer}.") and all(name in module for name in ATTENTION):
                for names, before, after in (
                    (QUERY_COUNTS, shape.heads, heads.n_queries),
                    (KEY_COUNTS, shape.kv_heads, heads.n_keys),
                ):
                    known = [name for name in names if getattr(module, name, None) == before]
                    if not known:
                        raise ConfigError(f"no tensor plan for model type {config['model_type']}: no {names[0]}")
                    for name in known:
                        setattr(module, name, after)


def join_ranks(model: Any, layer_paths: list[str], part: Part, all_reduce: AllReduce | None) -> None:
    """Wrap the column-cut products so that their sums are complete. Called once the weights are in place."""
    if part.tp_size == 1:
        return
    if all_reduce is None:
        raise ConfigError(f"tensor parallel size {part.tp_size} needs an all-reduce")
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if any(path.startswith(f"{layer}.") for layer in layer_paths):
            for name in ("o_proj", "down_proj"):
                if name in module:
                    module[name] = Summed(module[name], all_reduce)


class Summed(nn.Module):
    """A product whose input features are spread over ranks: summed over them, then the bias is added once."""

    def __init__(self, linear: Any, all_reduce: AllReduce) -> None:
        super().__init__()
        if "bias" in linear:
            self.bias = linear.pop("bias")
        self.linear = linear
        self._all_reduce = all_reduce

    def __call__(self, x: Any) -> Any:
        total = self._all_reduce(self.linear(x))
        return total + self.bias if "bias" in self else total
