"""The handshake's messages as bytes: the fixed header, the two hellos, and the texts of rejects.

Pure. What is decoded here comes from somebody who has proved nothing yet.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from mlxcel_nb.cluster.names import INCARNATION_BYTES, check_name, check_role, has_control
from mlxcel_nb.errors import ConfigError, HandshakeError, WireError
from mlxcel_nb.wire.fields import Reader, str8

MAGIC = b"MXNB"
VERSION = 5
HEADER = struct.Struct("!4sHBH")
"""Magic, version, type, length of the body: the same in every version of the protocol."""

MAX_BODY = 1024
MAX_MESSAGE = HEADER.size + MAX_BODY
"""Most bytes that are ever buffered for a peer that has not proved itself."""

NONCE_BYTES = 32
PUBLIC_BYTES = 32
TAG_BYTES = 32

SUITES = {1: "aes-256-gcm", 2: "chacha20-poly1305"}


class MessageType(IntEnum):
    CLIENT_HELLO = 1
    SERVER_HELLO = 2
    CLIENT_PROOF = 3
    VERDICT = 4
    REJECT = 5


class RejectCode(IntEnum):
    """Unauthenticated reasons: shown as a hint, never acted on beyond closing."""

    VERSION = 1
    SUITE = 2
    CLUSTER = 3
    MALFORMED = 4
    PENDING = 5
    AUTHENTICATION = 6


class VerdictCode(IntEnum):
    """A server's authenticated decision about a client that has proved itself."""

    ACCEPTED = 0
    CAPACITY = 1
    IDENTITY = 2
    DUPLICATE = 3


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What one side says of itself in every handshake it makes."""

    cluster: str
    node_id: str
    role: str
    incarnation: bytes
    data_addr: str = ""
    suite: int = 1
    transports: int = 1

    def __post_init__(self) -> None:
        check_name("cluster name", self.cluster)
        check_name("node id", self.node_id)
        check_role(self.role)
        if len(self.incarnation) != INCARNATION_BYTES:
            raise ConfigError(f"an incarnation has {INCARNATION_BYTES} bytes, not {len(self.incarnation)}")
        if self.suite not in SUITES:
            raise ConfigError(f"cipher suite {self.suite} is unknown; there are {_known_suites()}")


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A ClientHello or ServerHello: one side's `Identity` and what is fresh for this connection."""

    suite: int
    transports: int
    nonce: bytes
    x25519: bytes
    incarnation: bytes
    cluster: str
    node_id: str
    role: str
    data_addr: str
    libs: str

    def encode(self) -> bytes:
        """The body, without the header."""
        return b"".join((
            bytes([self.suite, self.transports]), self.nonce, self.x25519, self.incarnation,
            str8(self.cluster), str8(self.node_id), str8(self.role), str8(self.data_addr), str8(self.libs),
        ))  # fmt: skip

    @classmethod
    def decode(cls, body: bytes, what: str) -> Hello:
        """The hello in `body`; `WireError` when it is not exactly one."""
        reader = Reader(body, what)
        hello = cls(
            suite=reader.integer(1, "suite"),
            transports=reader.integer(1, "transports"),
            nonce=reader.take(NONCE_BYTES, "nonce"),
            x25519=reader.take(PUBLIC_BYTES, "key"),
            incarnation=reader.take(INCARNATION_BYTES, "incarnation"),
            cluster=reader.str8("cluster name"),
            node_id=reader.str8("node id"),
            role=reader.str8("role"),
            data_addr=reader.str8("address"),
            libs=reader.str8("library list"),
        )
        reader.finish()
        try:
            check_name("cluster name", hello.cluster)
            check_name("node id", hello.node_id)
            check_role(hello.role)
        except ConfigError as error:
            raise WireError(f"{what}: {error.cause}") from None
        if has_control(hello.data_addr):
            raise WireError(f"{what}: the address holds a control character")
        return hello


def message(kind: MessageType, body: bytes) -> bytes:
    """Header and body."""
    return HEADER.pack(MAGIC, VERSION, kind, len(body)) + body


def encode_reject(code: RejectCode, detail: str = "") -> bytes:
    """A whole Reject; also for the listener, which may turn somebody away before any handshake exists."""
    return message(MessageType.REJECT, bytes([code]) + str8(detail))


def decode_coded(body: bytes, what: str, *, tag: bool) -> tuple[int, str, bytes]:
    """Code, detail and (for a Verdict) tag."""
    reader = Reader(body, what)
    code, detail = reader.integer(1, "code"), reader.str8("detail")
    proof = reader.take(TAG_BYTES, "tag") if tag else b""
    reader.finish()
    return code, detail, proof


def suite_name(suite: int) -> str:
    """Name of a cipher suite, known or not."""
    return SUITES.get(suite, f"suite {suite}")


def suite_number(name: str) -> int:
    """Number of the cipher suite called `name` on the command line."""
    for number, known in SUITES.items():
        if known == name:
            return number
    raise ConfigError(f"cipher suite {name!r} is unknown; there are {_known_suites()}")


def remote(error: HandshakeError) -> HandshakeError:
    """`error`, marked as the peer's decision."""
    error.local = False
    return error


def _known_suites() -> str:
    return ", ".join(SUITES.values())
