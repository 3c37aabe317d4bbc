"""How tensor ranks share the heads and the feed-forward units of a layer. Pure: nothing but whole numbers.

A rank's query heads are contiguous and it holds the kv-heads they read, so every rank runs the model's own attention
on fewer heads. With as many kv-heads as ranks or more, ranks get whole kv-groups, as evenly as can be. With fewer, a
kv-head is replicated on the ranks that share its query heads. A quantised weight is cut between quantisation groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxcel_nb.errors import ConfigError

Range = tuple[int, int]
"""First and one past the last."""


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank, as ranges of the model's own numbering. Query heads divide evenly among the kv-heads."""

    queries: Range
    keys: Range

    @property
    def n_queries(self) -> int:
        return self.queries[1] - self.queries[0]

    @property
    def n_keys(self) -> int:
        return self.keys[1] - self.keys[0]


def split_evenly(total: int, parts: int, unit: int = 1) -> tuple[Range, ...]:
    """`total` in `parts` contiguous ranges cut at multiples of `unit`, longer ones first.

    Raises:
        ConfigError: some part would be empty.
    """
    units = -(-total // unit)
    if units < parts:
        raise ConfigError(f"{total} cannot be cut in {parts} parts at multiples of {unit}")
    base, extra = divmod(units, parts)
    ends = [0]
    for part in range(parts):
        ends.append(min(total, ends[-1] + (base + (part < extra)) * unit))
    return tuple(itertools.pairwise(ends))


def split_heads(heads: int, kv_heads: int, tp: int, unit: int = 1) -> tuple[HeadShare, ...]:
    """Each rank's heads; boundaries fall on multiples of `unit` query heads.

    Raises:
        ConfigError: no such split; the message names the numbers and the sizes that work.
    """
    shares = _try_split(heads, kv_heads, tp, unit)
    if shares is None:
        quantised = f", cut at whole quantisation groups ({unit} heads)" if unit > 1 else ""
        raise ConfigError(
            f"tensor parallel size {tp} does not work for {heads} heads and {kv_heads} kv-heads{quantised}",
            advice=f"Sizes that work: {_spell(working_sizes(heads, kv_heads, unit))}.",
        )
    return shares


def working_sizes(heads: int, kv_heads: int, unit: int = 1) -> list[int]:
    """Every tensor parallel size `split_heads` accepts."""
    return [tp for tp in range(1, heads + 1) if _try_split(heads, kv_heads, tp, unit) is not None]


def _try_split(heads: int, kv_heads: int, tp: int, unit: int) -> tuple[HeadShare, ...] | None:
    if tp < 1 or heads < 1 or kv_heads < 1 or heads % kv_heads or heads % unit:
        return None
    group = heads // kv_heads
    lot = math.lcm(group, unit) // group  # kv-groups that must stay together
    if tp <= kv_heads // lot:
        keys = split_evenly(kv_heads, tp, lot)
        return tuple(HeadShare((a * group, b * group), (a, b)) for a, b in keys)
    if tp < kv_heads or group % unit:
        return None
    shares: list[HeadShare] = []
    for head in range(kv_heads):
        ranks = tp // kv_heads + (head < tp % kv_heads)
        if ranks > group // unit:
            return None
        start = head * group
        shares += [HeadShare((start + a, start + b), (head, head + 1)) for a, b in split_evenly(group, ranks, unit)]
    return tuple(shares)


def _spell(sizes: list[int]) -> str:
    """1 to 4, 6 and 8 -> "1-4, 6, 8"."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


def head_group(groups: Iterable[int]) -> int:
    """One group for all products that attention ends with: the least common multiple of theirs.

    Layers that share keys and values must be cut alike, whatever each is quantised to.
    """
    return math.lcm(1, *groups)


def check_tp(config: Mapping[str, Any], tp: int) -> None:
    """Refuse more tensor ranks than there are query heads, before an engine starts or a weight is read.

    Below that every size works: what cannot be cut for it is computed whole on every rank.

    Raises:
        ConfigError: naming heads, kv-heads, the size, and the sizes that work.
    """
    text = config.get("text_config")
    source = {**config, **(text if isinstance(text, Mapping) else {})}
    heads = source.get("num_attention_heads")
    if isinstance(heads, int) and not isinstance(heads, bool) and tp > max(1, heads):
        kv_heads = source.get("num_key_value_heads") or heads
        raise ConfigError(
            f"tensor parallel size {tp} does not work for {heads} heads and {kv_heads} kv-heads",
            advice=f"Sizes that work: 1-{heads}.",
        )
