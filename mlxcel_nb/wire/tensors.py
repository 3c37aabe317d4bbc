"""Arrays as bytes: the tensor header, whole tensors, and tensors split over frames.

    version u8 = 1 | dtype u8 | flags u8 | ndim u8 (0..8) | dims u32 x ndim | name str8 | raw_length u64 | data

A tensor that is split is that very string, cut anywhere behind the header; each piece is led by

    tensor id u32 (below 2^24) | offset u64 | total u64

so the first byte of a frame tells them apart: 1 for a whole tensor, 0 for a piece.

Pure; any thread. Peers are members, but every figure they send is checked against the others before memory is
taken, and no byte of a tensor that fails is handed on.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntFlag
from typing import TYPE_CHECKING, NamedTuple

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire import quantised
from mlxcel_nb.wire.compression import check_claim, compress, decompress
from mlxcel_nb.wire.dtypes import DTYPES, DType, dtype_coded, dtype_named
from mlxcel_nb.wire.fields import str8
from mlxcel_nb.wire.frames import ALIGNMENT, HEAD_BYTES, MAX_PAYLOAD, bytes_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = [
    "DTYPES",
    "Assembler",
    "Flag",
    "TensorHeader",
    "decode",
    "decode_header",
    "encode",
    "encode_header",
    "payloads",
]

VERSION = 1
MAX_NDIM = 8
MAX_DIM = (1 << 32) - 1
MAX_TENSOR = 8 << 30
"""Bytes of one tensor, unless the receiver sets a lower limit."""

PART_BYTES = 512 << 10
"""Of a piece: large enough for full speed, small enough that a cancel waits behind one only briefly."""
MIN_PART_BYTES = 512
"""The first piece holds the whole header."""
MAX_OPEN = 64
"""Tensors that may be incomplete at once."""

_PART = struct.Struct("!IQQ")
PIECE_LEAD = HEAD_BYTES + _PART.size
"""Bytes of a frame's plaintext in front of a piece."""
_MAX_ID = (1 << 24) - 1
_DIMS = [struct.Struct(f"!{ndim}I") for ndim in range(MAX_NDIM + 1)]


class Flag(IntFlag):
    LZ4 = 1
    QUANTISED = 2
    SHUFFLED = 4


# The same as plain integers: operations on flag members cost microseconds, and the hot path has none to spare.
_LZ4, _QUANTISED, _SHUFFLED = 1, 2, 4
_ALL_FLAGS = _LZ4 | _QUANTISED | _SHUFFLED


class TensorHeader(NamedTuple):
    """What a tensor says of itself. `raw_length` is the size of its data once decompressed, in bytes."""

    dtype: str
    dims: tuple[int, ...]
    name: str
    raw_length: int
    flags: int = 0


def encode_header(dtype: str, dims: Sequence[int], name: str, raw_length: int, flags: int = 0) -> bytes:
    """The header, after the checks a receiver would make."""
    kind = dtype_named(dtype)
    dims = tuple(dims)
    if len(dims) > MAX_NDIM or not all(0 <= dim <= MAX_DIM for dim in dims):
        raise WireError(f"a tensor of shape {dims} cannot travel")
    _check_sizes(kind, dims, flags, raw_length, MAX_TENSOR)
    return (
        bytes((VERSION, kind.code, flags, len(dims)))
        + _DIMS[len(dims)].pack(*dims)
        + str8(name)
        + raw_length.to_bytes(8, "big")
    )


