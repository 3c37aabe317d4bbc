"""How prompts are read between the tokens of others, on clocks that the tests turn."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import pairwise

import pytest

from mlxcel_nb.scheduling.limits import Limits
from mlxcel_nb.scheduling.pace import GROWTH, LEAST, START, Pace
from mlxcel_nb.scheduling.scheduler import Scheduler
from mlxcel_nb.scheduling.sequence import Request
from mlxcel_nb.scheduling.step_plan import Chunk, StepPlan, Work
from tests.scheduling.ranks import plain

Cost = Callable[[Work], float]


def bandwidth(work: Work) -> float:
    """Seconds, of a machine that takes 50 ms to read the weights and 4 ms to compute a token beside it."""
    return max(0.050, 0.004 * work.size) + 0.0005 * work.size


def measured(work: Work) -> float:
    """Seconds, of SmolLM2-135M on one core: 68 ms for one row, 85 and 4 a token for more."""
    return 0.068 if work.size == 1 else 0.085 + 0.0038 * work.size


def compute(work: Work) -> float:
    """Seconds, of a machine on which a step costs 2 ms and a token 0.2 ms."""
    return 0.002 + 0.0002 * work.size


class Clock:
    """Runs requests on one stage that takes its time; notes when each token came."""

    def __init__(self, cost: Cost, **limits: object) -> None:
        self.scheduler = Scheduler(Limits(rooms=((plain(10**6),),), **limits))
        self.cost = cost
        self.now = 0.0
        self.came: dict[int, list[float]] = defaultdict(list)
        self.chunks: list[int] = []

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            plan = self.scheduler.next(self.now)
            assert plan is not None
            seconds = sum(map(self.cost, plan.work))
            self.now += seconds
            self.chunks += [work.read for work in plan.work if work.chunks]
            rows = [row for work in plan.work for row in work.sampled]
            self.scheduler.took(plan.step, dict.fromkeys(rows, 5), seconds)
            for row in rows:
                self.came[row].append(self.now)
            for sequence in self.scheduler.running:
                if sequence.position >= sequence.limit:
                    self.scheduler.finish(sequence)

    def gaps(self, row: int, begin: float, end: float) -> list[float]:
        times = [each for each in self.came[row] if begin <= each <= end]
        return [after - before for before, after in pairwise(times)]


def ask(clock: Clock, tokens: int, make: int, first: int = 1, owner: str = "") -> int:
    prompt = tuple(first + each % 100 for each in range(tokens))
    return clock.scheduler.add(Request(prompt=prompt, max_tokens=make, owner=owner), clock.now).number


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize(
    ("cost", "mixed"), [(bandwidth, False), (bandwidth, True), (compute, False), (compute, True), (measured, True)]
)
def test_a_stream_takes_at_most_two_and_a_half_times_its_idle_time_while_a_long_prompt_is_read(
    cost: Cost, mixed: bool, streams: int
) -> None:
    clock = Clock(cost, mixed=mixed)
    rows = [ask(clock, 30, 3000, first=1 + each) for each in range(streams)]
    clock.run(lambda: len(clock.came[rows[-1]]) > 100)
    idle = statistics.median(clock.gaps(0, 0, clock.now)[-50:])
    begin = clock.now
    arrives = ask(clock, 1500, 1, first=50)
    clock.run(lambda: bool(clock.came[arrives]))
    during = sorted(clock.gaps(0, begin, clock.now))
    assert during[int(0.99 * len(during))] <= 2.5 * idle
    alone = 1500 / 256 * cost(Work(0, -1, (), (Chunk(0, 256, False),)))
    assert clock.now - begin < 7 * alone, "and it is read all the same"


def test_while_nothing_decodes_prompts_are_read_in_whole_chunks() -> None:
    clock = Clock(bandwidth)
    ask(clock, 600, 1)
    clock.run(lambda: clock.scheduler.idle)
    assert clock.chunks == [256, 256, 88]


@pytest.mark.parametrize(("cost", "mixed"), [(bandwidth, False), (bandwidth, True), (measured, True)])
def test_of_a_burst_all_are_soon_answered_together(cost: Cost, mixed: bool) -> None:
    """16 requests at once, of 128 tokens in and 64 out: nearly as quick as if all prompts were read first."""

    def seconds(**limits: object) -> float:
        clock = Clock(cost, mixed=mixed, **limits)
        for each in range(16):
            ask(clock, 128, 64, first=1 + each)
        clock.run(lambda: clock.scheduler.idle)
        return clock.now

    assert seconds() < 1.15 * seconds(gap=1e9)


def test_short_prompts_do_not_wait_for_a_long_one_of_another() -> None:
    clock = Clock(bandwidth)
    long = ask(clock, 3000, 1, owner="long")
    short = ask(clock, 20, 1, first=50, owner="short")
    clock.run(lambda: clock.scheduler.idle)
    assert clock.came[short][0] < clock.came[long][0] / 3


def test_a_chunk_of_twice_its_time_is_followed_by_one_of_half_the_length() -> None:
    pace = Pace(2.0, 256)
    assert pace.length == START
    for seconds in (0.1, 0.1, 5.0):
        pace.decoded(seconds)
    pace.read(2 * START, 0.4, 1)
    assert pace.length == START / 2
    for _ in range(30):
        pace.read(START, 0.05, 1)
    assert pace.length == pytest.approx(2 * START, abs=1)
    for _ in range(30):
        pace.read(2 * START, 0.2, 4)
    assert pace.length == pytest.approx(4 * START, abs=1), "four groups, four times the round"


def test_a_quick_step_counts_for_less_than_a_slow_one() -> None:
    pace = Pace(2.0, 256)
    pace.decoded(0.1)
    pace.read(START, 0.05, 1)
    assert pace.length == START + START * GROWTH


def test_the_length_stays_within_its_bounds_and_moves_by_half_or_towards_double() -> None:
    pace = Pace(2.0, 64)
    pace.decoded(0.1)
    pace.read(START, 1e-9, 1)
    assert pace.length == START + START * GROWTH, "on the way to twice as much"
    for _ in range(20):
        pace.read(64, 1e-9, 1)
    assert pace.length == pytest.approx(64, abs=1)
    for _ in range(5):
        pace.read(64, 100.0, 1)
    assert pace.length == LEAST


def test_ends_of_prompts_tell_nothing() -> None:
    pace = Pace(2.0, 256)
    pace.decoded(0.1)
    pace.read(START // 2 - 1, 10.0, 1)
    assert pace.length == START


def test_without_measurements_the_length_is_the_first() -> None:
    pace = Pace(2.0, 256)
    pace.read(16, 1.0, 1)
    assert pace.length == START


def test_a_round_of_groups_earns_a_chunk_and_a_chunk_spends_it() -> None:
    pace = Pace(2.0, 256)
    for _ in range(4):
        assert not pace.allowed(8, 1, 8)
        pace.earn(groups=4, decoding=8, wanting=1)
    assert pace.allowed(8, 1, 8) == START
    pace.earn(4, 8, 1)
    assert pace.allowed(8, 1, 8) == START, "what is not used is not saved up"
    pace.spend(3)
    assert pace.allowed(8, 1, 8) == 0, "a short chunk takes nearly as long"


def test_mixed_steps_read_along_what_leaves_them_their_time() -> None:
    pace = Pace(2.0, 256, mixed=True)
    assert not pace.allowed(2, 1, 2), "a step that reads nothing is looked at first"
    pace.earn(1, decoding=2, wanting=1)
    pace.decoded(0.3)  # its batch was put together
    assert not pace.allowed(2, 1, 2), "and a second one, which is what a step takes"
    pace.earn(1, decoding=2, wanting=1)
    pace.decoded(0.1)
    assert pace.allowed(2, 1, 2) == pace.allowed(4, 1, 4) == START
    assert not pace.allowed(5, 1, 5) and not pace.allowed(1, 1, 1), "twice as many, or half as many, take another time"
    assert pace.allowed(2, 2, 2) == START, "two get no more than one"
    for _ in range(30):
        pace.read(START, 0.16, 1)
    assert pace.allowed(2, 1, 2) == pytest.approx(10, abs=1)
    pace.read(10, 0.26, 1)
    assert pace.allowed(2, 1, 2) == 6, "of 160 ms beside a step's 100 only 100 are left"


def test_many_who_wait_for_few_are_read_faster() -> None:
    pace = Pace(2.0, 256)
    pace.earn(1, decoding=3, wanting=4)
    assert pace.allowed(3, 4, 3) == 12 * START
    pace.rest()
    pace.earn(1, decoding=1, wanting=100)
    assert pace.allowed(1, 100, 1) == 256


def test_of_a_burst_those_who_have_just_begun_read_the_others_along() -> None:
    pace = Pace(2.0, 256, mixed=True)
    assert pace.allowed(14, 2, 0) == 256
    pace.earn(1, 14, 2)
    pace.earn(1, 14, 2)
    assert pace.allowed(14, 2, 14) == START, "texts that are under way do not stutter for two"
    clock = Clock(measured, mixed=True)
    for each in range(16):
        ask(clock, 128, 64, first=2 + each)
    clock.run(lambda: clock.scheduler.idle)
    assert len({moment for times in clock.came.values() for moment in times}) <= 8 + 64, (
        "256 tokens a step, then 64 of all"
    )


def test_a_stream_beside_a_burst_is_not_of_it() -> None:
    """One that is under way, and two that come: it does not stutter, though they have just begun."""
    clock = Clock(measured, mixed=True)
    first = ask(clock, 30, 500)
    clock.run(lambda: len(clock.came[first]) > 100)
    begin = clock.now
    both = [ask(clock, 600, 20, first=50 + each, owner="another") for each in range(2)]
    clock.run(lambda: all(clock.came[each] for each in both))
    during = sorted(clock.gaps(first, begin, clock.now))
    assert during[int(0.9 * len(during))] <= 2.5 * measured(Work(0, 0, (first,)))


def test_when_few_are_left_their_time_is_looked_at_anew() -> None:
    """32 texts, then one, and one prompt after the other: what is idle is what is idle for that one."""
    clock = Clock(measured, mixed=True)
    first = ask(clock, 30, 3000)
    for each in range(31):
        ask(clock, 30, 40, first=2 + each)
    clock.run(lambda: len(clock.scheduler.running) == 1)
    begin = clock.now
    for each in range(20):
        arrives = ask(clock, 200, 1, first=50 + each, owner="another")
        clock.run(lambda arrives=arrives: bool(clock.came[arrives]))  # type: ignore[misc]
    during = sorted(clock.gaps(first, begin, clock.now))
    assert during[int(0.9 * len(during))] <= 2.5 * measured(Work(0, 0, (first,)))


class Pipeline(Clock):
    """Several stages, each of which takes its part of a step's time, one step after the other."""

    def __init__(self, cost: Cost, stages: int, **limits: object) -> None:
        super().__init__(cost, stages=stages, **limits)
        rooms = (tuple(plain(10**6) for _ in range(stages)),)
        self.scheduler = Scheduler(Limits(rooms=rooms, stages=stages, **limits))
        self.free = [0.0] * stages
        self.flying: deque[tuple[StepPlan, float, float]] = deque()
        self.result = 0.0

    def run(self, until: Callable[[], bool]) -> None:
        """As a leader goes about it: it begins what there is to begin, on the first stage, else takes a result."""
        while not until():
            if (plan := self.scheduler.next(self.now)) is not None:
                self.flying.append((plan, self.now, self.through(sum(map(self.cost, plan.work)))))
                continue
            plan, began, done = self.flying.popleft()
            self.now = max(self.now, done)
            seconds, self.result = self.now - max(began, self.result), self.now
            rows = [row for work in plan.work for row in work.sampled]
            self.scheduler.took(plan.step, dict.fromkeys(rows, 5), seconds)
            for row in rows:
                self.came[row].append(self.now)

    def through(self, seconds: float) -> float:
        """When a step that begins now leaves the last stage; the leader is the first."""
        at = self.now
        for stage, free in enumerate(self.free):
            at = self.free[stage] = max(at, free) + seconds / len(self.free)
        self.now = self.free[0]
        return at


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("stages", [2, 3])
def test_in_a_pipeline_of_mixed_steps_a_stream_takes_no_longer_than_in_one_process(stages: int, streams: int) -> None:
    clock = Pipeline(measured, stages, mixed=True)
    for each in range(streams):
        ask(clock, 5, 3000, first=1 + each, owner=str(each))
    clock.run(lambda: len(clock.came[0]) > 60 and len(clock.came[streams - 1]) > 60)
    idle = statistics.median(clock.gaps(0, 0, clock.now)[-20:])
    begin = clock.now
    arrives = ask(clock, 1500, 1, first=50, owner="another")
    clock.run(lambda: bool(clock.came[arrives]))
    during = sorted(clock.gaps(0, begin, clock.now))
    assert during[int(0.9 * len(during))] <= 2.5 * idle
