"""Bare nodes as processes of this host: they meet, lose and find each other again, and refuse to start in vain."""

from __future__ import annotations

import fcntl
import functools
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.bare_nodes import WAIT_S, Start, free_ports, nodes, secret_file
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)  # each wait inside has a deadline of its own

SECRET = "a secret of the test, long enough"


@pytest.fixture
def start() -> Iterator[Start]:
    with nodes() as starter:
        yield starter


def two_stages(folder: Path, ports: list[int], *more: str) -> Path:
    stages = [
        f'[[nodes]]\nid = "{name}"\naddress = "127.0.0.1:{port}"\nrole = "pipeline"\nstage = {stage}\n'
        for stage, (name, port) in enumerate(zip("ab", ports, strict=True))
    ]
    head = ["[cluster]", 'name = "lab"', "pipeline_parallel_size = 2", 'secret_file = "secret"', *more]
    file = folder / "cluster.toml"
    file.write_text("\n".join([*head, *stages]))
    return file


def ping(address: str, secret: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "mlxcel_nb", "net", "ping", address, "--secret-file", str(secret), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S)


def test_nodes_of_one_file_see_each_other_die_and_come_back(start: Start, tmp_path: Path) -> None:
    ports = free_ports(2)
    file, secret = two_stages(tmp_path, ports), secret_file(tmp_path, value=SECRET)
    words = ["--cluster-config", str(file), "--node-id"]
    a, b = start(*words, "a"), start(*words, "b")
    assert a.listens() == f"127.0.0.1:{ports[0]}"
    first = a.out[0]
    assert re.search(r": node a, pipeline_stage, stage 0, rank 0, cluster lab, AES-256-GCM, .+, 1 peer$", first), first
    met = a.line("b is alive"), b.line("a is alive")
    pong = ping(f"127.0.0.1:{ports[0]}", secret, "--cluster", "lab", "--count", "1")
    assert pong.returncode == 0 and "a (pipeline_stage) of cluster lab" in pong.stdout, pong.stderr

    b.process.kill()
    lost = a.line("b is dead", after=met[0])
    b = start(*words, "b")
    a.line("b is back, as a new process", after=lost)
    b.line("a is alive")

    for node, signum in ((b, signal.SIGTERM), (a, signal.SIGINT)):
        assert node.stop(signum) == 0, node.said
        assert SECRET not in node.said and "Traceback" not in node.said, node.said


def test_flags_are_enough_for_a_simple_cluster(start: Start, tmp_path: Path) -> None:
    """One end knows only an address and learns the id; the list may hold the node itself."""
    ports, secret = free_ports(2), secret_file(tmp_path)
    common = ["--secret-file", str(secret), "--suite", "chacha20-poly1305", "--cluster", "simple"]
    peers = f"a=127.0.0.1:{ports[0]},b=127.0.0.1:{ports[1]}"
    a = start(*common, "--node-id", "a", "--node-role", "Prefill", "--peers", peers)
    b = start(
        *common,
        *("--node-id", "b", "--node-role", "decode", "--bind", f"127.0.0.1:{ports[1]}"),
        *("--peers", f"127.0.0.1:{ports[0]}"),
    )
    a.line("b is alive")
    b.line("a is alive")
    assert "node a, prefill, cluster simple, ChaCha20-Poly1305" in a.out[0]
    pong = ping(b.listens(), secret, "--cluster", "simple", "--suite", "chacha20-poly1305", "--count", "1")
    assert pong.returncode == 0, pong.stderr


def test_a_router_from_the_command_line_joins_the_nodes_of_a_file(start: Start, tmp_path: Path) -> None:
    file = two_stages(tmp_path, free_ports(2))
    secret_file(tmp_path)
    a = start("--cluster-config", str(file), "--node-id", "a")
    a.listens()
    router = start("--cluster-config", str(file), "--node-role", "router")
    router.line("a is alive")
    assert re.search(r"node router-[0-9a-f]{8}, router, cluster lab", router.out[0])


