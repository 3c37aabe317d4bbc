"""Feed-forward parts: rows of what goes up, columns of what comes down. For the MLX thread.

Hidden units are independent of each other, so any of them may lie on any rank. Gate and up are cut alike, fused or
not. Experts are feed-forwards side by side: either each is cut, or each rank has some of them whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mlx import nn

from mlxcel_nb.models.sharding.block import Block, Whole, is_product
from mlxcel_nb.models.sharding.standins import AllReduce, SpreadNorm, become, sliced, spread_experts, summed
from mlxcel_nb.plan.cuts import scaled

DOWN = (
    "down_proj", "c_proj", "w2", "fc2", "fc_out", "dense_4h_to_h", "mlp_resid", "value", "proj_2", "output_linear",
)  # fmt: skip
"""The product at the end, by all its names; of two of them the first is meant."""

FUSED = ("gate_up_proj", "proj_1", "input_linear")
"""Gate and up in one product, all of the one before the other."""

INTERLEAVED = frozenset({"phi3small.MLP"})
"""Classes where their rows take turns."""

UP = (
    "up_proj", "gate_proj", "c_fc", "c_fc_0", "c_fc_1", "w1", "w3", "v1", "fc1", "fc_in", "dense_h_to_4h",
    "mlp_gate", "mlp_linear", "key",
)  # fmt: skip

BEFORE = ("x_k", "norm")
"""What works on the inputs."""

AFTER = ("ffn_sub_norm",)
"""Norms of all hidden units together."""


def name_of(module: Any) -> str:
    """A class by mlx-lm's file and its name, e.g. "llama.MLP"."""
    kind = type(module)
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"


def feed_forward(block: Block, *, sums: bool = True) -> None:
    """One feed-forward.

    Args:
        sums: its output is added up over the ranks; not where a mixture adds it to more of its kind first.
    """
    down = block.one_of(DOWN)
    if down is None:
        raise Whole("its products are not known")
    block.check_product(down)
    ups = [name for name in block.products() if name != down]
    if not ups or any(name not in (*UP, *FUSED, "w2") for name in ups):
        raise Whole("its products are not known")
    if getattr(block.module, "activation_sparsity", 0):
        raise Whole("its activation compares all hidden units")
    hidden = block.inputs(down)
    span = block.rank.units(hidden, block.group(down))
    for name in ups:
        outputs = block.outputs(name)
        if outputs == 2 * hidden and name_of(block.module) in INTERLEAVED:
            block.rows(name, [scaled(span, 2)])
        elif outputs == 2 * hidden:
            block.rows(name, [span, scaled(span, 1, hidden)])
        elif outputs == hidden:
            block.rows(name, [span])
        else:
            raise Whole(f"{name} has {outputs} outputs for {hidden} hidden units")
    block.columns(down, [span])
    for name in AFTER:
        if block.shapes.get(f"{name}.weight") == (hidden,) and type(block.at(name)) is nn.RMSNorm:
            block.array(f"{name}.weight", 0, [span], "rows")
            block.join(name, partial(_spread, width=hidden))
    for name in BEFORE:
        if block.shapes.get(name) == (block.inputs(ups[0]),) or block.shapes.get(f"{name}.weight") == (
            block.inputs(ups[0]),
        ):
            block.whole(name)
    block.whole(*(name for name in block.shapes if block.shapes[name] in ((), (1,))))  # one figure for all units
    if sums:
        block.join(down, summed)


def _spread(module: Any, all_reduce: AllReduce, *, width: int) -> None:
    become(module, SpreadNorm, all_reduce=all_reduce, width=width, counts=True)


def experts(block: Block, *, sums: bool = True, spread: bool = False) -> None:
    """The experts of a mixture, stacked: `SwitchGLU` or `SwitchMLP` of mlx-lm.

    Args:
        spread: each rank has some of the experts whole, instead of some hidden units of each.
    """
    names = [name for name, child in block.module.items() if is_product(child)]
    down = next((name for name in ("down_proj", "fc2") if name in names), None)
    if down is None or set(block.shapes) - {f"{name}.{leaf}" for name in names for leaf in ("weight", "bias")}:
        raise Whole("its products are not known")
    total, _, hidden = block.shapes[f"{down}.weight"]
    if spread:
        span = block.rank.units(total)
        for path in block.shapes:
            block.array(path, 0, [span], "experts")
        block.join("", partial(spread_experts, first=span[0], count=span[1] - span[0], sums=sums))
        return
    span = block.rank.units(hidden, block.group(down))
    for name in names:
        if name != down:
            block.rows(name, [span])
    block.columns(down, [span])
    if sums:
        block.join(down, summed)


def lone_product(block: Block) -> None:
    """A matrix in the place of a block: each rank multiplies some of the inputs."""
    (name,) = block.products()
    span = block.rank.units(block.inputs(name), block.group(name))
    block.columns(name, [span])
    block.join(name, partial(sliced, span=span))
