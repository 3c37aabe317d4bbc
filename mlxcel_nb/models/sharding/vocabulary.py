"""The vocabulary shared by tensor ranks, where that is asked for: rows of the embedding, and outputs of the head.

A rank looks up the tokens whose rows it has, and the ranks' answers are added up: all but one are nothing. Its head
gives the logits of its tokens; rank 0 of the last stage, which samples, puts everybody's side by side, before whatever
the model does to logits. Nothing is added in another order, so they are the whole head's to the last bit, as far as the
products are. The scheme is that of Megatron-LM (Shoeybi and others 2019). For the MLX thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models import stages
from mlxcel_nb.models.sharding.planning import BlockReport, TensorPlan
from mlxcel_nb.models.sharding.standins import AllReduce, become
from mlxcel_nb.models.staging.skeleton import Place, Skeleton, Use
from mlxcel_nb.plan.cuts import cut
from mlxcel_nb.plan.part import Part
from mlxcel_nb.plan.shards import split_evenly

Gather = Callable[[mx.array, Sequence[int]], mx.array]
"""Takes a rank's columns and how many each rank has; gives rank 0 all of them, in rank order. What other ranks get has
that shape and no meaning."""

READS_TABLE = frozenset({"llama4_text", "minicpm", "seed_oss"})
"""mlx-lm's files whose head, where it is tied, is a product with the embedding's array itself."""

KIND = "vocabulary"


@dataclass(frozen=True)
class Share:
    """Which tokens a rank has.

    Args:
        first, count: its rows.
        widths: rows of each rank.
        looks_up: the embedding is where the model begins; of a later stage it is the head, and only the shape of what
            it looks up is of use.
    """

    first: int
    count: int
    widths: tuple[int, ...]
    gather: Gather
    looks_up: bool


def share(made: TensorPlan, skeleton: Skeleton | None, part: Part, gather: Gather | None, *, tried: bool) -> bool:
    """Add the vocabulary to a tensor plan; False where every rank keeps the whole of it, as the plan then says.

    Args:
        tried: the catalogue has the architecture and proves it, so it is known what its code does with the vocabulary.

    Raises:
        ConfigError: there is nobody to put logits together.
    """
    places = _places(skeleton) if skeleton is not None else []
    if why := why_whole(skeleton, tried=tried):
        made.blocks.append(BlockReport("", KIND, sum(place.module.weight.size for place in places), why))
        return False
    if gather is None:
        raise ConfigError("ranks that share the vocabulary need a gather")
    assert skeleton is not None
    for place in places:
        rows, width = place.module.weight.shape
        spans = split_evenly(rows, part.tp_size)
        first, end = spans[part.tp_rank]
        for leaf in ("weight", "bias"):
            if leaf in place.module:
                made.cuts[f"{place.path}.{leaf}"] = cut("rows", 0, [(first, end)])
        made.blocks.append(BlockReport(place.path, KIND, rows * width))
        if stages.needed(skeleton, place, part):
            own = Share(first, end - first, tuple(stop - start for start, stop in spans), gather, part.is_first)
            made.joins.append((place.path, partial(_put_on, own=own)))
    return True


def _places(skeleton: Skeleton) -> list[Place]:
    """Tables that are looked up in with token ids, and products that give logits: as long as the vocabulary, or nearly.

    Tables of positions are shorter, and what else works on activations has fewer outputs.
    """
    tables = [place for place in skeleton.others if isinstance(place.module, nn.Embedding)]
    rows = next((place.module.weight.shape[0] for place in tables if place.path == skeleton.embedding_path), 0)
    heads = [
        place for place in skeleton.others
        if isinstance(place.module, nn.Linear) and skeleton.uses[place.path] & Use.AFTER
    ]  # fmt: skip
    return [place for place in (*tables, *heads) if 2 * place.module.weight.shape[0] >= rows > 0]


def why_whole(skeleton: Skeleton | None, *, tried: bool) -> str:
    """Why every rank keeps the whole vocabulary; "" where it is shared."""
    if skeleton is None or not skeleton.embedding_path:
        return "its parts are not known"
    if not tried:
        return "what its code does with them is not known"
    if skeleton.tied and type(skeleton.inner).__module__.rpartition(".")[2] in READS_TABLE:
        return "its code multiplies with the embedding itself"
    return ""


def _put_on(module: Any, all_reduce: AllReduce, *, own: Share) -> None:
    kind = PartOfHead if isinstance(module, nn.Linear | nn.QuantizedLinear) else PartOfTable
    become(module, kind, share=own, all_reduce=all_reduce)


class PartOfTable:
    """An embedding, of which a rank has some rows; where it is tied, the head too."""

    __slots__ = ()

    def __call__(self, ids: mx.array) -> Any:
        own: Share = self._share  # type: ignore[attr-defined]
        local = ids.astype(mx.int32) - own.first
        here = (local >= 0) & (local < own.count)
        out = super().__call__(mx.where(here, local, 0))  # type: ignore[misc]
        out = mx.where(here[..., None], out, mx.zeros((), out.dtype))
        return self._all_reduce(out) if own.looks_up else out  # type: ignore[attr-defined]

    def as_linear(self, x: mx.array) -> mx.array:
        own: Share = self._share  # type: ignore[attr-defined]
        return own.gather(super().as_linear(x), own.widths)  # type: ignore[misc]


class PartOfHead:
    """A head that gives the logits of a rank's tokens."""

    __slots__ = ()

    def __call__(self, x: mx.array) -> mx.array:
        own: Share = self._share  # type: ignore[attr-defined]
        return own.gather(super().__call__(x), own.widths)  # type: ignore[misc]
