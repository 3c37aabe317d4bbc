"""Bent frames, rows for either role: `FIRST_ROWS` stand for the first control frame, `FRAME_ROWS` come after it."""

from __future__ import annotations

import contextlib
import os
import struct
from typing import Any

import msgpack

from tests.peer import codec
from tests.peer.bends import Act, Bend, bend, each, steps
from tests.peer.codec import CLOSE, CONTROL, CREDIT, KV, PING, PONG, REKEY, STREAM, TENSOR, Direction
from tests.peer.peer import WAIT_S, Peer

MIB = 1 << 20
HELLO = {"schema": 1, "features": [], "versions": {}}


def first(payload: Any, kind: int = CONTROL) -> Act:
    """The first frame, with a payload that is packed when it is no bytes."""
    data = payload if isinstance(payload, bytes) else msgpack.packb(payload)
    return lambda peer: peer.send(kind, 0, data)


def firsts(*payloads: Any) -> tuple[Act, ...]:
    return tuple(map(first, payloads))


def schema(*values: Any) -> tuple[Act, ...]:
    return firsts(*(HELLO | {"schema": value} for value in values))


def frame(kind: int, payload: bytes = b"", channel: int = 0) -> Act:
    return lambda peer: peer.write(peer.out.seal(kind, channel, payload))


def frames(kind: int, *payloads: bytes) -> tuple[Act, ...]:
    return tuple(frame(kind, payload) for payload in payloads)


def head(length: int) -> Act:
    """Four bytes of length, and nothing behind them."""
    return lambda peer: peer.write(struct.pack(">I", length))


def sealed(change: Any) -> Act:
    """A ping whose sealed bytes are changed."""
    return lambda peer: peer.write(change(peer.out.seal(PING, 0, b"12345678")))


