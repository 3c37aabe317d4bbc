"""Somebody on the path between `net ping` and `net listen`, and the order in which two sides may speak."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import msgpack
import pytest

from tests.peer import codec, ends
from tests.peer.ends import SECRET, START_S, Listener
from tests.peer.peer import Ended, Peer

Change = Callable[[int, bytes], bytes]
"""Number of the message, counted over both directions, and the message: what goes on."""


def read_message(sock: socket.socket) -> bytes:
    head = sock.recv(9, socket.MSG_WAITALL)
    return head + (sock.recv(int.from_bytes(head[7:9], "big"), socket.MSG_WAITALL) if len(head) == 9 else b"")


def pour(source: socket.socket, sink: socket.socket, seen: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            seen += data
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def relay(files: dict[str, str], listener: Listener, change: Change) -> tuple[int, str, bytes]:
    """`net ping` through a relay that changes the four messages of the handshake. Status, text, bytes that passed."""
    seen = bytearray()
    with ends.net_ping(files, "--count", "3", "--size", "5000") as (ping, server):
        near, _ = server.accept()
        with near, socket.create_connection(listener.address, START_S) as far:
            for sock in (near, far):
                sock.settimeout(START_S)
            with contextlib.suppress(OSError):
                for number in range(4):
                    source, sink = ((near, far), (far, near))[number % 2]
                    message = read_message(source)
                    seen += message
                    if len(message) < 9:
                        break
                    sink.sendall(change(number, message))
                else:
                    back = threading.Thread(target=pour, args=(far, near, seen))
                    back.start()
                    pour(near, far, seen)
                    back.join()
        return ping.end(), ping.text, bytes(seen)


def test_a_relay_that_changes_nothing_is_a_wire(files: dict[str, str], listener: Listener) -> None:
    """It sees names and sizes, and neither a secret nor what is said."""
    status, text, seen = relay(files, listener, lambda _, message: message)
    assert status == 0, text
    assert b"mlxcel" in seen
    assert SECRET not in seen and b"schema" not in seen and b"versions" not in seen


@pytest.mark.parametrize("name", ["nonce", "key", "incarnation", "node id", "libs", "transports"])
@pytest.mark.parametrize("number", [0, 1], ids=["ClientHello", "ServerHello"])
def test_no_bit_of_a_hello_can_be_changed_on_the_way(
    number: int, name: str, files: dict[str, str], listener: Listener
) -> None:
    at = {"nonce": 20, "key": 50, "incarnation": 80, "node id": 100, "libs": None, "transports": 10}[name]

    def change(count: int, message: bytes) -> bytes:
        if count != number:
            return message
        if at is None:  # a text added, with its lengths put right
            return codec.message(message[6], message[9:-1] + codec.str8("mlx 9"))
        return message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]

    status, text, _ = relay(files, listener, change)
    assert status == 1 and "authentication failed" in text


@pytest.mark.parametrize("number", [2, 3], ids=["ClientProof", "Verdict"])
@pytest.mark.parametrize("from_end", [1, 32])
def test_no_bit_of_a_tag_can_be_changed_on_the_way(
    number: int, from_end: int, files: dict[str, str], listener: Listener
) -> None:
    def change(count: int, message: bytes) -> bytes:
        at = len(message) - from_end
        return message[:at] + bytes([message[at] ^ 0x80]) + message[at + 1 :] if count == number else message

    status, text, _ = relay(files, listener, change)
    assert status == 1 and "authentication failed" in text


def test_a_refusal_cannot_be_turned_into_a_welcome(files: dict[str, str], listener: Listener) -> None:
    """The tag of verdict 1 does not fit code 0, nor the other way round."""

    def change(count: int, message: bytes) -> bytes:
        return message[:9] + b"\x01" + message[10:] if count == 3 else message

    status, text, _ = relay(files, listener, change)
    assert status == 1 and "does not know this cluster's secret" in text


# ------------------------------------------------------------------------------------------- who speaks first


def test_a_client_that_waits_for_the_listener_s_first_frame(listener: Listener) -> None:
    with listener.dial() as peer:
        peer.be_client(greet=False)
        first = peer.next_frame()
        assert first.kind == codec.CONTROL and msgpack.unpackb(first.payload)["schema"] == 1
        peer.send(codec.CONTROL, 0, msgpack.packb({"schema": 1, "features": [], "versions": {}}))
        peer.ping()
        peer.pong()
        peer.close("done")


def test_a_server_that_waits_for_the_client_s_first_frame(files: dict[str, str]) -> None:
    with ends.net_ping(files) as (ping, server), ends.accept(server) as peer:
        peer.be_server(greet=False)
        first = peer.next_frame()
        assert first.kind == codec.CONTROL and msgpack.unpackb(first.payload)["schema"] == 1
        peer.send(codec.CONTROL, 0, msgpack.packb({"schema": 1, "features": [], "versions": {}}))
        assert [frame.kind for frame in peer.frames()] == [codec.CLOSE]
        peer.farewell()
        assert ping.end() == 0


def test_a_first_frame_that_comes_together_with_the_verdict(files: dict[str, str]) -> None:
    """A server may send it at once: the client finds frames behind the message it was reading."""
    with ends.net_ping(files) as (ping, server), ends.accept(server) as peer:
        written: list[bytes] = []
        peer.hear_client_hello()
        peer.say_server_hello()
        peer.hear_client_proof()

        def hold_back(data: bytes) -> None:
            written.append(data)

        peer.write = hold_back
        peer.say_verdict()
        peer.send(codec.CONTROL, 0, msgpack.packb({"schema": 1, "features": [], "versions": {}}))
        del peer.write
        peer.write(b"".join(written))
        assert peer.next_frame().kind == codec.CONTROL
        assert [frame.kind for frame in peer.frames()] == [codec.CLOSE]
        peer.farewell()
        assert ping.end() == 0


@pytest.mark.parametrize("size", [1, 7])
def test_bytes_may_come_in_any_pieces(size: int, files: dict[str, str], listener: Listener) -> None:
    def in_pieces(peer: Peer) -> None:
        def write(data: bytes) -> None:
            for at in range(0, len(data), size):
                peer.sock.sendall(data[at : at + size])

        peer.write = write

    with listener.dial(rekey_every=3) as peer:
        in_pieces(peer)
        peer.be_client()
        for _ in range(8):
            peer.ping(b"in pieces")
            peer.pong()
        peer.close("done")
    with ends.net_ping(files, "--rekey-every", "2") as (ping, server), ends.accept(server, rekey_every=3) as peer:
        in_pieces(peer)
        assert [frame.kind for frame in peer.be_server().frames()] == [codec.CLOSE]
        peer.farewell()
        assert ping.end() == 0


def test_a_listener_that_ends_says_goodbye(files: dict[str, str]) -> None:
    with ends.net_listen(files) as listener, listener.dial() as peer:
        peer.be_client()
        listener.command.process.terminate()
        assert "ends" in peer.last_words()
        assert listener.command.end() == 0


def test_a_listener_that_is_killed_is_an_end_without_a_word(files: dict[str, str]) -> None:
    with ends.net_listen(files) as listener, listener.dial() as peer:
        peer.be_client()
        listener.command.process.kill()
        with pytest.raises(Ended):
            list(peer.frames())
