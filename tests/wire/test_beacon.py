"""Beacons: believed when tagged, fresh, new and ours."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire.beacon import MAX_BYTES, MAX_CLOCKS, Beacon, BeaconFilter, decode, encode
from mlxcel_nb.wire.keys import beacon_key
from tests.wire.ends import SECRET

KEY = beacon_key(SECRET)
NOW = 1_764_400_000_000
ONE = Beacon(
    time_ms=NOW, nonce=bytes(16), incarnation=b"i" * 16, cluster="mlxcel", node_id="node-a", role="hybrid",
    addresses=("10.0.0.1:9000", "[fe80::1%en0]:9000"),
)  # fmt: skip


def listener() -> BeaconFilter:
    return BeaconFilter("mlxcel", [KEY])


def test_a_fresh_beacon_is_believed_once() -> None:
    heard, datagram = listener(), encode(ONE, KEY)
    assert heard.accept(datagram, NOW) == ONE
    assert heard.accept(datagram, NOW + 10) is None
    assert heard.replayed == 1
    assert heard.accept(encode(replace(ONE, nonce=b"2" * 16), KEY), NOW + 20) is not None


def test_a_stranger_s_beacon_is_counted_and_not_reported() -> None:
    heard = listener()
    for datagram in (b"", b"MXNB", bytes(1300), encode(ONE, beacon_key(b"another secret of ours"))):
        assert heard.accept(datagram, NOW) is None
    assert heard.foreign == 4 and heard.report is None


def test_an_old_secret_s_beacons_are_heard_during_a_rotation() -> None:
    old = beacon_key(b"the secret before this one")
    assert BeaconFilter("mlxcel", [KEY, old]).accept(encode(ONE, old), NOW) == ONE


def test_another_cluster_under_the_same_secret_is_ignored() -> None:
    heard = BeaconFilter("other", [KEY])
    assert heard.accept(encode(ONE, KEY), NOW) is None
    assert (heard.elsewhere, heard.foreign) == (1, 0)


@pytest.mark.parametrize("off", [-30_000, 0, 30_000])
def test_clocks_may_differ_by_thirty_seconds(off: int) -> None:
    assert listener().accept(encode(ONE, KEY), NOW + off) == ONE


@pytest.mark.parametrize(
    ("off", "words"), [(-45_000, "45 seconds ahead"), (45_000, "45 seconds behind this one, or somebody replays")]
)
def test_a_clock_difference_is_reported_at_most_once_a_minute(off: int, words: str) -> None:
    heard = listener()
    assert heard.accept(encode(ONE, KEY), NOW + off) is None
    assert heard.report is not None and heard.report.startswith("node-a: ") and words in heard.report
    assert heard.clocks == {"node-a": -off / 1000}
    heard.report = None
    for later in (1_000, 59_000):
        heard.accept(encode(replace(ONE, time_ms=NOW + later), KEY), NOW + later + off)
        assert heard.report is None
    heard.accept(encode(replace(ONE, time_ms=NOW + 61_000), KEY), NOW + 61_000 + off)
    assert heard.report is not None


def test_each_node_with_a_wrong_clock_is_reported_and_forgotten_when_it_is_right_again() -> None:
    heard = listener()
    for node in ("node-a", "node-b"):
        heard.accept(encode(replace(ONE, node_id=node), KEY), NOW + 40_000)
        assert heard.report is not None and heard.report.startswith(node)
        heard.report = None
    assert set(heard.clocks) == {"node-a", "node-b"}
    assert heard.accept(encode(replace(ONE, time_ms=NOW + 40_000), KEY), NOW + 40_000) is not None
    assert set(heard.clocks) == {"node-b"}


def test_a_member_with_many_names_costs_a_bounded_number_of_clocks() -> None:
    heard = listener()
    for number in range(MAX_CLOCKS + 50):
        heard.accept(encode(replace(ONE, node_id=f"n{number}"), KEY), NOW + 40_000)
    assert len(heard.clocks) == MAX_CLOCKS


def test_a_replay_is_refused_for_as_long_as_its_time_would_be_accepted() -> None:
    heard = listener()
    ahead = encode(replace(ONE, time_ms=NOW + 30_000), KEY)
    assert heard.accept(ahead, NOW) is not None
    for later in range(1_000, 60_001, 1_000):
        assert heard.accept(ahead, NOW + later) is None
    assert heard.replayed == 60


@given(st.data())
def test_a_flipped_bit_is_foreign(data: st.DataObject) -> None:
    datagram = bytearray(encode(ONE, KEY))
    bit = data.draw(st.integers(0, 8 * len(datagram) - 1))
    datagram[bit // 8] ^= 1 << bit % 8
    assert listener().accept(bytes(datagram), NOW) is None
    with pytest.raises(WireError):
        decode(bytes(datagram), KEY)


@pytest.mark.parametrize(
    "bent",
    [{"node_id": ""}, {"node_id": "a\nb"}, {"role": "r" * 33}, {"cluster": "c" * 129}, {"addresses": ("\x1b[2J",)}],
    ids=str,
)
def test_a_member_s_bent_beacon_is_malformed(bent: dict) -> None:
    """Case 49, for datagrams."""
    heard = listener()
    assert heard.accept(encode(replace(ONE, **bent), KEY), NOW) is None
    assert heard.malformed == 1


def test_versions_types_and_trailing_bytes_are_checked_under_the_tag() -> None:
    import hmac

    good = encode(ONE, KEY)[:-32]
    for body in (
        good + b"\0",
        good[:5] + b"\6" + good[6:],
        good[:6] + b"\1" + good[7:],
        good[:7] + b"\1" + good[8:],
        good[:-3],
    ):
        with pytest.raises(WireError, match="beacon"):
            decode(body + hmac.digest(KEY, body, "sha256"), KEY)


def test_a_beacon_fits_into_one_datagram_or_is_not_made() -> None:
    addresses = tuple(f"10.0.0.{i}:9000" for i in range(100))
    with pytest.raises(WireError, match="fewer addresses"):
        encode(replace(ONE, addresses=addresses), KEY)
    assert len(encode(replace(ONE, addresses=addresses[:70]), KEY)) <= MAX_BYTES


def test_other_keys_take_the_place_of_those_that_were_believed() -> None:
    heard, newer = listener(), beacon_key(b"a newer secret than that one")
    heard.use([newer])
    assert heard.accept(encode(ONE, KEY), NOW) is None
    assert heard.accept(encode(ONE, newer), NOW) == ONE
