"""What a bare node is to be, from a file or flags, and where its names lead."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.config import ClusterConfig, parse_config
from mlxcel_nb.errors import ConfigError
from mlxcel_nb.launch.bare_plan import NodePlan, Whereabouts, from_file, from_flags, judge

TWO = """
[cluster]
name = "lab"
pipeline_parallel_size = 2
port_range = "9000-9010"
secret_file = "s"
[[nodes]]
id = "a"
address = "h1:9000"
role = "pipeline"
stage = 0
[[nodes]]
id = "b"
address = "h2:9001"
role = "pipeline"
stage = 1
"""

OWN = frozenset({"127.0.0.1", "::1", "10.0.0.1", "fd00::1"})


def config(text: str = TWO) -> ClusterConfig:
    return parse_config(text, source="cluster.toml")


def plan(text: str = TWO, node_id: str = "a") -> NodePlan:
    return from_file(config(text), source="cluster.toml", node_id=node_id)


def where(h1: list[str], h2: list[str]) -> Whereabouts:
    return judge(plan(), {"h1": h1, "h2": h2}, OWN)


def two(a: str, b: str) -> str:
    return TWO.replace("h1:9000", a).replace("h2:9001", b)


def test_a_node_of_a_file_listens_at_its_address_and_knows_the_others() -> None:
    made = plan()
    assert (made.cluster, made.role, made.bind, made.peers) == (
        "lab",
        "pipeline_stage",
        Address("h1", 9000),
        {"b": Address("h2", 9001)},
    )
    assert made.secret_file == "s" and not made.alone and made.members == ("a", "b")


def test_a_router_is_beside_the_nodes_of_a_file() -> None:
    made = from_file(config(), source="c", role="Router")
    assert made.node_id.startswith("router-") and list(made.peers) == ["a", "b"]
    assert made.bind == Address("127.0.0.1", 0)
    with pytest.raises(ConfigError, match="lists a as a node"):
        from_file(config(), source="c", role="router", node_id="a")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({}, r"which node of the file is this\? Give --node-id; c lists a, b"),
        ({"node_id": "z"}, "lists no node 'z'"),
        ({"node_id": "a", "role": "decode"}, "makes a pipeline_stage, not decode"),
        ({"node_id": "a", "bind": "10.0.0.1:1"}, "--bind contradicts c"),
    ],
)
def test_flags_do_not_contradict_a_file(flags: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_file(config(), source="c", **flags)


def test_one_list_of_peers_serves_every_node() -> None:
    peers = "a=10.0.0.1:9000, b=10.0.0.2:9000"
    for me, other in (("a", "b"), ("b", "a")):
        made = from_flags(cluster="lab", node_id=me, role="prefill", peers=peers)
        assert list(made.peers) == [other] and made.bind.port == 9000
    made = from_flags(cluster="lab", node_id="a", peers="10.0.0.1:9000,10.0.0.2:9000", bind="10.0.0.1:9000")
    assert (made.peers, made.strangers) == ({}, (Address("10.0.0.2", 9000),))


def test_only_a_hybrid_node_with_nobody_beside_it_is_alone() -> None:
    def alone(**flags: object) -> bool:
        return from_flags(cluster="lab", node_id="a", **flags).alone

    assert alone()
    assert not alone(role="decode") and not alone(peers="h:1") and not alone(secret_given=True)
    one = '[[nodes]]\nid = "a"\naddress = "127.0.0.1:9000"\n'
    assert plan(one).alone
    assert not from_file(config(one), source="c", node_id="a", secret_given=True).alone
    assert not from_file(config(one), source="c", node_id="a", discover=True).alone


def test_all_flags_that_are_wrong_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match="the command line has 8 mistakes") as caught:
        from_flags(
            cluster="",
            node_id="x\n",
            role="decoder",
            peers="a=h:1,a=h:2,h:1,b,=h:3",
            bind="h:p",
        )
    told = "\n".join(caught.value.lines())
    for flag in ("--cluster", "--node-id", "--node-role", "--bind"):
        assert f" {flag}: " in told
    for peer in ("a is there twice", "h:1 is there twice", "'b' lacks a port", "a peer's id has 0 bytes"):
        assert f"--peers: {peer}" in told


def test_an_id_with_spaces_around_it_and_a_role_that_is_none_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        from_flags(cluster="lab", node_id="a ", role="bogus")
    told = "\n".join(caught.value.lines())
    assert "--node-id: 'a ' begins or ends with a space" in told and "router" in told


def test_a_port_outside_the_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="port 80 is outside --port-range, 9000-9010"):
        from_flags(cluster="lab", node_id="a", bind="h:80", port_range=(9000, 9010))


def test_names_lead_to_one_address_to_listen_on_and_to_where_peers_come_from() -> None:
    found = where(["127.0.1.1", "10.0.0.1"], ["10.0.0.2", "fd00::2"])
    assert found == Whereabouts(bind="10.0.0.1", sources={"b": ("10.0.0.2", "fd00::2")})


def test_a_peer_on_this_host_may_come_from_any_of_its_addresses() -> None:
    ips = {"10.0.0.1": ["10.0.0.1"], "h2": ["fd00::1"]}
    found = judge(plan(two("10.0.0.1:9000", "h2:9001")), ips, OWN)
    assert set(found.sources["b"]) == OWN


@pytest.mark.parametrize(
    ("h1", "h2", "refused"),
    [
        (["10.0.0.1"], ["fd00::2"], "node b: h2 is IPv6, and this node's own address, 10.0.0.1, IPv4. Write addresses"),
        (["fd00::1"], ["10.0.0.2"], "node b: h2 is IPv4, and this node's own address, fd00::1, IPv6. Write addresses"),
        (["10.0.0.1"], ["10.0.0.2", "fd00::2"], ""),
        (["10.0.0.1"], ["::ffff:10.0.0.2"], ""),
    ],
)
def test_a_peer_elsewhere_has_an_address_of_this_nodes_family(h1: list[str], h2: list[str], refused: str) -> None:
    """A link over the other family would come from an address that the file does not have for this node."""
    if not refused:
        assert where(h1, h2).sources["b"] == tuple(h2)
        return
    with pytest.raises(ConfigError) as caught:
        where(h1, h2)
    assert refused in str(caught.value)


def test_a_plan_on_loopback_is_one_host() -> None:
    ips = {"localhost": ["::1", "127.0.0.1"], "127.0.0.1": ["127.0.0.1"]}
    found = judge(plan(two("localhost:9000", "127.0.0.1:9001")), ips, OWN)
    assert found.bind == "127.0.0.1" and "127.0.0.1" in found.sources["b"]


ONLY_HERE = "the name {} leads to 127.0.1.1 on this host"
NOT_OURS = "is not an address of this host. Start it on the host of that address, or write one of this host's: 10.0.0.1"


@pytest.mark.parametrize(
    ("own", "h1", "h2", "says"),
    [
        ("h1", ["127.0.1.1"], ["10.0.0.2"], f"node a: {ONLY_HERE.format('h1')}"),
        ("h1", ["10.0.0.1"], ["127.0.1.1"], f"node b: {ONLY_HERE.format('h2')}"),
        ("h1", [], ["10.0.0.2"], "node a: its name h1 is not known on this host"),
        ("h1", ["10.0.0.1"], [], "node b: the name h2 is not known here"),
        ("h1", ["10.0.0.9"], ["10.0.0.2"], f"node a: h1 (10.0.0.9) {NOT_OURS}"),
        ("10.0.0.9", ["10.0.0.9"], ["10.0.0.2"], f"node a: 10.0.0.9 {NOT_OURS}"),
    ],
)
def test_a_name_that_leads_nowhere_or_to_this_host_alone_is_refused(
    own: str, h1: list[str], h2: list[str], says: str
) -> None:
    """Case 46."""
    with pytest.raises(ConfigError, match=re.escape(says)):
        judge(plan(two(f"{own}:9000", "h2:9001")), {own: h1, "h2": h2}, OWN)


def test_all_names_that_are_wrong_are_told_at_once() -> None:
    """Case 46."""
    with pytest.raises(ConfigError, match="2 mistakes"):
        where([], ["127.0.1.1"])


def test_a_host_that_is_off_may_be_unknown_by_multicast() -> None:
    found = judge(plan(two("10.0.0.1:9000", "mac2.local:9001")), {"10.0.0.1": ["10.0.0.1"], "mac2.local": []}, OWN)
    assert (found.unknown, found.sources) == (("mac2.local",), {})


def test_a_loopback_peer_of_a_node_that_others_reach_is_refused() -> None:
    """Case 46."""
    made = from_flags(cluster="lab", node_id="a", peers="b=127.0.0.1:9001", bind="10.0.0.1:9000")
    with pytest.raises(ConfigError, match=r"node b: 127\.0\.0\.1 means this host, and the plan has others too"):
        judge(made, {"10.0.0.1": ["10.0.0.1"], "127.0.0.1": ["127.0.0.1"]}, OWN)


@pytest.mark.parametrize(
    ("flags", "unheard"),
    [
        ({"discover": True}, True),
        ({"peers": "b=10.0.0.2:9000"}, True),
        ({"peers": "10.0.0.2:9000,127.0.0.1:9001"}, True),
        ({"peers": "b=127.0.0.1:9001"}, False),
        ({"peers": "b=127.0.0.1:9001", "discover": True}, False),
        ({"discover": True, "bind": "10.0.0.1"}, False),
        ({"peers": "b=10.0.0.2:9000", "role": "router"}, False),
        ({}, False),
    ],
)
def test_a_node_that_others_cannot_find_is_told_apart(flags: dict[str, Any], unheard: bool) -> None:
    assert from_flags(cluster="lab", node_id="a", **flags).unheard is unheard
