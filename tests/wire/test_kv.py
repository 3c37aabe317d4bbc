"""KV messages: each says in full what it belongs to, golden vectors hold their bytes, and bent figures are errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire import kv, tensors
from mlxcel_nb.wire.kv import ArraySpec, Counts, KVType, Layout, Range, Transfer, Why
from tests.wire.kv_ends import MODEL, SPEC, sent, transfer

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "kv.json").read_text())
HEAD = 68
"""Bytes before the request id."""


def test_every_message_says_what_it_belongs_to() -> None:
    sender, begin, bodies, end = sent()
    own = sender.transfer
    for message in [*begin, *bodies[0], *bodies[1], end, sender.abandon(Why.GIVEN_UP), kv.encode_ack(own, sender.sent)]:
        header, _ = kv.decode(memoryview(message))
        assert (header.request, header.model, header.epoch, header.number) == ("req-1", MODEL, 3, 7)
        assert (header.heads, header.layout, header.dtype) == (Range(2, 4), Layout.PLAIN, "float16")
        if header.type is KVType.PIECE:
            assert own.tokens.begin <= header.tokens.begin < header.tokens.end <= own.tokens.end
            assert header.layer in {4, 5}
        else:
            assert header.tokens == own.tokens


@pytest.mark.parametrize("golden", GOLDEN["messages"], ids=lambda golden: golden["what"])
def test_golden_messages_are_made_and_read(golden: dict[str, Any]) -> None:
    own = Transfer(
        request=GOLDEN["request"], model=bytes.fromhex(GOLDEN["model"]), epoch=GOLDEN["epoch"],
        number=GOLDEN["transfer"], heads=Range(*GOLDEN["heads"]), tokens=Range(*GOLDEN["tokens"]),
        layout=Layout.PLAIN, dtype="bfloat16",
    )  # fmt: skip
    whole = bytes.fromhex(golden["bytes"])
    header, body = kv.decode(memoryview(whole))
    kind = KVType[golden["type"].upper()]
    assert header.type is kind and header.layer == golden.get("layer", kv.WHOLE)
    made: bytes
    if kind is KVType.BEGIN:
        made = kv.encode_begin(own, golden["layers"], golden["size"])
        assert kv.decode_begin(body) == (tuple(golden["layers"]), golden["size"])
    elif kind is KVType.LAYER:
        specs = tuple(ArraySpec(dtype, axis, tuple(dims)) for dtype, axis, dims in golden["arrays"])
        made = kv.encode_layer(own, golden["layer"], Layout.PLAIN, "bfloat16", specs, golden["scalars"])
        assert kv.decode_layer(body) == (specs, golden["scalars"])
    elif kind is KVType.PIECE:
        data, slots = bytes.fromhex(golden["raw"]), Range(*golden["slots"])
        tensor = tensors.encode("bfloat16", golden["dims"], "", data)
        parts = kv.encode_piece(own, golden["layer"], Layout.PLAIN, "bfloat16", golden["array"], slots, tensor)
        made = b"".join(map(bytes, parts))
        piece = kv.decode_piece(body)
        assert (piece.array, piece.slots) == (golden["array"], slots)
        assert bytes(tensors.decode(piece.tensor)[1]) == data
    elif kind in {KVType.END, KVType.ACK}:
        counts = Counts(golden["pieces"], golden["size"])
        made = (kv.encode_end if kind is KVType.END else kv.encode_ack)(own, counts)
        assert kv.decode_counts(body, "end") == counts
    else:
        made = kv.encode_refuse(own, Why(golden["code"]), golden["detail"], kind=kind)
        assert kv.decode_refusal(body) == (golden["code"], golden["detail"])
    assert made.hex() == golden["bytes"]


def test_the_golden_messages_are_of_every_type() -> None:
    assert {golden["type"].upper() for golden in GOLDEN["messages"]} == {kind.name for kind in KVType}


def bent(offset: int, value: bytes, *, of: int = 0) -> memoryview:
    """The begin message (or, `of` 1, a layer's) with some bytes replaced."""
    _, begin, bodies, _ = sent()
    message = bytearray([*begin, *bodies[0]][of])
    message[offset : offset + len(value)] = value
    return memoryview(bytes(message))


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (memoryview(b""), "0 bytes"),
        (memoryview(bytes(HEAD)), "68 bytes"),
        (bent(0, b"\0"), "version 0"),
        (bent(0, b"\2"), "version 2"),
        (bent(1, b"\0"), "type 0"),
        (bent(1, b"\x08"), "type 8"),
        (bent(2, b"\7"), "layout 7"),
        (bent(3, b"\x0e"), "dtype 14"),
        (bent(3, b"\xfe"), "dtype 254"),
        (bent(16, b"\0\0\0\4"), "begin message for layer 4"),
        (bent(16, b"\xff\xff\xff\xff", of=1), "layer message for layer 4294967295"),
        (bent(2, b"\0", of=1), "layout 0"),
        (bent(3, b"\xff", of=1), "dtype 255"),
        (bent(20, b"\0\0\0\4"), "heads 4 to 4"),
        (bent(20, b"\xff\xff\xff\xff"), "heads 4294967295 to 4"),
        (bent(28, b"\0\0\0\x21"), "tokens 33 to 32"),
        (bent(HEAD, b"\xff"), "within its request id"),
        (bent(HEAD + 1, b"\xff"), "UTF-8"),
    ],
)
def test_a_bent_head_is_an_error(payload: memoryview, words: str) -> None:
    """Case 49, for frames of kind 5."""
    with pytest.raises(WireError, match=words):
        kv.decode(payload)


