"""KV-cache transfer: the seven messages of frame kind 5.

A transfer moves a cache, or a range of its heads, of one request from one node to another, layer by layer and each
layer in pieces, while the sender may still be computing the rest:

    sender    begin, then for each layer in any order: layer, its pieces in any order; then end
              abandon instead, at any time
    receiver  ack once all of it is there and agrees
              refuse instead, at any time

Each message says in full what it belongs to:

    version u8 = 1 | type u8 | layout u8 | dtype u8 | transfer u32 | epoch u64 | layer u32
    | heads u32 u32 | tokens u32 u32 | model 32 | request str8 | body

so nothing is paired by the order in which it comes. `wire.kv_assembler` and `wire.kv_sender` are its two ends.
Pure; any thread. Peers are members, whose figures are still checked before anything is allocated for them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire import messages
from mlxcel_nb.wire.dtypes import DTYPES, dtype_named
from mlxcel_nb.wire.fields import Reader, clip, printable, str8
from mlxcel_nb.wire.tensors import MAX_DIM, MAX_NDIM

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

VERSION = 1
MODEL_BYTES = 32
"""SHA-256 of the model, as `models.digest` takes it."""

WHOLE = (1 << 32) - 1
"""Layer of messages about the transfer as a whole."""
ANY_DTYPE = 255
"""dtype of those, where its layers differ."""

MAX_LAYERS = 4096
MAX_ARRAYS = 64
"""Of one layer; a quantised one has six."""
MAX_SCALARS = 4 << 10
"""Bytes of a layer's scalars."""
MAX_PIECE = 16 << 20
"""Bytes that one piece stands for, decoded."""

_HEAD = struct.Struct(f"!BBBBIQIIIII{MODEL_BYTES}s")
_COUNTS = struct.Struct("!IQ")
_PLACE = struct.Struct("!BII")


class KVType(IntEnum):
    BEGIN = 1
    LAYER = 2
    PIECE = 3
    END = 4
    ACK = 5
    REFUSE = 6
    ABANDON = 7


class Layout(IntEnum):
    """How a layer keeps what it has seen."""

    MIXED = 0
    """Of a transfer whose layers differ; never of a layer."""
    PLAIN = 1
    """Keys and values (or MLA's latents and positions), a slot for each token, in order."""
    ROTATING = 2
    """Keys and values of a window; slots as they lie in memory."""
    QUANTISED = 3
    """Codes, scales, biases of keys, then of values; a slot for each token, in order."""
    CHUNKED = 4
    """Keys and values of the last tokens, from a start position on."""
    STATE = 5
    """Arrays that have no tokens: state-space and linear-attention layers."""
    LIST = 6
    """Several of these in one layer."""


BY_TOKEN = frozenset({Layout.PLAIN, Layout.QUANTISED})
"""Layouts whose slots are the transfer's tokens, so a piece's tokens follow from its slots."""


class Why(IntEnum):
    """Why a transfer is refused or abandoned; the connection lives on."""

    MODEL = 1
    EPOCH = 2
    ROOM = 3
    LAYOUT = 4
    LAYERS = 5
    GIVEN_UP = 6


class Range(NamedTuple):
    """From `begin` up to, and without, `end`."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What every message of one transfer says alike.

    `number` tells transfers of one sender on one connection apart. `tokens` are positions in the sequence; `heads`
    are kv-heads of the whole model. `layout` and `dtype` are those of all layers, or MIXED and None.
    """

    request: str
    model: bytes
    epoch: int
    number: int
    heads: Range
    tokens: Range
    layout: Layout
    dtype: str | None


class KVHeader(NamedTuple):
    """What a message says of itself. `layer` is WHOLE, and layout and dtype those of the transfer, where it has no
    layer.
    """

    type: KVType
    layout: Layout
    dtype: str | None
    number: int
    epoch: int
    layer: int
    heads: Range
    tokens: Range
    model: bytes
    request: str


class ArraySpec(NamedTuple):
    """One array of a layer; pieces are cut along `axis`."""

    dtype: str
    axis: int
    dims: tuple[int, ...]

    @property
    def slots(self) -> int:
        """Length of the axis that is cut; 1 for a scalar."""
        return self.dims[self.axis] if self.dims else 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.dims) * dtype_named(self.dtype).itemsize

    def cut(self, slots: int) -> tuple[int, ...]:
        """Shape of so many of its slots."""
        return (*self.dims[: self.axis], slots, *self.dims[self.axis + 1 :]) if self.dims else ()