def test_a_port_is_taken_from_the_range(start: Start, tmp_path: Path) -> None:
    secret = secret_file(tmp_path)
    (first,) = free_ports(1)
    with socket.create_server(("127.0.0.1", first)):
        node = start(
            *("--node-id", "a", "--node-role", "decode", "--secret-file", str(secret)),
            *("--port-range", f"{first}-{first + 20}"),
        )
        assert first < int(node.listens().rpartition(":")[2]) <= first + 20


def test_a_busy_port_names_who_holds_it_and_nothing_is_half_started(start: Start, tmp_path: Path) -> None:
    """Case 52."""
    ports = free_ports(2)
    file = two_stages(tmp_path, ports)
    secret_file(tmp_path)
    with socket.create_server(("127.0.0.1", ports[0])):
        a = start("--cluster-config", str(file), "--node-id", "a")
        assert a.end() == 1
        assert len(a.err) == 1 and f"error: node a: port {ports[0]} in use by pid {os.getpid()}. " in a.err[0], a.said
        assert f"or give a another port in {file}, the same on every host." in a.err[0], a.said
        assert a.out == []


def test_nodes_with_other_secrets_say_so_on_both_ends_and_go_on(start: Start, tmp_path: Path) -> None:
    """Case 50: authentication failed, as distinct from offline; the right secret, or the older one, lets in."""
    ports = free_ports(2)
    file = two_stages(tmp_path, ports)
    secret_file(tmp_path)
    other = secret_file(tmp_path, "other", "another secret of the test")
    words = ["--cluster-config", str(file), "--node-id"]
    a = start(*words, "a")
    a.listens()
    b = start(*words, "b", "--secret-file", str(other))
    for node in (a, b):
        assert until(lambda: any("authentication failed" in line for line in node.err), WAIT_S), node.said  # noqa: B023
        assert "offline" not in node.err[-1] and "is alive" not in node.said  # "a" may have been up long before "b"
        assert len([line for line in node.err if "authentication failed with" in line]) <= 4, node.said
    assert b.stop() == 0
    b = start(*words, "b", "--secret-file", str(other), "--previous-secret-file", str(tmp_path / "secret"))
    a.line("b is alive")


def test_a_secret_is_changed_on_every_host_without_a_restart(start: Start, tmp_path: Path) -> None:
    """Case 50: the file is replaced and each node told, one after the other; then each is told once more."""
    ports = free_ports(2)
    file, secret = two_stages(tmp_path, ports), secret_file(tmp_path, value=SECRET)
    old = secret_file(tmp_path, "old", SECRET)
    words = ["--cluster-config", str(file), "--node-id"]
    a, b = start(*words, "a"), start(*words, "b")
    for node, other in ((a, "b"), (b, "a")):
        node.line(f"{other} is alive")
    address = f"127.0.0.1:{ports[0]}"
    secret_file(tmp_path, value="a newer secret of the test")
    for node in (a, b):
        node.process.send_signal(signal.SIGHUP)
        node.line("the cluster secret is a new one, and the one before is good until the next SIGHUP")
        for known in (old, secret):
            pong = ping(address, known, "--cluster", "lab", "--count", "1")
            assert pong.returncode == 0, pong.stderr
    assert "authentication failed" not in a.said + b.said
    for node in (a, b):
        node.process.send_signal(signal.SIGHUP)
        node.line("the cluster secret is the same, and no other is good")
    assert "authentication failed" in ping(address, old, "--cluster", "lab").stderr
    assert ping(address, secret, "--cluster", "lab", "--count", "1").returncode == 0
    assert "is dead" not in a.said + b.said, "connections that stand are not touched"
    file.write_text("what is no cluster file")
    a.process.send_signal(signal.SIGHUP)
    a.line("the cluster secret stays as it is: ")
    assert a.stop() == 0


