"""Engines that are lost are started again a few times, at growing intervals."""

from __future__ import annotations

from mlxcel_nb.commands.revival import PAUSES_S, STEADY_S, Revival


def test_the_first_try_is_at_once_and_the_last_one_is_the_end() -> None:
    revival = Revival()
    assert [revival.pause_s(60.0) for _ in range(len(PAUSES_S) + 1)] == [*PAUSES_S, None]
    assert PAUSES_S[0] == 0.0 and list(PAUSES_S) == sorted(set(PAUSES_S))
    assert revival.tries == len(PAUSES_S)


def test_engines_that_were_well_for_long_have_all_tries_again() -> None:
    revival = Revival()
    for _ in range(2 * len(PAUSES_S)):
        assert revival.pause_s(STEADY_S) == PAUSES_S[0]
    assert revival.pause_s(STEADY_S - 1) == PAUSES_S[1]
