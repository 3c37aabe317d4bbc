"""The sending end of a KV-cache transfer: makes its messages, counts what went out, and knows when it was taken.

One object a transfer; one owner; pure. Each layer can go as soon as it has been computed, or in stretches of tokens
while a long prompt is still being read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire import kv, quantising, tensors
from mlxcel_nb.wire.dtypes import dtype_named
from mlxcel_nb.wire.frames import bytes_of
from mlxcel_nb.wire.kv import ArraySpec, Counts, KVType, Layout, Range, Transfer, Why
from mlxcel_nb.wire.quantised import FLOATS

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PIECE_BYTES = 512 << 10
"""Of a piece, decoded: as for other tensors, large enough for full speed and small enough to let others through."""


class KVSender:
    """One transfer.

    Args:
        transfer: what its messages say of it.
        layers: those that will be sent.
        nbytes: how much they come to at most, as plain elements.
        encoding: "plain", "lz4", "int8" or "int4", as `wire.encoding` chose; arrays it does not fit go plain.
        group: elements that share a scale, with int8 and int4; fewer where an array's rows are no multiple of it.
    """

    def __init__(
        self, transfer: Transfer, layers: Sequence[int], nbytes: int, *, encoding: str = "plain", group: int = 64
    ) -> None:
        self.transfer = transfer
        self.sent = Counts(0, 0)
        self.acknowledged = False
        self.refused: tuple[int, str] | None = None
        self.errors: list[quantising.Measured] = []
        """Of each piece that went as codes."""
        self._layers = tuple(sorted(layers))
        self._nbytes = nbytes
        self._encoding = encoding
        self._group = group
        self._described: dict[int, tuple[Layout, str, tuple[ArraySpec, ...]]] = {}

    def begin(self) -> bytes:
        return kv.encode_begin(self.transfer, self._layers, self._nbytes)

    def layer(
        self, layer: int, layout: Layout, dtype: str, arrays: Sequence[ArraySpec], scalars: dict[str, Any] | None = None
    ) -> bytes:
        """Says what `layer` consists of; before its pieces."""
        self._described[layer] = (layout, dtype, tuple(arrays))
        return kv.encode_layer(self.transfer, layer, layout, dtype, arrays, scalars or {})

    def pieces(
        self, layer: int, array: int, data: ReadableBuffer, *, begin: int = 0, piece_bytes: int = PIECE_BYTES
    ) -> Iterator[list[ReadableBuffer]]:
        """The frames that carry `data`: slots of one array from `begin` on, C-contiguous.

        Each is a list of parts for `Sealer.seal`, good until the next is asked for.
        """
        layout, dtype, specs = self._described[layer]
        spec = specs[array]
        view = bytes_of(data)
        per_slot = math.prod(spec.cut(1)) * dtype_named(spec.dtype).itemsize
        if not per_slot:
            return
        count, odd = divmod(len(view), per_slot)
        if odd or begin + count > spec.slots:
            raise WireError(f"{len(view)} bytes from slot {begin} on do not fit an array {spec.dims} of {spec.dtype}")
        if per_slot > kv.MAX_PIECE:
            raise WireError(
                f"a slot of {per_slot} bytes; at most {kv.MAX_PIECE} fit into a piece: cut along another axis"
            )
        step = max(1, piece_bytes // per_slot)
        for at in range(0, count, step):
            slots = Range(begin + at, begin + min(at + step, count))
            chunk = _cut(view, spec, count, at, slots.size)
            tensor = self._encode(spec.dtype, spec.cut(slots.size), chunk)
            self.sent = Counts(self.sent.pieces + 1, self.sent.nbytes + len(chunk))
            yield kv.encode_piece(self.transfer, layer, layout, dtype, array, slots, tensor)

    def end(self) -> bytes:
        return kv.encode_end(self.transfer, self.sent)

    def abandon(self, why: Why, detail: str = "") -> bytes:
        return kv.encode_refuse(self.transfer, why, detail, kind=KVType.ABANDON)

    def heard(self, payload: memoryview) -> bool:
        """Take an ack or refuse message; whether it is about this transfer.

        Raises:
            WireError: an acknowledgement of something else than was sent.
        """
        header, body = kv.decode(payload)
        if kv.transfer_of(header) != self.transfer:
            return False
        if header.type is KVType.REFUSE:
            self.refused = kv.decode_refusal(body)
        elif header.type is KVType.ACK:
            counts = kv.decode_counts(body, "ack")
            if counts != self.sent:
                raise WireError(f"kv transfer {header.number}: {counts} are acknowledged, {self.sent} were sent")
            self.acknowledged = True
        else:
            raise WireError(f"a kv {header.type.name.lower()} message to the sender of a transfer")
        return True

    def _encode(self, dtype: str, dims: tuple[int, ...], chunk: memoryview) -> list[ReadableBuffer]:
        group = next((size for size in (self._group, 32, 16) if dims and dims[-1] % size == 0), 0)
        if self._encoding in {"int8", "int4"} and dtype in FLOATS and group:
            try:
                codes, measured = quantising.quantise(
                    dtype, dims, chunk, bits=8 if self._encoding == "int8" else 4, group=group
                )
            except WireError:  # an element that is not finite has no code
                return tensors.encode(dtype, dims, "", chunk)
            if measured is not None:
                self.errors.append(measured)
            return tensors.encode(dtype, dims, "", codes, quantised_data=True)
        lz4 = self._encoding == "lz4"
        return tensors.encode(dtype, dims, "", chunk, compress_lz4=lz4, shuffle=lz4)


def _cut(view: memoryview, spec: ArraySpec, count: int, at: int, size: int) -> memoryview:
    """`size` slots from the `at`-th on, of the `count` in `view`."""
    inner = math.prod(spec.dims[spec.axis + 1 :]) * dtype_named(spec.dtype).itemsize
    outer = math.prod(spec.dims[: spec.axis])
    if outer == 1:
        return view[at * inner : (at + size) * inner]
    import numpy as np

    rows = np.frombuffer(view, np.uint8).reshape(outer, count, inner)[:, at : at + size]
    return memoryview(np.ascontiguousarray(rows).reshape(-1))
