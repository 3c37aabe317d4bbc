"""A second implementation of the data plane's bytes, written from the contract alone.

It shares no line with mlxcel_nb/wire and imports nothing from the package: where both read the contract in the same
way their bytes agree, and where one of them misread it the tests of this folder fail. Everything here is a function of
its arguments; sockets are in peer.py. Nothing refuses to make what the contract forbids: that is what it is for.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import lz4.block
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

MAGIC = b"MXNB"
VERSION = 5
CLIENT_HELLO, SERVER_HELLO, CLIENT_PROOF, VERDICT, REJECT = 1, 2, 3, 4, 5
BEACON = 16
CLOSE, PING, PONG, CONTROL, TENSOR, KV, STREAM, CREDIT, REKEY = range(9)
COUNTED = (TENSOR, KV, STREAM)
MIN_FRAME, MAX_FRAME = 21, (16 << 20) + (64 << 10)
MAX_BODY = 1024
SUITES: dict[int, type[AESGCM | ChaCha20Poly1305]] = {1: AESGCM, 2: ChaCha20Poly1305}


class Broken(Exception):
    """The other side did what the contract forbids."""


# ------------------------------------------------------------------------------------------------- primitives


def mac(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


def hkdf_expand(prk: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869, section 2.3, with SHA-256."""
    block, made, counter = b"", b"", 1
    while len(made) < length:
        block = mac(prk, block + info + bytes([counter]))
        made, counter = made + block, counter + 1
    return made[:length]


def hkdf(ikm: bytes, info: bytes, length: int = 32, salt: bytes = b"mlxcel-nb/5") -> bytes:
    return hkdf_expand(mac(salt, ikm), info, length)


def public_bytes(private: X25519PrivateKey) -> bytes:
    return private.public_key().public_bytes_raw()