@pytest.mark.parametrize(
    ("read", "body", "words"),
    [
        (kv.decode_begin, b"\0\0" + bytes(8), "0 layers"),
        (kv.decode_begin, b"\x10\x01" + bytes(8), "4097 layers"),
        (kv.decode_begin, b"\0\2" + bytes(8) + bytes(8), "growing order"),
        (kv.decode_begin, b"\0\1\xff\xff\xff\xff" + bytes(8), "growing order"),
        (kv.decode_begin, b"\0\1" + bytes(4) + bytes(9), "trailing"),
        (kv.decode_begin, b"\0\1" + bytes(4) + bytes(7), "within its size"),
        (kv.decode_layer, b"\x41", "65 arrays"),
        (kv.decode_layer, b"\1\x0e\0\0", "dtype 14"),
        (kv.decode_layer, b"\1\0\1\1\0\0\0\1", "cut along 1"),
        (kv.decode_layer, b"\1\0\0\x09" + bytes(36), "9 dimensions"),
        (kv.decode_layer, b"\0", "not MessagePack"),
        (kv.decode_layer, b"\0\x90", "a map"),
        (kv.decode_layer, b"\0" + bytes(4097), "4097 bytes of scalars"),
        (kv.decode_piece, bytes(9), "within its place"),
        (kv.decode_piece, bytes(10), "slots 0 to 0"),
        (kv.decode_piece, b"\0\0\0\0\5\0\0\0\4x", "slots 5 to 4"),
        (lambda body: kv.decode_counts(body, "end"), bytes(11), "11 bytes"),
        (kv.decode_refusal, b"\1\5why", "within its detail"),
        (kv.decode_refusal, b"\1\3why!", "trailing"),
    ],
)
def test_a_bent_body_is_an_error(read: Any, body: bytes, words: str) -> None:
    """Case 49, for frames of kind 5."""
    with pytest.raises(WireError, match=words):
        read(memoryview(body))


def test_what_a_peer_would_refuse_is_not_encoded() -> None:
    for arrays, scalars in (([SPEC] * 65, {}), ([SPEC], {"text": "x" * 5000})):
        with pytest.raises(WireError, match="cannot travel"):
            kv.encode_layer(transfer(), 4, Layout.PLAIN, "float16", arrays, scalars)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_an_error(data: bytes) -> None:
    for payload in (data, b"\1" + data, bytes([1, 1, 1, 1]) + data):
        try:
            header, body = kv.decode(memoryview(payload))
        except WireError:
            continue
        assert header.heads.size > 0 and len(body) < len(payload)
