"""Sequences that decode while others' prompts are read in the same forwards, and what each gives when it is alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_nb.models.batching import Group
from mlxcel_nb.models.mixing import Mixture
from mlxcel_nb.models.part import LoadedPart
from tests.models.batches import STEPS, Share, alone, shared, tokens_of

READ = ((3, 2), (7, 1, 5), (5, 2, 1), (6,), (2, 9))
"""How `read_while_others_decode` reads each prompt. Some are longer than a window of 8, which chunks reach beyond."""

Chunk = tuple[int, int]
"""A sequence, and how many of its next tokens."""


def every_position(part: LoadedPart, sequence: int) -> Any:
    """Logits (tokens, V) of a sequence that is alone: its prompt in chunks, then a token at a time."""
    caches, ids, at = part.make_cache(), mx.array(tokens_of(sequence)), 0
    found = []
    for count in (*READ[sequence], *[1] * STEPS[sequence]):
        found.append(part.forward(ids[None, at : at + count], caches, all_logits=True))
        at += count
    return np.array(mx.concatenate(found, axis=1)[0].astype(mx.float32))


class Mixtures:
    """Rows that decode and sequences that are being read, on every stage."""

    def __init__(self, parts: Sequence[LoadedPart], expected: dict[int, Any], share: Share = alone) -> None:
        self.parts, self.expected, self.share = parts, expected, share
        self.groups = [Group(part) for part in parts]
        self.caches: dict[int, list[list[Any]]] = {}
        self.at: dict[int, int] = {}
        self.worst = 0.0
        self.steps = 0

    @property
    def rows(self) -> tuple[int, ...]:
        return self.groups[0].rows

    def step(self, *chunks: Chunk) -> None:
        """A token of each row, and the chunks. Who has been read to the end joins."""
        segments = [*((row, 1) for row in self.rows), *chunks]
        for sequence, _ in chunks:
            self.caches.setdefault(sequence, [part.make_cache() for part in self.parts])
        spans = [(sequence, self.at.get(sequence, 0), count) for sequence, count in segments]
        x: Any = mx.array(np.concatenate([tokens_of(one)[at : at + count] for one, at, count in spans])[:, None])
        ends = np.cumsum([count for _, count in segments]) - 1
        self.steps += 1
        order = [*range(len(segments))][:: -1 if self.steps % 2 else 1]
        for stage, (part, group) in enumerate(zip(self.parts, self.groups, strict=True)):
            assert part.mixes and group.rows == self.rows
            read = [(self.caches[sequence][stage], count) for sequence, count in chunks]
            mixture = Mixture(part, group if group.rows else None, read)
            if isinstance(x, list):
                assert [part.size_of(each) for each in x] == [(mixture.width, 1)] * mixture.passes
            x = mixture.forward(x, wanted=[int(ends[index]) for index in order])
        self._compare(shared(x, self.share), [spans[index] for index in order])
        self.at |= {sequence: at + count for sequence, at, count in spans}
        for sequence, _ in chunks:
            if self.at[sequence] == sum(READ[sequence]):
                for group, caches in zip(self.groups, self.caches.pop(sequence), strict=True):
                    group.join([(sequence, caches)])

    def decode(self) -> None:
        """A token of each row, as nobody is read."""
        spans = [(row, self.at[row], 1) for row in self.rows]
        x: Any = mx.array(np.array([[tokens_of(row)[at]] for row, at, _ in spans]))
        for group in self.groups:
            x = group.forward(x)
        self._compare(shared(x, self.share), spans)
        self.at |= {row: at + 1 for row, at, _ in spans}

    def leave(self, row: int) -> None:
        for group in self.groups:
            group.leave([row])

    def _compare(self, logits: Any, spans: Sequence[tuple[int, int, int]]) -> None:
        assert logits.shape[:2] == (len(spans), 1)
        for (sequence, at, count), found in zip(spans, logits, strict=True):
            wanted = self.expected[sequence][at + count - 1]
            finite = np.isfinite(wanted)
            assert np.array_equal(finite, np.isfinite(found[0]))
            self.worst = max(self.worst, float(np.abs(found[0][finite] - wanted[finite]).max()))


def read_while_others_decode(parts: Sequence[LoadedPart], expected: dict[int, Any], share: Share = alone) -> float:
    """The largest difference while prompts are read beside no row, one, several, and several with a place free."""
    mixtures = Mixtures(parts, expected, share)
    mixtures.step((0, 3), (3, 6))
    mixtures.step((0, 2))
    mixtures.step((1, 7), (2, 5))
    mixtures.step((1, 1))
    mixtures.decode()
    mixtures.step((1, 5))
    mixtures.step((2, 2), (4, 2))
    mixtures.step((2, 1))
    mixtures.leave(0)
    assert all(group.width > len(group.rows) for group in mixtures.groups), "the place of one that has left is there"
    mixtures.step((4, 9))
    assert sorted(mixtures.rows) == [1, 2, 3, 4]
    mixtures.decode()
    mixtures.decode()
    return mixtures.worst
