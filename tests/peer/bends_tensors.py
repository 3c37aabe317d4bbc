"""Bent tensors and caches: rows for a receiver that looks into them. Cases 42 and 49.

Every row ends in a close frame with a reason, and no part of what it sent is handed on.
"""

from __future__ import annotations

import os
import struct
from typing import Any

from tests.peer import codec
from tests.peer.bends import Act, Bend, bend, each, steps
from tests.peer.codec import CONTROL, CREDIT, KV, LZ4, QUANTISED, SHUFFLED, STREAM, TENSOR, KVHead, piece, tensor
from tests.peer.peer import Peer

MIB = 1 << 20
NAME = "1.0.0"
FULL = (1 << 32) - 1


def frame(payload: bytes, kind: int = TENSOR, channel: int = 1) -> Act:
    return lambda peer: peer.write(peer.out.seal(kind, channel, payload))


def frames(*payloads: bytes) -> Act:
    return steps(*map(frame, payloads))


def float32(*dims: int, data: bytes = bytes(16), **bent: Any) -> bytes:
    return tensor(0, dims or (4,), data, **{"name": NAME} | bent)


def header(payload: bytes) -> int:
    """Bytes of its header."""
    return 4 + 4 * payload[3] + 1 + len(NAME) + 8


def lz4(raw: bytes, raw_length: int, bend: Any = bytes, **more: Any) -> bytes:
    return tensor(6, (len(raw),), raw, flags=LZ4, name=NAME, raw_length=raw_length, bend=bend, **more)


def lying(raw: bytes, claim: int, *, dims: bool) -> bytes:
    """A block whose declared size, and dims where asked, are a lie."""
    return tensor(6, (min(claim, FULL) if dims else len(raw),), raw, flags=LZ4, name=NAME, raw_length=claim)


def in_pieces(whole: bytes, size: int = 100) -> list[bytes]:
    return codec.pieces(whole, size)


RAW = bytes(range(256)) * 4
ZEROS = bytes(10_000_000)
WHOLE = float32(64, data=RAW[:256])
"""256 bytes of data behind 23 of header."""

SAYS_SIZE = "the product of dims and dtype equals what the data decodes to"
SAYS_LZ4 = "an error before allocation, no partial tensor used"
SAYS_PIECES = "tensor id, offset, total"


def flipped(payload: bytes, at: int) -> bytes:
    return payload[:at] + bytes([payload[at] ^ 0x10]) + payload[at + 1 :]


