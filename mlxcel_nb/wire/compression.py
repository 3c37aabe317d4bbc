"""LZ4 blocks without a size prefix, optionally with the bytes of the elements shuffled first.

Pure; any thread; LZ4 releases the GIL. A block's claim about its size is only believed up to what LZ4 can expand to and
to `MAX_RAW`, so a lie costs at most that much for a moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxcel_nb.errors import WireError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAX_RAW = 16 << 20
"""Decoded bytes of one compressed tensor; larger ones travel in pieces or plain."""

_MAX_RATIO = 255
"""One byte of an LZ4 block stands for at most 255."""


def compress(raw: ReadableBuffer, *, itemsize: int = 1) -> bytes | None:
    """The LZ4 block of `raw`, shuffled when `itemsize` > 1; None where that would not be smaller."""
    import lz4.block

    view = memoryview(raw)
    if not 0 < len(view) <= MAX_RAW:
        return None
    block = bytes(lz4.block.compress(_shuffle(view, itemsize) if itemsize > 1 else view, store_size=False))
    return block if len(block) < len(view) else None


def check_claim(block_length: int, raw_length: int) -> None:
    """Refuse a claimed size that no honest block of this length has, before anything is allocated for it."""
    if not block_length < raw_length <= min(MAX_RAW, block_length * _MAX_RATIO):
        raise WireError(f"an LZ4 block of {block_length} bytes cannot stand for {raw_length}")


def decompress(block: ReadableBuffer, raw_length: int, *, itemsize: int = 1) -> memoryview:
    """The `raw_length` bytes in `block`, unshuffled when `itemsize` > 1."""
    import lz4.block

    view = memoryview(block)
    check_claim(len(view), raw_length)
    try:
        raw = lz4.block.decompress(view, uncompressed_size=raw_length)
    except (lz4.block.LZ4BlockError, ValueError, MemoryError):
        raise WireError(f"an LZ4 block that does not decode to its {raw_length} bytes") from None
    if len(raw) != raw_length:
        raise WireError(f"an LZ4 block that decodes to {len(raw)} bytes, {raw_length} were announced")
    return memoryview(_unshuffle(raw, itemsize) if itemsize > 1 else raw).toreadonly()


def _shuffle(raw: memoryview, itemsize: int) -> bytes:
    """First bytes of all elements, then second bytes, and so on."""
    data = bytes(raw)
    return b"".join(data[i::itemsize] for i in range(itemsize))


def _unshuffle(data: bytes, itemsize: int) -> bytearray:
    count = len(data) // itemsize
    raw = bytearray(len(data))
    for i in range(itemsize):
        raw[i::itemsize] = data[i * count : (i + 1) * count]
    return raw
