"""A leader and its members, without a model: requests come, are cancelled and fail at random, plans travel at random
speed from rank to rank. What the scheduler promises of each plan is asserted as it is made."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mlxcel_nb.errors import Busy
from mlxcel_nb.scheduling.limits import Limits
from mlxcel_nb.scheduling.scheduler import Scheduler
from mlxcel_nb.scheduling.sequence import Request, Sequence, State
from mlxcel_nb.scheduling.step_plan import StepPlan
from tests.scheduling.ranks import END, Rank, alone, next_token


@dataclass
class Trouble:
    """How often, of a thousand turns of the loop."""

    cancels: int = 0
    failures: int = 0
    losses: float = 0.0
    """Share of what happens to sequences that are read elsewhere."""


@dataclass
class Flying:
    """A plan under way: which ranks have run it is known from their own count."""

    plan: StepPlan
    sampled: dict[int, int] = field(default_factory=dict)


class Simulation:
    """Run `run`; then everything that was asked has been answered."""

    def __init__(self, limits: Limits, seed: int = 0, trouble: Trouble | None = None) -> None:
        self.scheduler = Scheduler(limits)
        self.limits = limits
        self.random = random.Random(seed)
        self.trouble = trouble or Trouble()
        self.plans: list[StepPlan] = []
        self.answers: dict[int, list[int]] = {}
        self.sequences: dict[int, Sequence] = {}
        self.cancelled: set[int] = set()
        self.refused = 0
        self.failures = 0
        self.breaks: Callable[[StepPlan], bool] = lambda plan: False
        self.now = 0.0
        self.most_flying = 0
        self.overlapping_chunks = 0
        self.landings = 0
        self._first: set[int] = set()
        """Transfers whose first token has come."""
        self._flying: deque[Flying] = deque()
        self._has_caches: set[int] = set()
        self._coming: set[int] = set()
        self._must_go: set[int] = set()
        self._start_ranks()

    def _start_ranks(self) -> None:
        several = self.limits.homes > 1
        self.ranks = [[Rank(home, room, several) for room in rooms] for home, rooms in enumerate(self.limits.rooms)]

    # -- the loop

    def run(self, requests: list[Request], every: int = 3, most_turns: int = 200_000) -> None:
        """Have all answered; a request comes about every so many turns, all at once for 0."""
        coming = deque(requests)
        for _ in range(most_turns):
            self.now += 0.001
            while coming and (not every or self.random.randrange(every) == 0):
                self.ask(coming.popleft())
            if not coming and self.scheduler.idle:
                break
            self.turn()
        assert not coming and self.scheduler.idle, "somebody was never answered"
        self.settle()

    def ask(self, request: Request) -> Sequence | None:
        try:
            sequence = self.scheduler.add(request, self.now)
        except Busy:
            self.refused += 1
            return None
        self.sequences[sequence.number] = sequence
        self.answers[sequence.number] = []
        return sequence

    def turn(self) -> None:
        """One thing happens."""
        chance = self.random.randrange(1000)
        if chance < self.trouble.cancels and (live := self.live()):
            self.cancel(self.random.choice(live))
        elif chance < self.trouble.cancels + self.trouble.failures and self._flying:
            self.fail()
        if self.random.random() < 0.7:
            self.send()
        if self._flying and self.random.random() < 0.7:
            self.advance()
        self.receive()
        self.bring()

    def settle(self) -> None:
        """The last plans have run; nothing is left but blocks, and those go when they are told to."""
        while self.send() or self._flying or not self.scheduler.idle:
            while self._flying and not self.receive():
                self.advance()
            self.bring()
        assert self.scheduler.idle
        kept = [rank for home in self.ranks for rank in home]
        assert not any(rank.caches or any(batch.rows for batch in rank.batches.values()) for rank in kept), (
            "caches were left"
        )
        assert sum(len(home[0].blocks) for home in self.ranks) == self.scheduler.blocks
        for sequence in self.sequences.values():
            expected = alone(sequence.request.prompt, sequence.limit)
            answer = self.answers[sequence.number]
            assert answer == (expected[: len(answer)] if sequence.number in self.cancelled else expected)

    def live(self) -> list[Sequence]:
        return [each for each in self.sequences.values() if not each.over]

    def bring(self) -> None:
        """Something comes of a sequence that is read elsewhere, or its reader is lost."""
        awaiting = [each for each in self.live() if each.state is State.AWAITS and each.transfer >= 0]
        if not awaiting or self.random.random() < 0.7:
            return
        sequence = self.random.choice(awaiting)
        ranks, chance = self.ranks[sequence.home], self.random.random()
        if chance < self.trouble.losses:
            self.random.choice([self.scheduler.expect_again, self.scheduler.read_here])(sequence)
        elif sequence.transfer not in self._first:
            self._first.add(sequence.transfer)
            token = next_token(sequence.tokens, sequence.position)
            self.scheduler.made_elsewhere(sequence, token)
            self._say(sequence, token)
            self._note_leaving(sequence)
        elif all(rank.coming.get(sequence.number, (-1, 0))[0] == sequence.transfer for rank in ranks):
            for rank in ranks:
                rank.brought[sequence.transfer] = sequence.tokens[: rank.coming[sequence.number][1]]
            self.scheduler.landed(sequence)
            self.landings += 1

    def _say(self, sequence: Sequence, token: int) -> None:
        self.answers[sequence.number].append(token)
        assert sequence.tokens == [*sequence.request.prompt, *self.answers[sequence.number]]
        if token == END or sequence.position >= sequence.limit:
            self.scheduler.finish(sequence)

    # -- what may happen

    def cancel(self, sequence: Sequence) -> None:
        self.cancelled.add(sequence.number)
        self.scheduler.cancel(sequence)
        self._note_leaving(sequence)

    def fail(self) -> None:
        """The oldest step on its way fails on some rank: all caches are gone, everywhere."""
        self.failures += 1
        step = self._flying[0].plan.step
        rows = self.scheduler.flying[step]
        self.scheduler.reset([each for each in rows if not each.over])
        self._flying.clear()
        self._has_caches.clear()
        self._must_go.clear()
        self._start_ranks()

    def send(self) -> bool:
        """Ask for a plan, and see that it is one that can be."""
        scheduler, before = self.scheduler, dict(self.scheduler.flying)
        plan = scheduler.next(self.now)
        if plan is None:
            awaiting = any(each.state is State.AWAITS for each in scheduler.running)
            assert before or awaiting or scheduler.idle, "there is something to do, and nothing is done"
            return False
        assert len(scheduler.flying) <= self.limits.flights
        self.most_flying = max(self.most_flying, len(scheduler.flying))
        assert StepPlan.from_dict(plan.to_dict()) == plan
        self._check_flights(plan, before)
        self._check_lives(plan)
        self.plans.append(plan)
        self._flying.append(Flying(plan))
        return True

    def advance(self) -> None:
        """Some rank runs its next plan, if the stage before it has."""
        able = []
        for home in self.ranks:
            for index, rank in enumerate(home):
                flight = next((each for each in self._flying if each.plan.step > rank.steps), None)
                if flight is not None and (index == 0 or home[index - 1].steps >= flight.plan.step):
                    able.append((rank, flight, index == len(home) - 1))
        if able:
            rank, flight, last = self.random.choice(able)
            sampled = rank.run(flight.plan)
            flight.sampled |= sampled if last else {}

    def receive(self) -> bool:
        """The result of the oldest step, if all ranks have run it."""
        if not self._flying or any(rank.steps < self._flying[0].plan.step for home in self.ranks for rank in home):
            return False
        if self.breaks(self._flying[0].plan):
            self.fail()
            return True
        flight = self._flying.popleft()
        rows = self.scheduler.flying[flight.plan.step]
        over = {each.number for each in rows if each.over}
        self.scheduler.took(flight.plan.step, flight.sampled, seconds=self._seconds(flight.plan))
        for number, token in flight.sampled.items():
            sequence = self.sequences[number]
            if number in over:
                continue
            self._say(sequence, token)
        for sequence in rows:
            self._note_leaving(sequence)
        return True

    @staticmethod
    def _seconds(plan: StepPlan) -> float:
        return 0.004 + 0.0005 * max((work.size for work in plan.work), default=0)

    # -- what is promised of a plan

    def _note_leaving(self, sequence: Sequence) -> None:
        if sequence.over and not sequence.in_flight and sequence.number in self._has_caches:
            self._must_go.add(sequence.number)

    def _check_flights(self, plan: StepPlan, before: dict[int, tuple[Sequence, ...]]) -> None:
        flying = {each.number for rows in before.values() for each in rows}
        assert not flying & set(plan.drop), "one with a step on its way is not dropped"
        for work in plan.work:
            assert not flying & set(work.rows), "one with a step on its way is not run again"
            for number in {chunk.sequence for chunk in work.chunks} & flying:
                self.overlapping_chunks += 1
                steps = [step for step, rows in before.items() if number in {each.number for each in rows}]
                sent = [w for p in self.plans if p.step in steps for w in p.work if number in w.sequences]
                assert all(number not in w.sampled for w in sent), "but for the next chunk of its prompt"
        suspects = [n for work in plan.work for n in work.sequences if self.sequences[n].suspect]
        if suspects or any(each.suspect for rows in before.values() for each in rows):
            assert {n for work in plan.work for n in work.sequences} | flying <= set(suspects or flying)
            assert len(set(suspects)) <= 1, "who is suspected shares no step"

    def _check_lives(self, plan: StepPlan) -> None:
        assert self._must_go <= set(plan.drop), "who is over goes with the first plan that can"
        self._must_go.clear()
        assert set(plan.drop) <= self._has_caches and len(set(plan.drop)) == len(plan.drop), "dropped twice"
        self._has_caches -= set(plan.drop)
        for back in (self.sequences[number] for number in plan.drop if not self.sequences[number].over):
            staying = [s for s in map(self.sequences.get, self._has_caches) if s.home == back.home and not s.leaving]
            assert staying and all(each.number < back.number for each in staying), "who came last makes room"
            assert not plan.open, "and nobody takes it at once"
        for expect in plan.expect:
            assert expect.length == len(self.sequences[expect.sequence].tokens)
            self._has_caches.add(expect.sequence)
            self._coming.add(expect.sequence)
        self._coming &= self._has_caches
        for each in plan.open:
            sequence = self.sequences[each.sequence]
            assert (each.sequence in self._has_caches) == (each.sequence in self._coming) and not sequence.over
            self._coming.discard(each.sequence)
            assert each.position == sequence.position == len(self.answers[each.sequence])
            assert each.context == tuple(sequence.tokens[len(sequence.tokens) - len(each.context) :])
            assert len(each.context) >= each.position
            self._has_caches.add(each.sequence)
        at_work = {number for work in plan.work for number in work.sequences}
        assert at_work <= self._has_caches
        assert not any(self.sequences[number].leaving for number in at_work), "who leaves is given no more work"
        assert len(self._has_caches) <= self.limits.max_rows
        if any(self.sequences[number].request.exclusive for number in self._has_caches):
            assert len(self._has_caches) == 1, "who asked to be alone is alone"


def requests(
    count: int,
    *,
    seed: int = 0,
    prompts: tuple[int, int] = (1, 90),
    answers: tuple[int, int] = (1, 40),
    owners: int = 3,
    alike: float = 0.5,
    exclusive: float = 0.0,
    homes: int = 0,
    remote: float = 0.0,
) -> list[Request]:
    """Made-up ones; a share of them begins `alike`, some go on from there alike as well."""
    rng = random.Random(seed)
    common = [[rng.randrange(1, 200) for _ in range(prompts[1])] for _ in range(2)]
    made = []
    for _ in range(count):
        length = rng.randint(*prompts)
        tokens = [rng.randrange(1, 200) for _ in range(length)]
        if rng.random() < alike:
            shared = rng.randint(0, length)
            tokens[:shared] = rng.choice(common)[:shared]
        made.append(Request(
            prompt=tuple(tokens), max_tokens=rng.randint(*answers), owner=f"owner-{rng.randrange(owners)}",
            recent=rng.randrange(20), exclusive=rng.random() < exclusive,
            home=rng.randrange(homes) if homes and rng.random() < 0.3 else None,
            remote=remote > 0 and rng.random() < remote,
        ))  # fmt: skip
    return made
