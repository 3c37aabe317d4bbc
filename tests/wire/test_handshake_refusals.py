"""Refusals, rejects and malformed bytes in a handshake: each ends it, and none steers a terminal or a log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.errors import (
    AuthenticationFailed,
    ClusterMismatch,
    ConfigError,
    HandshakeError,
    Refused,
    SuiteMismatch,
    VersionMismatch,
)
from mlxcel_nb.wire.handshake import (
    ClientHandshake,
    Identity,
    RejectCode,
    ServerHandshake,
    State,
    VerdictCode,
    encode_reject,
)
from mlxcel_nb.wire.hello import MessageType, message
from tests.wire.ends import (
    CLIENT,
    GOLDEN,
    GOOD,
    SECRET,
    SERVER,
    client_after,
    golden_ends,
    header,
    hello,
    reject_in,
    server_after,
    shake,
)

# ------------------------------------------------------------------------------------------------ verdicts and rejects


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (VerdictCode.CAPACITY, "no room for another connection: 512 are open"),
        (VerdictCode.IDENTITY, "refuses the identity 'node-a': 512 are open"),
        (VerdictCode.DUPLICATE, "already has a live node 'node-a' of another incarnation"),
        (99, "refused the connection with code 99"),
    ],
)
def test_an_authenticated_refusal_says_why(code: int, words: str) -> None:
    client, server = golden_ends()
    with pytest.raises(Refused, match=words) as error:
        shake(client, server, verdict=code, detail="512 are open")
    assert not error.value.local
    assert client.refusal is not None and (client.refusal.code, client.refusal.authenticated) == (code, True)
    assert client.established is None and server.established is None and server.state is State.FAILED


def test_a_long_detail_is_cut_at_a_character() -> None:
    client, server = golden_ends()
    with pytest.raises(Refused):
        shake(client, server, verdict=1, detail="é" * 400)
    assert client.refusal is not None and client.refusal.detail == "é" * 127


@pytest.mark.parametrize("code", RejectCode)
def test_a_reject_ends_the_handshake_with_the_error_of_its_kind(code: RejectCode) -> None:
    kinds = {
        RejectCode.VERSION: VersionMismatch,
        RejectCode.SUITE: SuiteMismatch,
        RejectCode.CLUSTER: ClusterMismatch,
        RejectCode.MALFORMED: HandshakeError,
        RejectCode.PENDING: Refused,
        RejectCode.AUTHENTICATION: AuthenticationFailed,
    }
    for before in ((), (GOOD["ServerHello"],)):
        client = client_after(*before)
        with pytest.raises(kinds[code]) as error:
            client.receive_data(encode_reject(code))
        assert type(error.value) is kinds[code] and not error.value.local
        assert client.data_to_send() == b"" and client.refusal is not None and not client.refusal.authenticated


def test_a_stranger_s_words_cannot_steer_a_terminal() -> None:
    with pytest.raises(HandshakeError) as error:
        client_after().receive_data(encode_reject(RejectCode.MALFORMED, "\x1b]0;owned\x07\u202e"))
    assert str(error.value).isprintable()


# ------------------------------------------------------------------------------------------------ malformed


def bad_hellos() -> dict[str, bytes]:
    good = GOOD["ClientHello"][9:]
    fixed, names = good[:82], good[82:]
    return {
        "empty": b"",
        "cut in a nonce": good[:20],
        "cut in a name": good[:85],
        "a trailing byte": good + b"\0",
        "cluster empty": fixed + b"\0" + names[7:],
        "cluster of 129 bytes": fixed + b"\x81" + b"c" * 129 + names[7:],
        "cluster not UTF-8": fixed + b"\x02\xff\xfe" + names[7:],
        "cluster a surrogate": fixed + b"\x03\xed\xa0\x80" + names[7:],
        "node id with a newline": fixed + names[:7] + b"\x02a\n" + names[14:],
        "node id with a C1 control": fixed + names[:7] + b"\x03a\xc2\x9b" + names[14:],
        "role of 33 bytes": hello(role="r" * 33).encode(),
        "role empty": hello(role="").encode(),
        "address with an escape": hello(data_addr="\x1b[2J").encode(),
        "names longer than the body": fixed + b"\xff" + names[1:],
    }


@pytest.mark.parametrize("body", bad_hellos().values(), ids=bad_hellos())
def test_a_bent_hello_is_malformed_on_either_end(body: bytes) -> None:
    server, client = server_after(), client_after()
    with pytest.raises(HandshakeError, match="malformed"):
        server.receive_data(message(MessageType.CLIENT_HELLO, body))
    assert reject_in(server.data_to_send()) == (RejectCode.MALFORMED, "")
    with pytest.raises(HandshakeError, match="malformed"):
        client.receive_data(message(MessageType.SERVER_HELLO, body))
    assert client.data_to_send() == b""


def test_a_name_may_hold_what_people_write() -> None:
    for name in ("a", "é" * 64, "Büro-Mac №1 🙂 👩‍👩‍👧"):
        client, server = (
            ClientHandshake(replace(CLIENT, cluster=name, node_id=name), SECRET),
            ServerHandshake(replace(SERVER, cluster=name), [SECRET]),
        )
        shake(client, server)
        assert server.peer is not None and server.peer.node_id == name


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (header(kind=0), "unknown message type 0"),
        (header(kind=9), "unknown message type 9"),
        (header(kind=3), "ClientProof out of turn, ClientHello was due"),
        (header(kind=5, length=2), "Reject out of turn"),
        (header(kind=1, length=1025), "1025 bytes"),
        (header(kind=1, length=65535), "65535 bytes"),
    ],
)
def test_a_server_refuses_at_the_header(data: bytes, words: str) -> None:
    server = server_after()
    with pytest.raises(HandshakeError, match=words):
        server.receive_data(data)
    assert reject_in(server.data_to_send()) == (RejectCode.MALFORMED, "")
    assert server.state is State.FAILED


@pytest.mark.parametrize(
    ("before", "data", "words"),
    [
        ((), GOOD["Verdict"], "Verdict out of turn, ServerHello was due"),
        ((), GOOD["ClientHello"], "ClientHello out of turn"),
        ((GOOD["ServerHello"],), GOOD["ServerHello"], "ServerHello out of turn, Verdict was due"),
        ((GOOD["ServerHello"],), header(kind=7), "unknown message type 7"),
        ((GOOD["ServerHello"],), header(kind=4, length=1025), "1025 bytes"),
        ((GOOD["ServerHello"],), message(MessageType.VERDICT, b"\0\0" + bytes(33)), "1 trailing byte"),
        ((GOOD["ServerHello"],), message(MessageType.VERDICT, b"\0\0" + bytes(31)), "ends within its tag"),
        ((), message(MessageType.REJECT, b"\1\1"), "ends within its detail"),
        ((), message(MessageType.REJECT, b"\1\0x"), "trailing"),
    ],
)
def test_a_client_refuses_what_is_out_of_turn(before: tuple[bytes, ...], data: bytes, words: str) -> None:
    client = client_after(*before)
    with pytest.raises(HandshakeError, match=words):
        client.receive_data(data)
    assert client.state is State.FAILED and client.established is None


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_proof_of_another_size_is_malformed(size: int) -> None:
    server = server_after(GOOD["ClientHello"])
    with pytest.raises(HandshakeError, match=f"{size} bytes, not 32"):
        server.receive_data(message(MessageType.CLIENT_PROOF, bytes(size)))


@pytest.mark.parametrize("together", [True, False])
def test_bytes_between_proof_and_verdict_close(together: bool) -> None:
    server = server_after(GOOD["ClientHello"])
    with pytest.raises(HandshakeError, match="before it had the verdict"):
        if together:
            server.receive_data(GOOD["ClientProof"] + b"\0")
        else:
            server.receive_data(GOOD["ClientProof"])
            server.receive_data(b"\0")
    with pytest.raises(RuntimeError, match="no verdict is due"):
        server.verdict(0)
    assert server.established is None


def test_a_proof_is_good_for_one_connection_only() -> None:
    server = ServerHandshake(SERVER, [SECRET])
    server.receive_data(GOOD["ClientHello"])
    server.data_to_send()
    with pytest.raises(AuthenticationFailed):
        server.receive_data(GOOD["ClientProof"])


@given(st.binary(max_size=1200), st.integers(0, 2))
def test_random_bytes_end_in_a_handshake_error_or_in_waiting(data: bytes, led_by: int) -> None:
    """Case 51: whatever comes, the process lives and nobody is let in."""
    ends: list[ClientHandshake | ServerHandshake] = [
        server_after(), server_after(GOOD["ClientHello"]), client_after(), client_after(GOOD["ServerHello"]),
    ]  # fmt: skip
    for end in ends:
        try:
            end.receive_data([b"", b"MXNB", b"MXNB\0\5"][led_by] + data)
        except HandshakeError:
            assert end.state is State.FAILED
        assert end.established is None
        assert end.room >= 0


def test_an_end_of_stream_names_what_was_due() -> None:
    ends: list[tuple[Callable[[], ClientHandshake | ServerHandshake], str]] = [
        (client_after, "ServerHello was due"),
        (lambda: client_after(GOOD["ServerHello"]), "Verdict was due"),
        (server_after, "ClientHello was due"),
        (lambda: server_after(GOOD["ClientHello"]), "ClientProof was due"),
        (lambda: server_after(GOOD["ClientHello"], GOOD["ClientProof"]), "the verdict was due"),
    ]
    for make, words in ends:
        end = make()
        with pytest.raises(HandshakeError, match=words):
            end.receive_eof()
        assert end.state is State.FAILED


# ------------------------------------------------------------------------------------------------ misuse by this side


def test_nothing_is_taken_after_the_end() -> None:
    client, server = golden_ends()
    shake(client, server)
    for end in (client, server):
        with pytest.raises(RuntimeError, match="over"):
            end.receive_data(b"x")


def test_an_identity_that_no_peer_would_take_is_refused_at_home() -> None:
    for changes in ({"node_id": "a\nb"}, {"role": "r" * 33}, {"cluster": ""}, {"incarnation": b"1"}, {"suite": 3}):
        with pytest.raises(ConfigError):
            replace(CLIENT, **changes)


def test_secrets_appear_in_no_repr() -> None:
    client, server = golden_ends()
    shake(client, server)
    for end in (client, server, client.established, server.established, Secret(SECRET)):
        shown = f"{end!r} {end}"
        assert SECRET.hex() not in shown and repr(SECRET)[2:-1] not in shown
        assert GOLDEN["client_private"] not in shown


def test_a_plain_identity_speaks_tcp_and_aes() -> None:
    plain = Identity(cluster="c", node_id="n", role="r", incarnation=bytes(16))
    assert (plain.suite, plain.transports, plain.data_addr) == (1, 1, "")
