"""The handshake, version 5, without I/O: bytes in, bytes out.

Two rules. A message is judged as soon as its header is there: magic, version, type, length, in this order, so
nothing that will be refused is ever buffered. And one table (`machine.STEPS`) names what each side takes in each state
and what it says then; whatever else arrives ends the connection.

    client                                          server
    AWAITING_SERVER_HELLO  -- ClientHello  ->       AWAITING_CLIENT_HELLO
                           <- ServerHello  --       AWAITING_CLIENT_PROOF
    AWAITING_VERDICT       -- ClientProof  ->       AWAITING_VERDICT        (the owner decides: `verdict`)
    ESTABLISHED            <- Verdict 0    --       ESTABLISHED
    FAILED                 <- Reject, Verdict > 0   FAILED

One owner per object, on any one thread. The peer is trusted with nothing before its tag has been checked; its
names are only shown. Secrets and keys never appear in a repr.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.errors import (
    AuthenticationFailed,
    ClusterMismatch,
    HandshakeError,
    Refused,
    SuiteMismatch,
    VersionMismatch,
    WireError,
)
from mlxcel_nb.wire.fields import clip, printable, str8
from mlxcel_nb.wire.hello import (
    HEADER,
    TAG_BYTES,
    VERSION,
    Hello,
    Identity,
    MessageType,
    RejectCode,
    VerdictCode,
    decode_coded,
    encode_reject,
    message,
    remote,
    suite_name,
)
from mlxcel_nb.wire.keys import auth_key, hkdf_extract
from mlxcel_nb.wire.machine import Established, Handshake, Refusal, Side, State

__all__ = [
    "ClientHandshake",
    "Established",
    "Hello",
    "Identity",
    "Refusal",
    "RejectCode",
    "ServerHandshake",
    "State",
    "VerdictCode",
    "encode_reject",
]


class ClientHandshake(Handshake):
    """The dialling side.

    Args:
        identity: what this node says of itself.
        secret: the cluster's secret; retrying with an older one is the dialler's business.
        expect_node_id: the node that was meant to be reached, where known.
        where: the server's address, for error texts.
        nonce, private_key: fixed values for golden vectors; fresh ones are drawn otherwise.
    """

    _SIDE = Side.CLIENT
    _PEER_NAME = "the server"

    def __init__(
        self,
        identity: Identity,
        secret: Secret | bytes,
        *,
        expect_node_id: str | None = None,
        where: str = _PEER_NAME,
        nonce: bytes | None = None,
        private_key: bytes | None = None,
    ) -> None:
        super().__init__(identity, where=where, nonce=nonce, private_key=private_key)
        self._secret = secret if isinstance(secret, Secret) else Secret(secret)
        self._expect_node_id = expect_node_id
        self._shared = b""
        self._send(MessageType.CLIENT_HELLO, self._hello.encode())

    def _reject(self, code: RejectCode, detail: str = "") -> None:
        """Only servers reject; a client just leaves."""

    def _send(self, kind: MessageType, body: bytes) -> None:
        whole = message(kind, body)
        self._transcript += whole
        self._outgoing += whole

    def _handle(self, kind: MessageType, whole: bytes) -> None:
        body = whole[HEADER.size :]
        if kind is MessageType.REJECT:
            code, detail, _ = decode_coded(body, "Reject", tag=False)
            self.refusal = Refusal(code, detail, authenticated=False)
            raise remote(self._rejected(code, printable(detail), HEADER.unpack_from(whole)[1]))
        if kind is MessageType.SERVER_HELLO:
            self._server_hello(Hello.decode(body, "ServerHello"), whole)
        else:
            self._verdict(*decode_coded(body, "Verdict", tag=True))

    def _server_hello(self, hello: Hello, whole: bytes) -> None:
        self.peer = hello
        if hello.suite != self.identity.suite:
            raise self._other_suite(suite_name(hello.suite))
        if hello.cluster != self.identity.cluster:
            raise ClusterMismatch(
                f"{self._whom()} belongs to cluster {hello.cluster!r}, this side to {self.identity.cluster!r}",
                advice="Name the same cluster on both.",
            )
        if self._expect_node_id is not None and hello.node_id != self._expect_node_id:
            raise HandshakeError(
                f"{self._where} is node {hello.node_id!r}, not {self._expect_node_id!r}",
                advice="Check the addresses of the nodes.",
            )
        self._meet(hello)
        self._shared = self._agree(hello.x25519)
        self._transcript += whole
        digest = hashlib.sha256(self._transcript).digest()
        self._send(MessageType.CLIENT_PROOF, _client_tag(auth_key(self._secret.reveal()), digest))

    def _verdict(self, code: int, detail: str, tag: bytes) -> None:
        digest = hashlib.sha256(self._transcript).digest()
        expected = _verdict_tag(auth_key(self._secret.reveal()), digest, code, detail)
        if not hmac.compare_digest(tag, expected):
            raise self._unknown_secret()
        if code != VerdictCode.ACCEPTED:
            self.refusal = Refusal(code, detail, authenticated=True)
            raise remote(_refused(self._whom(), self.identity.node_id, code, printable(detail)))
        prk = hkdf_extract(digest, self._shared + self._secret.reveal())
        self._shared = b""
        self._establish(prk, is_client=True)

    def _fail(self) -> None:
        super()._fail()
        self._shared = b""

    def _other_suite(self, theirs: str) -> SuiteMismatch:
        return SuiteMismatch(
            f"{self._whom()} uses {theirs}, this side {suite_name(self.identity.suite)}",
            advice="Choose the same --suite on both.",
        )

    def _rejected(self, code: int, detail: str, version: int) -> HandshakeError:
        """The error for an unauthenticated Reject: it chooses the words, never what is done."""
        whom = self._whom()
        if code == RejectCode.VERSION:
            return VersionMismatch(
                f"{whom} says it speaks handshake version {detail or version}, this side version {VERSION}",
                advice="Install the same mlxcel-nb on both.",
            )
        if code == RejectCode.SUITE:
            return self._other_suite(detail or "another cipher suite")
        if code == RejectCode.CLUSTER:
            other = f"cluster {detail!r}" if detail else "another cluster"
            return ClusterMismatch(
                f"{whom} says it belongs to {other}, this side to {self.identity.cluster!r}",
                advice="Name the same cluster on both.",
            )
        if code == RejectCode.PENDING:
            return Refused(f"{whom} has too many unfinished connections", advice="Try again in a moment.")
        if code == RejectCode.AUTHENTICATION:
            return AuthenticationFailed(
                f"authentication failed with {whom}: it says this side does not know its cluster's secret",
                advice="Give both the same secret file.",
            )
        why = "called the handshake malformed" if code == RejectCode.MALFORMED else f"gave reason {code}"
        return HandshakeError(f"{whom} closed the connection and {why}" + (f": {detail}" if detail else ""))


class ServerHandshake(Handshake):
    """The listening side.

    Args:
        identity: what this node says of itself.
        secrets: the current secret, then older ones that are still let in.
        where: the client's address, for error texts.
        nonce, private_key: fixed values for golden vectors; fresh ones are drawn otherwise.
    """

    _SIDE = Side.SERVER
    _PEER_NAME = "the client"

    def __init__(
        self,
        identity: Identity,
        secrets: Sequence[Secret | bytes],
        *,
        where: str = _PEER_NAME,
        nonce: bytes | None = None,
        private_key: bytes | None = None,
    ) -> None:
        super().__init__(identity, where=where, nonce=nonce, private_key=private_key)
        if not secrets:
            raise ValueError("a server needs at least one secret")
        self._secrets = [secret if isinstance(secret, Secret) else Secret(secret) for secret in secrets]
        self._fitting: Secret | None = None
        self._shared = b""

    def _reject(self, code: RejectCode, detail: str = "") -> None:
        self._outgoing += encode_reject(code, detail)

    def _handle(self, kind: MessageType, whole: bytes) -> None:
        body = whole[HEADER.size :]
        if kind is MessageType.CLIENT_HELLO:
            self._client_hello(Hello.decode(body, "ClientHello"), whole)
        elif len(body) != TAG_BYTES:
            raise WireError(f"ClientProof has {len(body)} bytes, not {TAG_BYTES}")
        else:
            self._client_proof(body, whole)

    def _client_hello(self, hello: Hello, whole: bytes) -> None:
        self.peer = hello
        ours = suite_name(self.identity.suite)
        if hello.suite != self.identity.suite:
            self._reject(RejectCode.SUITE, ours)
            raise SuiteMismatch(
                f"{self._whom()} uses {suite_name(hello.suite)}, this side {ours}",
                advice="Choose the same --suite on both.",
            )
        if hello.cluster != self.identity.cluster:
            # Without our name in it: whoever has proved nothing is told nothing.
            self._reject(RejectCode.CLUSTER)
            raise ClusterMismatch(
                f"{self._whom()} asked for cluster {hello.cluster!r}, this side belongs to {self.identity.cluster!r}",
                advice="Name the same cluster on both.",
            )
        self._meet(hello)
        answer = message(MessageType.SERVER_HELLO, self._hello.encode())
        self._outgoing += answer
        self._transcript = whole + answer

    def _client_proof(self, tag: bytes, whole: bytes) -> None:
        assert self.peer is not None
        digest = hashlib.sha256(self._transcript).digest()
        for secret in self._secrets:
            if hmac.compare_digest(tag, _client_tag(auth_key(secret.reveal()), digest)) and self._fitting is None:
                self._fitting = secret
        if self._fitting is None:
            self._reject(RejectCode.AUTHENTICATION)
            raise self._unknown_secret()
        self._shared = self._agree(self.peer.x25519)
        self._transcript += whole

    @property
    def secret_index(self) -> int | None:
        """Which of `secrets` the client proved: 0 the current one; None before its proof."""
        return None if self._fitting is None else self._secrets.index(self._fitting)

    def verdict(self, code: int = VerdictCode.ACCEPTED, detail: str = "") -> None:
        """Tell the client the decision about it: queues the Verdict; code 0 makes this side ESTABLISHED."""
        if self.state is not State.AWAITING_VERDICT or self._fitting is None:
            raise RuntimeError(f"no verdict is due ({self.state.name})")
        if not 0 <= code <= 255:
            raise ValueError(f"verdict code {code} does not fit into a byte")
        detail = clip(detail)
        secret, digest = self._fitting.reveal(), hashlib.sha256(self._transcript).digest()
        tag = _verdict_tag(auth_key(secret), digest, code, detail)
        self._outgoing += message(MessageType.VERDICT, bytes([code]) + str8(detail) + tag)
        if code == VerdictCode.ACCEPTED:
            prk = hkdf_extract(digest, self._shared + secret)
            self._shared = b""
            self._establish(prk, is_client=False)
            self._advance(self._steps[0])
        else:
            self._fail()

    def _fail(self) -> None:
        super()._fail()
        self._shared = b""


def _client_tag(key: bytes, digest: bytes) -> bytes:
    return hmac.digest(key, b"client proof" + digest, "sha256")


def _verdict_tag(key: bytes, digest: bytes, code: int, detail: str) -> bytes:
    return hmac.digest(key, b"server verdict" + digest + bytes([code]) + str8(detail), "sha256")


def _refused(whom: str, node_id: str, code: int, detail: str) -> Refused:
    said = f": {detail}" if detail else ""
    match code:
        case VerdictCode.CAPACITY:
            return Refused(f"{whom} has no room for another connection{said}", advice="Try again later.")
        case VerdictCode.IDENTITY:
            return Refused(
                f"{whom} refuses the identity {node_id!r}{said}",
                advice="Use another node id; if it is the right one, name where it comes from in the cluster file.",
            )
        case VerdictCode.DUPLICATE:
            return Refused(
                f"{whom} already has a live node {node_id!r} of another incarnation",
                advice="Stop that process, or use another node id.",
            )
    return Refused(f"{whom} refused the connection with code {code}{said}")
