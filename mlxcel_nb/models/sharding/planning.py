"""The tensor plan of a model: its module tree walked from the top, each block given to the rule that fits it.

`plan` is a function of the model's shapes, its classes and the rank alone: no weight is read, so it holds for a model
that has none yet. `apply` changes the model's figures before the weights come, `join` puts the stand-ins on after.
For the MLX thread.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlx import nn

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models.quantisation import group_sizes
from mlxcel_nb.models.sharding import feed_forward
from mlxcel_nb.models.sharding.attention import OUTPUTS
from mlxcel_nb.models.sharding.block import Block, Join, Rank, Whole, is_product
from mlxcel_nb.models.sharding.families import MIXTURES, Rule, parallel, rule
from mlxcel_nb.models.sharding.feed_forward import name_of
from mlxcel_nb.models.sharding.standins import AllReduce, summed, together
from mlxcel_nb.plan.cuts import Cut
from mlxcel_nb.plan.kv_shares import KvShare
from mlxcel_nb.plan.part import Part
from mlxcel_nb.plan.recutting import ArrayShare
from mlxcel_nb.plan.shards import Range, head_group

REMARKABLE = 0.02
"""Share of the blocks' elements from which on a user is told that they are not cut. Routers are less."""

EXPERTS = ("cut", "spread")
"""Ways to share a mixture: some hidden units of every expert on each rank, or some experts whole."""


@dataclass(frozen=True)
class BlockReport:
    """What became of one block of `size` elements: `why` it stays whole on every rank, or "" where it is cut."""

    path: str
    kind: str
    size: int
    why: str = ""


@dataclass
class TensorPlan:
    """How one rank's share of a model differs from the whole.

    Args:
        cuts: name of an array -> its share; what is not named is kept whole.
        dropped: arrays that this rank has not. Rank 0 alone has what is added to a sum, which is added once.
        settings: path of a module, attribute, value.
        kept: path of a list of modules or computed array -> what is kept of it.
        joins: path of a module, what is put on it once the weights are in place.
        pairs: paths of two modules, the first called before the second, that are added up in one sum.
        blocks: every block that was found.
        kv_heads: layer -> the share of its keys and values that this rank keeps; of others it keeps all.
        states: layer -> the shares of the arrays of its state, by their numbers; of others it keeps all.
    """

    cuts: dict[str, Cut] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    settings: list[tuple[str, str, Any]] = field(default_factory=list)
    kept: list[tuple[str, Range]] = field(default_factory=list)
    joins: list[tuple[str, Join]] = field(default_factory=list)
    pairs: list[tuple[str, str]] = field(default_factory=list)
    blocks: list[BlockReport] = field(default_factory=list)
    kv_heads: dict[int, KvShare] = field(default_factory=dict)
    states: dict[int, dict[int, ArrayShare]] = field(default_factory=dict)

    def report(self) -> list[str]:
        """A line for each kind of block and what became of it, layers counted: "attention: cut in 7 layers"."""
        lines: dict[tuple[str, str], int] = {}
        for block in self.blocks:
            key = (block.kind, block.why)
            lines[key] = lines.get(key, 0) + 1
        return [
            f"{kind}: {f'whole on every rank, {why}' if why else 'cut'} ({count})"
            for (kind, why), count in lines.items()
        ]

    def remarks(self) -> list[str]:
        """A line for each reason why something that counts is computed whole on every rank, and not shared."""
        lines: dict[tuple[str, str], int] = {}
        for block in self.blocks:
            if block.why:
                lines[block.kind, block.why] = lines.get((block.kind, block.why), 0) + block.size
        least = REMARKABLE * sum(block.size for block in self.blocks)
        return [
            f"{kind} is computed whole on every tensor rank: {why}"
            for (kind, why), size in lines.items()
            if size >= least
        ]

    def _take(self, block: Block) -> None:
        self.cuts.update((block.full(name), cut) for name, cut in block.cuts.items())
        self.dropped.update(map(block.full, block.dropped | (block.first_only if block.rank.index else set())))
        self.settings += [(block.full(at), attribute, value) for at, attribute, value in block.settings]
        self.kept += [(block.full(name), span) for name, span in block.kept]
        self.joins += [(block.full(name), put_on) for name, put_on in block.joins]
        layer = layer_of(block.path)
        if block.kv_heads is not None and layer is not None:
            self.kv_heads[layer] = block.kv_heads
        if block.states and layer is not None:
            self.states[layer] = block.states


def plan(
    model: Any,
    config: Mapping[str, Any],
    part: Part,
    *,
    groups: Callable[[str], int] | None = None,
    experts: str = "cut",
) -> TensorPlan:
    """The plan of `part`'s tensor rank for `model`, whole or pruned.

    Args:
        groups: quantisation group of the weight at a path, 1 without; None reads it off `config`.
        experts: one of `EXPERTS`.
    """
    made = TensorPlan()
    if part.tp_size == 1:
        return made
    group = groups or group_sizes(config, model)
    modules = dict(model.named_modules())
    rank = Rank(part.tp_rank, part.tp_size, group, head_group(group(path) for path in modules if _ends(path, OUTPUTS)))
    _walk(model, "", rank, model, experts, made)
    return made


