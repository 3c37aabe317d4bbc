"""Bare nodes that find each other by beacons, and `net test` between them, on several hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import Host, hosts
from tests.launch.bare_nodes import Running, Start, nodes, secret_file

pytestmark = pytest.mark.timeout(240)  # each wait inside has a deadline of its own

COMMAND = [sys.executable, "-m", "mlxcel_nb"]


@pytest.fixture
def start() -> Iterator[Start]:
    with nodes() as starter:
        yield starter


def said(host: Host, *words: str) -> subprocess.CompletedProcess[str]:
    return host.run([*COMMAND, *words], timeout=120)


def test_nodes_started_with_nothing_but_a_name_and_a_secret_find_each_other(start: Start, tmp_path: Path) -> None:
    secret = str(secret_file(tmp_path))

    def node(host: Host, name: str) -> Running:
        words = ("--node-id", name, "--discover", "--secret-file", secret, "--bind", host.address)
        return start(*words, popen=host.popen)

    with hosts(2) as (alpha, beta):
        a, b = node(alpha, "a"), node(beta, "b")
        met = a.line("b is alive")
        b.line("a is alive")
        assert b.stop() == 0
        gone = a.line("b is dead", after=met)
        node(beta, "b").listens()  # another process, another port: its beacons tell
        a.line("b is back", after=gone)
        found = said(beta, "discover", "--secret-file", secret, "--json", "--seconds", "7")
        assert found.returncode == 0, found.stderr
        assert [each["node_id"] for each in json.loads(found.stdout)["nodes"]] == ["a", "b"]


FILE = """
[cluster]
name = "lab"
secret_file = "secret"
discovery = "{}"
"""

NODE = """
[[nodes]]
id = "{}"
address = "{}:{}"
role = "hybrid"
"""


def cluster_file(folder: Path, members: dict[str, str], *, port: int, discovery: str = "static") -> str:
    secret_file(folder)
    file = folder / "cluster.toml"
    file.write_text(FILE.format(discovery) + "".join(NODE.format(*each, port) for each in members.items()))
    return str(file)


def test_ports_that_only_beacons_tell_are_found_by_the_nodes_and_by_net_test(start: Start, tmp_path: Path) -> None:
    with hosts(2) as (alpha, beta):
        members = {"a": alpha.address, "b": beta.address}
        file = cluster_file(tmp_path, members, port=0, discovery="beacon")
        a = start("--config", file, "--node-id", "a", popen=alpha.popen)
        b = start("--config", file, "--node-id", "b", popen=beta.popen)
        a.line("b is alive")
        b.line("a is alive")
        tested = said(alpha, "net", "test", "--config", file, "--seconds", "0.1", "--pings", "3", "--json")
        assert tested.returncode == 0, tested.stderr
        pairs = json.loads(tested.stdout)["pairs"]
        assert [(each["from"], each["to"]) for each in pairs] == [("here", "a"), ("here", "b"), ("a", "b"), ("b", "a")]
        assert all(each["rtt_s"] > 0 and each["bytes_per_s"] > 0 and each["error"] is None for each in pairs)
        assert pairs[2]["addresses"] == [alpha.address, beta.address]


def test_net_test_names_the_slow_host_and_the_one_that_is_not_there(start: Start, tmp_path: Path) -> None:
    with hosts(3) as (alpha, beta, gamma):
        members = {"a": alpha.address, "b": beta.address, "c": gamma.address}
        file = cluster_file(tmp_path, members, port=9000)
        running = {
            name: start("--config", file, "--node-id", name, popen=host.popen)
            for name, host in zip("abc", (alpha, beta, gamma), strict=True)
        }
        for name, node in running.items():
            assert node.listens() == f"{members[name]}:9000"
        gamma.limit("3mbit")
        tested = said(alpha, "net", "test", "--config", file)
        assert tested.returncode == 0, tested.stderr
        assert "Bandwidth, from each row to each column" in tested.stdout
        warned = [line.partition(":")[0].split() for line in tested.stdout.splitlines() if line.startswith("! ")]
        assert any("c" in names for names in warned), tested.stdout  # on a busy machine there may be others
        gamma.limit(None)
        running["b"].stop()
        tested = said(alpha, "net", "test", "--config", file, "--seconds", "0.1", "--pings", "3")
        assert tested.returncode == 1
        assert "✕ connection refused" in tested.stdout
        offline = (
            f"b cannot be asked: host {members['b']}:9000 is offline: connection refused. Check that the node runs"
        )
        assert offline in tested.stdout, "with the mend that `net ping` has for it"
        stranger = secret_file(tmp_path, "other", "another secret of another cluster")
        refused = said(alpha, "net", "test", "--config", file, "--secret-file", str(stranger))
        assert refused.returncode == 1 and "does not accept this side's secret" in refused.stdout
