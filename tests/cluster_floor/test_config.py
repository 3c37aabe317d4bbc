"""The cluster file: what good ones mean, and that every mistake is named at once, with the line and the mend."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.config import ClusterConfig, check_text, load_config, parse_config
from mlxcel_nb.cluster.config_keys import TABLES
from mlxcel_nb.cluster.roles import ALIASES, ROLES, parse_role
from mlxcel_nb.errors import ConfigError
from tests.cluster_floor.config_files import MISTAKES, STAGES, A, cluster, mesh, node

SOURCE = "lab/cluster.toml"


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
        address = "mac3:9000"
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
    assert all(entry.address.is_loopback for entry in config.nodes)


@pytest.mark.parametrize(("text", "role"), [(text.upper(), role) for text, role in ALIASES.items()])
def test_roles_have_short_names(text: str, role: str) -> None:
    assert parse_role(text) == parse_role(f" {text.replace('_', '-')}") == role
    assert good(cluster(node("a", "h:1"))).nodes[0].role in ROLES


def test_the_router_is_for_the_command_line() -> None:
    assert parse_role("Router", router=True) == "router"
    with pytest.raises(ConfigError, match="belongs on a command line, not into a file"):
        parse_role("router")


# ------------------------------------------------------------------------------------------------ one mistake


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


def told(text: str) -> str:
    """The first line of the error."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text, source=SOURCE)
    return caught.value.lines()[0]


def test_what_can_be_judged_beside_a_mistake_is_and_else_more_may_show() -> None:
    """Layers of stages that have them, prefill without decode, whatever else is wrong; ports wait for `discovery`."""
    three = cluster(
        *(
            node(f"s{stage}", f"h{stage}:9000", role="pipeline", stage=stage, **layers)
            for stage, layers in enumerate([{"layers": "0-9"}, {"layers": "12-19"}, {}])
        ),
        pipeline_parallel_size=3,
    )
    gap, silent = sorted(wrong(three), key=lambda line: "is missing" in line)
    assert "node s1: layers 12-19 of stage 1 leave a gap" in gap and "node s2: layers is missing" in silent
    assert told(three).endswith("has 2 mistakes. More may show when these are mended:")
    roles = cluster(node("p", "h1:1", role="prefill"), node("s", "h2:1", role="pipeline", stage=0))
    assert len(wrong(roles)) == 2 and any("but no decode node" in line for line in wrong(roles))
    sizes = cluster(node("p", "h1:1", role="prefill"), pipeline_parallel_size="2")
    assert len(wrong(sizes)) == 2 and any("but no decode node" in line for line in wrong(sizes))
    ports = cluster(node("a", "h1"), discovery="broadcast")
    assert told(ports).endswith("More may show then.")
    both = cluster(node("a", "h:1"), model="", transport="udp")
    assert told(both).endswith("has 2 mistakes")


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
    with pytest.raises(ConfigError, match=r"lists no node 'c'\. It lists a"):
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
    with contextlib.suppress(ConfigError):
        parse_config(text, source=SOURCE)
