"""Case 66: another user of the same computer does not use a server that has no key."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.serve import neighbours
from mlxcel_nb.serve.neighbours import NOBODY, Address, asked_of_kernel, is_stranger, read_from_tables, user_of
from mlxcel_nb.serve.served import Served
from mlxcel_nb.serve.server import ApiServer

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     7        0 1 1 0 100 0 0 10 0
   1: 0100007F:1F40 0100007F:C001 01 00000000:00000000 00:00000000 00000000     7        0 2 1 0 20 4 30 10 -1
   2: 0100007F:C001 0100007F:1F40 01 00000000:00000000 00:00000000 00000000  1234        0 3 1 0 20 4 30 10 -1
   3: 0100007F:C004 0100007F:1F40 06 00000000:00000000 03:00001518 00000000     0        0 0 3 0
"""
TABLE6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid
   0: 00000000000000000000000001000000:C002 00000000000000000000000001000000:1F40 01 00000000:00000000 00:00000000 00000000  1235        0 4
   1: 0000000000000000FFFF00000100007F:C003 0000000000000000FFFF00000100007F:1F40 01 00000000:00000000 00:00000000 00000000  1236        0 4
broken
"""  # noqa: E501

little = pytest.mark.skipif(sys.byteorder != "little", reason="the tables above are of a little-endian machine")
linux = pytest.mark.skipif(sys.platform != "linux", reason="no other system tells whose a socket is")


@little
@pytest.mark.parametrize(
    ("host", "port", "user"),
    [
        ("127.0.0.1", 0xC001, 1234),
        ("::1", 0xC002, 1235),
        ("127.0.0.1", 0xC003, 1236),
        ("127.0.0.1", 0xC004, NOBODY),
        ("127.0.0.1", 0xC005, None),
    ],
)
def test_the_tables_of_the_system_say_whose_a_socket_is(tmp_path: Path, host: str, port: int, user: int | None) -> None:
    tables = [tmp_path / "tcp", tmp_path / "absent", tmp_path / "tcp6"]
    tables[0].write_text(TABLE)
    tables[2].write_text(TABLE6)
    assert read_from_tables((host, port), (host, 8000), tables) == user


@linux
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("way", [asked_of_kernel, read_from_tables, user_of])
def test_our_own_connections_are_ours(way: Callable[[Address, Address], int | None], host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as ours,
    ):
        peer, here = ours.getsockname()[:2], ours.getpeername()[:2]
        assert way(peer, here) == os.getuid()


@linux
@pytest.mark.parametrize("way", [asked_of_kernel, read_from_tables])
def test_who_has_hung_up_is_nobody(way: Callable[[Address, Address], int | None]) -> None:
    """The kernel calls the owner of what is left of a socket root, whoever it was."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as ours:
            peer, here = ours.getsockname(), ours.getpeername()
        assert way(peer, here) == NOBODY
        assert is_stranger(NOBODY)


@linux
def test_where_the_kernel_does_not_answer_the_tables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> int:
        raise OSError("not permitted")

    monkeypatch.setattr(neighbours, "asked_of_kernel", refuses)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        assert user_of(ours.getsockname(), ours.getpeername()) == os.getuid()


def test_root_and_whoever_is_not_known_are_no_strangers() -> None:
    assert not is_stranger(None) and not is_stranger(0) and not is_stranger(os.getuid())
    assert is_stranger(os.getuid() + 1)


@linux
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else for the time of a test")
def test_another_user_is_turned_away_unless_there_is_a_key() -> None:
    key = "k" * 32

    def asked(server: ApiServer) -> str:
        command = ["curl", "-sS", "-H", f"authorization: Bearer {key}", f"{server.url}/v1/models"]
        ran = subprocess.run(command, user=65534, group=65534, capture_output=True, text=True, timeout=60, cwd="/")
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    with ApiServer(Served(names=["m"]), port=0) as server:
        assert json.loads(asked(server))["error"]["code"] == "other_user"
    with ApiServer(Served(names=["m"]), port=0, key=Secret(key.encode())) as server:
        assert json.loads(asked(server))["data"][0]["id"] == "m"
