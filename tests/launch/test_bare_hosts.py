"""Bare nodes on several hosts: from one cluster file by name, cut off and back, and names that lead astray."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import Host, hosts
from tests.launch.bare_nodes import WAIT_S, Running, Start, nodes, secret_file
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)  # each wait inside has a deadline of its own

FILE = """
[cluster]
name = "lab"
tensor_parallel_size = 2
secret_file = "secret"
[[nodes]]
id = "a"
address = "{}:9000"
role = "tp"
rank = 0
[[nodes]]
id = "b"
address = "{}:9000"
role = "tp"
rank = 1
"""


@pytest.fixture
def start() -> Iterator[Start]:
    with nodes() as starter:
        yield starter


def cluster_file(folder: Path, a: str, b: str) -> Path:
    secret_file(folder)
    file = folder / "cluster.toml"
    file.write_text(FILE.format(a, b))
    return file


def test_nodes_on_two_hosts_meet_by_name_are_cut_off_and_come_back(start: Start, tmp_path: Path) -> None:
    file = cluster_file(tmp_path, "alpha", "beta")
    with hosts(2) as (alpha, beta):
        known = {"alpha": alpha.address, "beta": beta.address}
        for host in (alpha, beta):
            host.resolver(None, known)
        a = start("--cluster-config", str(file), "--node-id", "a", popen=alpha.popen)
        b = start("--cluster-config", str(file), "--node-id", "b", popen=beta.popen)
        assert a.listens() == f"{alpha.address}:9000"
        met = [node.line(f"{other} is alive") for node, other in ((a, "b"), (b, "a"))]
        beta.cut()
        for node, other, before in ((a, "b", met[0]), (b, "a", met[1])):
            suspect = node.line(f"{other} is suspect: ", after=before)
            node.line(f"{other} is dead: ", after=suspect)
        beta.mend()
        a.line("b is back", after=met[0])
        b.line("a is back", after=met[1])
        assert "as a new process" not in a.said + b.said
        assert (a.stop(), b.stop(signal.SIGTERM)) == (0, 0), a.said + b.said


def test_names_that_lead_astray_are_refused(start: Start, tmp_path: Path) -> None:
    """Case 46."""
    file = cluster_file(tmp_path, "alpha", "beta")
    with hosts(2) as (alpha, beta):
        alpha.resolver(None, {"alpha": "127.0.1.1", "beta": beta.address})
        beta.resolver(None, {"alpha": alpha.address})
        words = ["--cluster-config", str(file), "--node-id"]

        def refused(node: Running, *says: str) -> None:
            assert node.end() == 1 and node.out == [], node.said
            assert all(text in node.said for text in says) and "Traceback" not in node.said, node.said

        refused(start(*words, "a", popen=alpha.popen), "node a: the name alpha leads to 127.0.1.1", "/etc/hosts")
        refused(start(*words, "b", popen=beta.popen), "node b: its name beta is not known on this host")
        alpha.resolver(None, {"alpha": alpha.address, "beta": "127.0.1.1"})
        refused(start(*words, "a", popen=alpha.popen), "node b: the name beta leads to 127.0.1.1")
        beta.resolver(None, {"alpha": alpha.address, "beta": beta.address})
        refused(
            start(*words, "a", popen=beta.popen),
            f"node a: alpha ({alpha.address}) is not an address of this host",
            beta.address,
        )


def test_a_node_is_let_in_from_its_own_address_alone(start: Start, tmp_path: Path) -> None:
    """Whoever knows the secret is still not another node from elsewhere."""

    def flags(host: Host) -> list[str]:
        return ["--secret-file", str(tmp_path / "secret"), "--bind", f"{host.address}:9000"]

    secret_file(tmp_path)
    with hosts(3) as (alpha, beta, gamma):
        role = ("--node-role", "decode")
        a = start(*flags(alpha), *role, "--node-id", "a", "--peers", f"b={beta.address}:9000", popen=alpha.popen)
        a.listens()
        impostor = start(
            *flags(gamma), *role, "--node-id", "b", "--peers", f"a={alpha.address}:9000", popen=gamma.popen
        )
        impostor.listens()
        b = start(*flags(beta), *role, "--node-id", "b", "--peers", f"a={alpha.address}:9000", popen=beta.popen)
        b.line("a is alive")
        a.line("b is alive")
        assert "a is alive" not in impostor.said, impostor.said
        refusal = f"b is configured at {beta.address}, not at"
        assert until(lambda: any(refusal in line for line in impostor.err), WAIT_S), impostor.said
        assert sum(refusal in line for line in impostor.err) == 1, impostor.said


def test_nodes_at_addresses_of_different_networks_meet(start: Start, tmp_path: Path) -> None:
    """Each comes from its own address in the file, where the system would choose the one of the shared network."""
    with hosts(2, links=("eth0", "eth1")) as (alpha, beta):
        file = cluster_file(tmp_path, alpha.addresses["eth0"], beta.addresses["eth1"])
        a = start("--cluster-config", str(file), "--node-id", "a", popen=alpha.popen)
        b = start("--cluster-config", str(file), "--node-id", "b", popen=beta.popen)
        a.line("b is alive")
        b.line("a is alive")
        assert (a.stop(), b.stop()) == (0, 0), a.said + b.said
        assert "refused" not in a.said + b.said


def test_nodes_meet_over_link_local_addresses(start: Start, tmp_path: Path) -> None:
    """Told by the file as well as by flags; what they print has the interface too."""
    with hosts(2) as (alpha, beta):
        at, peer = f"[{alpha.link_local}%eth0]:9000", f"[{beta.link_local}%eth0]:9000"
        file = cluster_file(tmp_path, f"[{alpha.link_local}%eth0]", f"[{beta.link_local}%eth0]")
        a = start("--cluster-config", str(file), "--node-id", "a", popen=alpha.popen)
        assert a.listens() == at, a.said
        flags = ("--secret-file", str(tmp_path / "secret"), "--cluster", "lab", "--node-role", "tp")
        b = start(*flags, "--node-id", "b", "--bind", peer, "--peers", f"a={at}", "--discover", popen=beta.popen)
        assert b.listens() == peer, b.said
        a.line("b is alive")
        b.line("a is alive")
        words = ["net", "ping", at, "--cluster", "lab", "--count", "1", "--secret-file", str(tmp_path / "secret")]
        said = beta.run([sys.executable, "-m", "mlxcel_nb", *words])
        assert f" at {at}, listens on {at}" in said.stdout, said
        assert (a.stop(), b.stop()) == (0, 0), a.said + b.said
        for bind, says in (
            (f"[{alpha.link_local}]:9000", f"node c: {alpha.link_local} is link-local and lacks its interface. Write"),
            (f"[{alpha.link_local}%tb9]:9000", "node c: this host has no interface tb9"),
        ):
            c = start(*flags, "--node-id", "c", "--bind", bind, "--peers", peer, popen=alpha.popen)
            assert c.end() == 1 and says in c.said, c.said
            listen = ["net", "listen", "--bind", bind, "--secret-file", str(tmp_path / "secret")]
            refused = alpha.run([sys.executable, "-m", "mlxcel_nb", *listen])
            assert refused.returncode == 1 and "error: cannot listen on " in refused.stderr, refused
            assert "interface" in refused.stderr, refused