def _ends(path: str, names: tuple[str, ...]) -> bool:
    return path.rpartition(".")[2] in names


def _walk(module: Any, path: str, rank: Rank, root: Any, experts: str, made: TensorPlan) -> None:
    """Plan the blocks at and below a module, the outermost first."""
    if name_of(module) in MIXTURES:
        _mixture(module, path, rank, root, experts, made)
        return
    found = rule(module)
    if found is not None:
        kind, how = found
        if how is feed_forward.experts:
            how = partial(feed_forward.experts, spread=experts == "spread")
        _try(made, kind, how, Block(path, module, rank, root))
        return
    loose = [name for name, child in module.items() if is_product(child)]
    if loose and layer_of(path) is not None:
        size = sum(math.prod(child.weight.shape) for child in map(module.get, loose))
        made.blocks.append(BlockReport(path, type(module).__name__, size, "there is no rule for it"))
    for key, child in _children(module):
        _walk(child, f"{path}.{key}".strip("."), rank, root, experts, made)
    if parts := parallel(module):
        _pair(made, *(f"{path}.{part}" for part in parts))


def _pair(made: TensorPlan, first: str, second: str) -> None:
    """Replace the sums of two parts of a layer by one, if each has one."""
    ends = []
    for part in (first, second):
        sums = [place for place in made.joins if place[1] is summed and f"{place[0]}.".startswith(f"{part}.")]
        if not sums:
            return
        ends.append(sums[-1])
    made.joins = [place for place in made.joins if place not in ends]
    made.pairs.append((ends[0][0], ends[1][0]))


def _children(module: Any) -> list[tuple[str, Any]]:
    """Modules directly below, those in lists and tables too."""
    found: list[tuple[str, Any]] = []

    def visit(key: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            found.append((key, value))
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                visit(f"{key}.{index}", item)
        elif isinstance(value, dict):
            for name, item in value.items():
                visit(f"{key}.{name}", item)

    for key, value in module.items():
        visit(key, value)
    return found


def _try(made: TensorPlan, kind: str, how: Rule, block: Block) -> bool:
    try:
        how(block)
        block.check()
    except Whole as why:
        made.blocks.append(BlockReport(block.path, kind, block.size, str(why)))
        return False
    made.blocks.append(BlockReport(block.path, kind, block.size))
    made._take(block)
    return True


def _mixture(module: Any, path: str, rank: Rank, root: Any, experts: str, made: TensorPlan) -> None:
    """Routed and shared experts, added up once for all of them; where one cannot be cut, each on its own."""
    parts: list[tuple[str, Rule, Block]] = []

    def collect(inner: Any, at: str) -> None:
        for key, child in _children(inner):
            below = f"{at}.{key}".strip(".")
            found = rule(child)
            if found is None:
                collect(child, below)
            elif found[1] is feed_forward.experts:
                how = partial(feed_forward.experts, sums=False, spread=experts == "spread")
                parts.append(("experts", how, Block(below, child, rank, root)))
            elif found[1] is feed_forward.feed_forward:
                parts.append(
                    ("shared expert", partial(feed_forward.feed_forward, sums=False), Block(below, child, rank, root))
                )
            else:
                parts.append((*found, Block(below, child, rank, root)))

    collect(module, path)
    trial = TensorPlan()
    if parts and all(_try(trial, kind, how, block) for kind, how, block in parts):
        for name in ("cuts", "dropped"):
            getattr(made, name).update(getattr(trial, name))
        for name in ("settings", "kept", "joins", "blocks"):
            getattr(made, name).extend(getattr(trial, name))
        made.joins.append((path, summed))
        return
    for kind, how, block in parts:
        again = partial(how.func, **{**how.keywords, "sums": True}) if isinstance(how, partial) else how
        _try(made, kind, again, Block(block.path, block.module, rank, root))


def apply(model: Any, made: TensorPlan) -> None:
    """Tell the modules of `model` their rank's figures, and drop what the rank has not. Before weights are placed."""
    modules = dict(model.named_modules())
    for path, attribute, value in made.settings:
        if path in modules:
            setattr(modules[path], attribute, value)
    for name in made.dropped:
        path, _, leaf = name.rpartition(".")
        if path in modules and leaf in modules[path]:
            del modules[path][leaf]


def join(model: Any, made: TensorPlan, all_reduce: AllReduce | None) -> None:
    """Put the stand-ins on. Once the weights are in place.

    Raises:
        ConfigError: something is to be added up, and nobody does.
    """
    if made.joins and all_reduce is None:
        raise ConfigError("tensor parallel ranks need an all-reduce")
    modules = dict(model.named_modules())
    for path, span in made.kept:
        parent, _, key = path.rpartition(".")
        if parent in modules:
            value = modules[parent][key] if key in modules[parent] else getattr(modules[parent], key)
            setattr(modules[parent], key, value[span[0] : span[1]])
    if all_reduce is None:
        return
    for path, put_on in made.joins:
        if path in modules:
            put_on(modules[path], all_reduce)
    for first, second in made.pairs:
        if first in modules and second in modules:
            together(modules[first], modules[second], all_reduce)


def layer_of(path: str) -> int | None:
    """The layer that a path belongs to."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(match[1]) if match else None
