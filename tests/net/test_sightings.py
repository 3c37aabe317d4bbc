"""One entry a node: paths merged, the newest process shown, the silent forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.cluster.address import Address, parse_address
from mlxcel_nb.net.discovery.sightings import (
    GONE_S,
    MAX_ADDRESSES,
    MAX_NODES,
    MAX_PATHS,
    MAX_PROCESSES,
    Event,
    Heard,
    Sightings,
    dialable,
)
from mlxcel_nb.wire.beacon import Beacon

T0 = 1_764_400_000_000
ONE = Beacon(
    time_ms=T0, nonce=bytes(16), incarnation=b"1" * 16, cluster="c", node_id="a", role="hybrid", addresses=()
)  # fmt: skip
ETH, WIFI, LO = Heard("eth0", "broadcast"), Heard("wlan0", "IPv6"), Heard("lo", "multicast")
WIRED, WIRELESS = Address("10.0.0.1", 9000), Address("192.168.1.7", 9000)


class Ear:
    """Sightings with a clock that is set by hand."""

    def __init__(self, **options) -> None:
        self.sightings = Sightings(**options)
        self.now = 0.0

    def hear(self, beacon: Beacon = ONE, path: Heard = ETH, addresses=(WIRED,), *, at: float | None = None):
        self.now = self.now if at is None else at
        sent = replace(beacon, time_ms=beacon.time_ms + round(self.now * 1000))
        return self.sightings.heard(sent, path, addresses, now=self.now, now_ms=T0 + round(self.now * 1000))

    @property
    def only(self):
        (node,) = self.sightings.nodes()
        return node


def test_a_node_heard_by_two_paths_is_one_entry_with_both_its_addresses() -> None:
    ear = Ear()
    assert ear.hear().event is Event.FOUND
    change = ear.hear(path=WIFI, addresses=(WIRELESS,))
    assert (change.event, change.before.addresses) == (Event.CHANGED, (WIRED,))
    assert ear.only.paths == (ETH, WIFI)
    assert ear.only.addresses == (WIRED, WIRELESS)
    assert ear.hear(at=2.0) is None and ear.hear(path=WIFI, addresses=(WIRELESS,)) is None


def test_addresses_follow_the_rank_of_their_path_and_are_told_once() -> None:
    ear = Ear(rank=lambda path: 0 if path.interface == "lo" else 1)
    here = Address("127.0.0.1", 9000)
    ear.hear()
    ear.hear(path=LO, addresses=(here, WIRED))
    assert ear.only.addresses == (here, WIRED)


def test_silence_ends_a_path_and_then_the_node() -> None:
    ear = Ear()
    ear.hear(at=0.0)
    ear.hear(path=WIFI, addresses=(WIRELESS,))
    ear.hear(at=GONE_S - 1)
    (change,) = ear.sightings.expire(GONE_S)
    assert (change.event, change.node.paths, change.node.addresses) == (Event.CHANGED, (ETH,), (WIRED,))
    assert not ear.sightings.expire(2 * GONE_S - 1.5)
    (change,) = ear.sightings.expire(2 * GONE_S - 1)
    assert (change.event, change.node.node_id) == (Event.GONE, "a")
    assert not ear.sightings.nodes() and not ear.sightings.expire(99.0)


def test_a_restarted_node_replaces_its_former_process_at_once() -> None:
    ear = Ear()
    ear.hear(at=0.0)
    newer = replace(ONE, incarnation=b"0" * 16)
    change = ear.hear(newer, addresses=(WIRELESS,), at=1.0)
    assert (change.event, change.node.incarnation, change.node.addresses) == (
        Event.CHANGED,
        newer.incarnation,
        (WIRELESS,),
    )
    assert change.node.rivals == 0


@given(st.permutations(range(6)))
def test_old_beacons_sent_again_never_bring_the_former_process_back(order: list[int]) -> None:
    """Whatever the order: 0 to 2 are the old process's last beacons, 3 to 5 the new one's first."""
    ear = Ear()
    for number in order:
        beacon = replace(ONE, time_ms=T0 + 1000 * number, incarnation=(b"o" if number < 3 else b"n") * 16)
        ear.sightings.heard(beacon, ETH, (WIRED,), now=5.0, now_ms=T0 + 5000)
    assert ear.only.incarnation == b"n" * 16
    assert ear.only.rivals == 0


def test_two_live_processes_with_one_id_are_told_of_and_do_not_alternate() -> None:
    ear = Ear()
    seen = set()
    for at in range(0, 20, 2):
        for incarnation in (b"x" * 16, b"y" * 16):
            ear.hear(replace(ONE, incarnation=incarnation, time_ms=T0 + incarnation[0] % 2), at=float(at))
        seen.add(ear.only.incarnation)
    assert len(seen) == 1
    assert ear.only.rivals == 1


def test_who_listens_for_five_seconds_hears_of_two_live_processes() -> None:
    """Beacons come every 2 s; the worst case is that one process has just sent when the listening begins."""
    ear = Ear()
    for at, name in ((0.0, b"x"), (1.9, b"y"), (2.0, b"x"), (3.9, b"y"), (4.0, b"x")):
        ear.hear(replace(ONE, incarnation=name * 16), at=at)
    assert ear.only.rivals == 1


def test_a_node_that_crashes_at_each_start_shows_its_latest_process() -> None:
    ear = Ear()
    for start in range(3 * MAX_PROCESSES):
        ear.hear(replace(ONE, incarnation=start.to_bytes(16, "big")), at=start / 2)
        assert ear.only.incarnation == start.to_bytes(16, "big")
    assert ear.sightings.refused == 0


def test_the_clock_difference_is_that_of_the_latest_beacon() -> None:
    ear = Ear()
    ear.hear(replace(ONE, time_ms=T0 + 12_000), at=0.0)
    assert ear.only.clock_s == 12.0
    ear.hear(replace(ONE, time_ms=T0 + 9_000), at=0.0)  # it was overtaken on its way
    assert ear.only.clock_s == 12.0


def test_a_member_with_endless_names_paths_and_addresses_is_bounded() -> None:
    ear = Ear()
    for number in range(MAX_NODES + 10):
        ear.hear(replace(ONE, node_id=f"n{number}"))
    assert len(ear.sightings) == MAX_NODES and ear.sightings.refused == 10
    ear = Ear()
    for number in range(MAX_PATHS + 10):
        ear.hear(path=Heard(f"if{number}", "broadcast"), addresses=[Address("10.1.0.1", 1 + number)])
    assert len(ear.only.paths) == MAX_PATHS and len(ear.only.addresses) == MAX_ADDRESSES


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.sampled_from([b"1" * 16, b"2" * 16]), st.sampled_from([ETH, WIFI, LO]),
            st.floats(0, 3), st.integers(-20_000, 20_000),
        ),
        max_size=60,
    )
)  # fmt: skip
def test_whatever_is_heard_the_changes_add_up_to_what_is_shown(beacons: list) -> None:
    sightings, shown, now = Sightings(), {}, 0.0

    def tell(change) -> None:
        if change is None:
            return
        assert (change.event is Event.FOUND) == (change.node.node_id not in shown)
        if change.event is Event.GONE:
            del shown[change.node.node_id]
        else:
            shown[change.node.node_id] = change.node.incarnation, change.node.addresses

    for node, incarnation, path, wait, off in beacons:
        now += wait
        now_ms = T0 + round(now * 1000)
        beacon = replace(ONE, node_id=node, incarnation=incarnation, time_ms=now_ms + off)
        for change in sightings.expire(now):
            tell(change)
        tell(sightings.heard(beacon, path, [Address(path.interface, 1)], now=now, now_ms=now_ms))
        assert {n.node_id: (n.incarnation, n.addresses) for n in sightings.nodes()} == shown
        assert all(now - n.last < GONE_S for n in sightings.nodes())
    for change in sightings.expire(now + GONE_S + 1.0):
        tell(change)
    assert not shown and not sightings.nodes()


# ------------------------------------------------------------------------------------------------- addresses

OWN = {"10.0.0.5", "172.17.0.1", "fe80::5", "127.0.0.1", "::1"}


def dial(*announced: str, source: str = "10.0.0.9") -> list[str]:
    return [str(a) for a in dialable(announced, source=source, interface="en5", own=OWN)]


def test_another_hosts_loopback_and_what_is_ours_is_not_dialled() -> None:
    """Case 46, for addresses that come by beacons."""
    loopbacks = ["127.0.0.1:1", "127.1.2.3:1", "localhost:1", "[::1]:1", "[::ffff:127.0.0.1]:1"]
    assert dial(*loopbacks, "172.17.0.1:1", "10.0.0.5:1", "10.0.0.9:1") == ["10.0.0.9:1"]


@pytest.mark.parametrize("source", ["127.0.0.1", "10.0.0.5", "fe80::5%en5", "::ffff:10.0.0.5"])
def test_this_hosts_own_nodes_are_dialled_by_loopback_too(source: str) -> None:
    assert dial("127.0.0.1:1", "10.0.0.5:1", source=source) == ["127.0.0.1:1", "10.0.0.5:1"]


def test_a_link_local_address_gets_the_scope_of_where_it_was_heard() -> None:
    assert dial("[fe80::9]:1", "[fe80::9%eth7]:1", "[fd00::9]:1") == ["[fe80::9%en5]:1", "[fd00::9]:1"]


def test_what_is_no_address_of_a_node_is_left_out() -> None:
    assert dial("", "a", "10.0.0.9", "0.0.0.0:1", "[::]:1", "239.1.1.1:1", "10.0.0.9:0", "10.0.0.9:70000") == []


@given(st.lists(st.text(max_size=40), max_size=30), st.sampled_from(["10.0.0.9", "fe80::9", "127.0.0.1", ""]))
def test_nothing_a_member_announces_raises(announced: list[str], source: str) -> None:
    kept = dialable(announced, source=source, interface="en5", own=OWN)
    assert len(kept) <= MAX_ADDRESSES
    assert all(parse_address(str(address)) == address for address in kept)
