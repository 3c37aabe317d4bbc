"""The waiting room gives way to newcomers, and no one address can fill it."""

from __future__ import annotations

from mlxcel_nb.net.links.pending import PER_ADDRESS, POOL_SIZE, PendingPool


def fill(pool: PendingPool, count: int, ip: str = "") -> None:
    for i in range(count):
        assert pool.arrive(("filler", i), ip or f"198.51.100.{i}").admitted


def test_a_full_pool_gives_the_oldest_silent_place_to_the_newcomer():
    pool = PendingPool()
    fill(pool, POOL_SIZE)
    pool.hello_received(("filler", 0))
    arrival = pool.arrive("new", "203.0.113.1")
    assert arrival.admitted
    assert arrival.evicted is not None
    assert arrival.evicted.key == ("filler", 1)
    assert len(pool) == POOL_SIZE


def test_a_pool_full_of_whole_hellos_refuses_the_newcomer():
    pool = PendingPool()
    fill(pool, POOL_SIZE)
    for i in range(POOL_SIZE):
        pool.hello_received(("filler", i))
    arrival = pool.arrive("new", "203.0.113.1")
    assert not arrival.admitted
    assert str(POOL_SIZE) in arrival.reason


def test_one_address_holds_eight_places_and_the_ninth_is_refused():
    pool = PendingPool()
    fill(pool, PER_ADDRESS, ip="203.0.113.1")
    assert not pool.arrive("ninth", "203.0.113.1").admitted
    assert pool.arrive("other", "203.0.113.2").admitted


def test_loopback_and_configured_peers_have_no_limit_of_their_own():
    pool = PendingPool(trusted=frozenset({"203.0.113.9"}))
    fill(pool, PER_ADDRESS + 1, ip="127.0.0.1")
    for i in range(PER_ADDRESS + 1):
        assert pool.arrive(("v6", i), "::1").admitted
        assert pool.arrive(("configured", i), "203.0.113.9").admitted


def test_a_place_is_free_again_when_its_holder_leaves():
    pool = PendingPool()
    fill(pool, PER_ADDRESS, ip="203.0.113.1")
    pool.leave(("filler", 3))
    pool.leave("never there")
    arrival = pool.arrive("next", "203.0.113.1")
    assert arrival.admitted
    assert arrival.evicted is None
