"""Either end of a handshake, against a peer that knows the secret and says anything it likes with it."""

from __future__ import annotations

import functools
import hashlib
import hmac

from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.wire.handshake import ClientHandshake, Identity, ServerHandshake, State
from mlxcel_nb.wire.hello import HEADER, MAX_MESSAGE, MessageType, message
from mlxcel_nb.wire.keys import auth_key
from tests.fuzz.script import Script, bend, check_words

SECRET = b"0123456789abcdef0123456789abcdef"
AUTH = auth_key(SECRET)
CLIENT = Identity(cluster="fuzz", node_id="node-a", role="hybrid", incarnation=b"\xc2" * 16)
SERVER = Identity(cluster="fuzz", node_id="node-b", role="hybrid", incarnation=b"\x52" * 16)
CLIENT_KEY, SERVER_KEY = bytes(range(32)), bytes(range(1, 33))


@functools.cache
def _honest_hello(*, client: bool) -> bytes:
    """The first message of an honest end, whole."""
    if client:
        return ClientHandshake(CLIENT, SECRET, nonce=b"\xc1" * 32, private_key=CLIENT_KEY).data_to_send()
    server = ServerHandshake(SERVER, [SECRET], nonce=b"\x51" * 32, private_key=SERVER_KEY)
    server.receive_data(_honest_hello(client=True))
    return server.data_to_send()


def _framed(script: Script, kind: MessageType, honest: bytes) -> bytes:
    """One handshake message: honest, bent, or with a body of the script's under a fitting header."""
    form = script.number() & 3
    if form == 0:
        return honest
    if form == 1:
        return bend(script, honest)
    body = script.long() if form == 2 else bend(script, honest[HEADER.size :])
    return message(kind, body[:1100])


def handshake(data: bytes) -> None:
    """Either end, against a peer that knows the secret and says anything it likes with it."""
    script = Script(data)
    flags = script.number()
    end = _server(script, flags) if flags & 1 else _client(script, flags)
    assert len(end._buffer) <= MAX_MESSAGE, f"{len(end._buffer)} bytes are kept of a stranger"
    assert (end.established is not None) == (end.state is State.ESTABLISHED)
    if end.state is State.FAILED:
        assert end._private is None and not end._buffer


def _feed(end: ClientHandshake | ServerHandshake, script: Script, data: bytes, flags: int) -> bool:
    """Give `data` to `end`, in pieces where flag 2 says so, as a socket would; whether it goes on."""
    for piece in script.pieces(data) if flags & 2 else [data]:
        while piece:
            if end.state in {State.ESTABLISHED, State.FAILED}:
                return False
            taken, piece = piece[: end.room], piece[end.room :]  # noqa: PLW2901
            try:
                end.receive_data(taken)
            except MlxcelError as error:
                check_words(error)
                failed = end.state is State.FAILED
                assert failed
                return False
    return end.state is not State.FAILED


def _server(script: Script, flags: int) -> ServerHandshake:
    end = ServerHandshake(SERVER, [SECRET], nonce=b"\x51" * 32, private_key=SERVER_KEY)
    if flags & 4:
        _feed(end, script, script.rest(), flags)
        return end
    hello = _framed(script, MessageType.CLIENT_HELLO, _honest_hello(client=True))
    if not _feed(end, script, hello, flags):
        return end
    digest = hashlib.sha256(hello + end.data_to_send()).digest()
    proof = message(MessageType.CLIENT_PROOF, hmac.digest(AUTH, b"client proof" + digest, "sha256"))
    going = _feed(end, script, _framed(script, MessageType.CLIENT_PROOF, proof), flags)
    if going and end.state is State.AWAITING_VERDICT:
        if flags & 8:
            _feed(end, script, script.rest() or b"x", flags)
        else:
            end.verdict(script.number() & 3, script.short().decode("latin-1"))
    return end


def _client(script: Script, flags: int) -> ClientHandshake:
    end = ClientHandshake(
        CLIENT,
        SECRET,
        expect_node_id="node-b" if flags & 16 else None,
        nonce=b"\xc1" * 32,
        private_key=CLIENT_KEY,
    )
    if flags & 4:
        _feed(end, script, script.rest(), flags)
        return end
    first = end.data_to_send()
    hello = _framed(script, MessageType.SERVER_HELLO, _honest_hello(client=False))
    if not _feed(end, script, hello, flags):
        return end
    digest = hashlib.sha256(first + hello + end.data_to_send()).digest()
    said = script.take(1) + (detail := script.short()[:255]).join([bytes([len(detail)]), b""])
    verdict = message(
        MessageType.VERDICT, said + hmac.digest(AUTH, b"server verdict" + digest + said, "sha256")
    ) if script.number() & 1 == 0 else message(MessageType.REJECT, said)  # fmt: skip
    _feed(end, script, _framed(script, MessageType.VERDICT, verdict) + script.rest(), flags)
    return end
