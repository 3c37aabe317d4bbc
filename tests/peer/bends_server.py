"""Bent handshakes of a server: rows for `net ping`, from the ServerHello to the verdict.

`due` is what the client does next: `closed` is the end of the stream and not a byte before it, so no proof either, for
a client proves itself to nobody whose hello it refuses; `proof` is a proper proof and then the end, where the bend
comes behind it. `words` is what the user is told.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

from tests.peer import codec
from tests.peer.bends import Act, Bend, bend, each, steps
from tests.peer.bends_client import BAD_TEXT, CONTROLS, LOW_ORDER
from tests.peer.codec import message
from tests.peer.ends import STRANGER
from tests.peer.peer import Peer


def heard(peer: Peer) -> None:
    peer.hear_client_hello()


def hello(peer: Peer, **fields: Any) -> None:
    heard(peer)
    peer.hello = peer.hello.but(**fields)
    peer.say_server_hello()


def hellos(field: str, *values: Any) -> tuple[Act, ...]:
    return each(values, lambda peer, value: hello(peer, **{field: value}))


def say(kind: int, body: bytes | None = None, **header: Any) -> Act:
    """A message in place of the ServerHello, with the hello's body when none is given."""

    def act(peer: Peer) -> None:
        heard(peer)
        peer.say(kind, peer.hello.body() if body is None else body, **header)

    return act


def body(change: Any) -> Act:
    def act(peer: Peer) -> None:
        heard(peer)
        peer.say(2, change(peer.hello.body()))

    return act


def write(data: bytes) -> Act:
    def act(peer: Peer) -> None:
        heard(peer)
        peer.write(data)

    return act


def proved(peer: Peer) -> None:
    heard(peer)
    peer.say_server_hello()
    peer.hear_client_proof()


def instead(kind: int, body: bytes, **header: Any) -> Act:
    """A message in place of the verdict."""
    return steps(proved, lambda peer: peer.say(kind, body, **header))


def verdict(change: Any, code: int = 0, detail: bytes = b"") -> Act:
    """A verdict whose body, made properly, is changed."""

    def act(peer: Peer) -> None:
        proved(peer)
        tag = codec.verdict_tag(peer.secret, hashlib.sha256(peer.said(1, 2, 3)).digest(), code, detail)
        peer.say(4, change(bytes([code]) + codec.str8(detail) + tag))

    return act


def says(code: int, detail: bytes = b"") -> Act:
    """A proper verdict."""
    return verdict(bytes, code, detail)


def over(*kinds: int) -> Act:
    """A verdict over another transcript than all three messages."""

    def act(peer: Peer) -> None:
        proved(peer)
        transcript = hashlib.sha256(peer.said(*kinds)).digest()
        peer.say(4, bytes(2) + codec.verdict_tag(peer.secret, transcript, 0, b""))

    return act


def stranger(peer: Peer) -> None:
    """Does not know the secret, and lets in whoever comes."""
    proved(peer)
    peer.secret = STRANGER
    transcript = hashlib.sha256(peer.said(1, 2, 3)).digest()
    peer.say(4, bytes(2) + codec.verdict_tag(peer.secret, transcript, 0, b""))


def reflected(field: str) -> Act:
    def act(peer: Peer) -> None:
        heard(peer)
        peer.hello = peer.hello.but(**{field: getattr(peer.other, field)})
        peer.say_server_hello()

    return act


def whole_reflection(peer: Peer) -> None:
    heard(peer)
    peer.write(message(2, peer.sent[1][9:]))


def echo(peer: Peer) -> None:
    heard(peer)
    peer.write(peer.sent[1])


def echoed_proof(peer: Peer) -> None:
    """The client's own tag sent back as a verdict's."""
    proved(peer)
    peer.say(4, bytes(2) + peer.sent[3][9:])


def behind_hello(peer: Peer, more: bytes) -> None:
    heard(peer)
    peer.sent[2] = message(2, peer.hello.body())
    peer.write(peer.sent[2] + more)


def cut_verdict(peer: Peer, at: int) -> None:
    proved(peer)
    tag = codec.verdict_tag(peer.secret, hashlib.sha256(peer.said(1, 2, 3)).digest(), 0, b"")
    peer.write(message(4, bytes(2) + tag)[:at])
    peer.finish()


