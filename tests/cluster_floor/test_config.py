"""The cluster file: what good ones mean, and that every mistake is named at once, with the line and the mend."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.config import ClusterConfig, check_text, load_config, parse_config
from mlxcel_nb.cluster.config_keys import TABLES
from mlxcel_nb.cluster.roles import ALIASES, ROLES, parse_role
from mlxcel_nb.errors import ConfigError

SOURCE = "lab/cluster.toml"


def node(node_id: str, address: str, **keys: object) -> str:
    lines = [f"{key} = {_toml(value)}" for key, value in {"id": node_id, "address": address, **keys}.items()]
    return "\n".join(["[[nodes]]", *lines, ""])


def cluster(*nodes: str, **keys: object) -> str:
    return "\n".join(["format = 1", "[cluster]", *(f"{k} = {_toml(v)}" for k, v in keys.items()), *nodes])


def _toml(value: object) -> str:
    return (
        {True: "true", False: "false"}[value]
        if isinstance(value, bool)
        else str(value)
        if value == 0
        else (f'"{value}"' if isinstance(value, str) else str(value))
    )


def mesh(pp: int, tp: int, role: str, **keys: object) -> list[str]:
    """Nodes of a mesh, each on a host of its own."""
    return [
        node(f"n{s}{r}", f"10.0.{s}.{r + 1}:9000", role=role, stage=s, rank=r, **keys)
        for s in range(pp)
        for r in range(tp)
    ]


def good(text: str) -> ClusterConfig:
    config, mistakes = check_text(text, source=SOURCE)
    assert config is not None, [str(mistake) for mistake in mistakes]
    assert mistakes == []
    return config


def wrong(text: str) -> list[str]:
    config, mistakes = check_text(text, source=SOURCE)
    assert config is None
    return [str(mistake) for mistake in mistakes]


# ------------------------------------------------------------------------------------------------ what good ones mean


def test_every_key_is_read() -> None:
    config = good(
        """
        format = 1
        [cluster]
        name = "lab"
        tensor_parallel_size = 1
        pipeline_parallel_size = 2
        data_parallel_size = 1
        expert_parallel = false
        secret_file = "keys/secret"
        previous_secret_file = "/etc/old"
        transport = "Thunderbolt"
        discovery = "beacon"
        collectives = "mlx-ring"
        model = "smollm2-135m"
        port_range = "9000-9010"
        elastic = "spare"

        [[nodes]]
        id = "mac1"                # a comment
        address = "mac1.local"
        role = "Pipeline"
        stage = 0
        layers = "0-15"
        [nodes.resources]
        memory_bytes = 16_000_000_000
        compute_units = 8

        [[nodes]]
        id = "mac2"
        address = "[fd00::2]:9001"
        role = "pipeline-stage"
        stage = 1
        rank = 0
        replica = 0
        layers = "16-29"

        [[nodes]]
        id = "mac3"
        address = "10.0.0.3:9000"
        spare = true
        """
    )
    assert (config.name, config.transport, config.discovery, config.elastic) == (
        "lab",
        "thunderbolt",
        "beacon",
        "spare",
    )
    assert (config.secret_file, config.previous_secret_file) == ("lab/keys/secret", "/etc/old")
    assert (config.port_range, config.model, config.collectives) == ((9000, 9010), "smollm2-135m", "mlx-ring")
    one, two, three = config.nodes
    assert (one.address, one.role, one.stage, one.rank, one.replica) == (
        Address("mac1.local", 0),
        "pipeline_stage",
        0,
        0,
        0,
    )
    assert (one.layers, one.memory_bytes, one.compute_units) == ((0, 16), 16_000_000_000, 8)
    assert (two.address, two.layers, two.memory_bytes) == (Address("fd00::2", 9001), (16, 30), 0)
    assert (three.role, three.spare, three.stage, config.spares) == ("hybrid", True, None, (three,))
    assert [(m.members, m.layers) for m in config.meshes] == [(("mac1", "mac2"), ((0, 16), (16, 30)))]


def test_one_node_is_enough_and_needs_no_secret() -> None:
    config = good('[[nodes]]\nid = "a"\naddress = "127.0.0.1:9000"')
    assert config.nodes[0].role == "hybrid" and config.name == "mlxcel" and config.meshes == ()
    assert config.serves_alone("a")
    assert not good(cluster(node("a", "h1:9000"), node("b", "h2:9000"))).serves_alone("a")


def test_a_mesh_has_its_members_in_the_order_of_a_layout() -> None:
    texts = mesh(2, 2, "2D")
    config = good(cluster(*reversed(texts), tensor_parallel_size=2, pipeline_parallel_size=2))
    assert [m.members for m in config.meshes] == [("n00", "n01", "n10", "n11")]
    assert [(n.stage, n.rank) for n in config.nodes] == [(1, 1), (1, 0), (0, 1), (0, 0)]


def test_ranks_need_no_stage_and_stages_no_rank() -> None:
    ranks = good(cluster(*(node(f"r{r}", f"h{r}:9000", role="TP", rank=r) for r in (0, 1)), tensor_parallel_size=2))
    assert [(n.role, n.stage, n.rank) for n in ranks.nodes] == [
        ("tensor_parallel_rank", 0, 0),
        ("tensor_parallel_rank", 0, 1),
    ]


def test_replicas_are_meshes_of_their_own() -> None:
    nodes = [node(f"d{d}s{s}", f"h{d}{s}:9000", role="pipeline", stage=s, replica=d) for d in (0, 1) for s in (0, 1)]
    config = good(cluster(*nodes, pipeline_parallel_size=2, data_parallel_size=2))
    assert {m.name: m.members for m in config.meshes} == {
        "replica-0": ("d0s0", "d0s1"),
        "replica-1": ("d1s0", "d1s1"),
    }
    whole = good(cluster(node("a", "h1:9000"), node("b", "h2:9000"), data_parallel_size=2))
    assert [(n.id, n.replica) for n in whole.nodes] == [("a", 0), ("b", 1)]


def test_groups_that_hold_one_node_need_no_name() -> None:
    roles = ["prefill", "prefill", "decode"]
    config = good(cluster(*(node(f"n{i}", f"h{i}:9000", role=role) for i, role in enumerate(roles))))
    assert [n.group for n in config.nodes] == ["prefill-0", "prefill-1", "decode-0"]
    larger = [
        node(f"{role}{r}", f"{role}{r}:9000", role=role, rank=r, group=f"{role}-7")
        for role in ("prefill", "decode")
        for r in (0, 1)
    ]
    config = good(cluster(*larger, tensor_parallel_size=2))
    assert {m.name: m.members for m in config.meshes} == {
        "prefill-7": ("prefill0", "prefill1"),
        "decode-7": ("decode0", "decode1"),
    }


def test_all_on_loopback_is_a_plan_on_one_host() -> None:
    """Case 46."""
    config = good(cluster(node("a", "localhost:9000"), node("b", "127.0.0.1:9001"), node("c", "[::1]:9000")))
    assert config.on_one_host


@pytest.mark.parametrize(("text", "role"), [(text.upper(), role) for text, role in ALIASES.items()])
def test_roles_have_short_names(text: str, role: str) -> None:
    assert parse_role(text) == parse_role(f" {text.replace('_', '-')}") == role
    assert good(cluster(node("a", "h:1"))).nodes[0].role in ROLES


def test_the_router_is_for_the_command_line() -> None:
    assert parse_role("Router", router=True) == "router"
    with pytest.raises(ConfigError, match="belongs on a command line, not into a file"):
        parse_role("router")


# ------------------------------------------------------------------------------------------------ one mistake

A, B = node("a", "h1:9000"), node("b", "h2:9000")
STAGES = [node(f"s{s}", f"h{s}:9000", role="pipeline", stage=s) for s in (0, 1)]


def stages(*layers: str | None, pp: int = 2, **keys: object) -> str:
    nodes = [
        node(f"s{s}", f"h{s}:9000", role="pipeline", stage=s, **({"layers": ours} if ours else {}))
        for s, ours in enumerate(layers)
    ]
    return cluster(*nodes, pipeline_parallel_size=pp, **keys)


MISTAKES = [
    ("", "[[nodes]]: the file lists no node. Add [[nodes]] with an id and an address for each."),
    ("nodes = []", "[[nodes]]: the file lists no node. Add [[nodes]] with an id and an address for each."),
    ("format = 2\n" + A, "line 1: format: 2 is not known here. This version reads format = 1; update mlxcel_nb where the file comes from a newer one."),
    ("[[nodes]", "is not TOML: Expected ']]' at the end of an array declaration (at line 1, column 8). Text is \"quoted\", and a table has [brackets]."),
    ("x = " + "[" * 5000, "nests too deeply. Take the brackets away."),
    ("[nodes]\nid = 'a'", "line 1: [[nodes]]: is not a list of tables. Write [[nodes]], with two brackets, for each node."),
    ("cluster = 1\n" + A, "[cluster]: is not a table. Write [cluster] on a line of its own, and keys below it."),
    ("[[node]]\nid = 'a'", 'line 1: node is not a key of the top of the file. Perhaps nodes?'),
    ("name = 'x'\n" + A, "line 1: name is not a key of the top of the file. It belongs under [cluster]."),
    (cluster(A, nmae="x"), "line 3: [cluster]: nmae is not a key of [cluster]. Perhaps name?"),
    (cluster(A, stage=0), "line 3: [cluster]: stage is not a key of [cluster]. It belongs under [[nodes]]."),
    (cluster(node("a", "h:1", memory_bytes=0)), "line 6: node a: memory_bytes is not a key of [[nodes]]. It belongs under [nodes.resources]."),
    (cluster(A + "[nodes.resources]\nmemory_byte = 1"), 'line 7: node a, resources: memory_byte is not a key of [nodes.resources]. Perhaps memory_bytes?'),
    (cluster(A + "[nodes.resources]\nmemory_bytes = 1.6e10"), 'line 7: node a, resources: memory_bytes is a number, not a whole number. Write it like 16000000000.'),
    (cluster(A + "[nodes.resources]\ncompute_units = -1"), 'line 7: node a, resources: compute_units -1 is out of range. Write a whole number from 0 to 1048576.'),
    (cluster(A, tensor_parallel_size="2"), "line 3: [cluster]: tensor_parallel_size is text, not a whole number. Write it like 2."),
    (cluster(A, tensor_parallel_size=0), "line 3: [cluster]: tensor_parallel_size 0 is out of range. Write a whole number from 1 to 512."),
    (cluster(A, pipeline_parallel_size=True), "line 3: [cluster]: pipeline_parallel_size is true or false, not a whole number. Write it like 2."),
    (cluster(A, expert_parallel=1), "line 3: [cluster]: expert_parallel is a whole number, not true or false. Write it like true."),
    (cluster(A, transport="udp"), 'line 3: [cluster]: transport \'udp\' is not a choice. Choose from "auto", "tcp", "thunderbolt", "rdma".'),
    (cluster(A, discovery="mdns"), 'line 3: [cluster]: discovery \'mdns\' is not a choice. Choose from "static", "beacon".'),
    (cluster(A, elastic=True), 'line 3: [cluster]: elastic is true or false, not text. Write it like "off".'),
    (cluster(A, collectives="nccl"), 'line 3: [cluster]: collectives \'nccl\' is not a choice. Choose from "own", "mlx-ring", "mlx-jaccl", "mlx-nccl".'),
    (cluster(A, port_range="9010-9000"), 'line 3: [cluster]: port_range \'9010-9000\' is not a range of ports. Write the first and the last port, from 1 to 65535, like "9000-9010".'),
    (cluster(A, port_range="0-70000"), 'line 3: [cluster]: port_range \'0-70000\' is not a range of ports. Write the first and the last port, from 1 to 65535, like "9000-9010".'),
    (cluster(A, port_range="9100-9110"), "line 6: node a: port 9000 is outside port_range, 9100-9110. Take one within, or widen port_range."),
    (cluster(A, model=""), 'line 3: [cluster]: model is empty, too long, or holds a control character. Write 1 to 4096 printable characters, like "smollm2-135m".'),
    (cluster(A, secret_file="s", previous_secret_file="s"), "line 4: [cluster]: secret_file and previous_secret_file are one file. Leave previous_secret_file out until the secret changes."),
    (cluster(A, expert_parallel=True), "line 3: [cluster]: expert_parallel has nothing to spread experts over: tensor_parallel_size and data_parallel_size are 1. Set one of them to 2 or more, or leave expert_parallel out."),
    # Names.
    (cluster(A, name=""), 'line 3: [cluster]: name has 0 bytes of UTF-8; 1 to 128 are allowed. Write 1 to 128 bytes of printable text, like "lab".'),
    (cluster(A, name="a\\tb"), 'line 3: [cluster]: name \'a\\tb\' holds a control character. Write 1 to 128 bytes of printable text, like "lab".'),
    (cluster(node("", "h:1")), 'line 4: node 1: id has 0 bytes of UTF-8; 1 to 128 are allowed. Write 1 to 128 bytes of printable text, like "mac1".'),
    (cluster(node("é" * 65, "h:1")), 'line 4: node ' + "é" * 65 + ': id has 130 bytes of UTF-8; 1 to 128 are allowed. Write 1 to 128 bytes of printable text, like "mac1".'),
    (cluster("[[nodes]]\naddress = 'h:1'"), "line 3: node 1: id is missing. The node's name, unlike any other's. Write it as 1 to 128 bytes of UTF-8, no control characters."),
    (cluster(A, node("a", "h2:9000")), "line 8: node a: 2 nodes have this id (lines 4, 8). Give each node an id of its own."),
    # Addresses.
    (cluster("[[nodes]]\nid = 'a'"), "line 3: node a: address is missing. Where it listens and is reached; the port may be left out with beacons. Write it as HOST:PORT, [IPV6]:PORT."),
    (cluster(node("a", "h1")), 'line 5: node a: address lacks a port. Write "h1:9000", or set discovery = "beacon", by which nodes tell their ports.'),
    (cluster(node("a", "fd00::1:9000")), 'line 5: node a: address lacks a port. Write "[fd00::1:9000]:9000", or set discovery = "beacon", by which nodes tell their ports.'),
    (cluster(node("a", "h1:90000")), 'line 5: node a: address port 90000 is not between 0 and 65535. Write it as HOST:PORT, [IPV6]:PORT.'),
    (cluster(node("a", "not a host:1")), "line 5: node a: address 'not a host' is not a host name or an IP address. Write it as HOST:PORT, [IPV6]:PORT."),
    (cluster(A, node("b", "H1.:9000")), "line 9: node a and node b: address h1:9000 is given 2 times. Give each a port or a host of its own."),
    (cluster(node("a", "10.0.0.1:1"), node("b", "[::ffff:10.0.0.1]:1")), "line 9: node a and node b: address 10.0.0.1:1 is given 2 times. Give each a port or a host of its own."),
    (cluster(node("a", "0.0.0.0:1")), "line 5: node a: 0.0.0.0 means every interface, and nobody can dial it. Write the address by which the other hosts reach it."),
    (cluster(node("a", "239.1.2.3:1")), "line 5: node a: 239.1.2.3 is a multicast address. Write the address of one host."),
    (cluster(node("a", "[fe80::1]:1")), "line 5: node a: fe80::1 is link-local and lacks its interface, as in [fe80::1%en0]:9000. Write the address of one host."),
    # Roles.
    (cluster(node("a", "h:1", role="prefil")), "line 6: node a: role 'prefil' is not a role. Perhaps prefill?"),
    (cluster(node("a", "h:1", role="pp")), "line 6: node a: role 'pp' is not a role. Perhaps pipeline?"),
    (cluster(node("a", "h:1", role="router")), "line 6: node a: role 'router' belongs on a command line, not into a file. Leave it out of the file and start it by itself: mlxcel-nb node --node-role router"),
    (cluster(*STAGES), "line 2: [cluster]: node s0 and node s1 are pipeline_stage, but pipeline_parallel_size is 1. Set pipeline_parallel_size = 2."),
    (cluster(*STAGES, pipeline_parallel_size=2, tensor_parallel_size=2), "line 4: [cluster]: node s0 and node s1 are pipeline_stage, but tensor_parallel_size is 2. Make the role pipeline_tensor_parallel, with stage and rank, or set tensor_parallel_size = 1."),
    (cluster(*mesh(1, 2, "2d"), tensor_parallel_size=2), "line 2: [cluster]: node n00 and node n01 are pipeline_tensor_parallel, but pipeline_parallel_size is 1. Set pipeline_parallel_size = 2, or make the role tensor_parallel_rank."),
    (cluster(node("a", "h:1", stage=1)), "line 6: node a: stage 1 does not exist: pipeline_parallel_size is 1. Write stage = 0, or leave it out."),
    (cluster(node("a", "h:1", layers="0-3")), "line 6: node a: a hybrid node holds a whole model, and no layers by hand. Leave layers out."),
    (cluster(node("a", "h:1", group="g")), "line 6: node a: group is for prefill and decode nodes, and this one is hybrid. Leave group out."),
    (cluster(node("a", "h:1", role="prefill")), '[[nodes]]: there are prefill nodes, but no decode node. Add one with role = "decode", or make the others hybrid.'),
    (cluster(A, B, tensor_parallel_size=2), 'line 2: [cluster]: a mesh of 2 ranks is asked for, but node a and node b hold no place in it. Give 2 nodes role = "tensor_parallel_rank" with rank, or set the sizes to 1.'),
    (cluster(*STAGES, node("c", "h3:9000", rank=0), pipeline_parallel_size=2), 'line 19: node c: a hybrid node holds a whole model, and has no rank. Write role = "pipeline_stage", or leave rank out.'),
    (cluster(node("a", "h1:1", role="prefill", group="g"), node("b", "h2:1", role="decode", group="g"), node("c", "h3:1", role="decode")), 'line 13: node b: group g holds prefill nodes, and this one is decode. Give it another group.'),
    # Places.
    (cluster(*STAGES, pipeline_parallel_size=3), "the mesh: stage 2 is held by no node. Add a node for it."),
    (cluster(STAGES[0], pipeline_parallel_size=512), "the mesh: stage 1; stage 2; stage 3; stage 4; stage 5; stage 6 and 505 more are held by no node. Add a node for each."),
    (cluster(*mesh(2, 2, "2d")[:3], tensor_parallel_size=2, pipeline_parallel_size=2), "the mesh: stage 1, rank 1 is held by no node. Add a node for it."),
    (cluster(*STAGES, node("c", "h3:9000", role="pipeline", stage=1), pipeline_parallel_size=2), 'line 16: node s1 and node c: stage 1 of the mesh is held 2 times. Give each a place of its own.'),
    (cluster(STAGES[0], node("c", "h3:9000", role="pipeline", stage=2), pipeline_parallel_size=2), 'line 14: node c: stage 2 does not exist: pipeline_parallel_size is 2. Write stage = 0, or up to 1.'),
    (cluster(STAGES[0], node("c", "h3:9000", role="pipeline"), pipeline_parallel_size=2), 'line 10: node c: stage is missing: pipeline_parallel_size is 2. Write stage = 0, or up to 1.'),
    (cluster(A, B, data_parallel_size=3), "line 3: [cluster]: data_parallel_size is 3, but no node is in replica 2. Add nodes for it, or lower data_parallel_size."),
    (cluster(A, B, node("c", "h3:1"), data_parallel_size=2), "line 12: node c: data_parallel_size is 2, and so many replicas have a node already. Raise data_parallel_size, or take the node out."),
    (cluster(node("a", "h1:1", role="prefill"), node("b", "h2:1", role="decode"), data_parallel_size=2), "line 3: [cluster]: data_parallel_size is 2, but there is no mesh to repeat: all nodes are in groups. Leave it out; several groups do the same for prefill and decode."),
    (cluster(node("p", "h1:1", role="prefill", rank=0), node("q", "h2:1", role="prefill", rank=1), node("d", "h3:1", role="decode", rank=0), tensor_parallel_size=2), "group decode-0: rank 1 is held by no node. Add a node for it."),
    # Layers.
    (stages("0-15", "15-29"), 'line 16: node s1: layers 15-29 of stage 1 overlap: stage 0 ends at layer 15. Begin them at 16, and let stages follow each other.'),
    (stages("0-15", "17-29"), 'line 16: node s1: layers 17-29 of stage 1 leave a gap: stage 0 ends at layer 15. Begin them at 16, and let stages follow each other.'),
    (stages("1-15", "16-29"), "line 9: node s0: layers 1-15 of stage 0 leave a gap: the first layer is 0. Begin them at 0, and let stages follow each other."),
    (stages("0-15", None), 'line 11: node s1: layers is missing, but other nodes of the mesh have them by hand. Write layers for every node of it, or for none.'),
    (stages("0-15", "all"), 'line 16: node s1: layers \'all\' is not a layer range. Write the first and the last layer, from 0 to 9999, like "0-15".'),
    (stages("0-15", "29-16"), 'line 16: node s1: layers \'29-16\' is not a layer range. Write the first and the last layer, from 0 to 9999, like "0-15".'),
    # Spares.
    (cluster(A, node("b", "h2:1", spare=True)), 'line 2: [cluster]: node b is spare, but is never used while elastic is "off". Set elastic = "spare", or leave spare out.'),
    (cluster(A, elastic="spare"), "line 3: [cluster]: elastic is on, but no node is spare. Write spare = true for a node."),
    (cluster(A, node("b", "h2:1", spare=True, rank=0), elastic="replan"), "line 12: node b: a spare node has no rank of its own. Leave rank or spare out."),
    (cluster(node("b", "h2:1", spare=True), elastic="spare"), "[[nodes]]: every node is spare, and none holds a model. Leave spare out for those that do the work."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line"), MISTAKES, ids=[line[:60] for _, line in MISTAKES])
def test_one_mistake_is_one_line_with_its_mend(text: str, line: str) -> None:
    assert wrong(text) == [line]
    with pytest.raises(ConfigError) as caught:
        parse_config(text, source=SOURCE)
    error = caught.value
    assert len(error.lines()) == 1 and str(error).startswith(SOURCE) and error.advice
    assert line.partition(": ")[2].partition(". ")[0] in str(error)


@pytest.mark.parametrize("loopback", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "127.0.1.1"])
def test_a_loopback_address_is_refused_where_others_are_elsewhere(loopback: str) -> None:
    """Case 46."""
    (line,) = wrong(cluster(node("a", f"{loopback}:9000"), node("b", "10.0.0.2:9000")))
    host = loopback.strip("[]")
    assert line == (
        f"line 5: node a: {host} means its own host to every host, and node b is not there. "
        "Write the address by which the other hosts reach it."
    )


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file() -> None:
    text = """
