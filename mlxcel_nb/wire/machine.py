"""What both ends of a handshake share: the table of its steps, buffering, the header's checks, the two ways it ends.

`wire.handshake` is the module to use and explains the protocol; this one holds the part that has no side. Two rules:
whatever is no step of `STEPS` ends the connection, and states change in one place, `_advance`. docs/wire.md draws
the table. Pure but for the random source; one owner per object.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import ClassVar, NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from mlxcel_nb.errors import AuthenticationFailed, HandshakeError, VersionMismatch, WireError
from mlxcel_nb.wire.hello import (
    HEADER,
    MAGIC,
    MAX_BODY,
    MAX_MESSAGE,
    NONCE_BYTES,
    VERSION,
    Hello,
    Identity,
    MessageType,
    RejectCode,
)
from mlxcel_nb.wire.keys import DirectionKeys, direction_keys


class State(Enum):
    AWAITING_SERVER_HELLO = auto()
    AWAITING_CLIENT_HELLO = auto()
    AWAITING_CLIENT_PROOF = auto()
    AWAITING_VERDICT = auto()
    """On a client: from the server. On a server: from its own owner; not a byte may arrive meanwhile."""
    ESTABLISHED = auto()
    FAILED = auto()


class Side(Enum):
    CLIENT = "client"
    SERVER = "server"


class Step(NamedTuple):
    """In `state`, `takes` may come. If it is good, `says` is sent and the side goes on to `then`.

    A step that takes None is this side's own: its owner has decided.
    """

    side: Side
    state: State
    takes: MessageType | None
    says: MessageType | None
    then: State


BEGINNINGS: Mapping[Side, tuple[MessageType | None, State]] = {
    Side.CLIENT: (MessageType.CLIENT_HELLO, State.AWAITING_SERVER_HELLO),
    Side.SERVER: (None, State.AWAITING_CLIENT_HELLO),
}
"""What a side says first, and its first state."""

STEPS = (
    Step(Side.CLIENT, State.AWAITING_SERVER_HELLO, MessageType.SERVER_HELLO, MessageType.CLIENT_PROOF,
         State.AWAITING_VERDICT),
    Step(Side.CLIENT, State.AWAITING_SERVER_HELLO, MessageType.REJECT, None, State.FAILED),
    Step(Side.CLIENT, State.AWAITING_VERDICT, MessageType.VERDICT, None, State.ESTABLISHED),
    Step(Side.CLIENT, State.AWAITING_VERDICT, MessageType.REJECT, None, State.FAILED),
    Step(Side.SERVER, State.AWAITING_CLIENT_HELLO, MessageType.CLIENT_HELLO, MessageType.SERVER_HELLO,
         State.AWAITING_CLIENT_PROOF),
    Step(Side.SERVER, State.AWAITING_CLIENT_PROOF, MessageType.CLIENT_PROOF, None, State.AWAITING_VERDICT),
    Step(Side.SERVER, State.AWAITING_VERDICT, None, MessageType.VERDICT, State.ESTABLISHED),
)  # fmt: skip
"""All there is. Anything else leads to FAILED: another message, one that is not good, a Verdict above 0."""

_BY_STATE: Mapping[tuple[Side, State], tuple[Step, ...]] = {
    (side, state): tuple(step for step in STEPS if (step.side, step.state) == (side, state))
    for side in Side
    for state in State
}


@dataclass(frozen=True)
class Refusal:
    """Why the peer said no: a RejectCode (`authenticated` false) or a VerdictCode."""

    code: int
    detail: str
    authenticated: bool


@dataclass(frozen=True, kw_only=True)
class Established:
    """What an accepted handshake leaves behind."""

    peer: Hello
    suite: int
    transports: int
    """The bits of `transports` that both sides named."""
    is_client: bool
    """The client opens odd channels, the server even ones."""
    send: DirectionKeys
    receive: DirectionKeys
    leftover: bytes
    """Bytes of frames that arrived behind the Verdict; always empty on a server."""
    prk: bytes = field(repr=False)

    def path_keys(self, path: int) -> tuple[DirectionKeys, DirectionKeys]:
        """Send and receive keys of a further path between the same two, 1 to 255: see docs/wire.md."""
        return split_keys(self.prk, is_client=self.is_client, path=path)


class Handshake(ABC):
    """What both sides share: buffering, the header's checks, the ends."""

    _SIDE: ClassVar[Side]
    _PEER_NAME: ClassVar[str]

    def __init__(self, identity: Identity, *, where: str, nonce: bytes | None, private_key: bytes | None) -> None:
        self.identity = identity
        self.state = BEGINNINGS[self._SIDE][1]
        self.peer: Hello | None = None
        self.established: Established | None = None
        self.refusal: Refusal | None = None
        self._where = where
        self._buffer = bytearray()
        self._outgoing = bytearray()
        self._transcript = b""
        self._private: X25519PrivateKey | None = (
            X25519PrivateKey.generate() if private_key is None else X25519PrivateKey.from_private_bytes(private_key)
        )
        self._hello = Hello(
            suite=identity.suite,
            transports=identity.transports,
            nonce=secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce,
            x25519=self._private.public_key().public_bytes_raw(),
            incarnation=identity.incarnation,
            cluster=identity.cluster,
            node_id=identity.node_id,
            role=identity.role,
            data_addr=identity.data_addr,
            libs="",
        )

    def data_to_send(self) -> bytes:
        """What is due to the peer now; also after an exception, before the socket is closed."""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    @property
    def room(self) -> int:
        """Bytes to read at most before the next `receive_data`, so that no stranger makes this side buffer more."""
        return MAX_MESSAGE - len(self._buffer)

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take what arrived, in pieces of any size.

        Raises:
            HandshakeError: the connection is to be closed after `data_to_send` has been flushed.
        """
        if self.state in (State.ESTABLISHED, State.FAILED):
            raise RuntimeError(f"the handshake is over ({self.state.name})")
        self._buffer += data
        try:
            while self.state not in (State.ESTABLISHED, State.FAILED) and self._buffer:
                if not self._take_message():
                    return
        except HandshakeError:
            self._fail()
            raise
        except WireError as error:
            self._reject(RejectCode.MALFORMED)
            self._fail()
            raise HandshakeError(f"{self._whom()} sent a malformed handshake: {error}") from None

    def receive_eof(self) -> None:
        """The peer closed its end: always an error here."""
        waited_for = self._due()
        self._fail()
        what = "the verdict" if waited_for is None else title(waited_for)
        raise HandshakeError(f"{self._whom()} closed the connection when {what} was due")

    def _take_message(self) -> bool:
        """Handle the first whole message in the buffer; False when more bytes are needed."""
        if self._due() is None:
            raise HandshakeError(f"{self._whom()} sent bytes before it had the verdict")
        if not MAGIC.startswith(self._buffer[: len(MAGIC)]):
            raise HandshakeError(
                f"{self._whom()} does not speak this protocol", advice="Check the address and the port."
            )
        if len(self._buffer) < HEADER.size:
            return False
        _, version, kind, length = HEADER.unpack_from(self._buffer)
        step = self._check_header(version, kind, length)
        end = HEADER.size + length
        if len(self._buffer) < end:
            return False
        whole = bytes(self._buffer[:end])
        del self._buffer[:end]
        self._handle(MessageType(kind), whole)
        self._advance(step)
        return True

    def _check_header(self, version: int, kind: int, length: int) -> Step:
        """The step that a message with this header takes, if it is good."""
        step = next((step for step in self._steps if step.takes == kind), None)
        if version != VERSION and (step is None or kind != MessageType.REJECT):  # which is laid out alike in all
            self._reject(RejectCode.VERSION, str(VERSION))
            raise VersionMismatch(
                f"{self._whom()} speaks handshake version {version}, this side version {VERSION}",
                advice="Install the same mlxcel-nb on both.",
            )
        if kind not in MessageType._value2member_map_:
            raise WireError(f"unknown message type {kind}")
        if step is None:
            due = self._due()
            assert due is not None
            raise WireError(f"{title(MessageType(kind))} out of turn, {title(due)} was due")
        if length > MAX_BODY:
            raise WireError(f"a body of {length} bytes, at most {MAX_BODY} are allowed")
        return step

    @property
    def _steps(self) -> tuple[Step, ...]:
        return _BY_STATE[self._SIDE, self.state]

    def _due(self) -> MessageType | None:
        """What the peer is to say now; None where it is to be silent."""
        return next((step.takes for step in self._steps), None)

    def _advance(self, step: Step) -> None:
        """`step` has been taken."""
        self.state = step.then

    @abstractmethod
    def _handle(self, kind: MessageType, whole: bytes) -> None:
        """Act on one whole message, header and all, that was expected."""

    @abstractmethod
    def _reject(self, code: RejectCode, detail: str = "") -> None:
        """Queue a Reject, where this side may send one."""

    def _meet(self, hello: Hello) -> None:
        """Refuse one's own reflection."""
        if hello.incarnation == self.identity.incarnation or hello.x25519 == self._hello.x25519:
            raise HandshakeError(
                f"{self._whom()} is this node itself", advice="Check the address: it may lead back here by a relay."
            )

    def _agree(self, peer_public: bytes) -> bytes:
        """Z, after which the ephemeral private key is forgotten."""
        private, self._private = self._private, None
        if private is None:
            raise RuntimeError("the ephemeral key has been used")
        try:
            return private.exchange(X25519PublicKey.from_public_bytes(peer_public))
        except ValueError:  # the all-zero result of a low-order point
            raise HandshakeError(f"{self._whom()} sent a key of low order") from None

    def _establish(self, prk: bytes, *, is_client: bool) -> None:
        assert self.peer is not None
        send, receive = split_keys(prk, is_client=is_client)
        self.established = Established(
            peer=self.peer,
            suite=self.identity.suite,
            transports=self._hello.transports & self.peer.transports,
            is_client=is_client,
            send=send,
            receive=receive,
            leftover=bytes(self._buffer),
            prk=prk,
        )
        self._buffer.clear()

    def _fail(self) -> None:
        self.state = State.FAILED
        self._private = None
        self._buffer.clear()

    def _whom(self) -> str:
        """The peer as errors name it: its address, and the id it claims where that is known."""
        if self.peer is None:
            return self._where
        return self.peer.node_id if self._where == self._PEER_NAME else f"{self.peer.node_id} ({self._where})"

    def _unknown_secret(self) -> AuthenticationFailed:
        return AuthenticationFailed(
            f"authentication failed with {self._whom()}: it does not know this cluster's secret",
            advice="Give both the same secret file.",
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.identity.node_id} {self.state.name}>"


def split_keys(prk: bytes, *, is_client: bool, path: int | None = None) -> tuple[DirectionKeys, DirectionKeys]:
    c2s, s2c = direction_keys(prk, b"c2s", path=path), direction_keys(prk, b"s2c", path=path)
    return (c2s, s2c) if is_client else (s2c, c2s)


def title(kind: MessageType) -> str:
    return "".join(word.capitalize() for word in kind.name.split("_"))