def cut_hello(peer: Peer, at: int) -> None:
    heard(peer)
    peer.write(message(2, peer.hello.body())[:at])
    peer.finish()


def reject(code: int, detail: bytes = b"", *, version: int = 5) -> Act:
    def act(peer: Peer) -> None:
        heard(peer)
        peer.say(5, bytes([code]) + codec.str8(detail), version=version)

    return act


FLIPS = tuple(
    verdict(lambda whole, bit=bit: bytes(byte ^ (1 << bit % 8 if at == bit // 8 else 0)
         for at, byte in enumerate(whole)),
            code, b"no")
    for code in (0, 1) for bit in (0, 1, 7, 17, 30, 40, 287)
)  # fmt: skip
"""A bit of a verdict's code, detail or tag turned over."""

SERVER_ROWS: list[Bend] = [
    bend("wrong magic", "wrong magic: close", "closed",
         *(say(2, magic=magic) for magic in (b"MXNC", b"XXNB", bytes(4))), words="does not speak this protocol"),
    bend("another protocol", "wrong magic: close", "closed",
         *map(write, (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b"220 mail\r\n", os.urandom(60))),
         words="does not speak this protocol"),
    bend("versions", "a hard stop that says what each side speaks", "closed",
         *(say(2, version=version) for version in (0, 4, 6, 65535)), words="version"),
    bend("types out of turn", "out of turn: close", "closed",
         say(1), say(4, bytes(34)), write(message(3, bytes(32))), words="due"),
    bend("unknown types", "an unknown type: close", "closed",
         *(say(kind) for kind in (0, 6, 16, 255)), words="unknown"),
    bend("the client's own hello, as it came", "out of turn: close", "closed", echo, words="due"),
    bend("lengths", "a body has at most 1024 bytes", "closed",
         say(2, b""), say(2, b"", length=1025), say(2, b"", length=65535), say(2, bytes(1024)), words="malformed"),
    bend("a hello cut at each byte", "the stream ends: close", "closed", *each((8, 50), cut_hello),
         words="closed the connection"),
    bend("bodies cut short, their length too", "malformed: close", "closed",
         *(body(lambda whole, at=at: whole[:at]) for at in (1, 34, 66, 82, 83, 90)), words="malformed"),
    bend("trailing bytes", "trailing bytes in a body: close", "closed",
         body(lambda whole: whole + b"\0"), body(lambda whole: whole.ljust(1024, b"\0")), words="trailing"),
    bend("suites", "both sides name the same suite", "closed", *hellos("suite", 0, 2, 3, 255), words="uses"),
    bend("another cluster", "the client closes when the cluster is not its own", "closed",
         *hellos("cluster", "other", "Mlxcel", "mlxcel "), words="cluster"),
    bend("names out of bounds", "1 to 128 bytes, role 1 to 32", "closed",
         *hellos("node_id", "", "n" * 129), *hellos("role", "", "r" * 33), *hellos("cluster", "", "c" * 129),
         words="bytes"),
    bend("control characters in names", "no control characters", "closed",
         *hellos("node_id", *CONTROLS), *hellos("role", CONTROLS[0]), words="control character"),
    bend("texts that are not UTF-8", "str8 is UTF-8", "closed",
         *hellos("node_id", *BAD_TEXT), *hellos("data_addr", BAD_TEXT[0]), *hellos("libs", BAD_TEXT[1]), words="UTF-8"),
    bend("keys of low order", "an all-zero Z closes the connection", "closed", *hellos("x25519", *LOW_ORDER),
         words="low order"),
    bend("its own incarnation", "a relay must not join a node to itself", "closed",
         reflected("incarnation"), words="itself"),
    bend("its own key", "a relay must not join a node to itself", "closed", reflected("x25519"), words="itself"),
    bend("its own hello as a ServerHello", "a relay must not join a node to itself", "closed",
         whole_reflection, words="itself"),
    bend("a frame in place of the hello", "wrong magic: close", "closed", write(bytes(3) + b"\x1d" + os.urandom(29)),
         words="does not speak this protocol"),
    bend("bytes behind the hello", "one type in each state", "closed or proof",
         *each((b"MXNXx", message(2, bytes(100))), behind_hello), words="speak|due"),
    bend("the end in place of the verdict", "close", "proof", steps(proved, Peer.finish),
         words="closed the connection when Verdict was due"),
    bend("messages out of turn in place of the verdict", "out of turn: close", "proof",
         instead(1, bytes(100)), instead(2, bytes(100)), instead(3, bytes(32)), words="due"),
    bend("unknown types in place of the verdict", "an unknown type: close", "proof",
         *(instead(kind, bytes(34)) for kind in (0, 6, 255)), words="unknown"),
    bend("another version in place of the verdict", "a hard stop", "proof",
         instead(4, bytes(34), version=6), words="version"),
    bend("lengths of the verdict", "malformed: close", "proof",
         instead(4, b""), instead(4, bytes(33)), instead(4, b"\0\xff" + bytes(32)), instead(4, b"", length=1025),
         words="malformed"),
    bend("a verdict with a trailing byte", "trailing bytes in a body: close", "proof",
         verdict(lambda whole: whole + b"\0"),
         words="trailing"),
    bend("a verdict cut at each byte", "the stream ends: close", "proof", *each((1, 9, 11, 42), cut_verdict),
         words="closed the connection"),
    bend("a verdict with a bit turned over", "nobody on the path can turn one verdict into another", "proof", *FLIPS,
         words="does not know this cluster's secret|UTF-8|malformed"),
    bend("a tag of zeros", "a bad tag: the server does not know the secret", "proof", instead(4, bytes(34)),
         words="authentication failed.*does not know"),
    bend("a server that does not know the secret", "a bad tag: the server does not know the secret", "proof", stranger,
         words="authentication failed.*does not know"),
    bend("verdicts over other transcripts", "T2 covers all three messages", "proof",
         over(1, 2), over(2, 3), over(2, 1, 3),
         words="does not know"),
    bend("the client's tag as a verdict's", "each tag has its label", "proof", echoed_proof, words="does not know"),
    bend("verdict 1", "at capacity", "proof", says(1), says(1, b"512 connections"), words="no room"),
    bend("verdict 2", "identity refused", "proof", says(2), says(2, b"another address"), words="refuses the identity"),
    bend("verdict 3", "already connected from another incarnation", "proof", says(3), words="another incarnation"),
    bend("verdicts nobody knows", "above 0 is no", "proof", says(4), says(255, b"why"), words="refused"),
    bend("a refusal whose detail is not UTF-8", "detail str8", "proof", says(1, b"\xff\xfe"), words="UTF-8"),
    bend("Reject 1", "a hint, never acted on beyond closing", "closed",
         reject(1), reject(1, b"6"), reject(1, b"6, 7", version=6),
         words="version"),
    bend("Reject 2", "a hint", "closed", reject(2), reject(2, b"chacha20-poly1305"), words="another cipher|chacha20"),
    bend("Reject 3", "a hint", "closed", reject(3), words="cluster"),
    bend("Reject 4", "a hint", "closed", reject(4, b"what"), words="malformed"),
    bend("Reject 5", "try again after a jittered moment", "closed", reject(5), words="too many"),
    bend("Reject 6", "a hint", "closed", reject(6), words="authentication failed"),
    bend("codes of Reject that nobody knows", "a hint", "closed",
         reject(0), reject(7), reject(255, b"x" * 255), words="reason"),
    bend("a Reject of another version", "its layout stays in every version", "closed",
         *(reject(1, b"9", version=version) for version in (0, 4, 6, 65535)), words="version"),
    bend("a Reject after the proof", "a hint", "proof", instead(5, b"\x06\0"), instead(5, b"\x04\0"),
         words="authentication failed|malformed"),
    bend("a Reject of another layout", "code u8, detail str8", "closed",
         say(5, b""), say(5, b"\x01"), say(5, b"\x01\x05ab"), say(5, b"\x01\x00x"), say(5, b"\x01\x02\xff\xfe"),
         words="malformed"),
    bend("a Reject that steers a terminal", "shown as a hint, never acted on", "closed",
         reject(1, b"\x1b[2J\x1b]0;owned\x07"), reject(3, "\u202eevil\n\nerror: x".encode()), words="version|cluster"),
]  # fmt: skip