def flip(data: bytes, bit: int) -> bytes:
    return bytes(byte ^ (1 << bit % 8 if at == bit // 8 else 0) for at, byte in enumerate(data))


def other_keys(change: Any) -> Act:
    """A ping sealed with changed keys or number."""

    def act(peer: Peer) -> None:
        out = peer.out
        bent = Direction(out.suite, out.key, out.iv, out.number)
        change(bent, peer)
        peer.write(bent.seal(PING, 0, b"12345678"))

    return act


def replayed(peer: Peer) -> None:
    ping = peer.out.seal(PING, 0, b"12345678")
    peer.write(ping + ping)


def dropped(peer: Peer) -> None:
    peer.out.seal(PING, 0, b"12345678")
    peer.write(peer.out.seal(PING, 0, b"12345678"))


def swapped(peer: Peer) -> None:
    pings = [peer.out.seal(PING, 0, b"1234567" + bytes([n])) for n in range(2)]
    peer.write(pings[1] + pings[0])


def reflected(peer: Peer) -> None:
    """A frame of the other side's, sent back as it came."""
    peer.ping()
    length = int.from_bytes(peer.peek(4), "big")
    peer.write(peer.peek(4 + length))


def set_key(bent: Direction, key: bytes) -> None:
    bent.key = key


def rekeyed(bent: Direction, _peer: Peer) -> None:
    bent.rekey()


def after_rekey(peer: Peer) -> None:
    """A rekey frame, and the next frame under the old key all the same."""
    peer.write(peer.out.seal(REKEY))
    peer.write(peer.out.seal(PING, 0, b"12345678"))


def rekeyed_in_part(what: str) -> Act:
    """Behind a rekey frame only the key, only the iv, or all but the number is new."""

    def act(peer: Peer) -> None:
        old = Direction(peer.out.suite, peer.out.key, peer.out.iv, peer.out.number + 1)
        peer.write(peer.out.seal(REKEY))
        peer.out.rekey()
        bent = Direction(peer.out.suite, peer.out.key, peer.out.iv)
        setattr(bent, what, getattr(old, what))
        peer.write(bent.seal(PING, 0, b"12345678"))

    return act


def unread(peer: Peer, filler: bytes) -> None:
    """Pings whose pongs are not read, until the other side has had enough or the wire is full."""
    peer.sock.settimeout(2)
    with contextlib.suppress(TimeoutError, ConnectionError):
        for _ in range(64):
            peer.write(peer.out.seal(PING, 0, b"12345678" + filler))
    peer.sock.settimeout(WAIT_S)


def ended(*parts: bytes) -> Act:
    """The end of the stream behind some bytes, without a close frame."""

    def act(peer: Peer) -> None:
        peer.write(b"".join(parts))
        peer.finish()

    return act


def ended_within(peer: Peer, at: int) -> None:
    peer.write(peer.out.seal(CONTROL, 0, msgpack.packb({"type": "x"}))[:at])
    peer.finish()


def behind_close(peer: Peer) -> None:
    peer.write(peer.out.seal(CLOSE, 0, codec.str8("bye")) + peer.out.seal(PING, 0, b"12345678") + os.urandom(100))


def nested(depth: int, leaf: bytes = b"\x01") -> bytes:
    """{"schema": 1, "x": [[[...]]]}"""
    return b"\x82\xa6schema\x01\xa1x" + b"\x91" * depth + leaf


def hello_with(entry: bytes) -> bytes:
    """A hello with one more key, "x", whose value is `entry` as it stands."""
    return b"\x84\xa6schema\x01\xa8features\x90\xa8versions\x80\xa1x" + entry


SAYS_SCHEMA = "an unknown schema: close with the reason"
SAYS_MAP = "control is a MessagePack map, and the first frame is one"
SAYS_AUTH = "a frame that does not authenticate ends the connection"

FIRST_ROWS: list[Bend] = [
    bend("a first frame of another kind", "the first frame each way is a control frame", "told",
         *(first(payload, kind) for kind, payload in (
             (PING, b"12345678"), (PONG, b"12345678"), (TENSOR, codec.tensor(0, (1,), bytes(4))), (KV, b"x"),
             (STREAM, msgpack.packb(HELLO)), (CREDIT, bytes(4))))),
    bend("a rekey before the first control frame", "the first frame each way is a control frame", "told",
         steps(Peer.rekey, first(HELLO))),
    bend("a close in place of the first frame", "the last frame", "told", first(codec.str8("no"), CLOSE)),
    bend("unknown schemas", SAYS_SCHEMA, "told",
         *schema(0, 2, -1, 1 << 63, "1", b"1", None, [], {}, 1.5), words="schema"),
    bend("a schema that is true", SAYS_SCHEMA, "told", *schema(True), words="schema"),
    bend("a schema that is no number", SAYS_SCHEMA, "told", *schema(float("nan"), float("inf")), words="schema"),
    bend("no schema", SAYS_SCHEMA, "told", first({}), first({"features": [], "versions": {}}), words="schema"),
    bend("features and versions of other types", "what a peer cannot use of them does no harm", "served",
         *firsts({"schema": 1}, HELLO | {"features": {"a": 1}, "versions": ["x"]},
         HELLO | {"features": None, "versions": 7},
                 HELLO | {"features": [1, None, "f" * 300], "versions": {"mlx": 3, "x": None}},
                 HELLO | {"features": ["f"] * 3000, "versions": {f"v{n}": "1" for n in range(2000)}})),
    bend("keys nobody knows", "a map may say more", "served",
         *firsts(HELLO | {"later": {"deep": [1, 2.5, b"x", None]}})),
    bend("no map", SAYS_MAP, "told", *firsts([], 1, None, "schema", [HELLO], b"\xc4\x01x")),
    bend("an empty payload", SAYS_MAP, "told", first(b"")),
    bend("half a map", SAYS_MAP, "told", *(first(msgpack.packb(HELLO)[:at]) for at in range(1, 27, 5))),
    bend("bytes behind the map", SAYS_MAP, "told",
         *(first(msgpack.packb(HELLO) + more) for more in (b"\0", b"\xc0" * 9))),
    bend("two maps", SAYS_MAP, "told", first(msgpack.packb(HELLO) * 2)),
    bend("the code that is never used", SAYS_MAP, "told", first(b"\xc1"), first(hello_with(b"\xc1"))),
    bend("a key twice", "a message means one thing", "told", first(b"\x82\xa6schema\x02\xa6schema\x01")),
    bend("keys that are no text", "text keys", "told",
         *(first(hello_with(b"\x81" + key + b"\x01"))
         for key in (b"\x01", b"\xc0", b"\xc4\x01k", b"\x90", b"\xcb" + bytes(8)))),
    bend("text that is not UTF-8", "text is UTF-8", "told",
         first(hello_with(b"\xa2\xff\xfe")), first(hello_with(b"\xa1\xc3"))),
    bend("extension types", "nothing could name a type", "told",
         *(first(hello_with(ext)) for ext in (b"\xd4\x01\x00", b"\xd6\xff" + bytes(4), b"\xc7\x0c\xff" + bytes(12),
                                              b"\xc7\x00\x05", b"\xc9\xff\xff\xff\xff\x01", b"\xd8\x7f" + bytes(16)))),
    bend("nesting without end", "depth is bounded", "told",
         *(first(nested(depth)) for depth in (17, 500, 1100, 60_000)), first(nested(60_000, b""))),
    bend("maps in maps without end", "depth is bounded", "told", first(hello_with(b"\x81\xa1x" * 15_000 + b"\x01"))),
    bend("claims of size without the bytes", "checked before anything is allocated", "told",
         *(first(hello_with(claim + b"\xff\xff\xff\xff" + b"xx")) for claim in (b"\xdd", b"\xdf", b"\xdb", b"\xc6")),
         first(b"\xdf\xff\xff\xff\xff"), first(b"\xdf\x7f\xff\xff\xff\xa6schema\x01")),
    bend("ten thousand empty maps", "a small message does not become a large heap", "told",
         first(hello_with(b"\xdc\x27\x10" + b"\x80" * 10_000)), first(hello_with(b"\xdc\x27\x10" + b"\x90" * 10_000))),
    bend("a first message of a megabyte", "it is kept as long as the connection: 64 KiB", "told",
         first(HELLO | {"x": "x" * MIB}), first(HELLO | {"x": [1] * 100_000})),
    bend("a frame of another key first", SAYS_AUTH, "told", other_keys(lambda bent, peer: set_key(bent, bytes(32)))),
    bend("the end in place of the first frame", "an end without a close frame is an error", "told or cut", ended()),
]  # fmt: skip

FRAME_ROWS: list[Bend] = [
    bend("length 0", "21 to 16 MiB + 64 KiB", "told", head(0)),
    bend("length 20", "21 to 16 MiB + 64 KiB", "told", *each((1, 16, 20), lambda p, size: head(size)(p))),
    bend("length 20 with a tag that holds", "21 to 16 MiB + 64 KiB", "told",
         lambda p: p.write(p.out.seal_plain(b"\x03\0\0\0"))),
    bend("the shortest frame", "21 is legal", "served", frame(CONTROL), frame(STREAM, channel=1)),
    bend("one byte beyond the longest", "refused before anything is allocated", "told", head(codec.MAX_FRAME + 1)),
    bend("length 2^31", "refused before anything is allocated", "told", head(1 << 31), head((1 << 31) - 1)),
    bend("length 2^32 - 1", "refused before anything is allocated", "told", head((1 << 32) - 1)),
    bend("the longest frame", "16 MiB + 64 KiB are legal", "served",
         frame(KV, bytes(codec.MAX_FRAME - 21), channel=1)),
    bend("the longest length and no more", "the stream ends within a frame", "told or cut",
         ended(struct.pack(">I", codec.MAX_FRAME))),
    bend("a length in the wrong order of bytes", "integers are big-endian", "told",
         lambda p: p.write(struct.pack("<I", 29) + bytes(29))),
    bend("a bit flipped anywhere", SAYS_AUTH, "told",
         *each(range(4 * 8, (4 + 29) * 8, 11), lambda p, bit: sealed(lambda data: flip(data, bit))(p))),
    bend("a bit flipped in the length", "the length is authenticated", "told",
         sealed(lambda data: struct.pack(">I", 30) + data[4:] + b"\0"),
         sealed(lambda data: struct.pack(">I", 28) + data[4:-1])),
    bend("another length under the tag", "AAD = the 4 length bytes", "told",
         lambda p: p.write(struct.pack(">I", 29) + p.out.seal(PING, 0, b"12345678", length=30)[4:]),
         lambda p: p.write(struct.pack(">I", 29) + p.out.seal(PING, 0, b"12345678", length=29 << 24)[4:])),
    bend("no associated data", "AAD = the 4 length bytes", "told",
         lambda p: p.write(struct.pack(">I", 29) + codec.SUITES[p.out.suite](p.out.key).encrypt(
             p.out.nonce(p.out.number), b"\x01" + bytes(12), b""))),
    bend("a tag of zeros", SAYS_AUTH, "told", sealed(lambda data: data[:-16] + bytes(16))),
    bend("random bytes of a frame's size", SAYS_AUTH, "told",
         *each((21, 29, 1000, 100_000), lambda p, size: p.write(struct.pack(">I", size) + os.urandom(size)))),
    bend("a frame in the clear", SAYS_AUTH, "told",
         lambda p: p.write(struct.pack(">I", 29) + b"\x01" + bytes(4) + b"12345678" + bytes(16))),
    bend("a wrong key", SAYS_AUTH, "told", other_keys(lambda bent, peer: set_key(bent, bytes(32)))),
    bend("the other direction's key", SAYS_AUTH, "told", other_keys(lambda bent, peer: set_key(bent, peer.into.key))),
    bend("the other suite", SAYS_AUTH, "told", other_keys(lambda bent, peer: setattr(bent, "suite", 3 - bent.suite))),
    bend("the secret as the key", SAYS_AUTH, "told", other_keys(lambda bent, peer: set_key(bent, peer.secret[:32]))),
    bend("numbers that do not follow", "the number starts at 0 and goes up by one", "told",
         *(other_keys(lambda bent, peer, step=step: setattr(bent, "number", bent.number + step))
         for step in (-1, 1, 2, 1 << 32))),
    bend("a number in the wrong order of bytes", "big-endian", "told",
         other_keys(lambda bent, peer: setattr(bent, "number", bent.number << 88))),
    bend("a replayed frame", "a replayed frame is never acted on", "told", replayed),
    bend("a dropped frame", "a dropped frame is noticed at the next", "told", dropped),
    bend("swapped frames", "a swapped frame is never acted on", "told", swapped),
    bend("a reflected frame", "a reflected frame is never acted on", "told", reflected),
    bend("unknown kinds", "unknown kinds close the connection", "told",
         *each((9, 10, 16, 127, 128, 255), lambda p, kind: frame(kind, b"x")(p))),
    bend("a ping of less than 8 bytes", "8 bytes, echoed", "told", *frames(PING, b"", b"1234567")),
    bend("a ping with more than 1 MiB of filler", "up to 1 MiB", "told",
         frame(PING, bytes(8 + MIB + 1)), frame(PING, bytes(4 * MIB))),
    bend("a ping with 1 MiB of filler", "up to 1 MiB", "served",
         steps(lambda p: p.ping(os.urandom(MIB)), Peer.pong)),
    bend("a ping on another channel", "echoed", "served",
         frame(PING, b"12345678", 7), frame(PING, b"12345678", (1 << 32) - 1)),
    bend("a pong of less than 8 bytes", "8 bytes, echoed", "told", *frames(PONG, b"", b"1234567")),
    bend("a pong with more than 1 MiB of filler", "up to 1 MiB", "told", frame(PONG, bytes(8 + MIB + 1))),
    bend("pings whose pongs are not read", "at most 8 unanswered", "told or cut or cut within a frame",
         lambda p: unread(p, os.urandom(MIB))),
    bend("a close without a reason", "reason str8", "told", frame(CLOSE)),
    bend("a close that is no str8", "reason str8", "told",
         *frames(CLOSE, b"\x05bye", b"\x03bye!", b"\x02\xff\xfe", bytes(257))),
    bend("a close", "answered with one's own", "told", *frames(CLOSE, b"\0", codec.str8("bye"), codec.str8("x" * 255))),
    bend("a close whose reason steers a terminal", "shown as a hint at most", "told",
         *frames(CLOSE, codec.str8("\x1b[2J\x1b]0;owned\x07"), codec.str8("a\nerror: b"))),
    bend("bytes behind the close", "the last frame", "told", behind_close),
    bend("a rekey with a payload", "empty", "told", *frames(REKEY, b"\0", bytes(32))),
    bend("a rekey that the next frame does not heed", SAYS_AUTH, "told", after_rekey),
    bend("half a rekey", "key, iv and number change together", "told", *map(rekeyed_in_part, ("key", "iv", "number"))),
    bend("new keys without a rekey frame", SAYS_AUTH, "told", other_keys(rekeyed)),
    bend("a hundred rekeys in a row", "legal", "served", steps(*[Peer.rekey] * 100)),
    bend("the end of the stream", "an end without a close frame is an error", "cut", ended()),
    bend("the end of the stream within a length", "an error", "cut", *(ended(bytes(size)) for size in (1, 2, 3))),
    bend("the end of the stream within a frame", "an error", "cut", *each((4, 5, 9, 20, 27), ended_within)),
]  # fmt: skip

DROPPED_ROWS: list[Bend] = [
    bend("kinds 3 to 7, whatever they hold", "net listen drops kinds 3 to 7", "served",
         steps(*(frame(kind, payload, channel) for kind in (CONTROL, TENSOR, KV, STREAM, CREDIT)
                    for channel in (0, 1, 2, 1 << 31) for payload in (b"", b"\xc1", os.urandom(50))))),
    bend("credits of other sizes", "net listen drops kinds 3 to 7", "served",
         steps(*frames(CREDIT, b"", bytes(3), bytes(5)))),
    bend("credits beyond counting", "net listen drops kinds 3 to 7", "served",
         steps(*(frame(CREDIT, b"\xff" * 4, 1) for _ in range(3)))),
    bend("bent tensors", "net listen drops kinds 3 to 7", "served",
         steps(frame(TENSOR, codec.tensor(255, ((1 << 32) - 1,) * 8, b"x")),
                  frame(TENSOR, codec.piece(1, 1 << 63, (1 << 64) - 1, b"")))),
]  # fmt: skip