@pytest.mark.parametrize("nohup", [False, True], ids=["", "nohup"])
def test_a_node_ends_with_its_terminal_unless_nohup_forbids_it(start: Start, tmp_path: Path, nohup: bool) -> None:
    secret = secret_file(tmp_path)
    ours, theirs = pty.openpty()

    def on_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        if nohup:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    popen = functools.partial(subprocess.Popen, preexec_fn=on_terminal)
    with os.fdopen(theirs):
        node = start("--node-id", "a", "--node-role", "decode", "--secret-file", str(secret), popen=popen)
        node.listens()
    node.process.send_signal(signal.SIGHUP)
    node.line("the cluster secret is the same")
    os.close(ours)
    if not nohup:
        assert node.end() == 0, node.said
        return

    def told_again() -> bool:
        node.process.send_signal(signal.SIGHUP)  # the first may have come together with the terminal's
        return node.said.count("the cluster secret is the same") > 1

    assert until(told_again, WAIT_S), node.said
    assert node.stop() == 0


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        ("", 0o600, "is empty"),
        ("short", 0o600, "has 5 bytes; at least 16 are needed"),
        (SECRET, 0o644, "may be read by others (mode 644)"),
        (None, 0, "does not exist"),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused_at_the_start(
    start: Start, tmp_path: Path, content: str | None, mode: int, says: str
) -> None:
    """Case 50."""
    file = two_stages(tmp_path, free_ports(2))
    if content is not None:
        secret_file(tmp_path, value=content).chmod(mode)
    a = start("--cluster-config", str(file), "--node-id", "a")
    assert a.end() == 1 and a.out == []
    assert len(a.err) == 1 and says in a.err[0], a.said


def test_a_hybrid_node_alone_reads_no_secret_and_every_other_needs_one(start: Start, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    file = tmp_path / "cluster.toml"
    file.write_text(
        f'[cluster]\nsecret_file = "nowhere"\n[[nodes]]\nid = "a"\naddress = "127.0.0.1:{port}"\nrole = "hybrid"\n'
    )
    nowhere = str(tmp_path / "nowhere")
    alone = start("--cluster-config", str(file), "--node-id", "a", MLXCEL_CLUSTER_SECRET_FILE=nowhere)
    assert "alone: no cluster secret is read" in alone.out[alone.line("listening on")]
    assert alone.stop(signal.SIGTERM) == 0, alone.said
    refused = [
        start("--node-id", "a", "--node-role", "decode"),
        start("--node-id", "a", "--node-role", "router"),
        start("--node-id", "a", "--peers", "b=127.0.0.1:9"),
        start("--cluster-config", str(file), "--node-role", "router"),
    ]
    for node in refused:
        assert node.end() == 1 and node.out == [], node.said
        assert len(node.err) == 1 and ("needs the cluster secret" in node.err[0] or "does not exist" in node.err[0])


def test_a_bad_file_is_refused_with_all_its_mistakes(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[cluster]\nnmae = "x"\n[[nodes]]\nid = ""\naddress = "h:1"\n')
    node = start("--cluster-config", str(file), "--node-id", "a")
    assert node.end() == 1 and node.out == []
    assert len(node.err) == 3 and "has 2 mistakes" in node.err[0], node.said
    missing = start("--cluster-config", str(tmp_path / "none.toml"), "--node-id", "a")
    assert missing.end() == 1 and "does not exist" in missing.said and len(missing.err) == 1


def test_a_peer_that_was_never_reached_is_said_to_be_unseen_once_a_reason(start: Start, tmp_path: Path) -> None:
    secret, (here, there) = secret_file(tmp_path), free_ports(2)
    a = start(
        *("--node-id", "a", "--secret-file", str(secret)),
        *("--peers", f"b=127.0.0.1:{here},127.0.0.1:{there}"),
    )
    a.line(f"b is unseen: host 127.0.0.1:{here} is offline: connection refused")
    a.line(f"127.0.0.1:{there} is unseen: host 127.0.0.1:{there} is offline: connection refused")
    b = start("--node-id", "b", "--secret-file", str(secret), "--bind", f"127.0.0.1:{here}")
    a.line("b is alive")
    assert (a.stop(), b.stop()) == (0, 0)
    assert sum("b is unseen" in line for line in a.out) == 1 and "loopback alone" not in a.said, a.said
