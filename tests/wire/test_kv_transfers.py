"""KV transfers: whole or not at all, in any order, and within the memory that was asked for."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from typing import Any

import lz4.block
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire import kv, kv_assembler, quantising, tensors
from mlxcel_nb.wire.kv import ArraySpec, Counts, Layout, Range, Transfer, Why
from mlxcel_nb.wire.kv_assembler import Abandoned, ArrivedLayer, Complete, Refusal
from mlxcel_nb.wire.kv_sender import KVSender
from tests.wire.kv_ends import LIMIT, SPEC, assembler, content, feed, header_of, sent, transfer


def messages_of(layers: tuple[int, ...] = (4, 5), **options: Any) -> tuple[KVSender, list[bytes]]:
    sender, begin, bodies, end = sent(layers=layers, **options)
    return sender, [*begin, *(message for body in bodies for message in body), end]


def only(events: list[Any]) -> Any:
    (event,) = events
    return event


# ------------------------------------------------------------------------------------------------ the good way


@given(st.integers(0, 2**32), st.sampled_from([64, 500, 1000, 1 << 20]))
def test_layers_and_pieces_come_in_any_order(seed: int, piece_bytes: int) -> None:
    sender, begin, bodies, end = sent(piece_bytes=piece_bytes)
    order = random.Random(seed)
    stream = [body[0] for body in bodies]
    rest = [message for body in bodies for message in body[1:]] + [end]
    order.shuffle(stream)
    order.shuffle(rest)
    receiver = assembler()
    *nothing, last = [receiver.add(memoryview(message)) for message in [*begin, *stream, *rest]]
    assert not any(nothing)
    assert isinstance(last, Complete) and last.transfer == sender.transfer
    for layer, arrived in last.layers.items():
        assert (arrived.layout, arrived.dtype, arrived.specs) == (Layout.PLAIN, "float16", (SPEC, SPEC))
        assert [bytes(array) for array in arrived.arrays] == [content(layer, 0), content(layer, 1)]
        assert arrived.scalars == {"layer": layer}
    assert sender.heard(memoryview(last.ack)) and sender.acknowledged
    assert receiver.reserved == receiver.allocated == 0


@given(st.integers(0, 2**32))
def test_layers_may_be_handed_over_one_by_one(seed: int) -> None:
    """Each once, when the last of it is here; nothing of it is kept, and none of it may come again."""
    _, begin, bodies, end = sent()
    order = random.Random(seed)
    stream, rest = [body[0] for body in bodies], [message for body in bodies for message in body[1:]]
    order.shuffle(rest)
    handed: dict[int, list[bytes]] = {}
    lacks = {header_of(body[0]).layer: {*body[1:]} for body in bodies}

    def filled(_: Transfer, layer: int, arrived: ArrivedLayer) -> None:
        assert layer not in handed and not lacks[layer], "before it was all there"
        handed[layer] = [bytes(array) for array in arrived.arrays]

    receiver = assembler(filled=filled)
    assert not feed(receiver, [*begin, *stream])
    for message in rest:
        lacks[header_of(message).layer].discard(message)
        assert not feed(receiver, [message])
    assert handed == {layer: [content(layer, 0), content(layer, 1)] for layer in (4, 5)}
    assert not receiver.allocated
    done = only(feed(receiver, [end]))
    assert not done.layers
    receiver = assembler(filled=lambda *_: None)
    with pytest.raises(WireError, match="come twice"):
        feed(receiver, [*begin, *stream, *rest, rest[0]])


def test_transfers_of_one_connection_may_be_interleaved() -> None:
    one, two = messages_of()[1], messages_of(own=transfer(number=8, request="req-2"))[1]
    receiver = assembler()
    events = feed(receiver, [message for pair in zip(one, two, strict=True) for message in pair])
    assert [event.transfer.request for event in events] == ["req-1", "req-2"]


def test_tokens_may_be_sent_while_more_are_being_computed() -> None:
    """A layer is described once; stretches of its tokens follow, each a contiguous array of its own."""
    sender = KVSender(transfer(), [4], 2 * SPEC.nbytes)
    spec = SPEC
    messages = [sender.begin(), sender.layer(4, Layout.PLAIN, "float16", (spec, spec))]
    for begin, end in ((16, 24), (0, 10), (10, 16)):
        part = spec.cut(end - begin)
        for array in range(2):
            data = bytes((begin,)) * ArraySpec("float16", 2, part).nbytes
            messages += [b"".join(map(bytes, parts)) for parts in sender.pieces(4, array, data, begin=begin)]
    done = only(feed(assembler(), [*messages, sender.end()]))
    row = b"".join(bytes((n,)) * 32 * size for n, size in ((0, 10), (10, 6), (16, 8)))
    assert [bytes(array) for array in done.layers[4].arrays] == [row * 2, row * 2]


@pytest.mark.parametrize("encoding", ["lz4", "int8", "int4"])
def test_pieces_may_travel_smaller(encoding: str) -> None:
    sender = KVSender(transfer(), [4], 2 * SPEC.nbytes, encoding=encoding, group=16)
    data = b"".join(i.to_bytes(1, "big") + b"\x3c" for i in range(200)) * 4
    data = data[: SPEC.nbytes] + bytes(max(0, SPEC.nbytes - len(data)))
    messages = [sender.begin(), sender.layer(4, Layout.PLAIN, "float16", (SPEC, SPEC))]
    for array in range(2):
        messages += [b"".join(map(bytes, parts)) for parts in sender.pieces(4, array, data)]
    assert sum(map(len, messages)) < 2 * SPEC.nbytes
    got = only(feed(assembler(), [*messages, sender.end()])).layers[4].arrays[1]
    if encoding == "lz4":
        assert bytes(got) == data and not sender.errors
    else:
        codes, measured = quantising.quantise("float16", SPEC.dims, data, bits=int(encoding[3:]), group=16)
        assert bytes(got) == bytes(quantising.dequantise("float16", SPEC.dims, codes))
        assert sender.errors == [measured, measured]


def test_what_has_no_codes_goes_plain() -> None:
    odd = ArraySpec("int32", 1, (1, 4, 16))
    sender = KVSender(transfer(layout=Layout.STATE, dtype="float32"), [4], 4096, encoding="int8", group=16)
    infinite = b"\0\0\x80\x7f" * 64
    messages = [sender.begin(), sender.layer(4, Layout.STATE, "float32", (odd, ArraySpec("float32", 1, (1, 4, 16))))]
    for array, data in ((0, bytes(range(256))), (1, infinite)):
        messages += [b"".join(map(bytes, parts)) for parts in sender.pieces(4, array, data)]
    done = only(feed(assembler(), [*messages, sender.end()]))
    assert [bytes(array) for array in done.layers[4].arrays] == [bytes(range(256)), infinite]


def test_empty_arrays_and_scalars_are_arrays_too() -> None:
    own = transfer(layout=Layout.STATE, dtype="float32")
    specs = (ArraySpec("float32", 0, (0, 4)), ArraySpec("int64", 0, ()))
    sender = KVSender(own, [0], 8)
    messages = [sender.begin(), sender.layer(0, Layout.STATE, "float32", specs)]
    for array, data in ((0, b""), (1, b"12345678")):
        messages += [b"".join(map(bytes, parts)) for parts in sender.pieces(0, array, data)]
    done = only(feed(assembler(), [*messages, sender.end()]))
    assert [bytes(array) for array in done.layers[0].arrays] == [b"", b"12345678"]


def test_a_receiver_says_where_arrays_go() -> None:
    places: dict[tuple[int, int], bytearray] = {}

    def place(_: kv.Transfer, layer: int, index: int, spec: ArraySpec) -> memoryview:
        places[layer, index] = bytearray(spec.nbytes)
        return memoryview(places[layer, index])

    only(feed(assembler(place=place), messages_of()[1]))
    assert {key: bytes(data) for key, data in places.items()} == {(n, a): content(n, a) for n in (4, 5) for a in (0, 1)}


# ---------------------------------------------------------------------------------------------- not complete


@pytest.mark.parametrize("lost", range(1, 7))
def test_nothing_is_handed_over_while_anything_is_missing(lost: int) -> None:
    _, messages = messages_of(layers=(4,), piece_bytes=1024)
    assert len(messages) == 7
    del messages[lost]
    receiver = assembler()
    if lost == 1:
        with pytest.raises(WireError, match="not been described"):
            feed(receiver, messages)
        return
    assert not feed(receiver, messages) and receiver.reserved


def test_an_end_that_announces_what_cannot_be_all_is_an_error() -> None:
    sender, messages = messages_of(layers=(4,), piece_bytes=1024)
    *rest, _ = messages
    for counts, words in (
        (Counts(sender.sent.pieces - 1, sender.sent.nbytes), "announced were"),
        (Counts(sender.sent.pieces, sender.sent.nbytes - 1), "announced were"),
        (Counts(sender.sent.pieces + 1, sender.sent.nbytes), "are all of it"),
    ):
        with pytest.raises(WireError, match=words):
            feed(assembler(), [*rest, kv.encode_end(sender.transfer, counts)])
    short = Counts(sender.sent.pieces - 1, sender.sent.nbytes - len(content(4, 1)) % 1024)
    with pytest.raises(WireError, match="0 layers and parts of 1 arrays are missing"):
        feed(assembler(), [*rest[:-1], kv.encode_end(sender.transfer, short)])
    with pytest.raises(WireError, match="ends twice"):
        feed(assembler(), [*rest[:-1], messages[-1], messages[-1]])


# ------------------------------------------------------------------------------------------------- bent pieces


def twisted(message: bytes, offset: int, value: bytes) -> bytes:
    return message[:offset] + value + message[offset + len(value) :]


BODY = 68 + 1 + len("req-1")


def piece_of(slots: Range, array: int = 0, *, tokens: Range | None = None, tensor: bytes | None = None) -> bytes:
    """A piece of layer 4, by hand."""
    dims = SPEC.cut(slots.size)
    size = ArraySpec("float16", 2, dims).nbytes
    whole = tensor or b"".join(map(bytes, tensors.encode("float16", dims, "", bytes(size))))
    own = transfer()
    due = tokens or Range(own.tokens.begin + slots.begin, own.tokens.begin + slots.end)
    lead = kv.head(own, kv.KVType.PIECE, layer=4, layout=Layout.PLAIN, dtype="float16", tokens=due)
    return lead + kv._PLACE.pack(array, *slots) + whole


def lz4_tensor(claimed: int, block: bytes) -> bytes:
    dims = SPEC.cut(24)
    return b"\1\1\1\4" + b"".join(d.to_bytes(4, "big") for d in dims) + b"\0" + claimed.to_bytes(8, "big") + block


ZEROS = bytes(lz4.block.compress(bytes(SPEC.nbytes), store_size=False))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([piece_of(Range(0, 4)), piece_of(Range(0, 4))], "come twice"),
        ([piece_of(Range(0, 4)), piece_of(Range(3, 5))], "come twice"),
        ([piece_of(Range(4, 8)), piece_of(Range(0, 5))], "come twice"),
        ([piece_of(Range(4, 8)), piece_of(Range(0, 24))], "come twice"),
        ([piece_of(Range(20, 25))], "slots 20 to 25 of an array of 24"),
        ([piece_of(Range(0, 4), array=2)], "array 2; layer 4 has 2"),
        ([piece_of(Range(0, 4), tokens=Range(8, 13))], "tokens 8 to 13"),
        ([piece_of(Range(0, 4), tensor=b"\1\2\0\0\0" + bytes(8))], "bfloat16"),
        ([piece_of(Range(0, 4), tensor=b"".join(map(bytes, tensors.encode("float16", (2,), "", bytes(4)))))], "is due"),
        ([piece_of(Range(0, 4), tensor=b"x")], "1 bytes"),
        ([twisted(piece_of(Range(0, 4)), 2, b"\2")], "ROTATING"),
        ([twisted(piece_of(Range(0, 4)), 3, b"\2")], "bfloat16"),
        ([twisted(piece_of(Range(0, 4)), 4, b"\0\0\0\x09")], "which was not begun"),
        ([twisted(piece_of(Range(0, 4)), 8, bytes(7) + b"\4")], "another request, model, epoch"),
        ([twisted(piece_of(Range(0, 4)), 16, b"\0\0\0\5")], "not been described"),
        ([twisted(piece_of(Range(0, 4)), 20, bytes(4))], "head range"),
        ([twisted(piece_of(Range(0, 4)), 36, bytes(32))], "model"),
        ([twisted(piece_of(Range(0, 4)), 70, b"x")], "another request"),
        ([piece_of(Range(0, 24), tensor=lz4_tensor(SPEC.nbytes, ZEROS[:-1]))], "does not decode"),
        ([piece_of(Range(0, 24), tensor=lz4_tensor(SPEC.nbytes - 1, ZEROS))], "take 1536"),
        ([piece_of(Range(0, 24), tensor=lz4_tensor(1 << 31, ZEROS))], "take 1536"),
        ([piece_of(Range(0, 24), tensor=lz4_tensor(1 << 63, ZEROS))], "at most"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bent_piece_is_an_error(messages: list[bytes], words: str) -> None:
    """Cases 42 and 49: overlaps, another place, another tensor, a block that lies."""
    sender = KVSender(transfer(), [4, 5], 4 * SPEC.nbytes)
    receiver = assembler()
    feed(receiver, [sender.begin(), sender.layer(4, Layout.PLAIN, "float16", (SPEC, SPEC))])
    with pytest.raises(WireError, match=words):
        feed(receiver, messages)


def test_gaps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_assembler, "MAX_GAPS", 3)
    sender = KVSender(transfer(), [4], 2 * SPEC.nbytes)
    receiver = assembler()
    feed(receiver, [sender.begin(), sender.layer(4, Layout.PLAIN, "float16", (SPEC, SPEC))])
    feed(receiver, [piece_of(Range(n, n + 1)) for n in (0, 4, 2, 3, 1)])
    with pytest.raises(WireError, match="more than 3 separate stretches"):
        feed(receiver, [piece_of(Range(n, n + 1)) for n in (10, 12, 14)])


def test_layers_are_described_once_and_agree_with_what_was_announced() -> None:
    sender = KVSender(transfer(), [4], 2 * SPEC.nbytes)
    longer = ArraySpec("float16", 2, (1, 2, 25, 16))
    layer = sender.layer(4, Layout.PLAIN, "float16", (SPEC, SPEC))
    for messages, words in (
        ([layer, layer], "described twice"),
        ([sender.layer(4, Layout.PLAIN, "float16", (longer,))], r"\[25\] slots for 24 tokens"),
        ([sender.layer(4, Layout.PLAIN, "float16", (SPEC,) * 3)], "4608 bytes; it announced 3072"),
        ([sender.layer(5, Layout.PLAIN, "float16", (SPEC,))], "layer 5 is not part"),
        ([sender.begin()], "begun twice"),
    ):
        with pytest.raises(WireError, match=words):
            feed(assembler(), [sender.begin(), *messages])
    with pytest.raises(WireError, match="to the receiver"):
        feed(assembler(), [sender.begin(), kv.encode_ack(sender.transfer, Counts(0, 0))])


def test_large_claims_cost_nothing_before_data_comes() -> None:
    spec = ArraySpec("float16", 2, (1, 8, 24, 1 << 16))
    sender = KVSender(transfer(), [4], 2 * spec.nbytes)
    receiver = assembler(limit=1 << 40)
    messages = [sender.begin(), sender.layer(4, Layout.PLAIN, "float16", (spec, spec))]
    tracemalloc.start()
    try:
        assert not feed(receiver, messages)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
    assert receiver.allocated == 0 and receiver.reserved == 2 * spec.nbytes


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("own", "options", "why", "words"),
    [
        (transfer(model=bytes(32)), {}, Why.MODEL, "the cache is of model 000000000000, loaded here is 000102030405"),
        (transfer(epoch=4), {}, Why.EPOCH, "epoch 4 has not begun here, 3 runs"),
        (transfer(), {"limit": 6143}, Why.ROOM, "6144 bytes are announced, there is room for 6143"),
        (transfer(), {"layers": range(5, 9)}, Why.LAYERS, "layer 4 is not held here, which are 5 to 8"),
        (transfer(), {"suits": lambda *_: "groups of 64, kept are 32"}, Why.LAYOUT, "groups of 64, kept are 32"),
    ],
)
def test_what_does_not_suit_is_refused_and_the_connection_lives(
    own: kv.Transfer, options: dict[str, Any], why: Why, words: str
) -> None:
    """Case 39, between two nodes: both values are named, and the next transfer works."""
    sender, messages = messages_of(own=own)
    receiver = assembler(**options)
    refusal = only(feed(receiver, messages))
    assert isinstance(refusal, Refusal) and (refusal.why, refusal.detail) == (why, words)
    assert sender.heard(memoryview(refusal.message)) and sender.refused == (why, words)
    assert receiver.reserved == 0
    receiver._limit, receiver._layers, receiver._suits = LIMIT, range(8), None
    assert isinstance(only(feed(receiver, messages_of()[1])), Complete)


def test_a_receiver_gives_a_transfer_up_and_drops_what_still_comes() -> None:
    sender, messages = messages_of()
    receiver = assembler()
    feed(receiver, messages[:4])
    refusal = receiver.refuse(sender.transfer, Why.GIVEN_UP, "cancelled")
    assert sender.heard(memoryview(refusal.message)) and receiver.allocated == receiver.reserved == 0
    assert not feed(receiver, messages[4:])
    assert isinstance(only(feed(receiver, messages)), Complete)


def test_a_sender_gives_a_transfer_up() -> None:
    sender, messages = messages_of()
    event = only(feed(receiver := assembler(), [*messages[:4], sender.abandon(Why.GIVEN_UP, "cancelled")]))
    assert event == Abandoned(sender.transfer, Why.GIVEN_UP, "cancelled") and receiver.reserved == 0


def test_what_belongs_to_an_older_plan_is_dropped() -> None:
    _, messages = messages_of()
    receiver = assembler()
    feed(receiver, messages[:4])
    receiver.advance(4)
    assert receiver.reserved == 0 and not feed(receiver, messages[4:])
    assert receiver.stale == len(messages) - 4
    assert isinstance(only(feed(receiver, messages_of(own=transfer(epoch=4))[1])), Complete)


def test_open_and_refused_transfers_are_bounded() -> None:
    receiver = assembler()
    for number in range(kv_assembler.MAX_OPEN):
        assert receiver.add(memoryview(KVSender(transfer(number=number), [4], 1).begin())) is None
    for number in range(kv_assembler.MAX_OPEN, kv_assembler.MAX_OPEN + 400):
        assert isinstance(receiver.add(memoryview(KVSender(transfer(number=number), [4], 1).begin())), Refusal)
    assert len(receiver._open) == kv_assembler.MAX_OPEN and len(receiver._refused) == kv_assembler.MAX_REFUSED


# ------------------------------------------------------------------------------------------------ the sender


def test_an_acknowledgement_of_something_else_is_an_error() -> None:
    sender, _ = messages_of()
    other = replace(sender.transfer, number=8)
    assert not sender.heard(memoryview(kv.encode_ack(other, sender.sent))) and not sender.acknowledged
    with pytest.raises(WireError, match="are acknowledged"):
        sender.heard(memoryview(kv.encode_ack(sender.transfer, Counts(1, 1))))
    with pytest.raises(WireError, match="to the sender"):
        sender.heard(memoryview(sender.end()))


def test_data_that_does_not_fit_is_not_sent() -> None:
    sender = KVSender(transfer(), [4], 1 << 30)
    sender.layer(4, Layout.PLAIN, "float16", (SPEC, ArraySpec("float32", 0, (1, 1 << 23))))
    for data, begin in ((bytes(65), 0), (bytes(64), 24)):
        with pytest.raises(WireError, match="do not fit an array"):
            list(sender.pieces(4, 0, data, begin=begin))
    with pytest.raises(WireError, match="cut along another axis"):
        list(sender.pieces(4, 1, bytes(1 << 25)))


def test_pieces_are_of_the_size_that_was_asked_for() -> None:
    for message in messages_of(piece_bytes=640)[1]:
        if header_of(message).type is kv.KVType.PIECE:
            assert len(message) < 640 + 200
