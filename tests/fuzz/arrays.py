"""Tensors, whole and in pieces of several, with figures that agree or do not."""

from __future__ import annotations

import lz4.block

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire.tensors import DTYPES, Assembler, TensorHeader, payloads
from tests.fuzz.script import Script, bend, check_words

TENSOR_LIMIT = 1 << 18
"""Bytes a tensor may have here: small, so that inputs reach it."""


def tensors(data: bytes) -> None:
    """Whole tensors and pieces of several, on some channels, with figures that agree or do not."""
    script = Script(data)
    flags = script.number()
    placed: list[memoryview] = []

    def place(header: TensorHeader, size: int) -> memoryview:
        assert size == header.raw_length <= TENSOR_LIMIT, f"{size} bytes are asked for"
        placed.append(memoryview(bytearray(size)))
        return placed[-1]

    assembler = Assembler(limit=TENSOR_LIMIT, place=place if flags & 1 else None, in_order=bool(flags & 8))
    fed = 0
    try:
        while script:
            channel = script.number() & 3
            for payload in tensor_frames(script):
                fed += len(payload)
                if flags & 4:
                    stray(assembler, len(payload))
                if flags & 16 and placed:
                    assembler.withdraw(given := placed.pop())
                    held = bytes(given)
                    done = add(assembler, channel, payload, land=bool(flags & 2))
                    assert bytes(given) == held, "memory that was wanted back is written to"
                else:
                    done = add(assembler, channel, payload, land=bool(flags & 2))
                assert not flags & 8 or len(assembler._open) <= 1
                grown = sum(len(partial._grown) for partial in assembler._open.values())
                assert grown <= fed and len(assembler._open) <= 64
                if done is not None:
                    header, raw = done
                    assert raw.nbytes == header.raw_length <= TENSOR_LIMIT
    except WireError as error:
        check_words(error)


def add(
    assembler: Assembler, channel: int, payload: bytes, *, land: bool = True
) -> tuple[TensorHeader, memoryview] | None:
    """Give a payload to an assembler, decrypted to where it says, as a hot link does; what it completes keeps its
    bytes."""
    plain = b"\4" + channel.to_bytes(4, "big") + payload
    into = assembler.landing(len(plain)) if land else None
    if into is None:
        return assembler.add(channel, memoryview(payload))
    assert len(into) == len(plain)
    into[:] = plain
    done = assembler.add(channel, into[5:].toreadonly())
    if done is not None and done[1].obj is into.obj:
        held = bytes(done[1])
        assembler.settle()
        assert bytes(done[1]) == held, "a tensor that is through is written to"
    assembler.settle()
    return done


def stray(assembler: Assembler, size: int) -> None:
    """A frame of another kind comes in between, and is decrypted to where a piece was due."""
    if (into := assembler.landing(size + 5)) is not None:
        into[:] = b"\xee" * len(into)
        assembler.settle()


def tensor_frames(script: Script) -> list[bytes]:
    """The next payloads: raw, one tensor whose figures agree but for what is bent, or such a one in pieces."""
    form = script.number()
    if form & 3 == 0:
        return [script.long()]
    if form & 3 == 1:
        return [script.take(4) + script.take(8).rjust(8, b"\0") + script.take(8).rjust(8, b"\0") + script.long()]
    whole = _whole_tensor(script)
    if form & 4:
        whole = bend(script, whole)
    if form & 3 == 2:
        return [whole]
    pieces = [b"".join(map(bytes, p)) for p in payloads([whole], script.number(), part_bytes=512 + script.number())]
    if form & 8 and pieces:
        pieces = [pieces[script.number() % len(pieces)] for _ in range(script.number() & 7)]
    return [bend(script, piece) for piece in pieces] if form & 16 else pieces


def _whole_tensor(script: Script) -> bytes:
    kind = DTYPES[script.number() % len(DTYPES)]
    bits = script.number()
    flags = (bits & 1) | (bits & 2) | (4 if bits & 5 == 5 else 0)
    dims = [script.number() for _ in range(bits >> 3 & 3)]
    data = script.long()
    size = kind.itemsize
    for dim in dims:
        size *= dim
    if flags & 2:
        data = bytes([[2, 3, 4, 5, 6, 8][script.number() % 6], 0, 0, 16 << (script.number() & 3)]) + data
        size = len(data)
    elif bits & 32 and size <= TENSOR_LIMIT:
        data = (data * (size // len(data) + 1))[:size] if data else bytes(size)
    else:
        size = len(data)
    if flags & 1:
        data = lz4.block.compress(data, store_size=False)
        if bits & 64:
            data = bend(script, data)
    return b"".join((
        bytes((1, kind.code, flags, len(dims))), *(dim.to_bytes(4, "big") for dim in dims),
        b"\x051.2.3", size.to_bytes(8, "big"), data,
    ))  # fmt: skip
