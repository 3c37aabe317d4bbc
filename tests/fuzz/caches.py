"""KV transfers that are begun, described, filled and ended or not, in any order."""

from __future__ import annotations

import functools

import lz4.block

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire import kv, messages
from mlxcel_nb.wire.kv import ArraySpec, Range, Transfer
from mlxcel_nb.wire.kv_assembler import Complete, KVAssembler
from mlxcel_nb.wire.tensors import DTYPES, encode_header
from tests.fuzz.script import Script, bend, check_words

KV_LIMIT = 1 << 14
MODEL = b"m" * 32


def transfers(data: bytes) -> None:
    """Transfers that are begun, described, filled, ended or not, in any order, with figures that fit or are bent."""
    script = Script(data)
    flags = script.number()
    placed = 0

    def place(transfer: Transfer, layer: int, index: int, spec: ArraySpec) -> memoryview:
        nonlocal placed
        placed += spec.nbytes
        assert spec.nbytes <= KV_LIMIT and layer in range(4) and transfer.epoch <= 1 and index < kv.MAX_ARRAYS
        return memoryview(bytearray(spec.nbytes))

    assembler = KVAssembler(
        model=MODEL, layers=range(4), limit=KV_LIMIT, epoch=1, place=place if flags & 1 else None,
        suits=(lambda *_: "no" if flags & 4 else None) if flags & 2 else None,
    )  # fmt: skip
    try:
        while script:
            payload = _kv_message(script)
            event = assembler.add(memoryview(payload))
            assert assembler.allocated <= assembler.reserved <= KV_LIMIT
            if isinstance(event, Complete):
                assert sum(sum(map(len, layer.arrays)) for layer in event.layers.values()) <= KV_LIMIT
                for layer in event.layers.values():
                    assert [spec.nbytes for spec in layer.specs] == [len(array) for array in layer.arrays]
                assert kv.decode(memoryview(event.ack))[0].type is kv.KVType.ACK
    except WireError as error:
        check_words(error)


def _kv_message(script: Script) -> bytes:
    """One message of a sender's: mostly of transfer 0 or 1 of what `_kv_shape` says it has."""
    form = script.number()
    kind, number = 1 + (form & 7) % 7, form >> 3 & 1
    bent = form >> 4 == 15
    epoch = script.number() & 3 if bent else 1
    layout, dtype, tokens, specs = _kv_shape(number)
    layer = script.number() & 1 if kind in {2, 3} else kv.WHOLE
    heads = Range(0, 2)
    slots = Range(0, 0)
    body = b""
    if kind == 1:
        count = 1 + (script.number() & 1)
        nbytes = script.number(2) if bent else count * sum(spec.nbytes for spec in specs)
        layers = b"".join(i.to_bytes(4, "big") for i in range(count))
        body = count.to_bytes(2, "big") + layers + nbytes.to_bytes(8, "big")
    elif kind == 2:
        body = bytes((len(specs),))
        for spec in specs:
            body += bytes((dtype_code(spec.dtype), spec.axis, len(spec.dims)))
            body += b"".join(dim.to_bytes(4, "big") for dim in spec.dims)
        body += script.short() if form & 64 else messages.pack({"n": 1})
    elif kind == 3:
        array, begin, size = script.number() % len(specs), script.number() & 7, 1 + (script.number() & 7)
        spec = specs[array]
        slots = Range(begin, begin + size) if bent else Range(min(begin, spec.slots - 1), min(spec.slots, begin + size))
        body = bytes((array,)) + b"".join(n.to_bytes(4, "big") for n in slots) + _kv_tensor(script, spec, slots, form)
    elif kind in {4, 5}:
        body = script.number().to_bytes(4, "big") + (script.number(2) << 2).to_bytes(8, "big")
    else:
        body = bytes((script.number(),)) + b"\3why"
    if kind == 3 and layout in kv.BY_TOKEN:
        tokens = Range(tokens.begin + slots.begin, tokens.begin + slots.end)
    if bent:
        twist = script.number()
        layer ^= twist & 1
        heads = Range(twist >> 1 & 1, 1 + (twist >> 2 & 1))
        tokens = Range(tokens.begin + (twist >> 3 & 1), tokens.end + (twist >> 4 & 1))
        number ^= twist >> 5 & 1
    head = kv._HEAD.pack(
        1, kind, layout, dtype_code(dtype), number, epoch, layer & 0xFFFFFFFF, *heads, *tokens,
        MODEL if script.number() != 255 else bytes(32),
    ) + b"\1r"  # fmt: skip
    whole = head + body
    return bend(script, whole) if form >> 4 == 14 else whole


def dtype_code(name: str) -> int:
    return next(kind.code for kind in DTYPES if kind.name == name)


@functools.cache
def _kv_shape(number: int) -> tuple[kv.Layout, str, Range, tuple[ArraySpec, ...]]:
    if number:
        return kv.Layout.STATE, "float32", Range(0, 9), (ArraySpec("float32", 1, (1, 4, 8)), ArraySpec("int32", 0, ()))
    spec = ArraySpec("float16", 2, (1, 2, 8, 16))
    return kv.Layout.PLAIN, "float16", Range(5, 13), (spec, spec)


def _kv_tensor(script: Script, spec: ArraySpec, slots: Range, form: int) -> bytes:
    """The slots as a tensor: plain, under LZ4, or as codes, and bent now and then."""
    dims = spec.cut(slots.size)
    itemsize = next(kind.itemsize for kind in DTYPES if kind.name == spec.dtype)
    size = itemsize
    for dim in dims:
        size *= dim
    how = script.number()
    fill = bytes((script.number(),))
    if how & 3 == 1:
        block = lz4.block.compress(fill * size, store_size=False)
        tensor = encode_header(spec.dtype, dims, "", size, 1) + block
    elif how & 3 == 2 and spec.dtype.startswith("float") and dims and dims[-1] % 16 == 0:
        elements = size // itemsize
        bits = (4, 8, 2, 6)[how >> 2 & 3]
        codes = bytes((bits, 0, 0, 16)) + fill * (elements * bits // 8 + 2 * (elements // 16) * itemsize)
        tensor = encode_header(spec.dtype, dims, "", len(codes), 2) + codes
    else:
        tensor = encode_header(spec.dtype, dims, "", size) + fill * size
    return bend(script, tensor) if how & 64 and form & 16 else tensor
