"""When polling pays, and when it stops."""

from __future__ import annotations

import time

from mlxcel_nb.net.hot.spin import CREDIT, MISS_COSTS, TRY_EVERY, Spin

LONG_S = 1000.0


def polls(spin: Spin) -> bool:
    return spin.until() > time.perf_counter() + LONG_S / 2


def miss(spin: Spin) -> bool:
    polled = polls(spin)
    spin.missed()
    return polled


def test_who_polls_in_vain_stops_and_tries_again_once_in_a_while() -> None:
    spin = Spin(LONG_S)
    polled = [miss(spin) for _ in range(10 * TRY_EVERY)]
    assert sum(polled[: TRY_EVERY // 2]) == -(-CREDIT // MISS_COSTS)
    assert 8 <= sum(polled[TRY_EVERY // 2 :]) <= 11


def test_a_single_miss_changes_nothing() -> None:
    spin = Spin(LONG_S)
    for _ in range(50):
        assert miss(spin)
        for _ in range(MISS_COSTS):
            assert polls(spin)


def test_polling_goes_on_once_it_pays_again() -> None:
    spin = Spin(LONG_S)
    while miss(spin):
        pass
    while not polls(spin):
        spin.missed()
    assert polls(spin)


def test_ranks_that_share_cores_never_poll() -> None:
    spin = Spin(0.0)
    assert not any(polls(spin) for _ in range(2 * TRY_EVERY))
