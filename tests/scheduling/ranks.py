"""Members as the scheduler's tests play them: they run plans against caches that are lists of tokens, and object to
every plan that real ones could not run."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from mlxcel_nb.plan.capacity import Room
from mlxcel_nb.plan.facts import Growth
from mlxcel_nb.scheduling.step_plan import BLOCK, StepPlan, Work

VOCAB = 200
END = 0
"""The token that ends a text."""


def plain(tokens: int, step: int = 1, per_token: int = 10) -> Room:
    """Room for one sequence of so many tokens, of caches that grow."""
    return Room({Growth(per_token=per_token, step=step): 2}, 2 * per_token * tokens)


def next_token(tokens: list[int], position: int) -> int:
    """What the model says after `tokens`, as number `position` of an answer: any change of either changes it."""
    return zlib.crc32(bytes(tokens) + position.to_bytes(4, "big")) % VOCAB


def alone(prompt: tuple[int, ...], limit: int) -> list[int]:
    """The answer of a request that has the model for itself."""
    tokens = list(prompt)
    for position in range(limit):
        tokens.append(next_token(tokens, position))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]


@dataclass
class Batch:
    """A batched cache, by the rules of `models.batching.Group`: who leaves is not cut out at once."""

    rows: list[int] = field(default_factory=list)
    free: int = 0
    wasted: int = 0
    columns: int = 0

    def leave(self, number: int) -> None:
        self.rows.remove(number)
        self.free += 1
        if len(self.rows) < 2:
            self.free = self.wasted = self.columns = 0

    def join(self, numbers: list[int], lengths: Callable[[int], int]) -> None:
        before = len(self.rows)
        self.rows += numbers
        if len(self.rows) < 2 or not numbers:
            return
        arrivals = max(map(lengths, numbers))
        if before < 2 or len(numbers) > self.free or arrivals > self.columns:
            self.rebuild(lengths)
        else:
            self.free -= len(numbers)

    def rebuild(self, lengths: Callable[[int], int]) -> None:
        self.free = self.wasted = 0
        self.columns = max(map(lengths, self.rows))

    def tidy(self, lengths: Callable[[int], int], room: Room) -> None:
        if len(self.rows) < 2:
            return
        width, longest = len(self.rows) + self.free, max(map(lengths, self.rows))
        untidy = 4 * self.free > width or 2 * (self.wasted + self.free) > width
        if untidy or room.at(self.columns + 1) > room.at(longest + 1):
            self.rebuild(lengths)

    def step(self) -> None:
        self.wasted += self.free
        self.columns += 1


class Rank:
    """One node of one home."""

    def __init__(self, home: int, room: Room, others: bool = False) -> None:
        self.home = home
        self.others = others  # there are other homes, whose sequences and blocks it does not know
        self.room = room
        self.steps = -1
        self.caches: dict[int, list[int]] = {}
        self.positions: dict[int, int] = {}
        self.batches: dict[int, Batch] = {}
        self.blocks: dict[int, list[int]] = {}
        self.seen_blocks: set[int] = set()
        self.sent: dict[tuple[int, int], list[int]] = {}
        """What has come from elsewhere, by transfer and block of its sequence."""
        self.coming: dict[int, tuple[int, int]] = {}
        """What is expected, by sequence: transfer and tokens."""
        self.brought: dict[int, list[int]] = {}
        """What has come of transfers."""
        self.most_bytes = 0

    def run(self, plan: StepPlan) -> dict[int, int]:
        """Do what the plan says, in its order; the tokens that are sampled."""
        assert plan.step > self.steps
        self.steps = plan.step
        assert not set(plan.free) & ({keep.block for keep in plan.keep} | {adopt.block for adopt in plan.adopt}), (
            "a block is not kept only to be freed"
        )
        for block in plan.free:
            assert block in self.blocks or self.others, "a block is freed once"
            self.blocks.pop(block, None)
        for keep in plan.keep:
            if keep.home == self.home:
                tokens = self.caches[keep.sequence][keep.begin : keep.begin + BLOCK]
                assert len(tokens) == BLOCK and keep.block not in self.seen_blocks
                self.seen_blocks.add(keep.block)
                self.blocks[keep.block] = tokens
        self._check_memory()
        for number in plan.drop:
            assert number in self.caches or number in self.coming or self.others, "a sequence is dropped once"
            self.coming.pop(number, None)
            if number in self.caches:
                del self.caches[number], self.positions[number]
                self._leave_batch(number)
        for adopt in plan.adopt:
            if adopt.home == self.home:
                assert adopt.block not in self.seen_blocks
                self.seen_blocks.add(adopt.block)
                self.blocks[adopt.block] = self.sent[adopt.transfer, adopt.index]
        self._check_memory()
        opened = {each.sequence for each in plan.open}
        for restore in plan.restore:
            if restore.home == self.home:
                assert restore.blocks and restore.sequence in opened and restore.sequence not in self.caches
                self.caches[restore.sequence] = [t for block in restore.blocks for t in self.blocks[block]]
        self._bring(plan, opened)
        begun = {each.sequence for each in plan.restore} | {each.sequence for each in plan.land}
        for each in plan.open:
            if each.home == self.home:
                assert (each.sequence in self.caches) == (each.sequence in begun)
                self.coming.pop(each.sequence, None)
                self.caches.setdefault(each.sequence, [])
                self.positions[each.sequence] = each.position
        self._check_memory()
        assert max(Counter(work.home for work in plan.work).values(), default=0) <= 1, "one forward a home and step"
        sampled: dict[int, int] = {}
        for work in plan.work:
            if work.home == self.home:
                sampled |= self._work(work)
        self._check_memory()
        return sampled

    def _bring(self, plan: StepPlan, opened: set[int]) -> None:
        """What comes from elsewhere is expected, and becomes caches."""
        for expect in plan.expect:
            if expect.home == self.home:
                assert expect.sequence not in self.caches and expect.sequence not in opened
                self.coming[expect.sequence] = expect.transfer, expect.length
        for land in plan.land:
            if land.home == self.home:
                transfer, length = self.coming.pop(land.sequence)
                assert land.sequence in opened and transfer == land.transfer
                self.caches[land.sequence] = self.brought.pop(transfer)
                assert len(self.caches[land.sequence]) == length

    def _work(self, work: Work) -> dict[int, int]:
        assert len(work.tokens) == work.size
        if work.rows:
            batch = self.batches.setdefault(work.group, Batch())
            staying = [each for each in batch.rows if each in work.rows]
            assert list(work.rows[: len(staying)]) == staying, "who is in a batch keeps its place, who joins comes last"
            for number in set(batch.rows) - set(staying):
                batch.leave(number)
            for number in work.rows[len(staying) :]:
                self._leave_batch(number)
            batch.join(list(work.rows[len(staying) :]), self._length)
            batch.tidy(self._length, self.room)
            self._check_memory()
            batch.step()
        tokens = iter(work.tokens)
        for number in work.rows:
            self.caches[number].append(next(tokens))
        for chunk in work.chunks:
            batched = any(chunk.sequence in batch.rows for batch in self.batches.values())
            assert not batched, "a prompt is read on caches of its own"
            self.caches[chunk.sequence] += itertools.islice(tokens, chunk.count)
        sampled = {}
        for number in work.sampled:
            sampled[number] = next_token(self.caches[number], self.positions[number])
            self.positions[number] += 1
        return sampled

    def _leave_batch(self, number: int) -> None:
        for batch in self.batches.values():
            if number in batch.rows:
                batch.leave(number)

    def _length(self, number: int) -> int:
        return len(self.caches[number])

    def bytes(self) -> int:
        """As batched caches take it: all rows of a batch are as long as the longest."""
        total = len(self.blocks) * BLOCK * self.room.per_token
        batched = [batch for batch in self.batches.values() if len(batch.rows) > 1]
        total += sum((len(batch.rows) + batch.free) * self.room.at(batch.columns) for batch in batched)
        alone = self.caches.keys() - {row for batch in batched for row in batch.rows}
        total += sum(self.room.at(length) for _, length in self.coming.values())
        return total + sum(self.room.at(self._length(number)) for number in alone)

    def _check_memory(self) -> None:
        self.most_bytes = max(self.most_bytes, self.bytes())
        assert self.bytes() <= self.room.available, f"{self.bytes()} bytes of {self.room.available}"