def encode(
    dtype: str,
    dims: Sequence[int],
    name: str,
    data: ReadableBuffer,
    *,
    compress_lz4: bool = False,
    shuffle: bool = False,
    quantised_data: bool = False,
) -> list[ReadableBuffer]:
    """Header and data of a tensor, as parts for `Sealer.seal` or `payloads`; plain data is not copied.

    Args:
        dtype: name of the element type.
        dims: shape; of the array that is stood for, when quantised.
        name: what the receiver pairs it by.
        data: C-contiguous, little-endian.
        compress_lz4: try LZ4, and keep it where it is smaller.
        shuffle: shuffle the elements' bytes before LZ4.
        quantised_data: `data` is laid out as `wire.quantised` says.
    """
    view = bytes_of(data)
    flags = _QUANTISED if quantised_data else 0
    if quantised_data:
        quantised.split(dtype_named(dtype), dims, view)
    if compress_lz4:
        itemsize = dtype_named(dtype).itemsize if shuffle and not quantised_data else 1
        block = compress(view, itemsize=itemsize)
        if block is not None:
            flags |= _LZ4 | (_SHUFFLED if itemsize > 1 else 0)
            return [encode_header(dtype, dims, name, len(view), flags), block]
    return [encode_header(dtype, dims, name, len(view), flags), view]


def payloads(
    parts: Sequence[ReadableBuffer], tensor_id: int, *, part_bytes: int = PART_BYTES
) -> Iterator[list[ReadableBuffer]]:
    """Payloads of the frames that carry an encoded tensor: one when it fits into `part_bytes`, else numbered pieces.

    Each is a list of parts for one call of `Sealer.seal`; data is sliced, not copied. `tensor_id` tells tensors that
    are on their way on one channel apart; it may be used again once the tensor is through.
    """
    if not MIN_PART_BYTES <= part_bytes <= MAX_PAYLOAD - _PART.size:
        raise ValueError(f"pieces of {part_bytes} bytes")
    if not 0 <= tensor_id <= _MAX_ID:
        raise ValueError(f"tensor id {tensor_id}")
    views = [bytes_of(part) for part in parts]
    total = sum(map(len, views))
    if total <= part_bytes:
        yield list(views)
        return
    offset = 0
    # The first piece is shorter by the header, so that all others begin where the data would be aligned: see `Sealer`.
    header_bytes = sum(map(len, views[:-1]))
    while offset < total:
        piece: list[ReadableBuffer] = [_PART.pack(tensor_id, offset, total)]
        room = full = part_bytes if offset or header_bytes >= part_bytes else _first_bytes(header_bytes, part_bytes)
        while room and views:
            taken, rest = views[0][:room], views[0][room:]
            piece.append(taken)
            room -= len(taken)
            if len(rest):
                views[0] = rest
            else:
                del views[0]
        yield piece
        offset += full - room


