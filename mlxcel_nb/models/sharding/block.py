"""A block of a model in the hands of a rule: what the rule says of each of its arrays. For the MLX thread.

A block is the smallest part that is cut as one: an attention, a feed-forward, a mixture of experts, a recurrence.
A rule names what it knows; whatever a block holds beyond that leaves it whole on every rank, for a block computed
whole is right whatever it does. Nothing here reads a weight's values, only shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mlx import nn
from mlx.utils import tree_flatten

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models.sharding.standins import AllReduce
from mlxcel_nb.plan.cuts import Cut, cut
from mlxcel_nb.plan.kv_shares import KvShare
from mlxcel_nb.plan.recutting import ArrayShare
from mlxcel_nb.plan.shards import HeadShare, Range, split_evenly, split_heads

Join = Callable[[Any, AllReduce], None]
"""Puts a stand-in on a module, once its weights are in place."""


class Whole(Exception):
    """A block that stays whole on every rank; the text says why."""


@dataclass(frozen=True)
class Rank:
    """Who asks for a share.

    Args:
        group: the quantisation group of the weight at a path, 1 where it is not quantised.
        head_group: least common multiple of the groups of all products that attention ends with, so that layers that
            share keys are cut alike.
    """

    index: int
    size: int
    group: Callable[[str], int]
    head_group: int = 1

    def units(self, total: int, unit: int = 1) -> Range:
        """This rank's range of `total` units, cut at multiples of `unit`."""
        try:
            return split_evenly(total, self.size, unit)[self.index]
        except ConfigError:
            what = f"{total} units in groups of {unit}" if unit > 1 else f"{total} units"
            raise Whole(f"{what} are too few for {self.size} ranks") from None

    def heads(self, heads: int, kv_heads: int, head_size: int, group: int | None = None) -> HeadShare:
        """This rank's heads, cut where the product behind them, of `head_size` columns a head, may be cut.

        Args:
            group: its quantisation group; None takes `head_group`.
        """
        return self._shares(heads, kv_heads, head_size, group)[self.index]

    def is_first_holder(self, heads: int, kv_heads: int, head_size: int) -> bool:
        """No rank before this one holds this rank's kv-heads."""
        shares = self._shares(heads, kv_heads, head_size, None)
        return self.index == 0 or shares[self.index - 1].keys != shares[self.index].keys

    def _shares(self, heads: int, kv_heads: int, head_size: int, group: int | None) -> tuple[HeadShare, ...]:
        unit = math.lcm(head_size, self.head_group if group is None else group) // head_size
        try:
            return split_heads(heads, kv_heads, self.size, unit)
        except ConfigError as error:
            raise Whole(str(error)) from None

    @staticmethod
    def common(groups: Iterable[int]) -> int:
        """One group for products that are cut alike."""
        return math.lcm(1, *groups)


