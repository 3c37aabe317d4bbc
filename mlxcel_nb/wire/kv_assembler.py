"""The receiving end of KV-cache transfers: what arrives is checked, put in its place, and handed over when it is whole.

Layers and pieces may come in any order; a piece that overlaps another, does not fit its array, or belongs to something
nobody began ends the connection. What merely does not suit (another model, no room) is refused, and the
connection lives on. One owner; pure.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire import kv, quantising, tensors
from mlxcel_nb.wire.dtypes import dtype_named
from mlxcel_nb.wire.kv import BY_TOKEN, ArraySpec, Counts, KVHeader, KVType, Layout, Range, Transfer, Why

MAX_OPEN = 64
"""Transfers that may be incomplete at once."""
MAX_GAPS = 1024
"""Separate stretches of one array that may have arrived while others are missing."""
MAX_REFUSED = 256
"""Refused transfers whose messages, still on their way, are dropped."""


class ArrivedLayer(NamedTuple):
    """One layer, whole. `arrays` holds the bytes of each of `specs`, as plain elements in C order."""

    layout: Layout
    dtype: str
    specs: tuple[ArraySpec, ...]
    arrays: tuple[memoryview, ...]
    scalars: dict[str, Any]


class Complete(NamedTuple):
    """All of a transfer is here and agrees; `ack` is to be sent back. Layers that were handed over before are left
    out.
    """

    transfer: Transfer
    layers: dict[int, ArrivedLayer]
    ack: bytes


class Refusal(NamedTuple):
    """This side does not take a transfer; `message` is to be sent back."""

    transfer: Transfer
    why: Why
    detail: str
    message: bytes


class Abandoned(NamedTuple):
    """The sender gave a transfer up."""

    transfer: Transfer
    code: int
    detail: str


Event = Complete | Refusal | Abandoned
Place = Callable[[Transfer, int, int, ArraySpec], memoryview]
Filled = Callable[[Transfer, int, ArrivedLayer], None]
Suits = Callable[[Transfer, int, Layout, tuple[ArraySpec, ...], dict[str, Any]], str | None]


class KVAssembler:
    """Puts the transfers of one connection together.

    Args:
        model: hash of the model that is loaded here.
        layers: those that this node holds.
        limit: bytes of caches that may be on their way at once, decoded.
        epoch: of the plan in force; `advance` moves on.
        place: given transfer, layer, index of the array and its shape, the memory for all of it; called once for each
            array, when its first piece is here and has been checked. Fresh memory where not given.
        suits: looks at a layer before its pieces come; a text says why this node cannot keep such a one.
        filled: handed each layer as soon as it is whole, which the assembler does not keep then. Whether the transfer
            comes to its end is open.
    """

    def __init__(
        self,
        *,
        model: bytes,
        layers: range,
        limit: int,
        epoch: int = 0,
        place: Place | None = None,
        suits: Suits | None = None,
        filled: Filled | None = None,
    ) -> None:
        self.epoch = epoch
        self.stale = 0
        """Messages of epochs that are over, dropped."""
        self._model = model
        self._layers = layers
        self._limit = limit
        self._place = place
        self._suits = suits
        self._filled = filled
        self._open: dict[int, _Partial] = {}
        self._refused: dict[tuple[int, int, str], None] = {}

    @property
    def reserved(self) -> int:
        """Bytes that open transfers may come to."""
        return sum(partial.nbytes for partial in self._open.values())

    @property
    def allocated(self) -> int:
        """Bytes of memory that open transfers hold."""
        return sum(slot.nbytes for partial in self._open.values() for slot in partial.held())

    def advance(self, epoch: int) -> None:
        """A new plan: what belongs to older ones is forgotten, and dropped when it still comes."""
        self.epoch = max(self.epoch, epoch)
        self._open = {n: partial for n, partial in self._open.items() if partial.transfer.epoch >= self.epoch}
        self._refused.clear()

    def refuse(self, transfer: Transfer, why: Why, detail: str = "") -> Refusal:
        """Give up a transfer that is on its way: forget it, and drop what still comes."""
        self._open.pop(transfer.number, None)
        self._refused[transfer.number, transfer.epoch, transfer.request] = None
        while len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        return Refusal(transfer, why, detail, kv.encode_refuse(transfer, why, detail))

    def add(self, payload: memoryview) -> Event | None:
        """Take one message of a sender's; what it brought about, if anything.

        Raises:
            WireError: it breaks the contract; the connection is to be closed, and nothing incomplete to be used.
        """
        header, body = kv.decode(payload)
        if header.epoch < self.epoch:
            self.stale += 1
            return None
        key = (header.number, header.epoch, header.request)
        if header.type is KVType.BEGIN:
            return self._begin(header, body)
        if key in self._refused:
            if header.type in {KVType.END, KVType.ABANDON}:
                del self._refused[key]
            return None
        partial = self._open.get(header.number)
        if partial is None:
            raise WireError(f"a kv {header.type.name.lower()} message of transfer {header.number}, which was not begun")
        partial.check(header)
        if header.type is KVType.LAYER:
            return self._layer(partial, header, body)
        if header.type is KVType.PIECE:
            partial.piece(header, body, self._place)
            self._hand_over(partial, header.layer)
        elif header.type is KVType.END:
            partial.end(kv.decode_counts(body, "end"))
        elif header.type is KVType.ABANDON:
            code, detail = kv.decode_refusal(body)
            del self._open[header.number]
            return Abandoned(partial.transfer, code, detail)
        else:
            raise WireError(f"a kv {header.type.name.lower()} message to the receiver of a transfer")
        return self._finished(partial)

    def _begin(self, header: KVHeader, body: memoryview) -> Refusal | None:
        layers, nbytes = kv.decode_begin(body)
        if header.number in self._open:
            raise WireError(f"kv transfer {header.number} is begun twice")
        transfer = kv.transfer_of(header)
        self._refused.pop((header.number, header.epoch, header.request), None)
        if header.epoch > self.epoch:
            return self.refuse(transfer, Why.EPOCH, f"epoch {header.epoch} has not begun here, {self.epoch} runs")
        if header.model != self._model:
            theirs, ours = header.model.hex()[:12], self._model.hex()[:12]
            return self.refuse(transfer, Why.MODEL, f"the cache is of model {theirs}, loaded here is {ours}")
        if missing := [layer for layer in layers if layer not in self._layers]:
            held = f"{self._layers.start} to {self._layers.stop - 1}"
            return self.refuse(transfer, Why.LAYERS, f"layer {missing[0]} is not held here, which are {held}")
        room = self._limit - self.reserved
        if nbytes > room or len(self._open) >= MAX_OPEN:
            return self.refuse(transfer, Why.ROOM, f"{nbytes} bytes are announced, there is room for {room}")
        self._open[header.number] = _Partial(transfer, layers, nbytes)
        return None

    def _layer(self, partial: _Partial, header: KVHeader, body: memoryview) -> Event | None:
        specs, scalars = kv.decode_layer(body)
        partial.describe(header, specs, scalars)
        if self._suits is not None:
            why = self._suits(partial.transfer, header.layer, header.layout, specs, scalars)
            if why is not None:
                return self.refuse(partial.transfer, Why.LAYOUT, why)
        self._hand_over(partial, header.layer)
        return self._finished(partial)

    def _hand_over(self, partial: _Partial, layer: int) -> None:
        if self._filled is not None and (whole := partial.filled(layer)) is not None:
            self._filled(partial.transfer, layer, whole)

    def _finished(self, partial: _Partial) -> Complete | None:
        """The transfer handed over, if that was all of it."""
        if not partial.complete:
            return None
        del self._open[partial.transfer.number]
        return Complete(partial.transfer, partial.arrived(), kv.encode_ack(partial.transfer, partial.counts))


@dataclass
class _Slot:
    """One array on its way: where it goes, and which slots of it are there, as begins and ends of stretches in
    order.
    """

    spec: ArraySpec
    memory: memoryview | None = None
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return 0 if self.memory is None else self.memory.nbytes

    @property
    def complete(self) -> bool:
        return not self.spec.nbytes or (self.begins == [0] and self.ends == [self.spec.slots])

    def check_free(self, slots: Range) -> int:
        """Where among the stretches `slots` belong; an error when some of them are there already."""
        at = bisect.bisect_right(self.begins, slots.begin)
        if (at and self.ends[at - 1] > slots.begin) or (at < len(self.begins) and self.begins[at] < slots.end):
            raise WireError(f"slots {slots.begin} to {slots.end} of a cache array come twice")
        return at

    def mark(self, at: int, slots: Range) -> None:
        joins_left = at > 0 and self.ends[at - 1] == slots.begin
        joins_right = at < len(self.begins) and self.begins[at] == slots.end
        if joins_left and joins_right:
            self.ends[at - 1] = self.ends.pop(at)
            del self.begins[at]
        elif joins_left:
            self.ends[at - 1] = slots.end
        elif joins_right:
            self.begins[at] = slots.begin
        else:
            if len(self.begins) >= MAX_GAPS:
                raise WireError(f"a cache array that comes in more than {MAX_GAPS} separate stretches")
            self.begins.insert(at, slots.begin)
            self.ends.insert(at, slots.end)


class _Partial:
    """A transfer on its way."""

    def __init__(self, transfer: Transfer, layers: tuple[int, ...], nbytes: int) -> None:
        self.transfer = transfer
        self.nbytes = nbytes
        self.counts = Counts(0, 0)
        self._layers: dict[int, tuple[KVHeader, dict[str, Any], list[_Slot]] | None] = dict.fromkeys(layers)
        self._handed: set[int] = set()
        self._described = 0
        self._undescribed = len(layers)
        self._unfilled = 0
        self._announced: Counts | None = None

    def held(self) -> list[_Slot]:
        return [slot for layer in self._layers.values() if layer is not None for slot in layer[2]]

    def check(self, header: KVHeader) -> None:
        """Every message of a transfer says the same of it."""
        own = self.transfer
        said = (header.request, header.model, header.epoch, header.heads)
        if said != (own.request, own.model, own.epoch, own.heads):
            raise WireError(f"a kv message of transfer {own.number} with another request, model, epoch or head range")
        if header.tokens != own.tokens and header.type is not KVType.PIECE:
            raise WireError(f"a kv message of transfer {own.number} with another token range")
        whole = header.layer == kv.WHOLE
        if (whole or own.layout is not Layout.MIXED) and header.layout is not own.layout:
            raise WireError(f"a kv message of layout {header.layout.name} in a transfer of {own.layout.name}")
        if (whole or own.dtype is not None) and header.dtype != own.dtype:
            raise WireError(f"a kv message of {header.dtype} in a transfer of {own.dtype}")

    def describe(self, header: KVHeader, specs: tuple[ArraySpec, ...], scalars: dict[str, Any]) -> None:
        """A layer says what it consists of."""
        if header.layer not in self._layers:
            raise WireError(f"layer {header.layer} is not part of kv transfer {header.number}")
        if self._layers[header.layer] is not None:
            raise WireError(f"layer {header.layer} of kv transfer {header.number} is described twice")
        if header.layout in BY_TOKEN and any(spec.slots != self.transfer.tokens.size for spec in specs):
            raise WireError(
                f"layer {header.layer} has arrays of {[spec.slots for spec in specs]} slots for "
                f"{self.transfer.tokens.size} tokens"
            )
        self._described += sum(spec.nbytes for spec in specs)
        if self._described > self.nbytes:
            raise WireError(f"kv transfer {header.number} comes to {self._described} bytes; it announced {self.nbytes}")
        slots = [_Slot(spec) for spec in specs]
        self._layers[header.layer] = (header, scalars, slots)
        self._undescribed -= 1
        self._unfilled += sum(1 for slot in slots if not slot.complete)

    def piece(self, header: KVHeader, body: memoryview, place: Place | None) -> None:
        """Some slots of an array, put where they belong once everything about them agrees."""
        entry = self._layers.get(header.layer)
        if entry is None:
            raise WireError(f"a piece of layer {header.layer}, which has not been described")
        described, _, arrays = entry
        if (header.layout, header.dtype) != (described.layout, described.dtype):
            raise WireError(f"a piece of layer {header.layer} with another layout or dtype than the layer's")
        piece = kv.decode_piece(body)
        if piece.array >= len(arrays):
            raise WireError(f"a piece of array {piece.array}; layer {header.layer} has {len(arrays)}")
        slot = arrays[piece.array]
        spec = slot.spec
        if piece.slots.end > spec.slots:
            raise WireError(f"a piece of slots {piece.slots.begin} to {piece.slots.end} of an array of {spec.slots}")
        due = self.transfer.tokens
        if header.layout in BY_TOKEN:
            due = Range(due.begin + piece.slots.begin, due.begin + piece.slots.end)
        if header.tokens != due:
            raise WireError(
                f"a piece for tokens {header.tokens.begin} to {header.tokens.end}; its slots are {tuple(due)}"
            )
        at = slot.check_free(piece.slots)
        dims = spec.cut(piece.slots.size)
        nbytes = math.prod(dims) * dtype_named(spec.dtype).itemsize
        if not 0 < nbytes <= kv.MAX_PIECE:
            raise WireError(f"a kv piece of {nbytes} bytes; 1 to {kv.MAX_PIECE} are taken")
        data = _decode_piece(piece.tensor, spec.dtype, dims)
        if slot.memory is None:
            where = memoryview(bytearray(spec.nbytes)) if place is None else place(
                self.transfer, header.layer, piece.array, spec
            )  # fmt: skip
            slot.memory = where.cast("B")
        slot.mark(at, piece.slots)
        self._unfilled -= slot.complete
        _lay(data, slot.memory, spec, piece.slots)
        self.counts = Counts(self.counts.pieces + 1, self.counts.nbytes + nbytes)

    def end(self, counts: Counts) -> None:
        if self._announced is not None:
            raise WireError(f"kv transfer {self.transfer.number} ends twice")
        self._announced = counts

    @property
    def complete(self) -> bool:
        """Whether the sender says it is, and it is.

        Raises:
            WireError: it says so, and more or other things have come.
        """
        if self._announced is None:
            return False
        if self.counts.pieces > self._announced.pieces or self.counts.nbytes > self._announced.nbytes:
            raise WireError(f"kv transfer {self.transfer.number}: {self.counts}, announced were {self._announced}")
        whole = not self._undescribed and not self._unfilled
        if whole != (self.counts == self._announced):
            if self.counts == self._announced:
                raise WireError(
                    f"kv transfer {self.transfer.number} ended; {self._undescribed} layers and parts of "
                    f"{self._unfilled} arrays are missing"
                )
            raise WireError(
                f"kv transfer {self.transfer.number}: {self.counts} are all of it, announced {self._announced}"
            )
        return whole

    def filled(self, number: int) -> ArrivedLayer | None:
        """A layer, if it is whole; its memory is the caller's."""
        entry = self._layers[number]
        if entry is None or not all(slot.complete for slot in entry[2]):
            return None
        self._handed.add(number)
        layer = self._arrived(number)
        for slot in entry[2]:
            slot.memory = None
        return layer

    def arrived(self) -> dict[int, ArrivedLayer]:
        return {number: self._arrived(number) for number in self._layers if number not in self._handed}

    def _arrived(self, number: int) -> ArrivedLayer:
        entry = self._layers[number]
        assert entry is not None
        header, scalars, slots = entry
        assert header.dtype is not None
        arrays = tuple(memoryview(b"") if slot.memory is None else slot.memory for slot in slots)
        return ArrivedLayer(header.layout, header.dtype, tuple(slot.spec for slot in slots), arrays, scalars)


def _decode_piece(tensor: memoryview, dtype: str, dims: tuple[int, ...]) -> memoryview:
    """The plain elements of a piece; it must be of the dtype and dims that its place has."""
    header = tensors.decode_header(tensor)
    if (header.dtype, header.dims, header.name) != (dtype, dims, ""):
        raise WireError(f"a kv piece of {header.dtype} {header.dims} where {dtype} {dims} is due")
    header, data = tensors.decode(tensor, limit=kv.MAX_PIECE)
    return quantising.dequantise(dtype, dims, data) if header.flags & tensors.Flag.QUANTISED else data


def _lay(data: memoryview, memory: memoryview, spec: ArraySpec, slots: Range) -> None:
    """Put the elements of `slots` among those of the whole array."""
    inner = math.prod(spec.dims[spec.axis + 1 :]) * dtype_named(spec.dtype).itemsize
    outer = math.prod(spec.dims[: spec.axis])
    if outer == 1:
        memory[slots.begin * inner : slots.end * inner] = data
        return
    import numpy as np

    rows = np.frombuffer(memory, np.uint8).reshape(outer, spec.slots, inner)
    rows[:, slots.begin : slots.end] = np.frombuffer(data, np.uint8).reshape(outer, slots.size, inner)
