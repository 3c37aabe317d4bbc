"""The sequences that run on the ranks of one home, their batches, and the memory they share with kept blocks. Pure.

A layout has one home, but for expert-parallel ranks, each of which is one. Everything here says what there is and what
fits; which sequence comes or goes is the scheduler's.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

from mlxcel_nb.scheduling.adoption import Adoption
from mlxcel_nb.scheduling.draft import Draft
from mlxcel_nb.scheduling.kv_budget import Batch, KvBudget, Use
from mlxcel_nb.scheduling.limits import Limits
from mlxcel_nb.scheduling.places import Places
from mlxcel_nb.scheduling.prefix_tree import Node, PrefixTree
from mlxcel_nb.scheduling.sequence import Leaving, Sequence, State
from mlxcel_nb.scheduling.step_plan import BLOCK, Adopt, Expect, Hand, Keep, Land, Open, Restore

READERS = 4
"""Prompts of one owner that are read at a time: a short one need not wait for a long one, nor everybody for all. Of
short ones as many as a step can read."""

KEPT_AT_ONCE = 8
"""Blocks that a step keeps while somebody makes tokens, who waits for the copies: of SmolLM2-135M one takes a core a
millisecond or two, and a long prompt has fifty."""


def span(sequence: Sequence) -> int:
    """Tokens that it needs room for: those of its next step, and a block to begin with."""
    tokens = len(sequence.tokens) + (0 if sequence.state is State.DECODE else BLOCK)
    return min(tokens, sequence.most)


class Home:
    """One home.

    Args:
        number: of the rank.
        new_block: gives the next block its number.
        new_transfer: gives what comes of a sequence from elsewhere its number.
    """

    def __init__(
        self, limits: Limits, number: int, new_block: Callable[[], int], new_transfer: Callable[[], int]
    ) -> None:
        self.number = number
        self.budget = KvBudget(limits.rooms[number], limits.kept)
        self.running: list[Sequence] = []
        self.readers: deque[Sequence] = deque()
        """Whose tokens are being read, in the order of their turns."""
        self.read: list[Sequence] = []
        """Whose last chunk has been sent, and whose blocks have not been kept yet."""
        self._groups = limits.groups
        self._chunk = limits.chunk
        self._reusable = limits.reusable
        self._padded = limits.padded
        self._new_block = new_block
        self._new_transfer = new_transfer
        self._tree = PrefixTree()
        self._turn = -1
        self._numbers = itertools.count()
        self._places = Places(limits.groups)
        self._restoring = ExitStack()

    @property
    def blocks(self) -> int:
        return len(self._tree)

    def use(self) -> Use:
        """Bytes on the node that has least left, of its share."""
        return self.budget.fullest(self._batches(self.running), self.blocks)

    # -- groups

    def size(self, group: int) -> int:
        return sum(each.group == group for each in self.running)

    def smallest(self) -> int:
        """The group that the next sequence joins."""
        return min(range(self._groups), key=self.size)

    def decoding(self, group: int) -> list[Sequence]:
        """The rows of a group, in the order in which they came."""
        return [s for s in self.running if s.group == group and s.decodes]

    def ready(self) -> list[Sequence]:
        """The rows of the next group in turn that has no step on its way; none if there is no such group."""
        for group in range(self._groups):
            self._even_out(group)
        for ahead in range(1, self._groups + 1):
            group = (self._turn + ahead) % self._groups
            rows = self.decoding(group)
            if rows and not any(s.in_flight for s in self.running if s.group == group and s.state is State.DECODE):
                self._turn = group
                return self._in_batch(group, rows)
        return []

    def _in_batch(self, group: int, rows: list[Sequence]) -> list[Sequence]:
        """`rows` as the batch of a group has them on all members: who is in it keeps its place, who joins comes last.

        One whose prompt took long to read joins after others that came later.
        """
        for each in self.running:
            if each.batch == group and each not in rows:
                self._leave_batch(each)
        joined = [each for each in rows if each.batch != group]
        self._places.stepped(group, len(rows), len(joined))
        for each in joined:
            self._leave_batch(each)
            each.batch, each.place = group, next(self._numbers)
        return sorted(rows, key=lambda each: each.place)

    def _leave_batch(self, sequence: Sequence) -> None:
        if (group := sequence.batch) >= 0:
            sequence.batch = -1
            self._places.left(group, sequence.cached, sum(each.batch == group for each in self.running))

    def _even_out(self, group: int) -> None:
        """Hand the latest row on to the smallest group, where that is smaller by two or more and it fits."""
        idle = [each for each in self.decoding(group) if not each.in_flight]
        target = self.smallest()
        if not idle or self.size(group) - self.size(target) < 2:
            return
        moved = idle[-1]
        batch, places = moved.batch, self._places.of(group)
        moved.group = target
        self._leave_batch(moved)  # which keeps its place for now
        if not self.fits(self.running):
            moved.group, moved.batch = group, batch
            self._places.put_back(group, places)

    # -- memory

    def fits(self, sequences: Iterable[Sequence], blocks: int | None = None) -> bool:
        """Whether there is room for these sequences' next steps, and so many blocks; all there are, by default."""
        return (self.blocks if blocks is None else blocks) <= self.budget.beside(self._batches(sequences))

    def make_fit(self, sequences: Iterable[Sequence], draft: Draft) -> bool:
        """Let blocks go, least recently used first, until there is room for these sequences' next steps.

        None goes where that would not help.
        """
        return self._evict(self.budget.beside(self._batches(sequences)), draft)

    def _evict(self, most: int, draft: Draft) -> bool:
        """Let blocks go until there are `most`; False, and none goes, where more than that have to stay."""
        if self._tree.held > most:
            return False
        while len(self._tree) > most:
            gone = self._tree.evict()
            assert gone is not None, "what is not held can go"
            draft.let_go(gone)
        return True

    def _batches(self, sequences: Iterable[Sequence]) -> list[Batch]:
        if not self._padded:
            return [Batch(1, span(each)) for each in sequences]
        groups: dict[int, list[int]] = {}
        for each in sequences:
            groups.setdefault(each.group, []).append(span(each))
        batches = []
        for group, spans in groups.items():
            free, tokens = self._places.beside(group)
            batches.append(Batch(len(spans) + free, max(tokens, *spans)))
        return batches

    # -- prompts

    def could_read(self, sequence: Sequence) -> bool:
        """Whether a sequence's prompt may be read beside those of its owner that are being read.

        It waits for one that begins alike, beyond what is kept, to begin with its blocks: of its owner's, and of all
        that are to be kept.
        """
        if sequence.remote:
            return True
        owners = [each for each in self.readers if each.request.owner == sequence.request.owner]
        short = sum(each.to_read for each in owners) + len(sequence.tokens) <= self._chunk
        end = (len(self.known(sequence)) + 1) * BLOCK
        alike = self._reusable and len(sequence.tokens) > end
        return (short or len(owners) < READERS) and not (
            alike and any(each.tokens[:end] == sequence.tokens[:end] for each in [*owners, *self._unkept])
        )

    # -- prefixes

    def known(self, sequence: Sequence) -> list[Node]:
        """The kept blocks that `sequence` can begin with: its last token is run in any case, for what follows it."""
        return self._tree.match(sequence.tokens[:-1]) if self._reusable else []

    def come(self, sequence: Sequence, draft: Draft) -> bool:
        """Begin a sequence here, if there is room for it; with blocks that are kept, as far as they may stay."""
        sequence.group = self.smallest()
        everybody = [*self.running, sequence]
        if not self.fits(everybody, blocks=0):
            return False
        if sequence.remote:
            if fits := self.make_fit(everybody, draft):
                sequence.home, sequence.state = self.number, State.AWAITS
                self.running.append(sequence)
            return fits
        nodes = self.known(sequence)
        with self._tree.holding(nodes):
            fits = self.make_fit(everybody, draft)
        if not fits:  # with them there is no room for what comes after them
            if not self.make_fit(everybody, draft):
                return False
            nodes = self.known(sequence)
        self._begin(sequence, nodes, draft)
        self.running.append(sequence)
        return True

    def arrivals(self, draft: Draft) -> None:
        """Of those who are read elsewhere: expect what comes, go on with what has come, or read them here after all."""
        for sequence in [each for each in self.running if each.state is State.AWAITS and each.leaving is None]:
            if sequence.landed:
                draft.land.append(Land(sequence.number, sequence.transfer, self.number))
                self._open(sequence, len(sequence.tokens) - 1, draft)
                sequence.state, sequence.cached = State.DECODE, len(sequence.tokens) - 1
                sequence.transfer, sequence.landed = -1, False
                self.read.append(sequence)
            elif not sequence.remote:
                self._begin(sequence, self.known(sequence), draft)
            elif sequence.transfer < 0:
                sequence.transfer = self._new_transfer()
                expected = len(sequence.tokens)
                draft.expect.append(Expect(sequence.number, sequence.transfer, expected, self.number))

    def _begin(self, sequence: Sequence, nodes: list[Node], draft: Draft) -> None:
        sequence.home, sequence.state, sequence.cached = self.number, State.PREFILL, len(nodes) * BLOCK
        if not sequence.position:
            sequence.reused = sequence.cached
        if nodes:
            self._restoring.enter_context(self._tree.holding(nodes))
            draft.restore.append(Restore(sequence.number, tuple(node.block for node in nodes), self.number))
        self._open(sequence, len(sequence.tokens), draft)
        if (to := sequence.request.hand) is not None:
            draft.hand.append(Hand(sequence.number, *to, len(sequence.tokens), self.number))
        self.readers.append(sequence)

    def _open(self, sequence: Sequence, length: int, draft: Draft) -> None:
        params, context, position = sequence.request.params, sequence.context, sequence.position
        draft.open.append(Open(sequence.number, params, context, position, self.number, length))

    def sent(self) -> None:
        """The plan is complete: what it restores from may go with the next one."""
        self._restoring.close()

    def keep(self, draft: Draft) -> None:
        """Keep blocks of what has been read, and of those who have their answer, who stay until that is done."""
        waited_for = any(each.decodes for each in self.running) and self.fits(self.running)
        left = KEPT_AT_ONCE if waited_for else sys.maxsize
        for sequence in [each for each in self._unkept if each.leaving is None or not each.in_flight]:
            if (kept := self._keep(sequence, draft, left)) == left:
                return
            left -= kept
            if sequence.leaving is Leaving.KEEP:
                sequence.leaving = Leaving.DROP
            self.forget(sequence)

    @property
    def _unkept(self) -> list[Sequence]:
        """Who has been read, or has its answer, and is to be kept for others."""
        return [*self.read, *(each for each in self.running if each.leaving is Leaving.KEEP)]

    def _keep(self, sequence: Sequence, draft: Draft, most: int) -> int:
        """Keep the next blocks of what is in its caches, as many as there is room for, at most `most`; how many."""
        if not self._reusable:
            return 0
        found = list(self._grow(sequence.tokens[: sequence.cached], draft, most))
        draft.keep |= {block: Keep(sequence.number, begin, block, self.number) for begin, block in found}
        return len(found)

    def adopt(self, adoption: Adoption, draft: Draft) -> None:
        """Keep blocks that come from elsewhere, as many as there is room for."""
        adoption.kept = self.kept(adoption.tokens)
        if self._reusable and adoption.kept >= adoption.begin:
            for begin, block in self._grow(adoption.tokens, draft):
                draft.adopt[block] = Adopt(adoption.transfer, begin // BLOCK, block, self.number)
                adoption.kept += 1

    def _grow(self, tokens: list[int], draft: Draft, count: int = sys.maxsize) -> Iterator[tuple[int, int]]:
        """The blocks of `tokens` that were not kept and now are, as many as there is room for: first token, number.

        Args:
            count: of them, at most.
        """
        path = self._tree.match(tokens)
        most = self.budget.beside(self._batches(self.running))
        with ExitStack() as held:
            held.enter_context(self._tree.holding(path))
            for begin in range(len(path) * BLOCK, len(tokens) - BLOCK + 1, BLOCK)[:count]:
                if not self._evict(most - 1, draft):
                    return
                node = self._tree.add(path, tuple(tokens[begin : begin + BLOCK]), self._new_block())
                held.enter_context(self._tree.holding([node]))
                path.append(node)
                yield begin, node.block

    def kept(self, tokens: list[int]) -> int:
        """How many blocks of a sequence's beginning are kept."""
        return len(self._tree.match(tokens))

    def hold(self, tokens: list[int]) -> tuple[list[int], ExitStack]:
        """The kept blocks of a sequence's beginning, which stay until what is returned with them is closed."""
        nodes, held = self._tree.match(tokens), ExitStack()
        held.enter_context(self._tree.holding(nodes))
        return [node.block for node in nodes], held

    def go(self, sequence: Sequence, draft: Draft) -> None:
        """Its caches go with this plan."""
        self.running.remove(sequence)
        self._leave_batch(sequence)
        self.forget(sequence)
        draft.drop.append(sequence.number)

    def forget(self, sequence: Sequence) -> None:
        """Nothing more of it is read, or kept."""
        if sequence in self.readers:
            self.readers.remove(sequence)
        if sequence in self.read:
            self.read.remove(sequence)

    def clear(self, draft: Draft) -> None:
        """Let all blocks go."""
        while (block := self._tree.evict()) is not None:
            draft.let_go(block)
