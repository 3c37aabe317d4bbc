"""Decides every step of a loaded model: who runs, in whose company, and who comes and goes. Pure.

The leader's MLX thread owns one. It asks `next` for a plan while fewer than `Limits.flights` are on their way, has
all members run it, and hands the tokens back with `took`, in the order of the plans. Same calls, same plans. What is
promised:

* Everybody is served. Waiting requests are asked in by turns of their owners, and when the next one finds no room,
  nobody goes before it. Prompts are read in turns, decoding goes on between their chunks, and the sequence that came
  first is never put back while others run.
* Memory is never over-committed, on no node: a plan is made only when all its sequences' caches fit, as batched
  caches are, and with them all blocks that are kept for reuse. These give way first; then the sequence that came last
  is put back and later run again from its tokens, which gives the same text.
* A sequence with a step on its way is not scheduled again, moved or dropped, until its result has come. Only the
  chunks of one prompt may follow each other, so that all stages of a pipeline work on it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from mlxcel_nb.scheduling.adoption import Adoption
from mlxcel_nb.scheduling.bounds import most_tokens
from mlxcel_nb.scheduling.draft import Draft
from mlxcel_nb.scheduling.home import Home
from mlxcel_nb.scheduling.kv_budget import Use
from mlxcel_nb.scheduling.limits import Limits
from mlxcel_nb.scheduling.pace import SETTLED, Pace
from mlxcel_nb.scheduling.sequence import Leaving, Request, Sequence, State
from mlxcel_nb.scheduling.step_plan import BLOCK, Chunk, StepPlan, Work
from mlxcel_nb.scheduling.waiting import Waiting


@dataclass(frozen=True)
class Flight:
    """A step on its way.

    Args:
        decoded: sequences that decoded in it.
        read: tokens of prompts, of the home where they are most.
        paced: they were read while others decoded.
        beside: prompts were read in steps that were on their way when it was sent.
    """

    step: int
    rows: tuple[Sequence, ...]
    sampled: tuple[Sequence, ...]
    decoded: int
    read: int
    paced: bool
    beside: bool


class Scheduler:
    """Of one instance; any number of requests."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.preemptions = 0
        """How often a sequence was put back, so far."""
        self._pace = Pace(limits.slowdown, limits.chunk, mixed=limits.mixed)
        self._waiting = Waiting()
        self._flying: deque[Flight] = deque()
        self._numbers = itertools.count()
        self._steps = itertools.count()
        self._blocks = itertools.count()
        self._transfers = itertools.count()
        self._adoptions: list[Adoption] = []
        self._forget = False
        self._full = False  # whoever is next to be asked in finds no room
        self._homes = self._fresh_homes()

    # -- what the engine tells

    def add(self, request: Request, now: float) -> Sequence:
        """A request has come.

        Raises:
            RequestError: it can never run.
            Busy: too much is waiting already, or too much of the same owner.
        """
        limit = most_tokens(request, self.limits, [home.budget.longest for home in self._homes])
        self._waiting.check_room(request, self.limits.max_waiting, self.limits.max_waiting_tokens)
        tokens = [*request.prompt, *request.made]
        sequence = Sequence(next(self._numbers), request, limit, now, tokens, remote=request.remote)
        self._waiting.add(sequence)
        return sequence

    def took(self, step: int, tokens: Mapping[int, int], seconds: float | None = None) -> None:
        """The result of the oldest step on its way.

        Args:
            step: number of its plan.
            tokens: by number of sequence, what was sampled; those of sequences that are over are passed over.
            seconds: what it took: since it was sent, or since the result before it, whichever came later.
        """
        if not self._flying or self._flying[0].step != step:
            raise ValueError(f"the result of step {step} is not the next one")
        flight = self._flying.popleft()
        for sequence in flight.rows:
            sequence.in_flight -= 1
        for sequence in flight.sampled:
            if not sequence.over:
                sequence.tokens.append(tokens[sequence.number])
                sequence.state, sequence.suspect, sequence.failures = State.DECODE, False, 0
        if seconds is not None:
            self._learn(flight, seconds)

    def finish(self, sequence: Sequence) -> None:
        """It has its answer: blocks of it are kept, and its caches go with the next plan."""
        self._end(sequence, Leaving.KEEP)

    def cancel(self, sequence: Sequence) -> None:
        """Nobody wants its answer. One that has a step on its way goes with the first plan after that step's result."""
        self._end(sequence, Leaving.DROP)

    def expire(self, now: float) -> list[Sequence]:
        """Cancel all that are past their deadline, and say which they were."""
        late = [
            each
            for each in [*self.running, *self._waiting.everybody()]
            if each.request.deadline is not None and each.request.deadline <= now
        ]
        for each in late:
            self.cancel(each)
        return late

    def reset(self, suspects: Iterable[Sequence] = ()) -> None:
        """All caches and blocks are gone, everywhere, and no result comes of what was on its way: an epoch is over.

        What ran is put back. `suspects`, who were in the step that failed, share no step with others until they have
        made a token: should one fail again, it was alone.
        """
        for home in self._homes:
            for sequence in home.running:
                if sequence.over:
                    sequence.state = State.ENDED
                else:
                    sequence.begin()
                    self._waiting.put_back(sequence)
        for sequence in suspects:
            sequence.suspect, sequence.remote = True, False
            sequence.failures += 1
        for adoption in self._adoptions:
            adoption.kept = 0
        self._adoptions.clear()
        self._flying.clear()
        self._pace.rest()
        self._homes = self._fresh_homes()

    # -- what is read elsewhere

    def made_elsewhere(self, sequence: Sequence, token: int) -> None:
        """Whoever reads its tokens has made the one that follows."""
        sequence.tokens.append(token)

    def landed(self, sequence: Sequence) -> None:
        """All members have what was expected of it, and the token that follows is known."""
        sequence.landed = True

    def expect_again(self, sequence: Sequence) -> None:
        """What was expected of it will not come; it is read by somebody else."""
        sequence.transfer, sequence.landed = -1, False

    def read_here(self, sequence: Sequence) -> None:
        """Nobody else reads it."""
        sequence.remote, sequence.transfer, sequence.landed = False, -1, False

    def forget_prefixes(self) -> None:
        """The next plan frees all kept blocks."""
        self._forget = True

    def adopt(self, adoption: Adoption) -> None:
        """The next plan keeps blocks that have come from elsewhere, as far as there is room."""
        self._adoptions.append(adoption)

    def hold(self, tokens: list[int], home: int) -> tuple[list[int], ExitStack]:
        """The blocks that a home has kept of a sequence's beginning. They stay until what comes with them is closed."""
        return self._homes[home].hold(tokens)

    def kept(self, tokens: list[int]) -> int:
        """How many tokens of a sequence's beginning are kept, where most are."""
        return BLOCK * max(home.kept(tokens) for home in self._homes)

    def knows_best(self, tokens: list[int]) -> int:
        """The home that has kept most of a sequence's beginning; the first one, where none has any."""
        return max(self._homes, key=lambda home: (home.kept(tokens), -home.number)).number

    # -- facts

    @property
    def running(self) -> list[Sequence]:
        """Those that have caches and are not over, home by home."""
        return [each for home in self._homes for each in home.running if not each.over]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        return self._waiting.tokens

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, or is on its way; blocks may be kept."""
        return not (self._flying or self._waiting or self._adoptions or any(home.running for home in self._homes))

    @property
    def flying(self) -> dict[int, tuple[Sequence, ...]]:
        """The steps on their way, oldest first, and who takes part in each."""
        return {flight.step: flight.rows for flight in self._flying}

    @property
    def blocks(self) -> int:
        """Blocks that are kept."""
        return sum(home.blocks for home in self._homes)

    @property
    def kv_tokens(self) -> int:
        """Tokens in the caches of sequences, kept blocks not counted."""
        return sum(each.cached for home in self._homes for each in home.running)

    def kv_use(self) -> Use:
        """Bytes taken and available on the node that is fullest."""
        return max((home.use() for home in self._homes), key=lambda use: use.used / max(1, use.available))

    # -- the next step

    def next(self, now: float) -> StepPlan | None:
        """The next step; None while there is nothing to do before another result or request comes."""
        if len(self._flying) >= self.limits.flights:
            return None
        draft = Draft()
        for home in self._homes:
            if self._forget:
                home.clear(draft)
            home.keep(draft)
        for adoption in self._adoptions:
            self._homes[adoption.home].adopt(adoption, draft)
        self._adoptions.clear()
        for home in self._homes:
            self._put_back(home, draft)
        self._forget = False
        self._full = self._leave(draft)
        if not self._full:
            self._admit(draft, now)
        for home in self._homes:
            home.arrivals(draft)
        rows = self._choose(draft, [home for home in self._homes if home.fits(home.running)])
        for home in self._homes:
            home.sent()
        if draft.empty:
            return None
        step = next(self._steps)
        self._send(step, draft, rows)
        return draft.plan(step)

    def _put_back(self, home: Home, draft: Draft) -> None:
        """Make room for everybody's next step: without blocks, and if need be without who came last."""
        staying = [each for each in home.running if each.leaving is None]
        while staying and not home.make_fit(staying, draft):
            last = max(staying, key=lambda each: each.number)
            staying.remove(last)
            last.leaving = Leaving.AGAIN
            home.forget(last)

    def _leave(self, draft: Draft) -> bool:
        """Drop whoever leaves and has no step on its way. True if somebody had to make room for others."""
        crowded = False
        for home in self._homes:
            for sequence in [each for each in home.running if each.leaving is not None]:
                crowded |= sequence.leaving is Leaving.AGAIN
                if sequence.in_flight or sequence.leaving is Leaving.KEEP:
                    continue
                home.go(sequence, draft)
                if sequence.leaving is Leaving.AGAIN:
                    self.preemptions += 1
                    sequence.preemptions += 1
                    sequence.begin()
                    self._waiting.put_back(sequence)
                else:
                    sequence.state, sequence.leaving = State.ENDED, None
        return crowded

    def _admit(self, draft: Draft, now: float) -> None:
        """Ask in whoever is next, as long as there is room."""
        while sum(len(home.running) for home in self._homes) < self.limits.max_rows:
            sequence = self._come_next(draft)
            if sequence is None:
                return
            self._waiting.take(sequence)
            if sequence.started is None:
                sequence.started = now

    def _come_next(self, draft: Draft) -> Sequence | None:
        """The next sequence, begun at one of the homes.

        Of each owner a few prompts are read at a time, and none that is to begin with blocks of one of them.
        """
        running = [each for home in self._homes for each in home.running]
        if any(each.request.exclusive for each in running):
            return None
        for sequence in self._waiting.first():
            if sequence.request.exclusive and running:
                return None
            homes = [
                home
                for home in self._homes
                if sequence.request.home in (None, home.number) and home.could_read(sequence)
            ]
            if not homes:
                continue
            if len(homes) > 1:
                homes.sort(key=lambda home: (len(home.running), -len(home.known(sequence))))
            if any(home.come(sequence, draft) for home in homes):
                return sequence
            self._full = True
            return None
        return None

    def _choose(self, draft: Draft, homes: list[Home]) -> list[Sequence]:
        """Add the work of this step; who takes part."""
        decoding = sum(each.decodes for each in self.running)
        if suspects := [each for flight in self._flying for each in flight.rows if each.suspect]:
            return [] if decoding else self._read_on(draft, suspects[0])
        suspect = next((home.readers[0] for home in homes if home.readers and home.readers[0].suspect), None)
        if suspect is not None and (not decoding or self._pace.earned):
            # It waits until nothing is on its way, and everybody for it.
            return [] if self._flying else self._read(draft, suspect, self.limits.chunk)
        settled = sum(each.decodes and each.position >= SETTLED for each in self.running)
        chunk = self._pace.allowed(decoding, self._wanting(), settled) if decoding else self.limits.chunk
        taking: list[Sequence] = []
        for home in homes:
            readers = list(home.readers) if chunk and suspect is None else []
            if readers and not self.limits.mixed:
                taking += self._read(draft, readers[0], chunk)
                continue
            rows = home.ready()
            if decoding and not rows:
                readers = []  # a chunk by itself would come between two tokens of those who have a step on its way
            taking += self._compose(draft, home, rows, readers, chunk)
        return taking

    def _read_on(self, draft: Draft, suspect: Sequence) -> list[Sequence]:
        """The next chunk of a suspect that has one on its way."""
        going_on = suspect in self._homes[suspect.home].readers and suspect.leaving is None
        return self._read(draft, suspect, self.limits.chunk) if going_on else []

    def _read(self, draft: Draft, sequence: Sequence, chunk: int) -> list[Sequence]:
        """A chunk of one sequence by itself."""
        return self._compose(draft, self._homes[sequence.home], [], [sequence], chunk)

    def _compose(
        self, draft: Draft, home: Home, rows: list[Sequence], readers: list[Sequence], most: int
    ) -> list[Sequence]:
        """Add a home's work: a token of each of `rows`, and up to `most` tokens of `readers`, whose turn it is."""
        chunks, tokens, taking = [], [each.tokens[-1] for each in rows], list(rows)
        for each in rows:
            each.cached += 1
        for sequence in readers:
            if most == 0 or (sequence.suspect and taking):
                break
            count = min(most, sequence.to_read)
            most -= count
            tokens += sequence.tokens[sequence.cached : sequence.cached + count]
            sequence.cached += count
            home.readers.remove(sequence)
            (home.readers if sequence.to_read else home.read).append(sequence)
            chunks.append(Chunk(sequence.number, count, not sequence.to_read))
            taking.append(sequence)
        if taking:
            group = rows[0].group if rows else -1
            numbers = tuple(each.number for each in rows)
            draft.work.append(Work(home.number, group, numbers, tuple(chunks), tuple(tokens)))
        return taking

    def _send(self, step: int, draft: Draft, rows: list[Sequence]) -> None:
        """Note what is on its way now."""
        for each in rows:
            each.in_flight += 1
        sampling = {number for work in draft.work for number in work.sampled}
        sampled = tuple(each for each in rows if each.number in sampling)
        read = max((work.read for work in draft.work), default=0)
        decoding = sum(each.decodes for each in self.running)
        decoded = sum(len(work.rows) for work in draft.work)
        if read:
            self._pace.spend(read)
        elif rows:
            self._pace.earn(self._groups_at_work(), max(1, decoding), self._wanting())
        if not decoding:
            self._pace.rest()
        beside = any(flight.read for flight in self._flying)
        self._flying.append(Flight(step, tuple(rows), sampled, decoded, read, paced=bool(decoding), beside=beside))

    # -- the rest

    def _wanting(self) -> int:
        """Sequences whose prompts are being read, or are going to be as soon as their turn comes."""
        places = self.limits.max_rows - sum(len(home.running) for home in self._homes)
        coming = 0 if self._full else min(len(self._waiting), places)
        return coming + sum(len(home.readers) for home in self._homes)

    def _groups_at_work(self) -> int:
        """Groups that decode, of the home that has most."""
        return max(len({each.group for each in home.running if each.decodes}) for home in self._homes)

    def _learn(self, flight: Flight, seconds: float) -> None:
        disturbed = flight.beside or any(each.read for each in self._flying)
        if not flight.read and flight.rows and not disturbed:
            self._pace.decoded(seconds)
        elif flight.read and flight.paced and (flight.decoded or not self.limits.mixed):
            self._pace.read(flight.read, seconds, max(1, self._groups_at_work()))

    def _end(self, sequence: Sequence, leaving: Leaving) -> None:
        if sequence.over:
            return
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
            sequence.state = State.ENDED
        else:
            sequence.leaving = leaving
            self._homes[sequence.home].forget(sequence)

    def _fresh_homes(self) -> list[Home]:
        numbers = range(self.limits.homes)
        return [Home(self.limits, n, lambda: next(self._blocks), lambda: next(self._transfers)) for n in numbers]