def _first_bytes(header_bytes: int, part_bytes: int) -> int:
    """Of a first piece: the header, and as much data as keeps what follows at a multiple of `ALIGNMENT`."""
    return header_bytes + max(1, (part_bytes - header_bytes) // ALIGNMENT * ALIGNMENT)


def decode(payload: memoryview, *, limit: int = MAX_TENSOR) -> tuple[TensorHeader, memoryview]:
    """Header and raw data of a whole tensor. Data that was not compressed is a view into `payload`.

    Raises:
        WireError: any figure that contradicts another, or more than `limit` bytes.
    """
    kind, header, at = _decode_header(payload, limit)
    return header, _finish(kind, header, payload[at:])


def decode_header(payload: memoryview, *, limit: int = MAX_TENSOR) -> TensorHeader:
    """The header alone, checked; for whoever knows what is due before any of the data is looked at."""
    return _decode_header(payload, limit)[1]


class Assembler:
    """Puts tensors of one connection together from their frames. One owner; not shared between threads.

    Args:
        limit: bytes a tensor may have.
        place: given a header and a number of bytes, the memory those data bytes shall go to; called once for each
            tensor that arrives in pieces and is not compressed, after all checks. Without it, memory grows with
            what arrives.
        in_order: the sender finishes a tensor before it begins the next, so one that is incomplete when the next
            begins was abandoned and is forgotten.
    """

    def __init__(
        self,
        *,
        limit: int = MAX_TENSOR,
        place: Callable[[TensorHeader, int], memoryview] | None = None,
        in_order: bool = False,
    ) -> None:
        self._limit = limit
        self._place = place
        self._in_order = in_order
        self._open: dict[tuple[int, int], _Partial] = {}
        self._landed: _Partial | None = None

    def landing(self, size: int) -> memoryview | None:
        """Where a plaintext of `size` bytes may be decrypted to, so that the piece in it need not be moved any more.

        For the piece that is due of the one tensor on its way, into the memory that `place` gave. What leads the piece
        lies over the end of the one before, which `settle` puts back; whatever else arrives there is dealt with
        before that, or copied by `add`.
        """
        if len(self._open) != 1:
            return None
        (partial,) = self._open.values()
        into = partial.landing(size)
        self._landed = None if into is None else partial
        return into

    def settle(self) -> None:
        """What was decrypted to `landing` has been dealt with."""
        if self._landed is not None:
            self._landed.settle()
            self._landed = None

    def add(self, channel: int, payload: memoryview) -> tuple[TensorHeader, memoryview] | None:
        """Take the payload of a tensor frame; the tensor when this completes one.

        The data of a tensor that came whole is a view into `payload`, so it is only valid as long as that is.
        """
        if len(payload) and payload[0] == VERSION:
            return decode(payload if self._landed is None else memoryview(bytes(payload)), limit=self._limit)
        if len(payload) <= _PART.size:
            raise WireError(f"a tensor frame of {len(payload)} bytes")
        tensor_id, offset, total = _PART.unpack_from(payload)
        piece = payload[_PART.size :]
        if tensor_id > _MAX_ID:
            raise WireError(f"a tensor frame of unknown version {payload[0]}")
        key = (channel, tensor_id)
        partial = self._open.get(key)
        if partial is None:
            if offset:
                raise WireError(f"a piece of tensor {tensor_id} at offset {offset}, 0 was due")
            if self._in_order:
                self.discard()  # no byte of `piece` lies where what was covered is put back
            if len(self._open) >= MAX_OPEN:
                raise WireError(f"more than {MAX_OPEN} unfinished tensors")
            partial = self._begin(piece, total)
            self._open[key] = partial
            piece = piece[partial.header_length :]
        elif offset != partial.received:
            raise WireError(f"a piece of tensor {tensor_id} at offset {offset}, {partial.received} was due")
        elif total != partial.total:
            raise WireError(f"tensor {tensor_id} of {partial.total} bytes now claims {total}")
        if partial is self._landed:
            partial.received += len(piece)
        else:
            partial.append(piece, tensor_id)
        self.settle()
        if partial.received < total:
            return None
        del self._open[key]
        return partial.header, _finish(partial.kind, partial.header, partial.data())

    def _begin(self, piece: memoryview, total: int) -> _Partial:
        kind, header, at = _decode_header(piece, self._limit)
        expected = total - at
        if header.flags & _LZ4:
            check_claim(expected, header.raw_length)
        elif expected != header.raw_length:
            raise WireError(f"tensor {header.name!r} comes as {expected} bytes, its header says {header.raw_length}")
        place = None if header.flags & _LZ4 or self._place is None else self._place(header, expected)
        return _Partial(kind, header, at, total, place)

    def withdraw(self, memory: memoryview) -> None:
        """`memory`, which `place` gave, is wanted back: what is on its way there goes on in memory of its own."""
        self.settle()
        for partial in self._open.values():
            partial.withdraw(memory)

    def discard(self) -> None:
        """Forget what is incomplete, when the step it belonged to is over."""
        self.settle()
        self._open.clear()


class _Partial:
    """A tensor on its way."""

    def __init__(
        self, kind: DType, header: TensorHeader, header_length: int, total: int, place: memoryview | None
    ) -> None:
        self.kind = kind
        self.header = header
        self.header_length = header_length
        self.total = total
        self.received = header_length
        self._place = None if place is None else place.cast("B")
        self._grown = bytearray()
        self._covered: tuple[slice, bytes] | None = None

    def landing(self, size: int) -> memoryview | None:
        begin = self.received - self.header_length
        end = begin + size - PIECE_LEAD
        if self._place is None or begin < PIECE_LEAD or not begin < end <= len(self._place):
            return None
        lead = slice(begin - PIECE_LEAD, begin)
        self._covered = lead, bytes(self._place[lead])
        return self._place[lead.start : end]

    def settle(self) -> None:
        if self._covered is not None and self._place is not None:
            self._place[self._covered[0]] = self._covered[1]
            self._covered = None

    def withdraw(self, memory: memoryview) -> None:
        if self._place is not None and self._place.obj is memory.obj:
            self._place = memoryview(bytearray(self._place))

    def append(self, piece: memoryview, tensor_id: int) -> None:
        end = self.received + len(piece)
        if end > self.total:
            raise WireError(f"a piece of tensor {tensor_id} ends at {end}, past its {self.total} bytes")
        if self._place is None:
            self._grown += piece
        else:
            self._place[self.received - self.header_length : end - self.header_length] = piece
        self.received = end

    def data(self) -> memoryview:
        return memoryview(self._grown) if self._place is None else self._place


def _decode_header(payload: memoryview, limit: int) -> tuple[DType, TensorHeader, int]:
    """Element type, header, and where the data begins."""
    if len(payload) < 4:
        raise WireError(f"a tensor of {len(payload)} bytes")
    version, code, flags, ndim = payload[:4]
    if version != VERSION:
        raise WireError(f"a tensor of unknown version {version}")
    kind = dtype_coded(code)
    if ndim > MAX_NDIM:
        raise WireError(f"a tensor of {ndim} dimensions; at most {MAX_NDIM} are allowed")
    name_at = 4 + 4 * ndim
    if len(payload) <= name_at:
        raise WireError("a tensor that ends within its header")
    dims = _DIMS[ndim].unpack_from(payload, 4)
    length_at = name_at + 1 + payload[name_at]
    begin = length_at + 8
    if len(payload) < begin:
        raise WireError("a tensor that ends within its header")
    try:
        name = str(payload[name_at + 1 : length_at], "utf-8")
    except UnicodeDecodeError:
        raise WireError("a tensor whose name is not UTF-8") from None
    raw_length = int.from_bytes(payload[length_at:begin], "big")
    _check_sizes(kind, dims, flags, raw_length, limit)
    return kind, TensorHeader(kind.name, dims, name, raw_length, flags), begin


def _check_sizes(kind: DType, dims: tuple[int, ...], flags: int, raw_length: int, limit: int) -> None:
    if flags & ~_ALL_FLAGS:
        raise WireError(f"a tensor with unknown flags {flags:#x}")
    if flags & _SHUFFLED and (not flags & _LZ4 or flags & _QUANTISED):
        raise WireError(f"a tensor with shuffled bytes that is {'quantised' if flags & _LZ4 else 'not compressed'}")
    if raw_length > limit:
        raise WireError(f"a tensor of {raw_length} bytes; at most {limit} are taken")
    if flags & _QUANTISED:  # the exact size stands in the data's own prefix
        most = quantised.max_raw_length(dims)
        if raw_length > most:
            raise WireError(f"a quantised tensor of {raw_length} bytes; {dims} {kind.name} take at most {most}")
        return
    expected = math.prod(dims) * kind.itemsize
    if raw_length != expected:
        raise WireError(f"a tensor of {raw_length} bytes; {dims} {kind.name} take {expected}")


def _finish(kind: DType, header: TensorHeader, data: memoryview) -> memoryview:
    """The raw data, once it agrees with its header."""
    if header.flags & _LZ4:
        itemsize = kind.itemsize if header.flags & _SHUFFLED else 1
        data = decompress(data, header.raw_length, itemsize=itemsize)
    elif len(data) != header.raw_length:
        raise WireError(f"tensor {header.name!r} has {len(data)} bytes of data, its header says {header.raw_length}")
    if header.flags & _QUANTISED:
        quantised.split(kind, header.dims, data)
    return data
