"""Sequences that come, go and move between groups, and what each of them gives when it is alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_nb.models.batching import Group
from mlxcel_nb.models.batching_blocks import cut, from_blocks
from mlxcel_nb.models.part import LoadedPart

CHUNKS = ((3, 2), (7, 1, 5), (8,), (6,), (2, 9))
"""How each sequence's prompt is read. With a window of 8: some are shorter, as long, and longer."""

STEPS = (6, 14, 11, 11, 8)
"""Tokens that each sequence is given after its prompt."""

Share = Callable[[Any], Any]
"""Rank 0's value, on every rank."""


def alone(value: Any) -> Any:
    return value


def tokens_of(sequence: int) -> Any:
    """The prompt and what follows; the tokens are given, so that rows may be compared wherever they are."""
    rng = np.random.default_rng(sequence)
    return rng.integers(0, 257, sum(CHUNKS[sequence]) + STEPS[sequence]).astype(np.int32)


def through(parts: Sequence[LoadedPart], caches: Sequence[list[Any]], ids: Any) -> Any:
    """One chunk of one sequence through all stages."""
    x: Any = mx.array(ids)[None]
    for lap in range(parts[0].laps):
        for part, cache in zip(parts, caches, strict=True):
            x = part.forward(x, cache, lap=lap)
    mx.eval(x)
    return x


def prefilled(parts: Sequence[LoadedPart], sequence: int) -> list[list[Any]]:
    """A sequence's caches on each stage, after its prompt."""
    caches = [part.make_cache() for part in parts]
    ids, at = tokens_of(sequence), 0
    for count in CHUNKS[sequence]:
        through(parts, caches, ids[at : at + count])
        at += count
    return caches


def by_itself(parts: Sequence[LoadedPart], sequence: int, share: Share = alone) -> Any:
    """Logits (steps, V) of a sequence that is alone, after each token that follows the prompt."""
    caches, ids = prefilled(parts, sequence), tokens_of(sequence)[sum(CHUNKS[sequence]) :]
    return np.stack([shared(through(parts, caches, ids[at : at + 1]), share)[0, 0] for at in range(len(ids))])


def shared(x: Any, share: Share) -> Any:
    if not isinstance(x, mx.array):
        mx.eval(x)
        return share(None)
    return share(np.array(x.astype(mx.float32)))


def after_blocks(parts: Sequence[LoadedPart], expected: Any) -> float:
    """The largest difference of sequence 1 when the first 8 of its 13 tokens come in blocks of another cache."""
    source, ids = prefilled(parts, 1), tokens_of(1)
    blocks = [[cut(caches, 0, 3), cut(caches, 3, 8)] for caches in source]
    caches = [from_blocks(each, part) for each, part in zip(blocks, parts, strict=True)]
    through(parts, caches, ids[8:13])
    steps = [shared(through(parts, caches, ids[at : at + 1]), alone)[0, 0] for at in range(13, len(ids))]
    given = np.isfinite(expected)
    return float(np.abs(np.stack(steps)[given] - expected[given]).max())


class Groups:
    """One group on every stage, in step with each other."""

    def __init__(self, parts: Sequence[LoadedPart], share: Share = alone) -> None:
        self.parts, self.share = parts, share
        self.groups = [Group(part) for part in parts]
        self.given: dict[int, int] = {}

    def join(self, *sequences: int, caches: list[list[list[Any]]] | None = None, given: Sequence[int] = ()) -> None:
        held = caches or [prefilled(self.parts, sequence) for sequence in sequences]
        for stage, group in enumerate(self.groups):
            group.join([(sequence, each[stage]) for sequence, each in zip(sequences, held, strict=True)])
        self.given |= dict(zip(sequences, given or [0] * len(sequences), strict=True))

    def leave(self, *sequences: int) -> None:
        for group in self.groups:
            group.leave(sequences)
        for sequence in sequences:
            del self.given[sequence]

    def move(self, sequence: int, other: Groups) -> None:
        caches = [group.take_out(sequence) for group in self.groups]
        other.join(sequence, caches=[caches], given=[self.given.pop(sequence)])

    def step(self, expected: dict[int, Any], times: int = 1) -> float:
        """Give every row its next tokens; the largest difference of logits from those of the rows that are alone."""
        worst = 0.0
        for _ in range(times):
            rows = self.groups[0].rows
            assert list(rows) == list(self.given)
            ids = [[tokens_of(row)[sum(CHUNKS[row]) + self.given[row]]] for row in rows]
            x: Any = mx.array(np.array(ids, np.int32))
            for lap in range(self.parts[0].laps):
                for part, group in zip(self.parts, self.groups, strict=True):
                    assert group.rows == rows
                    if isinstance(x, list):
                        assert [part.size_of(each) for each in x] == [(group.width, 1)] * group.passes
                    x = group.forward(x, lap=lap)
                    assert isinstance(x, mx.array) or len(x) == group.passes
            logits = shared(x, self.share)
            assert len(logits) == len(rows)
            for row, found in zip(rows, logits, strict=True):
                wanted = expected[row][self.given[row]]
                finite = np.isfinite(wanted)
                assert np.array_equal(finite, np.isfinite(found[0]))
                worst = max(worst, float(np.abs(found[0][finite] - wanted[finite]).max()))
                self.given[row] += 1
        return worst


def come_and_go(parts: Sequence[LoadedPart], expected: dict[int, Any], share: Share = alone) -> float:
    """The largest difference while sequences join late, leave early, take another's place and change groups."""
    one, other = Groups(parts, share), Groups(parts, share)
    one.join(0)
    worst = one.step(expected)
    one.join(1)
    worst = max(worst, one.step(expected, 2))
    one.join(2)  # late
    worst = max(worst, one.step(expected, 2))
    one.leave(0)  # early
    worst = max(worst, one.step(expected))
    one.join(3)  # in its place
    worst = max(worst, one.step(expected, 3))
    other.join(4)
    worst = max(worst, other.step(expected))
    one.move(1, other)
    for _ in range(4):
        worst = max(worst, one.step(expected), other.step(expected))
    one.leave(2)
    worst = max(worst, one.step(expected))
    other.move(4, one)
    return max(worst, one.step(expected, 2), other.step(expected, 2))
