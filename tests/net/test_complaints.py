"""What is logged of those who cannot be let in."""

from __future__ import annotations

import itertools

from mlxcel_nb.net.links.complaints import FIRST_S, LONGEST_S, MAX_KEPT, Complaints, Seldom


def lines(complaints: Complaints, every_s: float, seconds: float, start: float = 0.0) -> list[float]:
    """When one peer that knocks every `every_s` is complained of."""
    knocks = [start + k * every_s for k in range(int(seconds / every_s))]
    return [at for at in knocks if complaints.due("10.0.0.2", "authentication", at)]


def test_the_pauses_double_up_to_an_hour():
    found = lines(Complaints(), 12, 10 * LONGEST_S)
    pauses = [b - a for a, b in itertools.pairwise(found)]
    assert found[0] == 0 and FIRST_S <= pauses[0] <= FIRST_S + 12
    assert pauses == sorted(pauses) and pauses[-1] <= LONGEST_S + 12
    assert len(found) < 20


def test_each_address_and_kind_has_pauses_of_its_own():
    complaints = Complaints()
    assert all(complaints.due(ip, kind, 1.0) for ip in ("a", "b") for kind in ("slow", "broken"))
    assert not complaints.due("a", "slow", 2.0)


def test_what_comes_back_after_an_hour_or_after_a_success_is_news():
    complaints = Complaints()
    ended = lines(complaints, 12, 3 * LONGEST_S)[-1]
    assert lines(complaints, 12, 60, 5 * LONGEST_S)[0] == 5 * LONGEST_S > ended
    assert not complaints.due("10.0.0.2", "authentication", 5 * LONGEST_S + 48)
    complaints.forget("10.0.0.2")
    assert complaints.due("10.0.0.2", "authentication", 5 * LONGEST_S + 49)


def test_a_flood_of_addresses_is_forgotten():
    complaints = Complaints()
    for number in range(3 * MAX_KEPT):
        assert complaints.due(str(number), "slow", 0.0)
    assert len(complaints._kept) <= MAX_KEPT


def test_what_is_told_seldom_is_told_at_once_and_then_after_its_pause():
    seldom = Seldom(60.0)
    assert [at for at in range(5, 200) if seldom.due(at)] == [5, 65, 125, 185]