[cluster]
name = ""
pipeline_parallel_size = 2
tensor_paralel_size = 2

[[nodes]]
id = "a"
address = "10.0.0.1:9000"
role = "pipeline"
stage = 0

[[nodes]]
id = "b"
address = "localhost:9000"
role = "pipelin"
stage = 1

[[nodes]]
id = "a"
address = "10.0.0.1:9000"
role = "pipeline"
stage = 0
[nodes.resources]
memory_bytes = "16 GB"
"""
    lines = wrong(text)
    assert [line.split(":")[0] for line in lines] == [
        "line 3",
        "line 5",
        "line 15",
        "line 16",
        "line 20",
        "line 21",
        "line 25",
    ]
    with pytest.raises(ConfigError, match="has 7 mistakes") as caught:
        parse_config(text, source=SOURCE)
    assert [line.strip() for line in caught.value.lines()[1:]] == lines


def test_a_slip_is_told_once() -> None:
    """A key that is misspelt, or whose value cannot be read, is not missing as well."""
    slip = node("b", "h2:9000", role="pipeline", stagee=1)
    assert len(wrong(cluster(STAGES[0], slip, pipeline_parallel_size=2))) == 1
    assert len(wrong(cluster(STAGES[0], node("b", "h2:9000", role="ppline", stage=1), pipeline_parallel_size=2))) == 1
    assert len(wrong(cluster(*STAGES, pipeline_parallel_size="2"))) == 1
    assert len(wrong("[cluster]\n[[nodes]]\nid = 'a'\nadress = 'h:1'")) == 1


def test_places_that_only_a_misplaced_node_could_hold_are_not_called_empty() -> None:
    lines = wrong(cluster(STAGES[0], node("b", "h2:9000", role="pipeline", stage=9), pipeline_parallel_size=4))
    assert any("stage 9 does not exist" in line for line in lines)
    assert any("stage 1; stage 2; stage 3 are held by no node" in line for line in lines)


def test_no_line_is_named_where_it_could_be_wrong() -> None:
    inline = 'nodes = [{id = "a", address = "h:1", stage = 4}]'
    assert not wrong(inline)[0].startswith("line")
    quoted = 'model = """\n[[nodes]]\n"""\n' + cluster(node("a", "h:1", stage=4)).replace("format = 1\n[cluster]\n", "")
    assert not any(line.startswith("line") for line in wrong(f"[cluster]\n{quoted}"))


# ------------------------------------------------------------------------------------------------ the file itself


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_bytes(b"\xef\xbb\xbf" + cluster(A, secret_file="s", previous_secret_file="~/old").encode())
    config = load_config(file)
    assert (config.secret_file, config.previous_secret_file) == (str(tmp_path / "s"), "~/old")
    assert config.node("a").address == Address("h1", 9000)
    with pytest.raises(ConfigError, match="lists no node 'c'. It lists a"):
        config.node("c")


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    for path, says in [(tmp_path / "none", "does not exist"), (tmp_path, "cannot be read"), ("a\0b", "cannot be read")]:
        with pytest.raises(ConfigError, match=says):
            load_config(path)
    (tmp_path / "latin").write_bytes(b"[cluster]\nname = '\xe9'")
    with pytest.raises(ConfigError, match="not UTF-8: line 2"):
        load_config(tmp_path / "latin")
    (tmp_path / "model").write_bytes(bytes(5 << 20))
    with pytest.raises(ConfigError, match="more than 4194304 bytes"):
        load_config(tmp_path / "model")


# ------------------------------------------------------------------------------------------------ anything at all

VALUES = st.one_of(
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.integers(-1, 5),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        [*ROLES, *ALIASES, "0-3", "h:1", "127.0.0.1:9000", "9000-9010", "static", "beacon", "spare", "a", "b"]
    ),
    st.lists(st.integers(), max_size=2),
)


def _document(draw_cluster: dict[str, object], nodes: list[dict[str, object]]) -> str:
    def value(one: object) -> str:
        if isinstance(one, str):
            return '"' + "".join(f"\\U{ord(c):08X}" for c in one) + '"'
        if isinstance(one, bool):
            return str(one).lower()
        return str(one)

    tables = [("[cluster]", draw_cluster), *(("[[nodes]]", node) for node in nodes)]
    return "\n".join(line for head, keys in tables for line in [head, *(f"{k} = {value(v)}" for k, v in keys.items())])


KEYS = {head: st.sampled_from([key.name for key in keys] + ["colour"]) for head, keys in TABLES.items()}


@given(
    st.dictionaries(KEYS["[cluster]"], VALUES, max_size=6),
    st.lists(st.dictionaries(KEYS["[[nodes]]"], VALUES, max_size=8), max_size=4),
)
def test_no_values_make_anything_but_a_config_or_its_mistakes(
    keys: dict[str, object], nodes: list[dict[str, object]]
) -> None:
    config, mistakes = check_text(_document(keys, nodes), source=SOURCE)
    assert (config is None) == bool(mistakes)
    for mistake in mistakes:
        assert mistake.mend and str(mistake).isprintable()


@given(st.text())
def test_no_text_makes_anything_but_a_config_or_a_config_error(text: str) -> None:
    try:
        parse_config(text, source=SOURCE)
    except ConfigError as error:
        assert "\n" not in str(error)
