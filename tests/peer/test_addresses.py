"""Further addresses of a process: announced on an established connection, and then good for more connections."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import msgpack
import pytest

from tests.hosts import hosts
from tests.peer import codec, ends
from tests.peer.ends import SECRET, START_S
from tests.peer.peer import Peer, Refused


def from_elsewhere(address: tuple[str, int], incarnation: bytes) -> Peer:
    sock = socket.create_connection(address, source_address=("127.0.0.2", 0))
    return Peer(sock, SECRET, node_id="two-legged", incarnation=incarnation)


def test_a_member_may_come_from_an_address_it_announced(files: dict[str, str]) -> None:
    arguments = ("node", "--node-id", "n", "--secret-file", files["secret"], "--bind", "127.0.0.1:0")
    with ends.command(*arguments) as running:
        found = running.wait_for(r"(127\.0\.0\.1):(\d+)")
        address, incarnation = (found[1], int(found[2])), os.urandom(16)
        with Peer.dial(address, SECRET, node_id="two-legged", incarnation=incarnation) as first:
            first.be_client()
            with from_elsewhere(address, incarnation) as second, pytest.raises(Refused) as refused:
                second.be_client()
            assert refused.value.code == 2
            told = {"type": "addresses", "addresses": ["127.0.0.2", "no address", 7]}
            first.send(codec.CONTROL, 0, msgpack.packb(told))
            first.ping()
            first.pong()
            with from_elsewhere(address, incarnation) as second:
                second.be_client().ping()
                second.pong()


def test_a_node_tells_its_peers_the_addresses_of_its_host(files: dict[str, str]) -> None:
    """With every heartbeat: a node may have connected before it knew its interfaces, and cables are plugged later."""
    with (
        hosts(2, links=("eth0", "tb0")) as (here, there),
        there.inside(),
        socket.create_server((there.address, 0)) as server,
    ):
        server.settimeout(START_S)
        process = here.popen(
            [sys.executable, "-m", "mlxcel_nb", "node", "--node-id", "n", "--secret-file", files["secret"],
             "--bind", f"{here.address}:0", "--peers", f"p={there.address}:{server.getsockname()[1]}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        with ends.accept(server, node_id="p", role="hybrid") as peer:
            for frame in peer.be_server().frames():
                message = msgpack.unpackb(frame.payload) if frame.kind == codec.CONTROL else {}
                if message.get("type") == "addresses":
                    break
            told = set(message["addresses"])
            assert {*here.addresses.values(), *here.addresses6.values()} <= told
            assert not any(address.startswith(("127.", "fe80", "::1")) for address in told)
            peer.farewell("thank you")
        process.terminate()
        process.wait(START_S)