TENSOR_ROWS: list[Bend] = [
    bend("dtype 14 and 255", "dtypes 0 to 13", "told",
         *(frame(tensor(code, (4,), bytes(16), name=NAME)) for code in (14, 128, 255)),
         words="dtype"),
    bend("version 0, 2, 255", "version 1", "told",
         *(frame(float32(version=version)) for version in (2, 255)), words="version"),
    bend("ndim 9 and 255", "ndim 0 to 8", "told",
         frame(float32(*[1] * 9, data=bytes(4))), frame(float32(ndim=9)), frame(float32(ndim=255)),
         words="dimensions|header"),
    bend("unknown flags", "other bits: close", "told",
         *(frame(float32(flags=flags)) for flags in (8, 16, 32, 64, 128)), words="flags"),
    bend("shuffled and not compressed", "4 without 1: close", "told", frame(float32(flags=SHUFFLED)),
         frame(float32(flags=SHUFFLED | QUANTISED)), words="shuffled"),
    bend("dims whose product overflows", "checked before anything is allocated", "told",
         frame(float32(FULL, FULL)), frame(float32(*[FULL] * 8)), frame(float32(1 << 31, 1 << 31, raw_length=16)),
         frame(float32(1 << 16, 1 << 16, 1 << 16, 1 << 16, raw_length=0, data=b"")),
         frame(float32(1 << 31, 2, raw_length=0, data=b"")), words="bytes"),
    bend("a raw_length that is not the product", SAYS_SIZE, "told",
         *(frame(float32(raw_length=size)) for size in (0, 15, 17, 64, 1 << 31, 1 << 63, (1 << 64) - 1)),
         words="16|bytes"),
    bend("data that is not raw_length", SAYS_SIZE, "told",
         *(frame(float32(raw_length=16, data=bytes(size))) for size in (0, 1, 15, 17, 1000)), words="16"),
    bend("a dim of zero with data", SAYS_SIZE, "told", frame(float32(0)), frame(float32(4, 0)), words="0"),
    bend("a scalar of another size", SAYS_SIZE, "told", frame(tensor(0, (), bytes(8), name=NAME)), words="4"),
    bend("a header cut at each byte", "malformed", "told", *(frame(WHOLE[:at]) for at in range(0, 23, 2))),
    bend("a name that is not UTF-8", "str8", "told", frame(float32(name=b"\xff\xfe")), words="UTF-8"),
    bend("a name longer than the frame", "str8", "told", frame(WHOLE[:8] + b"\xff" + WHOLE[9:30])),
    bend("names that name no step", "a tensor of a step carries epoch and step", "told",
         *(frame(float32(name=name))
         for name in ("", "1", "1.0", "-1.0.0", "1.0.0.0.0", "1.0.x", "1.0." + "9" * 30, "١.٠.٠")),
         words="named"),
    bend("quantised data of another size", SAYS_SIZE, "told",
         frame(float32(64, flags=QUANTISED, data=b"\x04\0" + struct.pack(">H", 64) + bytes(31))),
         frame(float32(64, flags=QUANTISED, data=b"\x04\0" + struct.pack(">H", 64) + bytes(400))),
         frame(float32(64, flags=QUANTISED, data=b"")), frame(float32(64, flags=QUANTISED, data=b"\x07\0\0\0")),
         frame(float32(64, flags=QUANTISED, data=b"\x04\x04\0\x40" + bytes(40))),
         frame(float32(64, flags=QUANTISED, data=b"\x04\0\0\0" + bytes(40)))),
    bend("quantised integers", "codes stand for floats", "told",
         frame(tensor(3, (64,), bytes(44), flags=QUANTISED, name=NAME))),
    bend("LZ4 with declared size 0 and 1", SAYS_LZ4, "told",
         frame(lying(RAW, 0, dims=True)), frame(lying(RAW, 1, dims=True)),
         frame(lying(RAW, 0, dims=False)), frame(lying(RAW, 1, dims=False)), words="LZ4|bytes"),
    bend("LZ4 with declared size true ± 1", SAYS_LZ4, "told",
         *(frame(lying(RAW, len(RAW) + by, dims=dims)) for by in (-1, 1) for dims in (True, False)), words="LZ4|bytes"),
    bend("LZ4 with declared size 2^31", SAYS_LZ4, "told",
         frame(lying(RAW, 1 << 31, dims=True)), frame(lying(RAW, 1 << 31, dims=False)),
         frame(tensor(0, (1 << 29,), ZEROS, flags=LZ4, name=NAME, raw_length=1 << 31)), words="LZ4|bytes"),
    bend("LZ4 with declared size 2^63", SAYS_LZ4, "told", frame(lying(RAW, 1 << 63, dims=False)),
         frame(tensor(6, (1 << 31, 1 << 31, 2), RAW, flags=LZ4, name=NAME, raw_length=1 << 63)), words="bytes"),
    bend("LZ4 with a flipped bit", SAYS_LZ4, "told or served", *each(range(23, 60), lambda p, at: frame(
        flipped(tensor(6, (1024,), RAW, flags=LZ4, name=NAME), at))(p))),
    bend("LZ4 cut in the middle", SAYS_LZ4, "told",
         *(frame(lz4(RAW, len(RAW), lambda block, keep=keep: block[: int(len(block) * keep)]))
         for keep in (0.0, 0.1, 0.5, 0.9)),
         words="LZ4"),
    bend("LZ4 with bytes behind its end", SAYS_LZ4, "told", frame(lz4(RAW, len(RAW), lambda block: block + b"\0")),
         frame(lz4(RAW, len(RAW), lambda block: block + block)), words="LZ4"),
    bend("LZ4 of random bytes", SAYS_LZ4, "told", frame(lz4(RAW, len(RAW), lambda _: os.urandom(300)))),
    bend("LZ4 with a size in front", "a raw block without size prefix", "told",
         frame(lz4(RAW, len(RAW), lambda block: struct.pack("<I", len(RAW)) + block)), words="LZ4"),
    bend("10 MB of zeros that claim to be 16 MB", SAYS_LZ4, "told",
         frame(tensor(6, (16_000_000,), ZEROS, flags=LZ4, name=NAME, raw_length=16_000_000)), words="LZ4"),
    bend("a piece past the end", SAYS_PIECES, "told",
         frames(in_pieces(WHOLE)[0], piece(1, 100, len(WHOLE), bytes(1000))), words="past|ends at"),
    bend("a first piece that is not the first", SAYS_PIECES, "told",
         *(frame(piece(1, offset, len(WHOLE), WHOLE[:100])) for offset in (1, 100, 1 << 63)), words="offset"),
    bend("a gap between pieces", SAYS_PIECES, "told", frames(in_pieces(WHOLE)[0], in_pieces(WHOLE)[2]), words="offset"),
    bend("pieces that overlap", SAYS_PIECES, "told",
         frames(in_pieces(WHOLE)[0], piece(1, 50, len(WHOLE), WHOLE[50:150])), words="offset"),
    bend("a piece twice", SAYS_PIECES, "told", frames(in_pieces(WHOLE)[0], in_pieces(WHOLE)[0]), words="offset"),
    bend("a total that changes", SAYS_PIECES, "told",
         *(frames(in_pieces(WHOLE)[0], piece(1, 100, total, WHOLE[100:200]))
         for total in (0, 200, len(WHOLE) + 1, (1 << 64) - 1)),
         words="total|claims|past"),
    bend("a total that contradicts the header", SAYS_SIZE, "told",
         *(frame(piece(1, 0, total, WHOLE[:100])) for total in (0, 99, 100, len(WHOLE) - 1, len(WHOLE) + 1, 1 << 63))),
    bend("a piece of nothing", SAYS_PIECES, "told",
         frame(piece(1, 0, len(WHOLE), b"")), frames(in_pieces(WHOLE)[0], piece(1, 100, len(WHOLE), b""))),
    bend("a header cut by the first piece", "cut behind its header", "told",
         frame(piece(1, 0, len(WHOLE), WHOLE[:20])), words="header"),
    bend("a lead cut short", SAYS_PIECES, "told", *(frame(in_pieces(WHOLE)[0][:at]) for at in range(1, 20, 3))),
    bend("a piece of another channel", "pieces come on one channel", "told",
         steps(frame(in_pieces(WHOLE)[0]), frame(in_pieces(WHOLE)[1], channel=3))),
    bend("65 unfinished tensors", "is forgotten", "served",
         steps(*(frame(codec.pieces(WHOLE, 100, tensor_id=number)[0]) for number in range(65)))),
    bend("a tensor of 2^40 bytes in pieces", "memory grows with what has come", "told or served",
         frame(piece(1, 0, (1 << 40) + 27, tensor(6, (1 << 20, 1 << 20), b"x", name=NAME, raw_length=1 << 40)))),
    bend("LZ4 in pieces that lies", SAYS_LZ4, "told",
         *(frames(*in_pieces(lying(RAW, len(RAW) + by, dims=True))) for by in (-1, 1)), words="LZ4"),
    bend("channels of the other side", "the client opens odd channels, the server even ones", "told",
         *(frame(WHOLE, channel=channel) for channel in (2, 4, 1 << 31)), words="channel"),
    bend("a tensor on the control channel", "channel 0 is control", "told", frame(WHOLE, channel=0), words="channel"),
    bend("kinds that have no business on a hot link", "closed", "told",
         frame(b"x", KV), frame(b"\x80", STREAM), words="hot link"),
    bend("credits of other sizes", "u32", "told", *(frame(bytes(size), CREDIT) for size in (0, 3, 5)), words="credit"),
    bend("more credit than can be counted", "u32", "told",
         steps(frame(b"\xff" * 4, CREDIT), frame(b"\xff" * 4, CREDIT)), words="credit"),
    bend("control that is no map", "a MessagePack map", "told",
         *(frame(data, CONTROL, 0) for data in (b"", b"\xc1", b"\x91\x01", b"\x81\x01\x01", b"\xc0\xc0")),
         words="message"),
]  # fmt: skip


