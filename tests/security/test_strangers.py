"""Whoever is no member, on this machine or on its network, gets nothing from a running cluster and breaks nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.secret import Secret, random_secret
from mlxcel_nb.errors import AuthenticationFailed, ClusterMismatch
from mlxcel_nb.launch import controller
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.wire.handshake import ClientHandshake
from tests.net.helpers import identity, run
from tests.security.canaries import Canary, found_in
from tests.tiny import make_tiny
from tests.waiting import until

pytestmark = pytest.mark.cluster

SECRET = Canary("cluster secret", b"canary-secret-of-a-running-cluster")
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
NAME = "quiet-cluster"
REJECT = b"MXNB\x00\x05\x05"
NOBODY = 65534


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLXCEL_NB_LOG", "DEBUG")
        patch.chdir(tmp_path_factory.mktemp("beside-the-notebook"))
        for name in ("mlx", "tokenizers", "secrets"):
            Path(f"{name}.py").write_text("raise SystemExit('a file of the user stood in for a library')")
        with Cluster(2, name=NAME, secret=Secret(SECRET.value)) as made:
            made.load(str(make_tiny(tmp_path_factory.mktemp("model") / "tiny")), pp=2)
            yield made


@pytest.fixture(autouse=True)
def still_works(cluster: Cluster) -> Iterator[None]:
    """Every test ends with the answer it began with."""
    before = cluster.generate("hello", PARAMS).token_ids
    yield
    assert cluster.generate("hello", PARAMS).token_ids == before
    assert all(node.state == "alive" for node in cluster.status().nodes)


def folder(cluster: Cluster) -> Path:
    assert cluster._launcher is not None and cluster._launcher.folder is not None
    return cluster._launcher.folder


def log_of(cluster: Cluster, node_id: str) -> str:
    return (folder(cluster) / "logs" / f"{node_id}.log").read_text()


def reply_to(address: Address, said: bytes) -> bytes:
    """What a node answers to `said` before it closes."""
    with socket.create_connection((address.host, address.port), timeout=10) as sock:
        sock.settimeout(10)
        heard = b""
        with contextlib.suppress(ConnectionError):
            sock.sendall(said)
            with contextlib.suppress(OSError):  # "not connected": refused already, and a refusal may still be read
                sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(65536):
                heard += piece
        return heard


def tls_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


STRANGE = {
    "HTTP": b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": tls_hello(),
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
    "random bytes": bytes(range(256)) * 16,
    "a frame": (1 << 24).to_bytes(4, "big") + bytes(1000),
    "half a hello": b"MXNB\x00\x05\x01\x00\xc8" + bytes(50),
    "a hello of zeros": b"MXNB\x00\x05\x01\x00\xc8" + bytes(200),
    "another version": b"MXNB\x00\x04\x01\x00\x00",
    "a verdict": b"MXNB\x00\x05\x04\x00\x22\x00\x00" + bytes(32),
    "a pickle": b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
    "nothing": b"",
}


@pytest.mark.parametrize("said", STRANGE.values(), ids=STRANGE)
def test_a_stranger_hears_nothing_or_a_bare_refusal(cluster: Cluster, said: bytes) -> None:
    for node in cluster.nodes:
        heard = reply_to(node.address, said)
        assert heard == b"" or heard.startswith(REJECT)
        assert len(heard) < 32
        assert not [word for word in (NAME.encode(), b"engine", SECRET.value) if word in heard]


def test_a_wrong_secret_is_a_line_in_the_log_without_either_secret(cluster: Cluster) -> None:
    wrong = Canary("wrong secret", b"canary-of-a-wrong-secret")
    node = cluster.nodes[0]
    with pytest.raises(AuthenticationFailed) as caught:
        run(dial(identity("engine-9", cluster=NAME), Secret(wrong.value), node.address))
    assert until(lambda: "authentication failed with host 127.0.0.1" in log_of(cluster, node.node_id))
    assert "does not speak this protocol" in log_of(cluster, node.node_id)
    said = str(caught.value) + log_of(cluster, node.node_id)
    assert found_in([SECRET, wrong], said.encode()) == []


def test_a_wrong_cluster_name_does_not_give_the_right_one_away(cluster: Cluster) -> None:
    hello = ClientHandshake(identity("engine-9", cluster="another"), random_secret()).data_to_send()
    heard = reply_to(cluster.nodes[0].address, hello)
    assert heard.startswith(REJECT) and NAME.encode() not in heard
    with pytest.raises(ClusterMismatch) as caught:
        run(dial(identity("engine-9", cluster="another"), random_secret(), cluster.nodes[0].address))
    assert NAME not in str(caught.value)


def test_a_proof_by_guessing_ends_in_a_refusal(cluster: Cluster) -> None:
    """By hand, so that it is the node that refuses: a client of ours would have given up by itself."""
    hello = ClientHandshake(identity("engine-9", cluster=NAME), random_secret()).data_to_send()
    heard = reply_to(cluster.nodes[0].address, hello + b"MXNB\x00\x05\x03\x00\x20" + bytes(32))
    assert heard.endswith(REJECT + b"\x00\x02\x06\x00")
    assert found_in([SECRET], heard) == []


def test_a_hundred_silent_connections_keep_nobody_out(cluster: Cluster) -> None:
    with contextlib.ExitStack() as stack:
        for node in cluster.nodes:
            for _ in range(100):
                stack.enter_context(socket.create_connection((node.address.host, node.address.port), timeout=10))
        assert cluster.generate("hello", PARAMS).finish_reason == "length"
        cluster._running().ask("engine-0", {"type": "status"})


def test_the_log_holds_no_key_and_no_secret(cluster: Cluster) -> None:
    for log in (folder(cluster) / "logs").iterdir():
        assert found_in([SECRET], log.read_bytes()) == []


def test_every_folder_above_a_socket_is_closed_to_others(cluster: Cluster) -> None:
    private = folder(cluster)
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    for parent in private.parents:
        info = parent.stat()
        assert not info.st_mode & 0o022 or info.st_mode & stat.S_ISVTX, f"others may replace what lies in {parent}"
        assert info.st_uid in {0, os.getuid()}


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can look as somebody else")
def test_another_user_can_open_neither_files_nor_sockets(cluster: Cluster) -> None:
    private = folder(cluster)
    sockets = [path for path in private.iterdir() if path.is_socket()]
    assert len(sockets) >= 10
    for path in [*sockets, controller.client_file(private), controller.engine_file(private)]:
        ran = subprocess.run(["/bin/cat", path], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True)
        assert (ran.returncode, ran.stdout) == (1, b"")
        assert b"Permission denied" in ran.stderr, path
    for node in cluster.nodes:
        ran = subprocess.run(["/bin/cat", f"/proc/{node.pid}/environ"], user=NOBODY, group=NOBODY, capture_output=True)
        assert ran.stdout == b"" or sys.platform != "linux"


def test_the_users_folder_is_the_last_place_an_engine_imports_from(cluster: Cluster) -> None:
    """The files beside the notebook that bear the names of libraries, above, would have ended the engines."""

    def path() -> list[str]:
        import sys

        return sys.path

    assert [found.index("") == len(found) - 1 for found in cluster.client[:].apply_sync(path)] == [True, True]
