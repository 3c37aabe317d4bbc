"""Golden vectors, byte for byte. wire.json comes from an independent implementation; so does tensors.json."""

from __future__ import annotations

import pytest

from mlxcel_nb.wire import beacon, tensors
from mlxcel_nb.wire.frame_reader import FrameReader
from mlxcel_nb.wire.frames import Kind, Opener, Sealer
from mlxcel_nb.wire.handshake import State
from mlxcel_nb.wire.keys import auth_key, beacon_key
from mlxcel_nb.wire.sealed import SealedBox, seal_secret
from tests.wire.ends import GOLDEN, SECRET, TENSORS, established, golden_ends

SUITES = pytest.mark.parametrize("suite", [1, 2], ids=["aes-256-gcm", "chacha20-poly1305"])

CLIENT_FRAMES = [
    (Kind.PING, 1, b"12345678"),
    (Kind.CONTROL, 0, b"\x80"),
    (Kind.REKEY, 0, b""),
    (Kind.PING, 1, b"after re"),
]
SERVER_FRAMES = [(Kind.PONG, 1, b"12345678"), (Kind.CLOSE, 0, b"\x03bye")]


def test_long_term_keys() -> None:
    assert auth_key(SECRET).hex() == GOLDEN["K_auth"]
    assert beacon_key(SECRET).hex() == GOLDEN["K_beacon"]


@SUITES
def test_every_message_of_the_handshake(suite: int) -> None:
    golden = GOLDEN[f"suite_{suite}"]
    client, server = golden_ends(suite)

    def sent(data: bytes, name: str) -> bytes:
        assert data.hex() == golden[name]
        return data

    server.receive_data(sent(client.data_to_send(), "ClientHello"))
    client.receive_data(sent(server.data_to_send(), "ServerHello"))
    server.receive_data(sent(client.data_to_send(), "ClientProof"))
    server.verdict(0)
    client.receive_data(sent(server.data_to_send(), "Verdict"))
    assert client.state is server.state is State.ESTABLISHED


@SUITES
def test_keys_of_the_connection(suite: int) -> None:
    golden = GOLDEN[f"suite_{suite}"]
    client, server = established(suite)
    assert client.prk.hex() == server.prk.hex() == golden["PRK"]
    assert client.send == server.receive and client.receive == server.send
    assert (client.send.key.hex(), client.send.iv.hex()) == (golden["c2s_key"], golden["c2s_iv"])
    assert (server.send.key.hex(), server.send.iv.hex()) == (golden["s2c_key"], golden["s2c_iv"])


@SUITES
@pytest.mark.parametrize(("direction", "plain"), [("c2s", CLIENT_FRAMES), ("s2c", SERVER_FRAMES)])
def test_frames_with_a_rekey_among_them(suite: int, direction: str, plain: list[tuple[Kind, int, bytes]]) -> None:
    golden = GOLDEN[f"suite_{suite}"][f"frames_{direction}"]
    client, server = established(suite)
    sender, receiver = (client, server) if direction == "c2s" else (server, client)
    sealer = Sealer(sender.send, suite)
    assert [sealer.seal(*frame).hex() for frame in plain] == golden

    reader = FrameReader(Opener(receiver.receive, suite))
    reader.feed(bytes.fromhex("".join(golden)))
    opened = [(frame.kind, frame.channel, bytes(frame.payload)) for frame in reader.frames()]
    assert opened == [frame for frame in plain if frame[0] is not Kind.REKEY]


def test_beacon() -> None:
    datagram, key = bytes.fromhex(GOLDEN["beacon"]), beacon_key(SECRET)
    heard = beacon.decode(datagram, key)
    assert (heard.node_id, heard.role, heard.addresses) == ("node-a", "hybrid", ("10.0.0.1:9000",))
    assert beacon.encode(heard, key) == datagram


def test_sealed_secret() -> None:
    golden = GOLDEN["sealed"]
    message = bytes.fromhex(golden["message"])
    place = {"node_id": golden["node_id"], "cluster": golden["cluster"]}
    box = SealedBox(bytes.fromhex(golden["E_private"]))
    assert seal_secret(SECRET, box.public, private=bytes.fromhex(golden["C_private"]), **place) == message
    assert box.open(message, **place) == SECRET


@pytest.mark.parametrize("golden", TENSORS, ids=lambda golden: golden["what"])
def test_tensors(golden: dict) -> None:
    raw, whole = bytes.fromhex(golden["raw"]), bytes.fromhex(golden["bytes"])
    header, data = tensors.decode(memoryview(whole))
    assert bytes(data) == raw
    assert header == tensors.TensorHeader(
        golden["dtype"], tuple(golden["dims"]), golden["name"], len(raw), golden["flags"]
    )
    parts = tensors.encode(
        golden["dtype"],
        golden["dims"],
        golden["name"],
        raw,
        compress_lz4=bool(golden["flags"] & tensors.Flag.LZ4),
        shuffle=bool(golden["flags"] & tensors.Flag.SHUFFLED),
        quantised_data=bool(golden["flags"] & tensors.Flag.QUANTISED),
    )
    encoded = b"".join(map(bytes, parts))
    if golden["flags"] & tensors.Flag.LZ4:  # another release of LZ4 may find a shorter block
        again, data = tensors.decode(memoryview(encoded))
        assert (again, bytes(data)) == (header, raw)
    else:
        assert encoded == whole