# -------------------------------------------------------------------------------------------------------- caches

HEAD = KVHead()
"""Two heads of 4, eight tokens, keys and values of one layer: 2 × 256 bytes."""
ARRAYS = ((0, 1, (2, 8, 4)), (0, 1, (2, 8, 4)))
DATA = [bytes(range(256)), bytes(range(255, -1, -1))]
OF_LAYER = HEAD.but(layer=2)


def begin(head: KVHead = HEAD, layers: tuple[int, ...] = (2,), nbytes: int = 512) -> bytes:
    return head.message(codec.kv_begin_body(layers, nbytes))


def layer(head: KVHead = OF_LAYER, arrays: Any = ARRAYS, scalars: bytes = b"\x80") -> bytes:
    return head.but(kind=codec.KV_LAYER).message(codec.kv_layer_body(arrays, scalars))


def cache_piece(array: int, head: KVHead = OF_LAYER, slots: tuple[int, int] = (0, 8), **bent: Any) -> bytes:
    whole = codec.tensor(**{"dtype": 0, "dims": (2, 8, 4), "data": DATA[array % 2], "name": ""} | bent)
    return head.but(kind=codec.KV_PIECE).message(codec.kv_piece_body(array, *slots, whole))


def kv_end(pieces: int = 2, nbytes: int = 512, head: KVHead = HEAD) -> bytes:
    return head.but(kind=codec.KV_END).message(codec.kv_counts(pieces, nbytes))


