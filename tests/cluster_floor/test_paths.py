"""Which way from node to node: preference, reasons, one agreement for all."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from mlxcel_nb.cluster.address import Address, parse_address
from mlxcel_nb.cluster.paths import agree, read_path, routes, way
from mlxcel_nb.cluster.places import Interface, Place, published
from mlxcel_nb.errors import ConfigError, WireError

LO = Interface(name="lo", kind="loopback", addresses=("127.0.0.1/8", "::1/128"))


def nic(name, kind, *addresses, speed=0, mtu=1500, up=True):
    return Interface(name=name, kind=kind, addresses=addresses, speed_bps=speed, mtu=mtu, up=up)


def place(node, *interfaces, host=None, listens="0.0.0.0", port=9000):
    return Place(node_id=node, host=host or f"host-{node}", listens=listens, port=port, interfaces=(LO, *interfaces))


def best(a, b, transport="auto"):
    return ways(a, b, transport)[0]


def ways(a, b, transport):
    return routes(dataclasses.replace(a, transport=transport), b)


def test_the_better_kind_is_taken_and_the_worse_ones_are_kept_for_later() -> None:
    kinds = [("tb", "thunderbolt", 3), ("eth", "wired", 0), ("wl", "wifi", 1), ("tun", "vpn", 2), ("x", "other", 4)]
    a = place("a", *(nic(f"{name}0", kind, f"10.0.{n}.1/24") for name, kind, n in kinds))
    b = place("b", *(nic(f"{name}1", kind, f"10.0.{n}.2/24") for name, kind, n in kinds))
    found = routes(a, b)
    assert [path.kind for path in found] == ["thunderbolt", "wired", "wifi", "vpn", "other"]
    assert str(found[0].address) == "10.0.3.2:9000"
    assert (found[0].interface, found[0].peer_interface, found[0].source) == ("tb0", "tb1", "10.0.3.1")
    assert str(found[0]) == "Thunderbolt tb0"
    assert found[0].reason == "network 10.0.3.0/24"


def test_a_way_is_of_the_lesser_kind_of_its_two_ends() -> None:
    a = place("a", nic("eth0", "wired", "10.0.0.1/24"))
    b = place("b", nic("wlan0", "wifi", "10.0.0.2/24"))
    assert best(a, b).kind == best(b, a).kind == "wifi"


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        ((), (), "no Thunderbolt on either side"),
        ((nic("bridge0", "thunderbolt", "10.1.0.1/24"),), (), "Thunderbolt: only a has it"),
        (
            (nic("bridge0", "thunderbolt", "10.1.0.1/24"),),
            (nic("bridge0", "thunderbolt"),),
            "Thunderbolt: bridge0 of b has no address",
        ),
        (
            (nic("tb0", "thunderbolt", "10.1.0.1/24", up=False),),
            (nic("tb1", "thunderbolt", "10.1.0.2/24"),),
            "Thunderbolt: tb0 of a is down",
        ),
        (
            (nic("bridge0", "thunderbolt", "10.1.0.1/24"),),
            (nic("bridge0", "thunderbolt", "10.2.0.2/24"),),
            "Thunderbolt: no address in common: bridge0 of a (10.1.0.1/24) and bridge0 of b (10.2.0.2/24)",
        ),
    ],
)
def test_why_not_thunderbolt_is_said(ours, theirs, reason) -> None:
    a = place("a", nic("eth0", "wired", "10.0.0.1/24"), *ours)
    b = place("b", nic("eth0", "wired", "10.0.0.2/24"), *theirs)
    path = best(a, b)
    assert str(path) == "wired eth0"
    assert path.reason == f"network 10.0.0.0/24; {reason}"


def test_a_listener_on_one_address_is_reached_there_and_the_reason_says_so() -> None:
    a = place("a", nic("eth0", "wired", "10.0.0.1/24"), nic("tb0", "thunderbolt", "10.1.0.1/24"))
    b = place("b", nic("eth0", "wired", "10.0.0.2/24"), nic("tb0", "thunderbolt", "10.1.0.2/24"), listens="10.0.0.2")
    assert [str(path.address) for path in routes(a, b)] == ["10.0.0.2:9000"]
    assert "b listens on 10.0.0.2, not on tb0" in best(a, b).reason
    only_v4 = place("b", nic("eth0", "wired", "10.0.0.2/24", "fd00::2/64"))
    assert [
        path.address.host for path in routes(place("a", nic("eth0", "wired", "fd00::1/64", "10.0.0.1/24")), only_v4)
    ] == ["10.0.0.2"]


def test_speed_then_frame_size_break_ties() -> None:
    slow, fast = nic("eth0", "wired", "10.0.0.1/24", speed=10**9), nic("eth1", "wired", "10.0.1.1/24", speed=10**10)
    b = place("b", nic("eth0", "wired", "10.0.0.2/24", speed=10**9), nic("eth1", "wired", "10.0.1.2/24", speed=10**10))
    assert [p.interface for p in routes(place("a", slow, fast), b)] == ["eth1", "eth0"]
    jumbo = dataclasses.replace(slow, mtu=9000, speed_bps=0)
    b = place("b", nic("eth0", "wired", "10.0.0.2/24", mtu=9000), nic("eth1", "wired", "10.0.1.2/24"))
    assert best(place("a", jumbo, dataclasses.replace(fast, speed_bps=0)), b).interface == "eth0"


def test_link_local_addresses_carry_the_diallers_zone_and_come_last_within_their_kind() -> None:
    a = place("a", nic("tb0", "thunderbolt", "fe80::1/64"), nic("eth0", "wired", "fe80::a/64"), listens="::")
    b = place("b", nic("bridge0", "thunderbolt", "fe80::2/64"), nic("en0", "wired", "fe80::b/64"), listens="::")
    path = best(a, b)
    assert str(path.address) == "[fe80::2%tb0]:9000"
    assert parse_address(str(path.address)) == path.address
    assert path.source == "fe80::1%bridge0"  # as b, which is dialled, sees it
    assert str(best(b, a).address) == "[fe80::1%bridge0]:9000"
    assert {p.kind for p in routes(a, b)} == {"thunderbolt", "wired"}  # tb0 to en0 is not one link
    a = place("a", nic("tb0", "thunderbolt", "169.254.3.1/16", "10.1.0.1/24"))
    b = place("b", nic("tb0", "thunderbolt", "169.254.4.1/16", "10.1.0.2/24"))
    assert [p.address.host for p in routes(a, b)] == ["10.1.0.2", "169.254.4.1"]


def test_bridges_of_containers_lead_nowhere() -> None:
    docker = nic("docker0", "virtual", "172.17.0.1/16")
    with pytest.raises(ConfigError, match="no address in common"):
        routes(place("a", docker), place("b", docker))


def test_one_address_on_two_hosts_is_no_way() -> None:
    same = nic("eth0", "wired", "10.0.0.1/24")
    with pytest.raises(ConfigError, match="a and b have no address in common: a has eth0"):
        routes(place("a", same), place("b", same))


def test_single_addresses_of_one_overlay_reach_each_other() -> None:
    a, b = place("a", nic("utun3", "vpn", "100.64.0.1/32")), place("b", nic("utun5", "vpn", "100.100.2.3/32"))
    assert str(best(a, b).address) == "100.100.2.3:9000"
    assert best(a, b).reason == "network 100.64.0.0/10; no Thunderbolt on either side"


def test_without_a_network_in_common_routing_is_tried() -> None:
    a = place("a", nic("eth0", "wired", "10.0.0.1/24"))
    b = place("b", nic("eth0", "wired", "10.9.0.2/24"), listens="10.9.0.2")
    path = best(a, b)
    assert (str(path.address), path.kind, path.interface) == ("10.9.0.2:9000", "other", "")
    assert path.reason.startswith("no network in common: by routing")
    assert best(a, place("b", listens="mac2.example")).address == Address("mac2.example", 9000)


def test_loopback_is_for_nodes_of_one_host_only() -> None:
    """Case 46."""
    a = place("a", nic("eth0", "wired", "10.0.0.1/24"))
    with pytest.raises(ConfigError, match=r"b listens on 127\.0\.0\.1 alone, which a on another host"):
        routes(a, place("b", nic("eth0", "wired", "10.0.0.2/24"), listens="127.0.0.1"))
    b = place("b", nic("eth0", "wired", "10.0.0.1/24"), host="host-a", port=9001)
    assert [(str(p.address), p.kind, p.reason) for p in routes(a, b)] == [
        ("127.0.0.1:9001", "loopback", "both on one host")
    ]
    far = place("b", nic("lo1", "wired", "127.0.0.9/8"), nic("eth0", "wired", "10.0.0.2/24"))
    assert [p.address.host for p in routes(place("a", nic("lo1", "wired", "127.0.0.8/8"), *a.interfaces), far)] == [
        "10.0.0.2"
    ]


def test_two_loopback_addresses_on_one_host_are_each_used_as_they_are() -> None:
    """Case 47."""
    one, two, six = (
        Place(node_id=n, host="h", listens=ip, port=p)
        for n, ip, p in (("a", "127.0.0.1", 1), ("b", "127.0.0.2", 2), ("c", "::1", 3))
    )
    agreed = agree([one, two, six], [(0, 1), (0, 2), (1, 2)])
    assert {edge: str(paths[0].address) for edge, paths in agreed.items()} == {
        (0, 1): "127.0.0.2:2",
        (0, 2): "[::1]:3",
        (1, 2): "[::1]:3",
    }


def test_the_same_places_give_the_same_agreement_in_any_order() -> None:
    """Case 47."""
    rng = random.Random(0)
    interfaces = [
        [
            nic(f"if{k}", kind, f"10.0.{k}.{n}/24", f"fd00:0:0:{k}::{n}/64")
            for k, kind in enumerate(("wired", "wired", "wifi"))
        ]
        for n in (1, 2, 3)
    ]
    edges = list(itertools.combinations(range(3), 2))
    told = set()
    for _ in range(20):
        for each in interfaces:
            rng.shuffle(each)
        rng.shuffle(edges)
        places = [place(name, *each, listens="::") for name, each in zip("abc", interfaces, strict=True)]
        agreed = agree(places, edges)
        told.add(tuple((edge, tuple(path.to_list()[0] for path in agreed[edge])) for edge in sorted(agreed)))
    assert len(told) == 1


def test_an_agreement_that_cannot_be_names_every_pair() -> None:
    nodes = [place(n, nic("eth0", "wired", f"10.{k}.0.1/24"), listens="127.0.0.1") for k, n in enumerate("abc")]
    with pytest.raises(ConfigError) as caught:
        agree(nodes, [(0, 1), (0, 2), (1, 2)])
    assert caught.value.cause.count("alone, which") == 3
    assert "--bind" in str(caught.value)


def test_a_transport_that_is_asked_for_is_taken_or_its_lack_explained() -> None:
    both = [nic("eth0", "wired", "10.0.0.{}/24"), nic("tb0", "thunderbolt", "10.1.0.{}/24")]

    def node(name, n, interfaces):
        return place(name, *(dataclasses.replace(i, addresses=(i.addresses[0].format(n),)) for i in interfaces))

    a, b = node("a", 1, both), node("b", 2, both)
    assert [p.kind for p in ways(a, b, "thunderbolt")] == ["thunderbolt", "wired"]
    assert [p.kind for p in ways(a, b, "rdma")] == ["thunderbolt", "wired"]
    assert [p.kind for p in ways(a, b, "tcp")] == ["wired"]
    assert "Thunderbolt is left alone (transport tcp)" in best(a, b, "tcp").reason
    path = best(a, node("b", 2, both[:1]), "thunderbolt")
    assert (path.kind, path.reason) == (
        "wired",
        "network 10.0.0.0/24; Thunderbolt was asked for; Thunderbolt: only a has it",
    )
    with pytest.raises(ConfigError, match="have Thunderbolt alone in common"):
        ways(node("a", 1, both[1:]), node("b", 2, both[1:]), "tcp")
    with pytest.raises(ConfigError, match="a is configured for transport tcp, b for thunderbolt"):
        ways(a, dataclasses.replace(b, transport="thunderbolt"), "tcp")
    same_host = dataclasses.replace(b, host=a.host)
    assert [p.kind for p in ways(a, same_host, "thunderbolt")] == ["loopback"]


def test_a_wildcard_listener_publishes_an_address_that_others_can_use() -> None:
    interfaces = (
        nic("docker0", "virtual", "172.17.0.1/16"),
        nic("tb0", "thunderbolt", "10.1.0.1/24"),
        nic("wlan0", "wifi", "10.2.0.1/24"),
        nic("eth0", "wired", "169.254.1.1/16", "fd00::1/64", "10.0.0.1/24"),
    )
    assert str(published(place("a", *interfaces))) == "10.0.0.1:9000"
    assert str(published(place("a", *interfaces, listens="::"))) == "10.0.0.1:9000"
    assert str(published(place("a", interfaces[1]))) == "10.1.0.1:9000"
    assert str(published(place("a", *interfaces, listens="10.2.0.1"))) == "10.2.0.1:9000"
    assert str(published(place("a"))) == "127.0.0.1:9000"


def test_a_connection_is_told_by_this_ends_interface() -> None:
    interfaces = (nic("eth0", "wired", "10.0.0.1/24", "fe80::1/64"), nic("tb0", "thunderbolt", "10.1.0.1/24"))
    assert way("10.1.0.1", "10.1.0.2", interfaces) == "Thunderbolt tb0"
    assert way("fe80::1%eth0", "fe80::2%eth0", interfaces) == "wired eth0"
    assert way("10.0.0.1", "10.0.0.1", ()) == way("", "127.0.0.1", ()) == way("::1", "::1", interfaces) == "loopback"
    assert way("10.0.0.1", "10.0.0.2", ()) == way("", "10.0.0.2", interfaces) == ""


def test_places_and_paths_travel() -> None:
    a = place("a", nic("tb0", "thunderbolt", "fe80::1/64", "10.1.0.1/24", speed=40 * 10**9, mtu=9000), listens="::")
    assert Place.from_dict("a", a.to_dict()) == a
    b = place("b", nic("tb0", "thunderbolt", "fe80::2/64", "10.1.0.2/24"), listens="::")
    for path in routes(a, b):
        assert read_path(path.to_list()) == path


@pytest.mark.parametrize(
    "change",
    [
        {"transport": "pigeon"},
        {"port": "x"},
        {"port": 70000},
        {"listens": "not a host"},
        {"interfaces": 3},
        {"interfaces": [["eth0"]]},
        {"interfaces": [["eth0", "wired", ["10.0.0.300/24"], 0, 0, True]]},
        {"interfaces": [["et\x1bh0", "wired", [], 0, 0, True]]},
        {"interfaces": [[7, "wired", [], 0, 0, True]]},
    ],
)
def test_a_place_that_cannot_be_read_is_refused_by_name(change) -> None:
    with pytest.raises(WireError, match="b tells its addresses"):
        Place.from_dict("b", {**place("b").to_dict(), **change})


def test_what_a_peer_tells_is_bounded() -> None:
    many = [[f"e{n}", "strange", [f"10.0.0.{k}/24" for k in range(1, 100)], 0, 0, True] for n in range(500)]
    told = Place.from_dict("b", {**place("b").to_dict(), "interfaces": many})
    assert len(told.interfaces) == 64
    assert len(told.interfaces[0].addresses) == 16
    assert told.interfaces[0].kind == "other"
    ours = place("a", nic("eth0", "wired", "10.0.0.200/24"))
    assert len(routes(ours, told)) == 6


@pytest.mark.parametrize(
    "bent", [None, ["x"], ["10.0.0.1:1", "magic", "", "", "", ""], ["nowhere", "wired", "", "", "", ""]]
)
def test_a_path_that_cannot_be_read_is_refused(bent) -> None:
    with pytest.raises(WireError, match="a path that cannot be read"):
        read_path(bent)


def test_ipv4_mapped_addresses_count_as_ipv4() -> None:
    a = place("a", nic("eth0", "wired", "10.0.0.1/24"))
    b = place("b", nic("eth0", "wired", "10.0.0.2/24"), listens="::ffff:10.0.0.2")
    assert best(a, b).kind == "wired"
    assert place("b", listens="::ffff:127.0.0.1").loopback == "127.0.0.1"
