"""Who lives: by the rules of the table of times and by nothing else."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mlxcel_nb.cluster.membership import (
    TRANSITIONS,
    Beat,
    Change,
    Ended,
    Event,
    Heard,
    Linked,
    Membership,
    Signal,
    State,
    Unreachable,
    missed_s,
    stalled,
)
from mlxcel_nb.util import times

FIRST, SECOND = b"\1" * 16, b"\2" * 16


class Watch:
    """One peer, "n1", and a clock that is moved by hand and judged every second."""

    def __init__(self) -> None:
        self.now = 100.0
        self.membership = Membership(self.now)
        self.membership.expect(["n1"], self.now)
        self.changes: list[Change] = []

    @property
    def state(self) -> State:
        return self.membership.members["n1"].state

    def tell(self, event: Event) -> None:
        self.changes += self.membership.apply(event, self.now)

    def linked(self, incarnation: bytes = FIRST) -> None:
        self.tell(Linked(node_id="n1", incarnation=incarnation))

    def heard(self, incarnation: bytes = FIRST) -> None:
        self.tell(Heard(node_id="n1", incarnation=incarnation))

    def beat(self, incarnation: bytes = FIRST, progress: int = 0) -> None:
        self.tell(Beat(node_id="n1", incarnation=incarnation, progress=progress))

    def ended(self, incarnation: bytes = FIRST, *, goodbye: bool = False) -> None:
        self.tell(Ended(node_id="n1", incarnation=incarnation, reason="it ended", goodbye=goodbye))

    def unreachable(self) -> None:
        self.tell(Unreachable(node_id="n1", reason="connection refused"))

    def wait(self, seconds: float, *, heard: bool = False) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + times.PING_S)
            if heard:
                self.heard()
            self.changes += self.membership.judge(self.now)

    def seen(self) -> list[State]:
        return [change.state for change in self.changes]


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def alive(watch: Watch) -> Watch:
    watch.linked()
    return watch


def test_a_peer_that_never_came_is_neither_dead_nor_alive(watch: Watch) -> None:
    watch.wait(60)
    watch.unreachable()
    assert (watch.state, watch.changes) == (State.UNSEEN, [])
    assert watch.membership.members["n1"].reason == "connection refused"


def test_silence_makes_suspect_after_three_seconds_and_dead_after_six(alive: Watch) -> None:
    alive.wait(times.SUSPECT_S - 0.5)
    assert alive.state is State.ALIVE
    alive.wait(1)
    assert (alive.state, alive.state.shown) == (State.QUIET, "suspect")
    alive.wait(times.DEAD_S - times.SUSPECT_S)
    assert alive.state is State.DEAD
    assert "silent" in alive.changes[-1].reason


def test_a_sign_of_life_mends_a_doubt(alive: Watch) -> None:
    alive.wait(4)
    alive.heard()
    assert alive.seen() == [State.ALIVE, State.QUIET, State.ALIVE]


def test_a_sign_of_life_that_is_told_twice_is_one(alive: Watch) -> None:
    """A pool tells every second when each link was last heard."""
    last = alive.now
    for _ in range(12):
        alive.wait(1)
        alive.changes += alive.membership.apply(Heard(node_id="n1", incarnation=FIRST), last)
    assert alive.seen() == [State.ALIVE, State.QUIET, State.DEAD]


def test_a_reset_alone_is_a_doubt_and_with_one_failed_reconnect_a_death(alive: Watch) -> None:
    alive.ended()
    assert (alive.state, alive.state.shown) == (State.CUT, "suspect")
    alive.unreachable()
    assert alive.state is State.DEAD


def test_a_reset_and_a_good_reconnect_change_nothing_in_the_end(alive: Watch) -> None:
    alive.ended()
    alive.linked()
    assert alive.seen() == [State.ALIVE, State.CUT, State.ALIVE]


def test_a_failed_reconnect_without_a_reset_proves_nothing(alive: Watch) -> None:
    alive.unreachable()
    alive.wait(4)
    alive.unreachable()
    assert alive.state is State.QUIET


def test_one_of_two_links_may_end(alive: Watch) -> None:
    alive.linked()
    alive.ended()
    assert alive.state is State.ALIVE
    alive.ended()
    assert alive.state is State.CUT


def test_a_goodbye_is_a_death_at_once_and_says_so(alive: Watch) -> None:
    alive.ended(goodbye=True)
    assert (alive.state, alive.changes[-1].reason) == (State.DEAD, "it ended")


def test_a_cut_link_without_any_news_is_dead_by_silence(alive: Watch) -> None:
    alive.ended()
    alive.wait(times.DEAD_S)
    assert alive.state is State.DEAD


def test_missed_heartbeats_count_though_the_link_answers(alive: Watch) -> None:
    alive.beat(progress=7)
    alive.wait(missed_s() - 0.5, heard=True)
    assert alive.state is State.ALIVE
    alive.wait(0.5, heard=True)
    assert (alive.state, alive.changes[-1].signal) == (State.DEAD, Signal.MISSED)
    alive.wait(30, heard=True)
    assert alive.state is State.DEAD, "it flapped"
    alive.beat(progress=8)
    assert alive.state is State.ALIVE


def test_dead_by_heartbeats_alone_takes_sixteen_seconds() -> None:
    assert missed_s() == 16.0


def test_one_that_never_sends_heartbeats_is_judged_by_its_link(alive: Watch) -> None:
    alive.wait(120, heard=True)
    assert alive.state is State.ALIVE


def test_progress_is_kept_with_the_time_it_last_moved(alive: Watch) -> None:
    alive.beat(progress=3)
    began = alive.now
    alive.wait(4, heard=True)
    alive.beat(progress=3)
    member = alive.membership.members["n1"]
    assert (member.progress, member.progress_at, member.beat_at) == (3, began, alive.now)


def test_a_living_peer_with_work_and_no_progress_is_stalled(alive: Watch) -> None:
    """Case 27."""
    member, load = alive.membership.members["n1"], {"step_s": 10.0, "waiting": 3}
    began = alive.now

    def beat(progress: int, *, busy: bool = True) -> None:
        alive.tell(Beat(node_id="n1", incarnation=FIRST, progress=progress, busy=busy, load=load))

    beat(3)
    assert member.load["waiting"] == 3 and member.still_s(began + 10.9) is None
    for _ in range(3):
        alive.wait(4, heard=True)
        beat(3)
    assert (alive.state, member.still_s(alive.now)) == (State.ALIVE, 12)
    beat(4)
    assert member.still_s(alive.now) is None
    beat(4, busy=False)
    assert member.still_s(alive.now + 99) is None, "it has nothing to do"
    beat(4)
    alive.ended()
    assert member.still_s(alive.now + 99) is None, "it is suspect for a reason of its own"


def test_whoever_waits_for_a_stalled_thread_gives_up_before_it_counts_as_stalled_itself() -> None:
    assert not stalled(True, 30.5, step_s=30) and stalled(True, 31, step_s=30) and not stalled(False, 99, step_s=30)


def test_a_restarted_peer_is_alive_at_once_and_told_as_such(alive: Watch) -> None:
    alive.linked(SECOND)
    assert (alive.state, alive.changes[-1].restarted) == (State.ALIVE, True)
    alive.ended(FIRST)
    alive.ended(FIRST, goodbye=True)
    assert alive.state is State.ALIVE, "an old process's end was taken for the new one's"


def test_what_an_old_process_says_late_does_not_keep_the_new_one_alive(alive: Watch) -> None:
    alive.linked(SECOND)
    for _ in range(7):
        alive.wait(1)
        alive.heard(FIRST)
        alive.beat(FIRST)
    assert alive.state is State.DEAD


def test_time_this_process_slept_is_not_held_against_anybody(alive: Watch) -> None:
    """Case 67."""
    alive.beat()
    alive.now += 3600
    alive.changes += alive.membership.judge(alive.now)
    assert alive.seen() == [State.ALIVE]
    alive.wait(times.DEAD_S)
    assert alive.state is State.DEAD


def test_one_that_is_forgotten_is_heard_of_no_more(alive: Watch) -> None:
    alive.membership.forget("n1")
    alive.heard()
    alive.wait(20)
    assert alive.seen() == [State.ALIVE]


def test_strangers_are_not_made_members_by_what_they_say(watch: Watch) -> None:
    assert watch.membership.apply(Heard(node_id="n9", incarnation=FIRST), watch.now) == []
    assert "n9" not in watch.membership.members


def test_every_state_and_every_signal_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {signal for row in TRANSITIONS.values() for signal in row} == set(Signal)
    assert all(state is not before for before, row in TRANSITIONS.items() for state in row.values())


# ------------------------------------------------------------------------------------------- whatever happens

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.floats(0.0, 9.0)),
        st.tuples(st.just("sleep"), st.floats(2.5, 5000.0)),
        st.tuples(st.sampled_from(["linked", "heard", "beat", "ended", "goodbye"]), st.sampled_from([FIRST, SECOND])),
        st.tuples(st.just("unreachable"), st.none()),
    ),
    max_size=40,
)


def play(watch: Watch, step: str, value: float | bytes | None) -> None:
    if isinstance(value, float):
        if step == "wait":
            watch.wait(value)
        else:
            watch.now += value
            watch.changes += watch.membership.judge(watch.now)
    elif isinstance(value, bytes):
        if step == "goodbye":
            watch.ended(value, goodbye=True)
        else:
            getattr(watch, step)(value)
    else:
        watch.unreachable()


@given(STEPS)
def test_changes_are_a_walk_through_the_table(steps: list[tuple[str, float | bytes | None]]) -> None:
    watch, state = Watch(), State.UNSEEN
    for step, value in steps:
        play(watch, step, value)
    for change in watch.changes:
        assert change.before is state
        assert change.state is TRANSITIONS[state].get(change.signal, state)
        assert change.state is not state or change.restarted
        state = change.state
    assert state is watch.state


@given(STEPS)
def test_nobody_dies_but_by_the_rules(steps: list[tuple[str, float | bytes | None]]) -> None:
    watch = Watch()
    for step, value in steps:
        seen = len(watch.changes)
        before = watch.membership.members["n1"]
        heard, beat = before.heard_at, before.beat_at
        play(watch, step, value)
        for change in watch.changes[seen:]:
            if change.state is not State.DEAD:
                continue
            by_link = change.signal is Signal.SILENT and change.at - heard >= times.DEAD_S
            by_beats = change.signal is Signal.MISSED and beat is not None and change.at - beat >= missed_s()
            by_cut = change.signal is Signal.UNREACHABLE and change.before is State.CUT
            by_goodbye = step == "goodbye" and change.signal is Signal.LEFT
            assert by_link or by_beats or by_cut or by_goodbye, change


@given(STEPS, st.sampled_from([FIRST, SECOND]))
def test_a_newer_process_comes_back_alive_whatever_was(
    steps: list[tuple[str, float | bytes | None]], incarnation: bytes
) -> None:
    watch = Watch()
    for step, value in steps:
        play(watch, step, value)
    watch.linked(b"\3" * 16)
    assert watch.state is State.ALIVE
    watch.ended(incarnation, goodbye=True)
    watch.heard(incarnation)
    assert watch.state is State.ALIVE


@given(STEPS)
def test_without_news_nobody_flaps(steps: list[tuple[str, float | bytes | None]]) -> None:
    watch = Watch()
    for step, value in steps:
        play(watch, step, value)
    seen = len(watch.changes)
    watch.wait(60)
    states = [change.state for change in watch.changes[seen:]]
    assert states in ([], [State.DEAD], [State.QUIET, State.DEAD])