def kv(*payloads: bytes) -> Act:
    return steps(*(frame(payload, KV) for payload in payloads))


BEGUN = (begin(), layer())
PIECES = (cache_piece(0), cache_piece(1))
CACHE = (*BEGUN, *PIECES, kv_end())


def in_flight(*more: bytes) -> Act:
    """Behind a beginning that is in order."""
    return kv(*BEGUN, *more)


SAYS_KV = "request, model, layer, layout, dtype, heads and tokens in every message; nothing paired by order"

KV_ROWS: list[Bend] = [
    bend("an empty message", SAYS_KV, "told", kv(b""), kv(begin()[:71])),
    bend("unknown versions, types, layouts, dtypes", SAYS_KV, "told",
         *(kv(begin(HEAD.but(**bent)))
         for bent in ({"version": 0}, {"version": 2}, {"kind": 0}, {"kind": 8}, {"layout": 99}, {"dtype": 14})),
         words="unknown"),
    bend("heads and tokens upside down", SAYS_KV, "told",
         kv(begin(HEAD.but(heads=(2, 2)))), kv(begin(HEAD.but(heads=(3, 2)))),
         kv(begin(HEAD.but(tokens=(9, 8)))), words="heads"),
    bend("a request that is not UTF-8, or longer than the message", SAYS_KV, "told",
         kv(begin(HEAD.but(request=b"\xff"))), kv(begin()[:70] + b"\xff"),
         words="UTF-8|ends|bytes"),
    bend("layers out of order, twice, none", SAYS_KV, "told",
         *(kv(begin(layers=layers)) for layers in ((2, 1), (2, 2), ())), words="layers"),
    bend("a beginning with bytes behind it", "trailing bytes", "told", kv(begin() + b"\0"), words="trailing"),
    bend("begun twice", SAYS_KV, "told", kv(begin(), begin()), words="twice"),
    bend("what nobody began", SAYS_KV, "told",
         kv(layer()), kv(PIECES[0]), kv(kv_end()), kv(begin(), layer(OF_LAYER.but(transfer=2))), words="not begun"),
    bend("a piece of a layer nobody described", SAYS_KV, "told", kv(begin(), PIECES[0]), words="described"),
    bend("a layer described twice", SAYS_KV, "told", in_flight(layer()), words="twice"),
    bend("a layer that is not part of it", SAYS_KV, "told", in_flight(layer(OF_LAYER.but(layer=3))), words="not part"),
    bend("another request, model, epoch, heads, tokens under the same number", SAYS_KV, "told",
         *(in_flight(cache_piece(0, OF_LAYER.but(**bent))) for bent in (
             {"request": "r-2"}, {"model": b"x" * 32}, {"epoch": 8}, {"heads": (0, 3)}, {"tokens": (0, 7)})),
         words="another|tokens"),
    bend("another layout or dtype than the layer's", SAYS_KV, "told", in_flight(cache_piece(0, OF_LAYER.but(dtype=1))),
         in_flight(cache_piece(0, OF_LAYER.but(layout=2))), words="layout|float16"),
    bend("more than was announced", "checked before anything is allocated", "told", kv(begin(nbytes=511), layer()),
         kv(begin(), layer(arrays=((0, 0, (FULL, FULL)),))), kv(begin(), layer(arrays=((0, 1, (FULL, 8, FULL)),))),
         words="announced|slots"),
    bend("an array of another dtype, too many dims, cut along none of them", SAYS_KV, "told",
         kv(begin(), layer(arrays=((14, 0, (8,)),))), kv(begin(), layer(arrays=((0, 0, (1,) * 9),))), kv(begin(),
         layer(arrays=((0, 3, (2, 8, 4)),)))),
    bend("scalars that are no map", "a MessagePack map", "told",
         kv(begin(), layer(scalars=b"\xc1")), kv(begin(), layer(scalars=b"\x80\0"))),
    bend("a piece past the end", "offset past the end", "told",
         in_flight(cache_piece(0, slots=(0, 9))), in_flight(cache_piece(0, slots=(8, 9))),
         in_flight(cache_piece(0, slots=(FULL - 1, FULL))), words="slots"),
    bend("a piece of no slots", SAYS_KV, "told",
         in_flight(cache_piece(0, slots=(4, 4))), in_flight(cache_piece(0, slots=(5, 4))), words="slots"),
    bend("a piece of an array there is none of", SAYS_KV, "told",
         in_flight(cache_piece(2)), in_flight(cache_piece(255)), words="array"),
    bend("a piece twice", "nothing is written twice", "told", in_flight(PIECES[0], PIECES[0]), words="twice"),
    bend("a piece whose tensor has another shape, dtype or name", SAYS_KV, "told",
         in_flight(cache_piece(0, dims=(8, 2, 4))), in_flight(cache_piece(0, dtype=3)), in_flight(cache_piece(0,
         name="1.0.0")), words="due"),
    bend("a piece whose tensor lies", SAYS_SIZE, "told", in_flight(cache_piece(0, data=bytes(255), raw_length=256)),
         in_flight(cache_piece(0, raw_length=1 << 40)), in_flight(cache_piece(0, flags=LZ4,
         bend=lambda block: block[:-3])),
         in_flight(cache_piece(0, flags=LZ4, raw_length=257))),
    bend("counts that do not agree", "an acknowledgement per transfer", "told",
         kv(*BEGUN, *PIECES, kv_end(1, 512)), kv(*BEGUN, *PIECES, kv_end(2, 511)),
         kv(*BEGUN, *PIECES, kv_end(3, 513)), kv(*BEGUN, PIECES[0], kv_end(1, 256))),
    bend("an end twice", SAYS_KV, "told", kv(*BEGUN, kv_end(), kv_end()), words="ends twice"),
    bend("a receiver's message to the receiver", SAYS_KV, "told",
         *(in_flight(HEAD.but(kind=kind).message(codec.kv_counts(2, 512)))
         for kind in (codec.KV_ACK,)), words="receiver"),
    bend("transfers of a past epoch", "nothing stale survives a re-plan", "served",
         kv(begin(HEAD.but(epoch=6)), layer(OF_LAYER.but(epoch=6)), cache_piece(0, OF_LAYER.but(epoch=6)))),
    bend("what this side does not take", "refused, and the connection lives", "served",
         kv(begin(HEAD.but(model=b"x" * 32)), layer(OF_LAYER.but(model=b"x" * 32))), kv(begin(layers=(9,))),
         kv(begin(nbytes=1 << 63)),
         kv(begin(HEAD.but(epoch=9)))),
]  # fmt: skip


def honest(peer: Peer) -> None:
    for payload in CACHE:
        peer.send(KV, 1, payload)
