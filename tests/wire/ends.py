"""Both ends of a connection on a wire made of bytes, and the golden values they are held against."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxcel_nb.wire.frames import Opener, Sealer
from mlxcel_nb.wire.handshake import ClientHandshake, Established, Hello, Identity, ServerHandshake
from mlxcel_nb.wire.hello import MessageType
from mlxcel_nb.wire.keys import DirectionKeys

VECTORS = Path(__file__).parents[1] / "vectors"
GOLDEN: dict[str, Any] = json.loads((VECTORS / "wire.json").read_text())
TENSORS: list[dict[str, Any]] = json.loads((VECTORS / "tensors.json").read_text())

SECRET = bytes.fromhex(GOLDEN["secret"])
CLIENT = Identity(
    cluster="mlxcel", node_id="node-a", role="hybrid", incarnation=b"\xc2" * 16, data_addr="127.0.0.1:9000"
)
SERVER = Identity(cluster="mlxcel", node_id="node-b", role="pipeline_stage", incarnation=b"\x52" * 16)
CLIENT_RANDOM: dict[str, Any] = {"nonce": b"\xc1" * 32, "private_key": bytes.fromhex(GOLDEN["client_private"])}
SERVER_RANDOM: dict[str, Any] = {"nonce": b"\x51" * 32, "private_key": bytes.fromhex(GOLDEN["server_private"])}


def golden_ends(suite: int = 1) -> tuple[ClientHandshake, ServerHandshake]:
    """The two ends of the golden vectors: all that is random elsewhere is fixed."""
    return (
        ClientHandshake(replace(CLIENT, suite=suite), SECRET, **CLIENT_RANDOM),
        ServerHandshake(replace(SERVER, suite=suite), [SECRET], **SERVER_RANDOM),
    )


def shake(client: ClientHandshake, server: ServerHandshake, *, verdict: int = 0, detail: str = "") -> None:
    """Carry the messages of one handshake, whole, both ways."""
    server.receive_data(client.data_to_send())
    client.receive_data(server.data_to_send())
    server.receive_data(client.data_to_send())
    server.verdict(verdict, detail)
    client.receive_data(server.data_to_send())


def established(suite: int = 1) -> tuple[Established, Established]:
    """Client's and server's view of one accepted handshake."""
    client, server = golden_ends(suite)
    shake(client, server)
    assert client.established is not None and server.established is not None
    return client.established, server.established


def one_way(suite: int = 1, *, rekey_every: int | None = None) -> tuple[Sealer, Opener]:
    """The two ends of one direction."""
    keys = DirectionKeys(bytes(range(32)), bytes(range(12)))
    return Sealer(keys, suite, rekey_every=rekey_every), Opener(keys, suite)


GOOD = {
    name: bytes.fromhex(GOLDEN["suite_1"][name]) for name in ("ClientHello", "ServerHello", "ClientProof", "Verdict")
}


def header(version: int = 5, kind: int = 1, length: int = 0, magic: bytes = b"MXNB") -> bytes:
    return struct.pack("!4sHBH", magic, version, kind, length)


def server_after(*messages: bytes) -> ServerHandshake:
    server = ServerHandshake(SERVER, [SECRET], **SERVER_RANDOM)
    for data in messages:
        server.receive_data(data)
    server.data_to_send()
    return server


def client_after(*messages: bytes) -> ClientHandshake:
    client = ClientHandshake(CLIENT, SECRET, **CLIENT_RANDOM)
    for data in messages:
        client.receive_data(data)
    client.data_to_send()
    return client


def hello(**changes: object) -> Hello:
    return replace(Hello.decode(GOOD["ClientHello"][9:], "ClientHello"), **changes)  # type: ignore[arg-type]


def reject_in(data: bytes) -> tuple[int, str]:
    """Code and detail of the one Reject that `data` is."""
    assert data[:4] == b"MXNB" and data[6] == MessageType.REJECT
    assert len(data) == 9 + int.from_bytes(data[7:9], "big") == 9 + 2 + data[10]
    return data[9], data[11:].decode()
