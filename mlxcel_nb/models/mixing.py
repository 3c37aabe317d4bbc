"""Mixed steps: sequences that decode and chunks of others' prompts in one forward, so that weights are read once.

Every token is a sequence of its own, (N, 1): to whatever works on one token at a time that is all the same. Only
attention has to know which tokens belong together. It is told by the caches: the model is given one for each layer that
stands for those of all sequences, and where its code would attend it is the cache that does, over one sequence's or one
batch's keys and values after the other. That prefill chunks ride on decode steps is Sarathi's (Agrawal and others
2023), that attention alone is done by sequence, Orca's (Yu and others 2022).

Every rank of a mesh does the same. For the MLX thread. Shapes: H heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxcel_nb.models.batching import Group
from mlxcel_nb.models.batching_rows import PLAIN, ROTATING, kind_of
from mlxcel_nb.models.mixing_table import MIXED
from mlxcel_nb.models.part import Handover, LoadedPart
from mlxcel_nb.models.processor import attention
from mlxcel_nb.models.stand_ins import ATTENTION, files_of


@dataclass(frozen=True)
class Segment:
    """Tokens of a step that attend together: one of each row of a batch, or those of a chunk.

    Args:
        rows: sequences.
        tokens: of each; more than one only where there is one sequence.
    """

    rows: int
    tokens: int

    def folded(self, x: mx.array) -> mx.array:
        """A segment's part of the step, (rows * tokens, H, 1, D), as sequences: (rows, H, tokens, D)."""
        return x.transpose(2, 1, 0, 3) if self.tokens > 1 else x

    unfolded = folded  # with one sequence, the same axes change places again


class Masks(tuple[Any, ...]):
    """A mask for each segment."""

    __slots__ = ()


class Mixed:
    """What a layer is given as its cache: it stands for one cache of each segment.

    Args:
        offset: positions of all tokens, (N,), which all layers have in common.
    """

    def __init__(self, caches: Sequence[Any], segments: Sequence[Segment], offset: mx.array) -> None:
        self.offset = offset
        self._caches, self._segments = caches, segments
        self._held: list[tuple[mx.array, mx.array]] = []

    def make_mask(self, _: int, **how: Any) -> Masks:
        """Each segment's own, as its cache makes it. The model's code hands them on to `attend`."""
        pairs = zip(self._caches, self._segments, strict=True)
        return Masks(cache.make_mask(segment.tokens, **how) for cache, segment in pairs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Put new keys and values (N, H, 1, D) into the segments' caches. What is given back is for `attend` alone."""
        new = zip(self._cut(keys), self._cut(values), strict=True)
        self._held = [cache.update_and_fetch(*pair) for cache, pair in zip(self._caches, new, strict=True)]
        return keys, values

    def attend(self, queries: mx.array, scale: float, mask: Masks, sinks: mx.array | None = None) -> mx.array:
        """Attention of every token over the keys and values of its own sequence, (N, H, 1, D)."""
        assert isinstance(mask, Masks), "a mask that knows nothing of segments"
        held, self._held = self._held, []
        found = [
            segment.unfolded(attention(own, *pair, scale=scale, mask=each, sinks=sinks))
            for segment, own, pair, each in zip(self._segments, self._cut(queries), held, mask, strict=True)
        ]
        return mx.concatenate(found) if len(found) > 1 else found[0]

    def _cut(self, x: mx.array) -> Iterable[mx.array]:
        at = 0
        for segment in self._segments:
            count = segment.rows * segment.tokens
            yield segment.folded(x[at : at + count])
            at += count


def can_mix(model: Any, architecture: str) -> bool:
    """Whether steps of `model`, in whose files ours stand in, may be mixed.

    Args:
        model: whole, before any of it is dropped, so that every rank comes to the same.
        architecture: the file of mlx-lm's that has it.
    """
    from mlx_lm.models.cache import make_prompt_cache

    attending = {file.__name__.rpartition(".")[2] for file in files_of(model) if hasattr(file, ATTENTION)}
    if not {architecture, *attending} <= MIXED:
        return False
    return all(kind_of(cache) in (PLAIN, ROTATING) for cache in make_prompt_cache(model))


class Mixture:
    """A group's rows and chunks of prompts in one forward.

    Args:
        part: one that `mixes`.
        group: with a row at least, or None.
        chunks: caches of a sequence that is read, and how many of its tokens are in the step.
    """

    passes = 1
    """Forwards, and handovers between two stages."""

    def __init__(self, part: LoadedPart, group: Group | None, chunks: Sequence[tuple[list[Any], int]]) -> None:
        self._part, self._group, self._chunks = part, group, chunks

    @property
    def width(self) -> int:
        """Sequences of one token in the handover: places in the batch, and tokens of the chunks."""
        return (self._group.width if self._group is not None else 0) + sum(count for _, count in self._chunks)

    def forward(
        self,
        x: mx.array | list[Handover],
        on_layer: Callable[[int, mx.array], None] | None = None,
        *,
        wanted: Sequence[int],
        lap: int = 0,
    ) -> Any:
        """Run the part over the next token of every row and the chunks.

        Args:
            x: token ids (rows + tokens, 1), those of the rows in the group's order, then those of the chunks one after
                the other; or the one handover of the stage before.
            on_layer, lap: as of `LoadedPart.forward`.
            wanted: which of the rows and tokens give logits, at least one.

        Returns:
            Logits (len(wanted), 1, V), in that order, from the part that samples; else a list of one handover. Not
            evaluated.
        """
        rows, width, moves = 0, 0, list(self._chunks)
        if self._group is not None:
            self._group.tidy()
            rows, width = len(self._group.rows), self._group.width
            moves = [(self._group.together, 1), *moves]
        slots = self._group.slots if self._group is not None else []
        only = mx.array([slots[index] if index < rows else index - rows + width for index in wanted])
        inputs: mx.array | Handover
        if isinstance(x, list):
            inputs = x[0]
        else:
            inputs = x if self._group is None else mx.concatenate([self._group.spread(x[:rows]), x[rows:]])
        out = self._part.forward(inputs, self._caches(width, moves), on_layer, lap=lap, only=only, moves=moves)
        if self._group is not None:
            self._group.count(1)
        return [out] if isinstance(out, dict) else out

    def _caches(self, width: int, moves: Sequence[tuple[list[Any], int]]) -> list[Mixed]:
        """A cache for every layer.

        Args:
            width: places in the batch, the first of `moves` unless 0.
            moves: caches of each segment, and tokens of its sequences.
        """
        positions: list[int] = []
        segments = []
        for index, (caches, count) in enumerate(moves):
            first = caches[0]
            if index == 0 and width > 1:
                segments.append(Segment(width, 1))
                positions += first.offset.tolist()
            else:
                segments.append(Segment(1, count))
                positions += range(first.offset, first.offset + count)
        offset = mx.array(positions)
        layers = zip(*(caches for caches, _ in moves), strict=True)
        return [Mixed(layer, segments, offset) for layer in layers]