class Counts(NamedTuple):
    """What was sent or received: pieces, and the bytes they stand for."""

    pieces: int
    nbytes: int


class Piece(NamedTuple):
    """Which slots of which array a tensor holds."""

    array: int
    slots: Range
    tensor: memoryview


# --------------------------------------------------------------------------------------------------- encoding


def head(
    transfer: Transfer,
    kind: KVType,
    *,
    layer: int = WHOLE,
    layout: Layout | None = None,
    dtype: str | None = None,
    tokens: Range | None = None,
) -> bytes:
    """What leads a message of `transfer`; without layer, layout, dtype and tokens one about the whole of it."""
    if layer == WHOLE:
        layout, dtype = transfer.layout, transfer.dtype
    code = ANY_DTYPE if dtype is None else dtype_named(dtype).code
    assert layout is not None
    return _HEAD.pack(
        VERSION, kind, layout, code, transfer.number, transfer.epoch, layer,
        *transfer.heads, *(tokens or transfer.tokens), transfer.model,
    ) + str8(transfer.request)  # fmt: skip


def encode_begin(transfer: Transfer, layers: Sequence[int], nbytes: int) -> bytes:
    """`layers` are what will come, in growing order; `nbytes` is how much at most, decoded."""
    body = len(layers).to_bytes(2, "big") + struct.pack(f"!{len(layers)}I", *layers) + nbytes.to_bytes(8, "big")
    return head(transfer, KVType.BEGIN) + body


def encode_layer(
    transfer: Transfer, layer: int, layout: Layout, dtype: str, arrays: Sequence[ArraySpec], scalars: dict[str, Any]
) -> bytes:
    """The arrays of one layer, and what else its cache remembers."""
    packed = messages.pack(scalars)
    if len(arrays) > MAX_ARRAYS or len(packed) > MAX_SCALARS:
        raise WireError(f"a cache layer of {len(arrays)} arrays and {len(packed)} bytes of scalars cannot travel")
    specs = b"".join(
        bytes((dtype_named(spec.dtype).code, spec.axis, len(spec.dims)))
        + struct.pack(f"!{len(spec.dims)}I", *spec.dims)
        for spec in arrays
    )
    return (
        head(transfer, KVType.LAYER, layer=layer, layout=layout, dtype=dtype) + bytes((len(arrays),)) + specs + packed
    )


def encode_piece(
    transfer: Transfer,
    layer: int,
    layout: Layout,
    dtype: str,
    array: int,
    slots: Range,
    tensor: Sequence[ReadableBuffer],
) -> list[ReadableBuffer]:
    """Some slots of one array, as parts for one frame; `tensor` is what `tensors.encode` made of them, without a
    name.
    """
    tokens = transfer.tokens
    if layout in BY_TOKEN:
        tokens = Range(tokens.begin + slots.begin, tokens.begin + slots.end)
    lead = head(transfer, KVType.PIECE, layer=layer, layout=layout, dtype=dtype, tokens=tokens)
    return [lead + _PLACE.pack(array, *slots), *tensor]


def encode_end(transfer: Transfer, counts: Counts) -> bytes:
    """All has been sent."""
    return head(transfer, KVType.END) + _COUNTS.pack(*counts)


def encode_ack(transfer: Transfer, counts: Counts) -> bytes:
    """All has arrived, and agrees."""
    return head(transfer, KVType.ACK) + _COUNTS.pack(*counts)


def encode_refuse(transfer: Transfer, why: Why, detail: str = "", *, kind: KVType = KVType.REFUSE) -> bytes:
    """The receiver does not take it; with `kind` ABANDON: the sender gives it up."""
    return head(transfer, kind) + bytes((why,)) + str8(clip(detail))


# --------------------------------------------------------------------------------------------------- decoding