def shared(private: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as all_zero:
        raise Broken("an x25519 key of low order") from all_zero


def str8(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return bytes([len(data)]) + data


@dataclass
class Fields:
    """Reads a body from its beginning; what is left over is an error."""

    data: bytes
    at: int = 0

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise Broken("a body is too short")
        self.at += size
        return self.data[self.at - size : self.at]

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def str8(self, least: int = 0, most: int = 255) -> str:
        try:
            text = self.take(self.integer(1)).decode()
        except UnicodeDecodeError as bad:
            raise Broken("a string is not UTF-8") from bad
        if not least <= len(text.encode()) <= most or any(ord(char) < 32 or 127 <= ord(char) < 160 for char in text):
            raise Broken(f"the string {text!r} is out of bounds")
        return text

    def end(self) -> None:
        if self.at != len(self.data):
            raise Broken("trailing bytes")


# -------------------------------------------------------------------------------------------------- handshake


def message(
    kind: int, body: bytes, *, magic: bytes = MAGIC, version: int = VERSION, length: int | None = None
) -> bytes:
    return magic + struct.pack(">HBH", version, kind, len(body) if length is None else length) + body


@dataclass(frozen=True)
class Hello:
    """Bodies of ClientHello and ServerHello. Text fields may be bytes too, so that they need not be UTF-8."""

    suite: int = 1
    transports: int = 1
    nonce: bytes = field(default_factory=lambda: os.urandom(32))
    x25519: bytes = bytes(32)
    incarnation: bytes = field(default_factory=lambda: os.urandom(16))
    cluster: str | bytes = "mlxcel"
    node_id: str | bytes = field(default_factory=lambda: f"ping-{os.urandom(4).hex()}")
    role: str | bytes = "router"
    data_addr: str | bytes = ""
    libs: str | bytes = ""

    def body(self) -> bytes:
        fixed = bytes([self.suite, self.transports]) + self.nonce + self.x25519 + self.incarnation
        return fixed + b"".join(map(str8, (self.cluster, self.node_id, self.role, self.data_addr, self.libs)))

    @classmethod
    def read(cls, body: bytes) -> Hello:
        take = Fields(body)
        hello = cls(
            take.integer(1),
            take.integer(1),
            take.take(32),
            take.take(32),
            take.take(16),
            take.str8(1, 128),
            take.str8(1, 128),
            take.str8(1, 32),
            take.str8(),
            take.str8(),
        )
        take.end()
        return hello

    def but(self, **changes: Any) -> Hello:
        return replace(self, **changes)


def proof_tag(secret: bytes, client_hello: bytes, server_hello: bytes) -> bytes:
    transcript = hashlib.sha256(client_hello + server_hello).digest()
    return mac(hkdf(secret, b"handshake auth"), b"client proof" + transcript)


def verdict_tag(secret: bytes, transcript: bytes, code: int, detail: bytes) -> bytes:
    signed = b"server verdict" + transcript + bytes([code]) + str8(detail)
    return mac(hkdf(secret, b"handshake auth"), signed)


# ----------------------------------------------------------------------------------------------------- frames


@dataclass
class Direction:
    """One direction's key, iv and number of the next frame."""

    suite: int
    key: bytes
    iv: bytes
    number: int = 0
    frames: int = 0
    rekeys: int = 0

    @classmethod
    def derive(cls, suite: int, prk: bytes, label: bytes) -> Direction:
        return cls(suite, hkdf_expand(prk, label + b" key", 32), hkdf_expand(prk, label + b" iv", 12))

    def nonce(self, number: int) -> bytes:
        return bytes(a ^ b for a, b in zip(self.iv, number.to_bytes(12, "big"), strict=True))

    def seal(self, kind: int, channel: int = 0, payload: bytes = b"", *, length: int | None = None) -> bytes:
        """The next frame whole; `length` overrides what its first four bytes say (and authenticate)."""
        plain = struct.pack(">BI", kind, channel) + payload
        return self.seal_plain(plain, length=length)

    def seal_plain(self, plain: bytes, *, length: int | None = None) -> bytes:
        head = struct.pack(">I", len(plain) + 16 if length is None else length)
        sealed = SUITES[self.suite](self.key).encrypt(self.nonce(self.number), plain, head)
        self.number += 1
        self.frames += 1
        return head + sealed

    def open(self, frame: bytes) -> tuple[int, int, bytes]:
        plain = SUITES[self.suite](self.key).decrypt(self.nonce(self.number), frame[4:], frame[:4])
        self.number += 1
        self.frames += 1
        kind, channel = struct.unpack(">BI", plain[:5])
        return kind, channel, plain[5:]

    def rekey(self) -> None:
        self.key, self.iv = hkdf_expand(self.key, b"rekey key", 32), hkdf_expand(self.key, b"rekey iv", 12)
        self.number = 0
        self.rekeys += 1


def connection_keys(
    suite: int, private: X25519PrivateKey, public: bytes, secret: bytes, transcript: bytes
) -> tuple[Direction, Direction]:
    """Client to server, then server to client."""
    prk = mac(transcript, shared(private, public) + secret)
    return Direction.derive(suite, prk, b"c2s"), Direction.derive(suite, prk, b"s2c")


# ---------------------------------------------------------------------------------------------------- tensors

ELEMENT_BYTES = {0: 4, 1: 2, 2: 2, 3: 4, 4: 2, 5: 1, 6: 1, 7: 4, 8: 1, 9: 8, 10: 2, 11: 8, 12: 8, 13: 8}
LZ4, QUANTISED, SHUFFLED = 1, 2, 4


def shuffle(data: bytes, size: int) -> bytes:
    return b"".join(data[first::size] for first in range(size))


def unshuffle(data: bytes, size: int) -> bytes:
    out, count = bytearray(len(data)), len(data) // size
    for first in range(size):
        out[first::size] = data[first * count : (first + 1) * count]
    return bytes(out)


def tensor(
    dtype: int,
    dims: tuple[int, ...],
    data: bytes,
    *,
    flags: int = 0,
    name: str | bytes = "0.0.0",
    version: int = 1,
    ndim: int | None = None,
    raw_length: int | None = None,
    bend: Callable[[bytes], bytes] = bytes,
) -> bytes:
    """A whole tensor; `data` is what is decoded in the end, and `bend` alters what travels."""
    raw = len(data) if raw_length is None else raw_length
    head = struct.pack(">BBBB", version, dtype, flags, len(dims) if ndim is None else ndim)
    head += b"".join(struct.pack(">I", dim) for dim in dims) + str8(name) + struct.pack(">Q", raw)
    if flags & SHUFFLED:
        data = shuffle(data, ELEMENT_BYTES.get(dtype, 1))
    if flags & LZ4:
        data = lz4.block.compress(data, store_size=False)
    return head + bend(data)


def read_tensor(payload: bytes) -> tuple[int, tuple[int, ...], str, bytes]:
    take = Fields(payload)
    version, dtype, flags, ndim = take.take(4)
    if version != 1 or dtype not in ELEMENT_BYTES or flags > 7 or flags & 5 == 4 or ndim > 8:
        raise Broken("a tensor's header")
    dims = tuple(take.integer(4) for _ in range(ndim))
    name, raw_length = take.str8(), take.integer(8)
    data = payload[take.at :]
    if flags & LZ4:
        data = lz4.block.decompress(data, uncompressed_size=raw_length)
    if flags & SHUFFLED:
        data = unshuffle(data, ELEMENT_BYTES[dtype])
    size = ELEMENT_BYTES[dtype]
    for dim in dims:
        size *= dim
    if len(data) != raw_length or (not flags & QUANTISED and size != raw_length):
        raise Broken(f"a tensor of {size} bytes says {raw_length} and has {len(data)}")
    return dtype, dims, name, data


def piece(tensor_id: int, offset: int, total: int, data: bytes) -> bytes:
    return struct.pack(">IQQ", tensor_id, offset, total) + data


def pieces(whole: bytes, size: int, tensor_id: int = 1) -> list[bytes]:
    return [piece(tensor_id, at, len(whole), whole[at : at + size]) for at in range(0, len(whole), size)]


# ------------------------------------------------------------------------------------------ beacons and sealing


def beacon(
    secret: bytes,
    *,
    time_ms: int,
    nonce: bytes,
    incarnation: bytes,
    cluster: str = "mlxcel",
    node_id: str = "node-a",
    role: str = "hybrid",
    addresses: tuple[str, ...] = (),
) -> bytes:
    data = MAGIC + struct.pack(">HBBQ", VERSION, BEACON, 0, time_ms) + nonce + incarnation
    data += str8(cluster) + str8(node_id) + str8(role) + bytes([len(addresses)]) + b"".join(map(str8, addresses))
    return data + mac(hkdf(secret, b"beacon"), data)


def read_beacon(secret: bytes, datagram: bytes) -> dict[str, Any]:
    data, tag = datagram[:-32], datagram[-32:]
    if not hmac.compare_digest(mac(hkdf(secret, b"beacon"), data), tag):
        raise Broken("a foreign beacon")
    take = Fields(data)
    if take.take(8) != MAGIC + struct.pack(">HBB", VERSION, BEACON, 0) or len(datagram) > 1200:
        raise Broken("no beacon of this version")
    read = {"time_ms": take.integer(8), "nonce": take.take(16), "incarnation": take.take(16)}
    read |= {"cluster": take.str8(1, 128), "node_id": take.str8(1, 128), "role": take.str8(1, 32)}
    read["addresses"] = tuple(take.str8() for _ in range(take.integer(1)))
    take.end()
    return read


def _sealing_key(z: bytes, mine: bytes, theirs: bytes, cluster: str) -> bytes:
    return hkdf(z, b"sealed secret" + mine + theirs + cluster.encode())


def seal_secret(secret: bytes, engine: bytes, *, cluster: str, node_id: str, private: X25519PrivateKey) -> bytes:
    own = public_bytes(private)
    key = _sealing_key(shared(private, engine), own, engine, cluster)
    return own + AESGCM(key).encrypt(bytes(12), secret, node_id.encode())


def open_secret(sealed: bytes, private: X25519PrivateKey, *, cluster: str, node_id: str) -> bytes:
    client = sealed[:32]
    key = _sealing_key(shared(private, client), client, public_bytes(private), cluster)
    return AESGCM(key).decrypt(bytes(12), sealed[32:], node_id.encode())


# ------------------------------------------------------------------------------------------------------- caches

KV_BEGIN, KV_LAYER, KV_PIECE, KV_END, KV_ACK, KV_REFUSE, KV_ABANDON = range(1, 8)
KV_WHOLE = (1 << 32) - 1
KV_PLAIN = 1


@dataclass(frozen=True)
class KVHead:
    """What leads every message of a transfer."""

    kind: int = KV_BEGIN
    layout: int = KV_PLAIN
    dtype: int = 0
    transfer: int = 1
    epoch: int = 7
    layer: int = KV_WHOLE
    heads: tuple[int, int] = (0, 2)
    tokens: tuple[int, int] = (0, 8)
    model: bytes = b"m" * 32
    request: str | bytes = "r-1"
    version: int = 1

    def but(self, **changes: Any) -> KVHead:
        return replace(self, **changes)

    def message(self, body: bytes = b"") -> bytes:
        fixed = (self.version, self.kind, self.layout, self.dtype, self.transfer, self.epoch, self.layer)
        return struct.pack(">BBBBIQIIIII", *fixed, *self.heads, *self.tokens) + self.model + str8(self.request) + body


def kv_begin_body(layers: tuple[int, ...], nbytes: int) -> bytes:
    return struct.pack(f">H{len(layers)}IQ", len(layers), *layers, nbytes)


def kv_layer_body(arrays: tuple[tuple[int, int, tuple[int, ...]], ...], scalars: bytes = b"\x80") -> bytes:
    """`arrays` are dtype, axis along which pieces are cut, and dims."""
    specs = (struct.pack(f">BBB{len(dims)}I", dtype, axis, len(dims), *dims) for dtype, axis, dims in arrays)
    return bytes([len(arrays)]) + b"".join(specs) + scalars


def kv_piece_body(array: int, begin: int, end: int, whole: bytes) -> bytes:
    return struct.pack(">BII", array, begin, end) + whole


def kv_counts(pieces: int, nbytes: int) -> bytes:
    return struct.pack(">IQ", pieces, nbytes)
