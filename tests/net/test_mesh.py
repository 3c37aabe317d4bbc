"""What is slow, by comparison: with the others, with the other direction, with the interfaces, with a better way."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.cluster.places import Interface, Place
from mlxcel_nb.errors import WireError
from mlxcel_nb.net.measuring.mesh import HERE, Mesh, Pair, summary, warnings
from mlxcel_nb.net.measuring.pair import Measured

GIGABIT = 117e6  # bytes a second, as a gigabit link carries them


def figures(rate: float = GIGABIT, rtt: float = 200e-6) -> Measured:
    return Measured(rtt_s=rtt, least_s=rtt, most_s=rtt, bytes_per_s=rate, pings=20)


def mesh(count: int = 3, places: dict[str, Place] | None = None, **odd: Measured | str) -> Mesh:
    """Nodes a, b, c, ..., all alike but for `odd`, such as `ab=figures(rate=1)` or `ab="offline"`."""
    names = [chr(ord("a") + k) for k in range(count)]
    pairs = []
    for source in names:
        for target in names:
            if source != target:
                each = odd.get(source + target, figures())
                ends = {"ours": f"10.0.0.{names.index(source)}", "theirs": f"10.0.0.{names.index(target)}"}
                said = {"error": each} if isinstance(each, str) else {"measured": each, **ends}
                pairs.append(Pair(source=source, target=target, **said))
    return Mesh(nodes=tuple(names), pairs=tuple(pairs), places=places or {})


def told(found: Mesh) -> list[tuple[str, str, str]]:
    return [(each.source, each.target, each.figure) for each in warnings(found)]


def place(node: str, *interfaces: Interface, listens: str = "0.0.0.0") -> Place:
    return Place(node_id=node, host=node, listens=listens, port=9000, interfaces=interfaces)


def interface(name: str, kind: str, address: str, mbit: int = 1000) -> Interface:
    return Interface(name=name, kind=kind, addresses=(f"{address}/24",), speed_bps=mbit * 10**6, mtu=1500)


def test_a_mesh_of_equals_has_nothing_slow() -> None:
    assert told(mesh(4)) == []
    assert told(mesh(2)) == []


def test_one_way_far_below_the_median_is_slow() -> None:
    found = mesh(4, bc=figures(rate=GIGABIT / 4))
    (warning,) = warnings(found)
    assert str(warning).startswith("b to c: 234 Mbit/s, where the median of the others is 936 Mbit/s. Look at its ")
    assert told(mesh(4, bc=figures(rate=GIGABIT / 2.5))) == []


def test_a_round_trip_several_times_the_others_is_slow_both_ways_and_said_once() -> None:
    far = figures(rtt=5e-3)
    found = mesh(3, ac=far, ca=far)
    assert told(found) == [("a", "c", "trip"), ("c", "a", "trip")]
    (line,) = summary(found, warnings(found))
    assert line.startswith("a to c: a round trip takes 5 ms")
    assert told(mesh(3, ca=far)) == [("c", "a", "trip")]
    near = figures(rtt=350e-6)  # such differences are chance
    assert told(mesh(3, ac=near, ca=near)) == []


def test_a_path_that_is_slow_by_two_figures_has_both_and_says_the_surer() -> None:
    bad = figures(rate=GIGABIT / 10, rtt=5e-3)
    found = mesh(3, ab=bad, ba=bad)
    assert told(found) == [("a", "b", "rate"), ("a", "b", "trip"), ("b", "a", "rate"), ("b", "a", "trip")]
    assert [line.partition(" Mbit")[0] for line in summary(found, warnings(found))] == ["a to b: 93.6", "b to a: 93.6"]


def test_a_lopsided_pair_is_told_even_when_there_is_no_other() -> None:
    (warning,) = warnings(mesh(2, ba=figures(rate=GIGABIT / 10)))
    assert (warning.source, warning.target) == ("b", "a")
    assert "93.6 Mbit/s this way and 936 Mbit/s the other" in warning.what


def test_a_node_whose_every_path_is_slow_is_one_line() -> None:
    slow = figures(rate=1e6)
    found = mesh(4, **{f"{other}d": slow for other in "abc"}, **{f"d{other}": slow for other in "abc"})
    assert len(warnings(found)) == 6
    (line,) = summary(found, warnings(found))
    assert line.startswith("d: every path to and from it is slow, 8 Mbit/s to 8 Mbit/s, where the median")
    found = mesh(4, ad=slow, bc=slow, cd=slow)
    assert len(summary(found, warnings(found))) == 3


def test_an_interface_that_negotiated_too_little_is_named() -> None:
    places = {
        name: place(name, interface("eth0", "wired", f"10.0.0.{k}", 100 if name == "c" else 1000))
        for k, name in enumerate("abc")
    }
    found = mesh(3, places, ac=figures(rate=11.7e6), bc=figures(rate=11.7e6))
    assert {each.advice for each in warnings(found)} == {
        "eth0 of c runs at 100 Mbit/s: look at its cable, its port and the switch's."
    }


def test_wifi_that_is_used_where_both_have_a_cable_is_told_with_the_address_to_use() -> None:
    places = {
        name: place(
            name, interface("wlan0", "wifi", f"10.0.0.{k}", 0), interface("eth0", "wired", f"192.168.7.{k + 1}")
        )
        for k, name in enumerate("ab")
    }
    found = mesh(2, places)
    warning, back = warnings(found)
    assert warning.figure == back.figure == "path"
    assert len(summary(found, [warning, back])) == 1
    assert warning.what == "goes by Wi-Fi, though wired eth0 leads there too"
    assert warning.advice == "Give b the address 192.168.7.2."


def test_wifi_alone_is_said_where_nothing_better_is_there() -> None:
    places = {name: place(name, interface("wlan0", "wifi", f"10.0.0.{k}", 0)) for k, name in enumerate("ab")}
    warning, back = warnings(mesh(2, places))
    assert (back.source, back.figure) == ("b", "path")
    assert warning.figure == "path" and "by Wi-Fi" in warning.what and "use a cable" in warning.advice


def test_nodes_of_one_host_are_not_told_to_use_a_cable() -> None:
    one = place("a", interface("wlan0", "wifi", "10.0.0.0", 0))
    found = mesh(2, {"a": one, "b": replace(one, node_id="b")})
    same = tuple(replace(pair, ours="10.0.0.0", theirs="10.0.0.0") for pair in found.pairs)
    assert warnings(replace(found, pairs=same)) == []
    assert found.kind(same[0]) == "loopback"


def seen(found: Mesh, **ways: Measured) -> Mesh:
    """`found`, with the ways from here to the nodes named."""
    ours = (Pair(source=HERE, target=target, measured=measured) for target, measured in ways.items())
    return replace(found, nodes=(HERE, *found.nodes), pairs=(*ours, *found.pairs))


def test_failed_pairs_and_the_way_from_here_do_not_count_into_the_median() -> None:
    found = seen(mesh(3, ab="offline", ba="offline"), a=figures(rate=1.0))
    assert [(pair.source, pair.target) for pair in found.failed] == [("a", "b"), ("b", "a")]
    assert found.median(lambda each: each.bytes_per_s) == GIGABIT
    assert told(found) == [(HERE, "a", "rate")], "nobody else is judged by it"


def test_the_way_from_here_is_judged_as_the_others_are() -> None:
    assert told(seen(mesh(2), a=figures(), b=figures())) == []
    assert told(seen(mesh(2), a=figures(), b=figures(rtt=5e-3))) == [(HERE, "b", "trip")]
    found = seen(mesh(3), a=figures(rate=1e6), b=figures(rate=1e6), c=figures(rate=1e6))
    (line,) = summary(found, warnings(found))
    assert line.startswith("here: every path from it is slow, 8 Mbit/s to 8 Mbit/s")


@pytest.mark.parametrize("ours", [figures(), figures(rate=1e6)], ids=["not from here", "from here too"])
def test_a_node_that_is_slow_to_all_is_one_line_whether_it_is_from_here_or_not(ours: Measured) -> None:
    slow = figures(rate=1e6)
    found = seen(mesh(3, ac=slow, ca=slow, bc=slow, cb=slow), a=figures(), b=figures(), c=ours)
    (line,) = summary(found, warnings(found))
    assert line.startswith("c: every path to and from it is slow")


def test_a_link_that_was_shaped_is_said_to_be_and_no_cable_is_blamed() -> None:
    slow = figures(rate=1e6, rtt=40e-3)
    found = mesh(3, ac=slow, ca=slow)
    shape = {frozenset("ac"): "20 ms, 10 Mbit/s"}
    pairs = (replace(pair, shape=shape.get(frozenset((pair.source, pair.target)), "")) for pair in found.pairs)
    found = replace(found, pairs=tuple(pairs))
    lines = summary(found, warnings(found))
    assert lines and all(line.endswith(". The link is shaped 20 ms, 10 Mbit/s.") for line in lines)
    assert "cable" not in " ".join(lines)
    assert {pair["shape"] for pair in found.to_dict()["pairs"]} == {None, "20 ms, 10 Mbit/s"}


@given(
    st.lists(
        st.one_of(
            st.just("offline"),
            st.builds(figures, rate=st.floats(0, 1e12), rtt=st.floats(0, 100)),
        ),
        min_size=6,
        max_size=6,
    )
)
def test_whatever_was_measured_is_judged_and_is_json(drawn: list[Measured | str]) -> None:
    found = mesh(3, **dict(zip(("ab", "ac", "ba", "bc", "ca", "cb"), drawn, strict=True)))
    slow = warnings(found)
    assert len(set(told(found))) == len(slow)
    assert len(summary(found, slow)) <= len(slow)
    assert json.loads(json.dumps(found.to_dict()))["nodes"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "bent",
    [
        None,
        {},
        {"rtt_s": "soon"},
        {**figures().to_dict(), "bytes_per_s": float("nan")},
        {**figures().to_dict(), "rtt_s": -1},
    ],
    ids=str,
)
def test_a_bent_report_of_a_node_is_refused(bent: object) -> None:
    assert Measured.from_dict(figures().to_dict()) == figures()
    with pytest.raises(WireError, match="measurement"):
        Measured.from_dict(bent)
