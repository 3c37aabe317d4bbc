"""What silence means: nothing, a ping, a doubt, an end."""

from __future__ import annotations

import pytest

from mlxcel_nb.net.control.liveness import Health, Liveness
from mlxcel_nb.util import times


@pytest.fixture
def life() -> Liveness:
    return Liveness(100.0)


def hear(life: Liveness, now: float, *, within_frame: bool = False, frames: bool = True) -> None:
    life.heard(now, within_frame=within_frame, frames=frames)


def live_until(life: Liveness, end: float) -> tuple[list[float], list[tuple[float, Health]]]:
    """When it was pinged, and each change of health with its time."""
    pings: list[float] = []
    changes = [(life.due, Health.ALIVE)]
    while life.due <= end and changes[-1][1] is not Health.DEAD:
        now = life.due
        judgement = life.judge(now)
        if judgement.ping:
            pings.append(now)
        if judgement.health is not changes[-1][1]:
            changes.append((now, judgement.health))
    return pings, changes[1:]


def test_a_fresh_link_is_not_pinged_before_it_was_idle_for_a_second(life):
    assert life.due == 100.0 + times.PING_S
    assert life.judge(life.due).ping


def test_a_busy_link_is_not_pinged(life):
    for tenth in range(1, 40):
        hear(life, 100.0 + tenth / 10)
        if life.due <= 100.0 + tenth / 10:
            assert not life.judge(100.0 + tenth / 10).ping
    pings, _ = live_until(life, 105.5)
    assert pings == pytest.approx([104.9])


def test_silence_is_pinged_every_second_then_suspect_then_dead(life):
    pings, changes = live_until(life, 200.0)
    assert pings == pytest.approx([101.0, 102.0, 103.0, 104.0, 105.0])
    assert changes == [(pytest.approx(103.0), Health.SUSPECT), (pytest.approx(106.0), Health.DEAD)]


def test_a_sign_of_life_mends_a_doubt(life):
    live_until(life, 104.0)
    hear(life, 104.5)
    assert life.judge(life.due).health is Health.ALIVE


def test_half_a_frame_and_then_silence_has_ten_seconds(life):
    hear(life, 100.5, within_frame=True, frames=False)
    _, changes = live_until(life, 200.0)
    assert changes[-1] == (pytest.approx(110.5), Health.DEAD)
    assert changes[0][1] is Health.SUSPECT


def test_a_frame_that_trickles_has_ten_seconds_too(life):
    hear(life, 100.0, within_frame=True, frames=False)
    for second in range(1, 10):
        hear(life, 100.0 + second, within_frame=True, frames=False)
        assert life.judge(100.0 + second).health is Health.ALIVE
    judgement = life.judge(life.due)
    assert judgement.health is Health.DEAD
    assert "rest of a frame" in judgement.reason


def test_the_next_frame_has_its_own_ten_seconds(life):
    hear(life, 100.0, within_frame=True, frames=False)
    hear(life, 109.0, within_frame=True, frames=True)
    life.judge(109.5)
    assert life.judge(110.5).health is Health.ALIVE


def test_time_this_process_slept_is_not_held_against_the_peer(life):
    """Case 67."""
    hear(life, 100.0, within_frame=True, frames=False)
    life.judge(life.due)
    assert life.judge(life.due + 3600.0).health is Health.ALIVE
