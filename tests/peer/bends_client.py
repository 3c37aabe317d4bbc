"""Bent handshakes of a client: rows for a listener, from the first byte to the verdict."""

from __future__ import annotations

import hashlib
import os
import struct
from typing import Any

from tests.peer import codec
from tests.peer.bends import Act, Bend, bend, each, steps
from tests.peer.codec import message
from tests.peer.ends import STRANGER
from tests.peer.peer import Peer

LOW_ORDER = [
    bytes.fromhex(point)
    for point in (
        "00" * 32,
        "01" + "00" * 31,
        "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
        "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
]
"""Encodings whose product with any scalar is zero: RFC 7748, sections 6.1 and 7, unreduced ones among them."""

LOW_ORDER += [point[:31] + bytes([point[31] | 0x80]) for point in LOW_ORDER]  # the top bit is masked

BAD_TEXT = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\x80")
"""Not UTF-8: a lone byte, half a character, a surrogate, five bytes, an overlong form."""

CONTROLS = ("a\nb", "\x00", "a\x7f", "\x1b[2J", "\x85", "a\r", "\t")


def say(body: bytes, kind: int = 1, **header: Any) -> Act:
    return lambda peer: peer.say(kind, body, **header)


def hello(peer: Peer, **fields: Any) -> None:
    peer.hello = peer.hello.but(**fields)
    peer.say_client_hello()


def hellos(field: str, *values: Any) -> tuple[Act, ...]:
    return each(values, lambda peer, value: hello(peer, **{field: value}))


def lives(peer: Peer, **fields: Any) -> None:
    """The hello is legal: the proof is sent behind it."""
    hello(peer, **fields)
    peer.hear_server_hello()
    peer.say_client_proof()


def body(change: Any) -> Act:
    """A ClientHello whose body is changed, with a length that fits."""
    return lambda peer: peer.say(1, change(peer.hello.body()))


def met(peer: Peer) -> None:
    peer.say_client_hello()
    peer.hear_server_hello()


def proof(change: Any) -> Act:
    """A ClientProof whose body is changed."""

    def act(peer: Peer) -> None:
        met(peer)
        peer.say(3, change(codec.proof_tag(peer.secret, peer.sent[1], peer.sent[2])))

    return act


def versions(peer: Peer, version: int) -> None:
    peer.say(1, peer.hello.body(), version=version)


def types(peer: Peer, kind: int) -> None:
    peer.say(kind, peer.hello.body())


def cut(peer: Peer, at: int) -> None:
    peer.write(message(1, peer.hello.body())[:at])
    peer.finish()


def cut_proof(peer: Peer, at: int) -> None:
    met(peer)
    peer.write(message(3, codec.proof_tag(peer.secret, peer.sent[1], peer.sent[2]))[:at])
    peer.finish()


def low_order(peer: Peer, point: bytes) -> None:
    peer.hello = peer.hello.but(x25519=point)
    met(peer)
    peer.say_client_proof()


def flipped_tag(peer: Peer, byte: int) -> None:
    met(peer)
    tag = bytearray(codec.proof_tag(peer.secret, peer.sent[1], peer.sent[2]))
    tag[byte] ^= 1 << byte % 8
    peer.say(3, bytes(tag))


def other_transcript(peer: Peer, kind: int) -> None:
    """Proves that it saw another hello than the one that travelled."""
    met(peer)
    seen = dict(peer.sent)
    seen[kind] = seen[kind][:-1] + bytes([seen[kind][-1] ^ 1])
    peer.say(3, codec.proof_tag(peer.secret, seen[1], seen[2]))


def behind_proof(peer: Peer, more: bytes) -> None:
    met(peer)
    tag = codec.proof_tag(peer.secret, peer.sent[1], peer.sent[2])
    peer.write(message(3, tag) + more)


def frame_behind_proof(peer: Peer) -> None:
    """A frame sealed under the right key, before the verdict said that there is one."""
    met(peer)
    peer.sent[3] = message(3, codec.proof_tag(peer.secret, peer.sent[1], peer.sent[2]))
    peer._make_keys(client=True)
    peer.write(peer.sent[3] + peer.out.seal(codec.CONTROL, 0, b"\x81\xa6schema\x01"))


def server_says(peer: Peer, kind: int) -> None:
    """A server's message where the proof is due."""
    met(peer)
    bodies = {1: peer.hello.body(), 2: peer.hello.body(), 4: bytes(34), 5: b"\x04\x00"}
    peer.say(kind, bodies.get(kind, bytes(32)))


def wrong_proof_key(peer: Peer) -> None:
    """The tag of a verdict in place of a proof's: the labels keep them apart."""
    met(peer)
    transcript = hashlib.sha256(peer.said(1, 2)).digest()
    peer.say(3, codec.verdict_tag(peer.secret, transcript, 0, b""))


def stranger(peer: Peer) -> None:
    peer.secret = STRANGER
    met(peer)
    peer.say_client_proof()


def reflected_incarnation(peer: Peer) -> None:
    """The listener's own, learnt on an earlier connection."""
    with Peer.dial(peer.sock.getpeername(), peer.secret) as earlier:
        met(earlier)
        hello(peer, incarnation=earlier.other.incarnation)


def reflected_hello(peer: Peer) -> None:
    """The listener's ServerHello of an earlier connection sent back as a ClientHello."""
    with Peer.dial(peer.sock.getpeername(), peer.secret) as earlier:
        met(earlier)
        peer.write(message(1, earlier.sent[2][9:]))


def replayed(peer: Peer) -> None:
    """Hello and proof of an earlier connection: the server's nonce and key are others now."""
    with Peer.dial(peer.sock.getpeername(), peer.secret) as earlier:
        earlier.be_client()
        peer.write(earlier.sent[1])
        peer.hear_server_hello()
        peer.write(earlier.sent[3])
        earlier.farewell()


FIXED = 82
"""Bytes of a hello before its first text."""

CLIENT_ROWS: list[Bend] = [
    bend("wrong magic", "wrong magic: close", "closed",
         *each((b"MXNC", b"XXNB", bytes(4), b"mxnb"), lambda p, magic: p.say(1, p.hello.body(), magic=magic))),
    bend("another protocol", "wrong magic: close", "closed",
         *each((b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"SSH-2.0-x\r\n", os.urandom(40), b"MXN\n"),
               lambda peer, data: peer.write(data))),
    bend("version 4", "a hard stop that says what this side speaks", "Reject 1", lambda p: versions(p, 4), words="^5$"),
    bend("version 6", "a hard stop that says what this side speaks", "Reject 1", lambda p: versions(p, 6), words="^5$"),
    bend("version 0", "a hard stop that says what this side speaks", "Reject 1", lambda p: versions(p, 0), words="^5$"),
    bend("version 65535", "a hard stop", "Reject 1", lambda p: versions(p, 65535), words="^5$"),
    bend("version in the wrong order of bytes", "integers are big-endian", "Reject 1", lambda p: versions(p, 5 << 8)),
    bend("version 6 with a body of another layout", "the header stays in every version", "Reject 1",
         say(b"\x00", version=6), say(bytes(1024), version=6), words="^5$"),
    bend("ServerHello first", "out of turn: close", "Reject 4", lambda p: types(p, 2)),
    bend("ClientProof first", "out of turn: close", "Reject 4", lambda p: types(p, 3), say(bytes(32), 3)),
    bend("Verdict first", "out of turn: close", "Reject 4", lambda p: types(p, 4)),
    bend("Reject first", "out of turn: close", "Reject 4 or closed", lambda p: p.reject(1, "5")),
    bend("unknown types", "an unknown type: close", "Reject 4", *each((0, 6, 16, 127, 255), types)),
    bend("length 0", "malformed: close", "Reject 4", say(b"")),
    bend("length 1", "malformed: close", "Reject 4", say(b"\x01")),
    bend("length 1024 of nothing", "malformed: close", "Reject 4", say(bytes(1024)), say(b"\xff" * 1024)),
    bend("length 1025", "a body has at most 1024 bytes", "Reject 4", say(bytes(1025)), say(b"", length=1025)),
    bend("length 65535", "refused at the header: nothing is buffered", "Reject 4", say(b"", length=65535)),
    bend("a hello cut at each byte", "the stream ends: close", "closed",
         *each((*range(10), *range(10, 125, 3)), cut)),
    bend("bodies cut at each byte, their length too", "malformed: close", "Reject 4",
         *(body(lambda whole, at=at: whole[:at]) for at in (*range(0, FIXED, 11), *range(FIXED, FIXED + 20)))),
    bend("a trailing byte", "trailing bytes in a body: close", "Reject 4", body(lambda whole: whole + b"\0")),
    bend("trailing bytes up to the limit", "trailing bytes in a body: close", "Reject 4",
         body(lambda whole: whole.ljust(1024, b"\0"))),
    bend("a length one too small", "the text ends within its field", "Reject 4",
         lambda p: p.say(1, p.hello.body(), length=len(p.hello.body()) - 1)),
    bend("a text longer than the body", "the text ends within its field", "Reject 4",
         body(lambda whole: whole[:82] + b"\xff" + whole[83:]),
         body(lambda whole: whole[:-1] + b"\x01")),
    bend("a second hello behind the first", "out of turn: close", "Reject 4",
         steps(Peer.say_client_hello, Peer.say_client_hello)),
    bend("a second hello in place of the proof", "out of turn: close", "Reject 4", lambda p: server_says(p, 1)),
    bend("server's messages in place of the proof", "out of turn: close", "Reject 4", *each((2, 4, 5), server_says)),
    bend("unknown types in place of the proof", "an unknown type: close", "Reject 4", *each((0, 6, 255), server_says)),
    bend("another version in place of the proof", "a hard stop", "Reject 1",
         steps(met, say(bytes(32), 3, version=6))),
    bend("wrong magic in place of the proof", "wrong magic: close", "closed",
         steps(met, say(bytes(32), 3, magic=b"MXNX"))),
    bend("unknown suites", "both sides name the same suite", "Reject 2", *hellos("suite", 0, 3, 255)),
    bend("the other suite", "both sides name the same suite", "Reject 2", *hellos("suite", 2), words="aes-256-gcm"),
    bend("unknown bits of transports", "what this side can do: else TCP", "accepted",
         *each((0, 2, 4, 6, 0xF8, 0xFF), lambda p, bits: lives(p, transports=bits))),
    bend("another cluster", "cluster name: Reject 3, which does not say ours", "Reject 3",
         *hellos("cluster", "other", "mlxcel2", "Mlxcel", "mlxcel ", "m"), words="^$"),
    bend("an empty name", "1 to 128 bytes", "Reject 4",
         *hellos("node_id", ""), *hellos("cluster", ""), *hellos("role", "")),
    bend("129 bytes of name", "1 to 128 bytes", "Reject 4", *hellos("node_id", "n" * 129, "é" * 65, "n" * 255),
         *hellos("cluster", "c" * 129)),
    bend("33 bytes of role", "1 to 32 bytes", "Reject 4", *hellos("role", "r" * 33, "é" * 17)),
    bend("control characters in a node id", "no control characters", "Reject 4", *hellos("node_id", *CONTROLS)),
    bend("control characters in a role", "no control characters", "Reject 4", *hellos("role", *CONTROLS)),
    bend("control characters in a cluster", "no control characters", "Reject 4", *hellos("cluster", *CONTROLS)),
    bend("texts that are not UTF-8", "str8 is UTF-8", "Reject 4",
         *(act for field in ("cluster", "node_id", "role", "data_addr", "libs") for act in hellos(field, *BAD_TEXT))),
    bend("the largest names", "128 bytes are allowed", "accepted",
         lambda p: lives(p, node_id="n" * 128, role="r" * 32, data_addr="a" * 255, libs="l" * 255)),
    bend("names as people write them", "UTF-8 without control characters", "accepted",
         lambda p: lives(p, node_id="Zoë's 💻 机")),
    bend("keys of low order", "an all-zero Z closes the connection", "closed or Reject 4", *each(LOW_ORDER, low_order)),
    bend("its own incarnation", "the server refuses its own incarnation", "closed", reflected_incarnation),
    bend("its own hello", "the server refuses its own incarnation", "closed", reflected_hello),
    bend("a proof of zeros", "authentication failed", "Reject 6",
         proof(lambda tag: bytes(32)), proof(lambda tag: b"\xff" * 32)),
    bend("a proof with a bit flipped, in each byte", "authentication failed", "Reject 6",
         *each(range(32), flipped_tag)),
    bend("a proof under another secret", "authentication failed", "Reject 6", stranger),
    bend("a proof over other hellos", "tags cover the messages as sent", "Reject 6", *each((1, 2), other_transcript)),
    bend("a verdict's tag as a proof", "each tag has its label", "Reject 6", wrong_proof_key),
    bend("a proof of an earlier connection", "nonces and keys are fresh", "Reject 6", replayed),
    bend("a proof of another length", "tag 32", "Reject 4",
         proof(lambda tag: b""), proof(lambda tag: tag[:31]), proof(lambda tag: tag + b"\0"),
         proof(lambda tag: tag * 32)),
    bend("a proof of 1025 bytes", "a body has at most 1024 bytes", "Reject 4",
         steps(met, say(b"", 3, length=1025))),
    bend("a proof cut at each byte", "the stream ends: close", "closed", *each(range(0, 41, 4), cut_proof)),
    bend("hello and a guess at once", "the proof covers the ServerHello", "Reject 6",
         lambda p: p.write(message(1, p.hello.body()) + message(3, os.urandom(32)))),
    bend("bytes behind the proof", "bytes after ClientProof before the Verdict: close", "closed or Reject 4",
         *each((b"\0", b"MXNB", message(3, bytes(32)), bytes(64), os.urandom(900)), behind_proof)),
    bend("a frame before the verdict", "bytes after ClientProof before the Verdict: close", "closed or Reject 4",
         frame_behind_proof),
    bend("nothing at all", "the stream ends: close", "closed", Peer.finish),
    bend("a length in the wrong order of bytes", "integers are big-endian", "Reject 4",
         lambda p: p.write(codec.MAGIC + struct.pack(">HB", 5, 1) + struct.pack("<H", 119) + p.hello.body())),
]  # fmt: skip
