"""The handshake: who gets in, who does not, what each end says; only the bytes matter, not their pieces."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxcel_nb.errors import (
    AuthenticationFailed,
    ClusterMismatch,
    HandshakeError,
    SuiteMismatch,
    VersionMismatch,
)
from mlxcel_nb.wire.handshake import (
    ClientHandshake,
    Hello,
    RejectCode,
    ServerHandshake,
    State,
    VerdictCode,
)
from mlxcel_nb.wire.hello import MAX_MESSAGE, MessageType, message
from mlxcel_nb.wire.keys import auth_key
from tests.wire.ends import (
    CLIENT,
    CLIENT_RANDOM,
    GOLDEN,
    GOOD,
    SECRET,
    SERVER,
    SERVER_RANDOM,
    client_after,
    golden_ends,
    header,
    hello,
    reject_in,
    server_after,
    shake,
)

OTHER_SECRET = b"quite another secret"
LOW_ORDER = [bytes(32), b"\x01" + bytes(31)]


# ------------------------------------------------------------------------------------------------ the good way


def test_both_ends_learn_who_the_other_is() -> None:
    client, server = golden_ends()
    shake(client, server)
    assert client.peer is not None and client.peer.node_id == "node-b" and client.peer.role == "pipeline_stage"
    assert server.peer is not None and server.peer.node_id == "node-a" and server.peer.data_addr == "127.0.0.1:9000"
    assert client.established is not None and client.established.is_client
    assert server.established is not None and not server.established.is_client


def test_nonces_keys_and_so_the_connection_s_keys_are_fresh_every_time() -> None:
    seen = set()
    for _ in range(3):
        client, server = ClientHandshake(CLIENT, SECRET), ServerHandshake(SERVER, [SECRET])
        shake(client, server)
        assert client.peer is not None and server.peer is not None and client.established is not None
        seen |= {client.peer.nonce, client.peer.x25519, server.peer.nonce, server.peer.x25519, client.established.prk}
    assert len(seen) == 15


def test_library_versions_are_not_told_to_strangers() -> None:
    _, server = golden_ends()
    server.receive_data(GOOD["ClientHello"])
    assert Hello.decode(server.data_to_send()[9:], "ServerHello").libs == ""


@given(st.lists(st.integers(1, 400), max_size=12), st.binary(max_size=64))
@example([1] * 400, b"frame bytes behind the verdict")
def test_pieces_of_any_size_give_the_same_handshake(sizes: list[int], behind: bytes) -> None:
    client, server = golden_ends()

    def carry(data: bytes, end: ClientHandshake | ServerHandshake) -> None:
        for size in [*sizes, len(data)]:
            piece, data = data[:size], data[size:]
            if piece:
                if end.state is State.ESTABLISHED:
                    rest.append(piece)
                else:
                    end.receive_data(piece)

    rest: list[bytes] = []
    carry(client.data_to_send(), server)
    carry(server.data_to_send(), client)
    carry(client.data_to_send(), server)
    server.verdict(0)
    carry(server.data_to_send() + behind, client)
    assert client.established is not None and server.established is not None
    assert client.established.prk.hex() == GOLDEN["suite_1"]["PRK"]
    assert client.established.leftover + b"".join(rest) == behind
    assert server.established.leftover == b""


def test_neither_side_asks_to_read_more_than_one_message() -> None:
    server = server_after()
    assert server.room == MAX_MESSAGE == 1033
    server.receive_data(GOOD["ClientHello"][:100])
    assert server.room == 933


# ------------------------------------------------------------------------------------------------ secrets


def test_a_wrong_secret_fails_on_both_ends_and_names_the_other() -> None:
    """Case 50: "authentication failed with" somebody is told apart from "offline", on both ends."""
    client = ClientHandshake(CLIENT, OTHER_SECRET, where="10.0.0.2:9000")
    server = ServerHandshake(SERVER, [SECRET], where="10.0.0.1")
    server.receive_data(client.data_to_send())
    client.receive_data(server.data_to_send())
    with pytest.raises(AuthenticationFailed, match=r"authentication failed with node-a \(10\.0\.0\.1\)") as at_server:
        server.receive_data(client.data_to_send())
    with pytest.raises(
        AuthenticationFailed, match=r"authentication failed with node-b \(10\.0\.0\.2:9000\)"
    ) as at_client:
        client.receive_data(server.data_to_send())
    assert at_server.value.local and not at_client.value.local
    assert client.refusal is not None and client.refusal.code == RejectCode.AUTHENTICATION
    assert not client.refusal.authenticated
    for error in (at_server.value, at_client.value):
        assert "secret file" in str(error) and OTHER_SECRET.decode() not in str(error)


@pytest.mark.parametrize("theirs", [SECRET + b"\n", SECRET[:-1] + b"\x00"], ids=["one more newline", "last byte"])
def test_secrets_that_differ_a_little_differ(theirs: bytes) -> None:
    """Case 50: a file that ends in two newlines keeps one of them, and so holds another secret."""
    client, server = ClientHandshake(CLIENT, theirs), ServerHandshake(SERVER, [SECRET])
    with pytest.raises(AuthenticationFailed):
        shake(client, server)


def test_after_a_rotation_the_old_secret_is_let_in_and_carries_the_connection() -> None:
    """Case 50: an old secret after rotation, with the server still taking it."""
    client, server = ClientHandshake(CLIENT, OTHER_SECRET), ServerHandshake(SERVER, [SECRET, OTHER_SECRET])
    shake(client, server)
    assert server.secret_index == 1
    assert client.established is not None and server.established is not None
    assert client.established.prk == server.established.prk


@pytest.mark.parametrize("code", [VerdictCode.ACCEPTED, VerdictCode.CAPACITY])
def test_a_server_that_does_not_know_the_secret_is_not_believed(code: int) -> None:
    tag = hmac.digest(auth_key(OTHER_SECRET), b"server verdict", "sha256")
    client = client_after(GOOD["ServerHello"])
    with pytest.raises(AuthenticationFailed, match="node-b: it does not know this cluster's secret"):
        client.receive_data(message(MessageType.VERDICT, bytes([code, 0]) + tag))
    assert client.established is None and client.refusal is None


@pytest.mark.parametrize("bit", range(0, 8 * 43, 7))
def test_nobody_on_the_path_can_change_a_verdict(bit: int) -> None:
    verdict = bytearray(GOOD["Verdict"])
    verdict[bit // 8] ^= 1 << bit % 8
    client = client_after(GOOD["ServerHello"])
    with pytest.raises(HandshakeError):
        client.receive_data(bytes(verdict))
        client.receive_eof()  # a longer length only leaves the client waiting for what never comes
    assert client.established is None and client.state is State.FAILED


@pytest.mark.parametrize("name", ["ClientHello", "ServerHello", "ClientProof"])
@given(st.data())
def test_nobody_on_the_path_can_change_any_message(name: str, data: st.DataObject) -> None:
    bent = bytearray(GOOD[name])
    bit = data.draw(st.integers(0, 8 * len(bent) - 1))
    bent[bit // 8] ^= 1 << bit % 8

    def wire(carried: str, real: bytes) -> bytes:
        assert carried != name or real == GOOD[name]
        return bytes(bent) if carried == name else real

    def deliver(end: ClientHandshake | ServerHandshake, data: bytes) -> None:
        before = end.state
        end.receive_data(data)
        if end.state is before:  # a longer length leaves it waiting for what never comes
            end.receive_eof()

    client, server = golden_ends()
    with pytest.raises(HandshakeError):
        deliver(server, wire("ClientHello", client.data_to_send()))
        deliver(client, wire("ServerHello", server.data_to_send()))
        deliver(server, wire("ClientProof", client.data_to_send()))
    assert client.established is None and server.established is None


# ------------------------------------------------------------------------------------------------ mismatches


@pytest.mark.parametrize("version", [4, 6])
def test_a_client_of_another_version_is_told_ours(version: int) -> None:
    """Case 51: a hard stop that says what each side speaks, before any of the body has come."""
    server = server_after()
    with pytest.raises(VersionMismatch, match=f"speaks handshake version {version}, this side version 5") as error:
        server.receive_data(header(version=version, length=65535))
    assert error.value.local
    assert reject_in(server.data_to_send()) == (RejectCode.VERSION, "5")


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("detail", [True, False])
def test_a_server_of_another_version_is_understood_when_it_rejects(version: int, detail: bool) -> None:
    """Case 51: the header and the Reject are laid out alike in every version."""
    text = str(version).encode() if detail else b""
    client = client_after()
    with pytest.raises(VersionMismatch, match=f"version {version}, this side version 5") as error:
        client.receive_data(header(version, 5, 2 + len(text)) + bytes([1, len(text)]) + text)
    assert not error.value.local


def test_a_server_of_another_version_that_answers_is_stopped() -> None:
    """Case 51."""
    with pytest.raises(VersionMismatch, match="version 6, this side version 5"):
        client_after().receive_data(header(6, 2, 100))


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"SSH-2.0-OpenSSH", b"\x16\x03\x01", bytes(50), b"MXN?"])
def test_whoever_speaks_another_protocol_gets_no_answer(data: bytes) -> None:
    """Case 51: random bytes end at the first one that does not fit."""
    server, client = server_after(), client_after()
    for end in (server, client):
        with pytest.raises(HandshakeError, match="does not speak this protocol"):
            end.receive_data(data)
        assert end.data_to_send() == b"" and end.state is State.FAILED


def test_another_suite_is_named_on_both_ends() -> None:
    """Case 51."""
    client, server = ClientHandshake(replace(CLIENT, suite=2), SECRET), server_after()
    with pytest.raises(SuiteMismatch, match="uses chacha20-poly1305, this side aes-256-gcm"):
        server.receive_data(client.data_to_send())
    with pytest.raises(SuiteMismatch, match="the server uses aes-256-gcm, this side chacha20-poly1305"):
        client.receive_data(server.data_to_send())


def test_another_cluster_is_refused_without_telling_a_stranger_which_one_this_is() -> None:
    client, server = ClientHandshake(replace(CLIENT, cluster="there"), SECRET), server_after()
    with pytest.raises(ClusterMismatch, match="cluster 'there', this side belongs to 'mlxcel'"):
        server.receive_data(client.data_to_send())
    answer = server.data_to_send()
    assert reject_in(answer) == (RejectCode.CLUSTER, "")
    with pytest.raises(ClusterMismatch, match="another cluster, this side to 'there'"):
        client.receive_data(answer)


def test_a_client_leaves_a_server_of_another_cluster_or_suite() -> None:
    for changes, kind in (({"cluster": "there"}, ClusterMismatch), ({"suite": 2}, SuiteMismatch)):
        answer = message(MessageType.SERVER_HELLO, replace(hello(node_id="node-b"), **changes).encode())
        client = client_after()
        with pytest.raises(kind):
            client.receive_data(answer)
        assert client.data_to_send() == b""


def test_a_client_leaves_a_node_it_did_not_mean_to_reach() -> None:
    client = ClientHandshake(CLIENT, SECRET, expect_node_id="node-c", where="10.0.0.2:9000", **CLIENT_RANDOM)
    with pytest.raises(HandshakeError, match=r"10\.0\.0\.2:9000 is node 'node-b', not 'node-c'"):
        client.receive_data(GOOD["ServerHello"])
    assert client.data_to_send() == GOOD["ClientHello"], "no proof for the wrong node"


@pytest.mark.parametrize("own", ["incarnation", "x25519"])
def test_a_relay_cannot_join_a_node_to_itself(own: str) -> None:
    ours = Hello.decode(GOOD["ClientHello"][9:], "hello")
    theirs = Hello.decode(GOOD["ServerHello"][9:], "hello")
    client, server = client_after(), server_after()
    with pytest.raises(HandshakeError, match="this node itself"):
        client.receive_data(message(MessageType.SERVER_HELLO, with_field(theirs, own, ours).encode()))
    with pytest.raises(HandshakeError, match="this node itself"):
        server.receive_data(message(MessageType.CLIENT_HELLO, with_field(ours, own, theirs).encode()))
    assert client.data_to_send() == server.data_to_send() == b""


def with_field(hello: Hello, field: str, source: Hello) -> Hello:
    value = getattr(source, field)
    return replace(hello, incarnation=value) if field == "incarnation" else replace(hello, x25519=value)


@pytest.mark.parametrize("point", LOW_ORDER)
def test_a_key_of_low_order_closes(point: bytes) -> None:
    with pytest.raises(HandshakeError, match="low order"):
        client_after().receive_data(
            message(MessageType.SERVER_HELLO, hello(node_id="node-b", incarnation=b"\x52" * 16, x25519=point).encode())
        )

    # A member that knows the secret, and so can prove itself over its useless key.
    server = ServerHandshake(SERVER, [SECRET], **SERVER_RANDOM)
    first = message(MessageType.CLIENT_HELLO, hello(x25519=point).encode())
    server.receive_data(first)
    digest = hashlib.sha256(first + server.data_to_send()).digest()
    proof = hmac.digest(auth_key(SECRET), b"client proof" + digest, "sha256")
    with pytest.raises(HandshakeError, match="low order"):
        server.receive_data(message(MessageType.CLIENT_PROOF, proof))
    assert server.data_to_send() == b""
