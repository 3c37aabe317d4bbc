"""`net test`: whom it tests with which secret, and what it refuses before it begins."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.secret import Secret, Secrets
from mlxcel_nb.cluster.shape import parse_link, parse_links
from mlxcel_nb.commands import nettest, parser, tree
from mlxcel_nb.commands.console import TerminalConsole
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.parser import UsageProblem, Where
from mlxcel_nb.commands.session import Held, Session
from mlxcel_nb.errors import ClusterError, ConfigError, SecretError
from tests.net.test_mesh import mesh

FILE = """
[cluster]
name = "lab"
{}
[[nodes]]
id = "a"
address = "10.0.0.1:9000"
[[nodes]]
id = "b"
address = "10.0.0.2:{}"
"""


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"one from a file of its own")
    path.chmod(0o600)
    return path


def file(folder: Path, cluster: str = 'secret_file = "secret"', port: int = 9000) -> str:
    (folder / "c.toml").write_text(FILE.format(cluster, port))
    return str(folder / "c.toml")


def given(line: str, where: Where = Where.SHELL) -> Any:
    return parser.parse(tree.build(where), parser.split(f"net test {line}"))


def context(*names: str) -> Context:
    session = Session()
    for name in names:
        node = SimpleNamespace(node_id="engine-0", address=Address("127.0.0.1", 1))
        secret = Secret(b"of the notebook's own")
        cluster = SimpleNamespace(name=name, secret=secret, nodes=[node], link=("5ms",), stop=lambda: None)
        session._held[name] = Held(cluster)
    return Context(TerminalConsole(io.StringIO(), io.StringIO()), session)


def test_a_notebook_tests_its_own_cluster_unless_a_file_is_given(key: Path, tmp_path: Path) -> None:
    whom = nettest._own(given("", Where.MAGIC), context("lab"))
    assert (whom.cluster, whom.secrets) == ("lab", Secrets(Secret(b"of the notebook's own")))
    assert whom.nodes == {"engine-0": [Address("127.0.0.1", 1)]}
    assert whom.shapes is not None and whom.shapes("engine-0") == parse_link("5ms"), "as the router's own links"
    with pytest.raises(ClusterError, match="cluster start"):
        nettest._own(given("", Where.MAGIC), context())
    with pytest.raises(UsageProblem, match="--config"):
        nettest._own(given(f"--secret-file {key}", Where.MAGIC), context("lab"))


def test_a_shell_needs_a_file() -> None:
    with pytest.raises(UsageProblem, match="--config"):
        given("")


def test_a_file_names_nodes_and_secrets_and_an_option_comes_first(key: Path, tmp_path: Path) -> None:
    whom = nettest._from_file(given(f"--config {file(tmp_path)}"))
    assert (whom.cluster, whom.secrets, whom.untold) == ("lab", Secrets(Secret(key.read_bytes())), ())
    assert whom.nodes == {"a": [Address("10.0.0.1", 9000)], "b": [Address("10.0.0.2", 9000)]}
    other = tmp_path / "other"
    other.write_bytes(b"a newer secret than that")
    other.chmod(0o600)
    line = f"--config {file(tmp_path)} --secret-file {other} --previous-secret-file {key}"
    assert nettest._from_file(given(line)).secrets == Secrets(Secret(other.read_bytes()), Secret(key.read_bytes()))


def test_ports_that_beacons_tell_are_listened_for(key: Path, tmp_path: Path) -> None:
    beacon = file(tmp_path, 'secret_file = "secret"\ndiscovery = "beacon"', port=0)
    whom = nettest._from_file(given(f"--config {beacon}"))
    assert whom.untold == ("b",) and whom.nodes["b"] == []
    with pytest.raises(ConfigError):
        nettest._from_file(given(f"--config {file(tmp_path, port=0)}"))


def test_without_a_secret_it_says_where_one_belongs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLXCEL_CLUSTER_SECRET_FILE", raising=False)
    monkeypatch.delenv("MLXCEL_CLUSTER_SECRET", raising=False)
    with pytest.raises(SecretError, match="secret_file in the cluster file"):
        nettest._from_file(given(f"--config {file(tmp_path, '')}"))


@pytest.mark.parametrize("much", ["--pings 1001", "--seconds 11"])
def test_more_than_a_node_would_do_is_refused_at_once(much: str, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match=r"at most 1000 pings and 10 seconds .*See: mlxcel-nb net test -h"):
        nettest.test(given(f"--config {file(tmp_path)} {much}"), context())


@pytest.mark.parametrize(("error", "status"), [({}, 0), ({"ab": "offline"}, 1)])
def test_a_pair_that_failed_is_exit_status_one(
    monkeypatch: pytest.MonkeyPatch, key: Path, tmp_path: Path, error: dict[str, str], status: int
) -> None:
    async def measured(nodes: Any, *_: Any, on_progress: Any, **__: Any) -> Any:
        on_progress(0, 2, "a to b")
        return mesh(2, **error)

    monkeypatch.setattr("mlxcel_nb.net.measuring.all_pairs.measure_mesh", measured)
    out = io.StringIO()
    asked = Context(TerminalConsole(out, io.StringIO()), context().session)
    assert nettest.test(given(f"--config {file(tmp_path)} --json"), asked) == status
    assert out.getvalue().startswith('{"cluster": "lab", "nodes": ["a", "b"]')


def test_a_cluster_s_own_shapes_and_losses_are_told() -> None:
    found = nettest._with_shapes(mesh(3), parse_links(["0-2:20ms,10Mbit"], ["a", "b", "c"]))
    assert {pair.source + pair.target: pair.shape for pair in found.pairs if pair.shape} == {
        "ac": "20 ms, 10 Mbit/s",
        "ca": "20 ms, 10 Mbit/s",
    }
    assert nettest._lost(found, {}) == []
    (line,) = nettest._lost(mesh(3, ab="offline", cb="offline"), {"a": "no sign of life for 6 s", "b": "was killed"})
    assert line.text.startswith("a counts as lost: no sign of life for 6 s. Its process answers again")