def decode(payload: memoryview) -> tuple[KVHeader, memoryview]:
    """Header and body of a message.

    Raises:
        WireError: a figure that is unknown, or contradicts another.
    """
    if len(payload) <= _HEAD.size:
        raise WireError(f"a kv message of {len(payload)} bytes")
    version, kind, layout, code, number, epoch, layer, *ends, model = _HEAD.unpack_from(payload)
    if version != VERSION:
        raise WireError(f"a kv message of unknown version {version}")
    if not 1 <= kind <= len(KVType):
        raise WireError(f"a kv message of unknown type {kind}")
    if layout >= len(Layout):
        raise WireError(f"a kv message of unknown layout {layout}")
    dtype = DTYPES[code].name if code < len(DTYPES) else None
    if dtype is None and code != ANY_DTYPE:
        raise WireError(f"a kv message of unknown dtype {code}")
    of_a_layer = kind in {KVType.LAYER, KVType.PIECE}
    if of_a_layer != (layer != WHOLE) or (of_a_layer and (dtype is None or layout == Layout.MIXED)):
        raise WireError(f"a kv {KVType(kind).name.lower()} message for layer {layer}, layout {layout}, dtype {code}")
    heads, tokens = Range(*ends[:2]), Range(*ends[2:])
    if heads.begin >= heads.end or tokens.begin > tokens.end:
        raise WireError(f"a kv message for heads {heads.begin} to {heads.end}, tokens {tokens.begin} to {tokens.end}")
    end = _HEAD.size + 1 + payload[_HEAD.size]
    if len(payload) < end:
        raise WireError("a kv message that ends within its request id")
    try:
        request = str(payload[_HEAD.size + 1 : end], "utf-8")
    except UnicodeDecodeError:
        raise WireError("a kv message whose request id is not UTF-8") from None
    header = KVHeader(KVType(kind), Layout(layout), dtype, number, epoch, layer, heads, tokens, model, request)
    return header, payload[end:]


def transfer_of(header: KVHeader) -> Transfer:
    """The transfer that a message about the whole of one belongs to; for answering it."""
    return Transfer(
        request=header.request, model=header.model, epoch=header.epoch, number=header.number, heads=header.heads,
        tokens=header.tokens, layout=header.layout, dtype=header.dtype,
    )  # fmt: skip


def decode_begin(body: memoryview) -> tuple[tuple[int, ...], int]:
    """Layers, and bytes at most."""
    reader = Reader(body, "a kv begin message")
    count = reader.integer(2, "layers")
    if not 1 <= count <= MAX_LAYERS:
        raise WireError(f"a kv transfer of {count} layers; 1 to {MAX_LAYERS} are taken")
    layers = struct.unpack(f"!{count}I", reader.take(4 * count, "layers"))
    nbytes = reader.integer(8, "size")
    reader.finish()
    if any(a >= b for a, b in zip(layers, (*layers[1:], WHOLE), strict=True)):
        raise WireError("a kv transfer whose layers are not in growing order")
    return layers, nbytes


def decode_layer(body: memoryview) -> tuple[tuple[ArraySpec, ...], dict[str, Any]]:
    """Arrays and scalars of a layer."""
    reader = Reader(body, "a kv layer message")
    count = reader.integer(1, "arrays")
    if count > MAX_ARRAYS:
        raise WireError(f"a cache layer of {count} arrays; at most {MAX_ARRAYS} are taken")
    specs = []
    for _ in range(count):
        code, axis, ndim = reader.take(3, "arrays")
        if code >= len(DTYPES) or ndim > MAX_NDIM or axis >= max(1, ndim):
            raise WireError(f"a cache array of dtype {code}, {ndim} dimensions, cut along {axis}")
        specs.append(ArraySpec(DTYPES[code].name, axis, struct.unpack(f"!{ndim}I", reader.take(4 * ndim, "dims"))))
    rest = body[reader.position :]
    if len(rest) > MAX_SCALARS:
        raise WireError(f"a cache layer with {len(rest)} bytes of scalars; at most {MAX_SCALARS} are taken")
    return tuple(specs), messages.unpack(rest)


def decode_piece(body: memoryview) -> Piece:
    """Place and tensor of a piece."""
    if len(body) <= _PLACE.size:
        raise WireError("a kv piece that ends within its place")
    array, begin, end = _PLACE.unpack_from(body)
    if begin >= end or end > MAX_DIM:
        raise WireError(f"a kv piece of slots {begin} to {end}")
    return Piece(array, Range(begin, end), body[_PLACE.size :])


def decode_counts(body: memoryview, what: str) -> Counts:
    """Counts of an end or ack message."""
    if len(body) != _COUNTS.size:
        raise WireError(f"a kv {what} message with {len(body)} bytes of counts")
    return Counts(*_COUNTS.unpack(body))


def decode_refusal(body: memoryview) -> tuple[int, str]:
    """Code (a `Why`, or one of a later version) and detail, fit to be shown, of a refuse or abandon message."""
    reader = Reader(body, "a kv refusal")
    code, detail = reader.integer(1, "code"), reader.str8("detail")
    reader.finish()
    return code, printable(detail)