@dataclass
class Block:
    """One module of the model `root` and what a rule has said of it so far. Names are dotted paths below the module."""

    path: str
    module: Any
    rank: Rank
    root: Any = None
    cuts: dict[str, Cut] = field(default_factory=dict)
    settings: list[tuple[str, str, Any]] = field(default_factory=list)
    joins: list[tuple[str, Join]] = field(default_factory=list)
    kept: list[tuple[str, Range]] = field(default_factory=list)
    first_only: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    kv_heads: KvShare | None = None
    """Of what an attention keeps in its cache, where ranks keep different heads of it."""
    states: dict[int, ArrayShare] = field(default_factory=dict)
    """Of what a recurrence keeps in its cache, by number of the array."""

    def __post_init__(self) -> None:
        found: Any = tree_flatten(self.module.parameters())
        self.shapes = {name: tuple(array.shape) for name, array in found}
        self._known: set[str] = set()

    @property
    def size(self) -> int:
        """Elements of all its arrays."""
        return sum(map(math.prod, self.shapes.values()))

    def full(self, name: str) -> str:
        """The name in the whole model."""
        return f"{self.path}.{name}".strip(".")

    def at(self, name: str) -> Any:
        """The module (or other value) at a path below the block, None when there is none."""
        value = self.module
        for key in name.split(".") if name else ():
            value = value[int(key)] if isinstance(value, list) else getattr(value, key, None)
            if value is None:
                return None
        return value

    def one_of(self, names: Iterable[str]) -> str | None:
        """The first name that a child with a weight goes by."""
        return next((name for name in names if f"{name}.weight" in self.shapes), None)

    def products(self) -> list[str]:
        """Children that are matrices, in the module's order."""
        return [name for name, child in self.module.items() if isinstance(child, nn.Module) and is_product(child)]

    def outputs(self, name: str) -> int:
        """Output features of a product."""
        return self.shapes[f"{name}.weight"][-2]

    def inputs(self, name: str) -> int:
        """Input features of a product."""
        return self.shapes[f"{name}.weight"][-1]

    def group(self, name: str) -> int:
        """Quantisation group of a product below the block."""
        return self.rank.group(self.full(name))

    def rows(self, name: str, ranges: Iterable[Range], how: str = "rows") -> None:
        """Cut the output features of a product, and its bias with them."""
        self.check_product(name)
        ranges = list(ranges)
        self.array(f"{name}.weight", len(self.shapes[f"{name}.weight"]) - 2, ranges, how)
        if f"{name}.bias" in self.shapes:
            self.array(f"{name}.bias", len(self.shapes[f"{name}.bias"]) - 1, ranges, how)

    def channels(self, name: str, ranges: Iterable[Range], how: str = "rows") -> None:
        """Cut a convolution that works on each channel alone."""
        ranges = list(ranges)
        for leaf in ("weight", "bias"):
            if f"{name}.{leaf}" in self.shapes:
                self.array(f"{name}.{leaf}", 0, ranges, how)
        for attribute in ("groups", "channels"):
            if hasattr(self.at(name), attribute):
                self.set(attribute, sum(stop - start for start, stop in ranges), at=name)

    def columns(self, name: str, ranges: Iterable[Range], how: str = "columns") -> None:
        """Cut the input features of a product, whose sum is then a part of the whole's. Rank 0 alone adds its bias."""
        self.check_product(name)
        axis = len(self.shapes[f"{name}.weight"]) - 1
        wanted = cut(how, axis, ranges)
        group = self.group(name)
        for edge in (edge for span in wanted.ranges for edge in span):
            if edge % group and edge != self.inputs(name):
                raise Whole(f"{name} would be cut inside a quantisation group of {group}")
        self.array(f"{name}.weight", axis, wanted.ranges, how)
        self.once(f"{name}.bias")

    def once(self, *names: str) -> None:
        """Arrays that rank 0 alone has, for they are added to a sum."""
        for name in names:
            if name in self.shapes:
                self._known.add(name)
                self.first_only.add(name)

    def array(self, name: str, axis: int, ranges: Iterable[Range], how: str) -> None:
        """Cut one array."""
        wanted = cut(how, axis, ranges)
        if not wanted.ranges:
            raise Whole(f"nothing of {name} is left for a rank")
        self._known.add(name)
        if not wanted.is_all(self.shapes[name]):
            self.cuts[name] = wanted

    def state(self, number: int, axis: int, ranges: Iterable[Range], total: int, *, in_place: bool = False) -> None:
        """The rank keeps `ranges` of an array of the cache, whose axis is `total` long in the whole model."""
        self.states[number] = ArrayShare(axis, tuple(span for span in ranges if span[0] < span[1]), total, in_place)

    def whole(self, *names: str) -> None:
        """Arrays and modules that every rank has as they are."""
        for name in names:
            self._known.update(found for found in self.shapes if found == name or found.startswith(f"{name}."))

    def set(self, attribute: str, value: Any, at: str = "") -> None:
        """Give the module at `at` another plain attribute."""
        self.settings.append((at, attribute, value))

    def drop(self, *names: str) -> None:
        """Arrays that this rank has no use for."""
        self._known.update(names)
        self.dropped.update(names)

    def keep(self, name: str, span: Range) -> None:
        """Keep only `span` of the list of modules, or of the computed array, at `name`; done once weights are in place,
        for it changes the names of those that follow.
        """
        self.kept.append((name, span))

    def join(self, name: str, put_on: Join) -> None:
        """Have a stand-in put on the module at `name`."""
        self.joins.append((name, put_on))

    def check(self) -> None:
        """Every array has been spoken of.

        Raises:
            Whole: naming those that have not.
        """
        unknown = sorted({name.removesuffix(".weight") for name in set(self.shapes) - self._known})
        if unknown:
            raise Whole(f"no rule for its {', '.join(unknown)}")

    def check_product(self, name: str) -> None:
        """Raises `Whole` for what only looks like a matrix that can be cut."""
        module = self.at(name)
        if not is_product(module):
            raise Whole(f"{name} is a {type(module).__name__}")


def is_product(module: Any) -> bool:
    """A matrix (or one for each head or expert) that can be cut by rows and by columns."""
    names = {kind.__name__ for kind in type(module).__mro__}
    return isinstance(module, nn.Linear) or bool(names & {"SwitchLinear", "MultiLinear"})
