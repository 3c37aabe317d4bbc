"""The second implementation against the golden vectors, so that it is right before it judges another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from tests.peer import codec
from tests.peer.codec import Direction, Hello

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "wire.json").read_text())
SECRET = bytes.fromhex(VECTORS["secret"])


def private(name: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(VECTORS[name]))


def test_the_peer_shares_no_code_with_the_package() -> None:
    for path in Path(__file__).parent.glob("*.py"):
        if path.name in {"codec.py", "peer.py"}:
            assert "import mlxcel_nb" not in path.read_text() and "from mlxcel_nb" not in path.read_text()


def test_long_term_keys() -> None:
    assert codec.hkdf(SECRET, b"handshake auth").hex() == VECTORS["K_auth"]
    assert codec.hkdf(SECRET, b"beacon").hex() == VECTORS["K_beacon"]


@pytest.mark.parametrize("suite", [1, 2])
def test_handshake_keys_and_frames(suite: int) -> None:
    golden = VECTORS[f"suite_{suite}"]
    hellos = [bytes.fromhex(golden[name]) for name in ("ClientHello", "ServerHello")]
    for kind, (data, owner) in enumerate(zip(hellos, ("client_private", "server_private"), strict=True), start=1):
        hello = Hello.read(data[9:])
        assert codec.message(kind, hello.body()) == data and hello.suite == suite
        assert hello.x25519 == codec.public_bytes(private(owner))
    assert hashlib.sha256(b"".join(hellos)).hexdigest() == golden["T1"]
    proof = codec.message(3, codec.proof_tag(SECRET, *hellos))
    assert proof.hex() == golden["ClientProof"]
    transcript = hashlib.sha256(b"".join(hellos) + proof).digest()
    assert transcript.hex() == golden["T2"]
    assert codec.message(4, bytes(2) + codec.verdict_tag(SECRET, transcript, 0, b"")).hex() == golden["Verdict"]
    server = codec.public_bytes(private("server_private"))
    for keys, name in zip(
        codec.connection_keys(suite, private("client_private"), server, SECRET, transcript), ("c2s", "s2c"), strict=True
    ):
        assert (keys.key.hex(), keys.iv.hex()) == (golden[f"{name}_key"], golden[f"{name}_iv"])
        remade = Direction(suite, keys.key, keys.iv)
        for frame in map(bytes.fromhex, golden[f"frames_{name}"]):
            kind, channel, payload = keys.open(frame)
            assert remade.seal(kind, channel, payload) == frame
            if kind == codec.REKEY:
                keys.rekey()
                remade.rekey()
    assert keys.frames == 2


def test_beacon_and_sealed_secret() -> None:
    golden = bytes.fromhex(VECTORS["beacon"])
    read = codec.read_beacon(SECRET, golden)
    assert codec.beacon(SECRET, **read) == golden
    sealed = VECTORS["sealed"]
    place = {"cluster": sealed["cluster"], "node_id": sealed["node_id"]}
    engine, client = (X25519PrivateKey.from_private_bytes(bytes.fromhex(sealed[f"{x}_private"])) for x in "EC")
    made = codec.seal_secret(SECRET, codec.public_bytes(engine), private=client, **place)
    assert made.hex() == sealed["message"]
    assert codec.open_secret(made, engine, **place) == SECRET


@pytest.mark.parametrize("flags", [0, codec.LZ4, codec.LZ4 | codec.SHUFFLED])
def test_tensors(flags: int) -> None:
    data = bytes(range(64)) * 4
    whole = codec.tensor(0, (8, 8), data, flags=flags, name="1.2.3")
    assert codec.read_tensor(whole) == (0, (8, 8), "1.2.3", data)
    assert b"".join(part[20:] for part in codec.pieces(whole, 100)) == whole
