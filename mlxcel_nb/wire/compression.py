"""LZ4 blocks without a size prefix, optionally with the bytes of the elements shuffled first.

Real caches and activations hardly shrink, padding and repeated content do. So a sender looks at a sample before it
spends time on the whole, and keeps a block only where it saves a tenth.

Pure; any thread; LZ4 and the shuffle release the GIL. A block's claim about its size is only believed up to what LZ4
can expand to and to `MAX_RAW`, so a lie costs at most that much for a moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxcel_nb.errors import WireError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAX_RAW = 16 << 20
"""Decoded bytes of one block. A larger tensor goes plain; whoever wants it compressed sends it as several tensors."""

WORTH_IT = 0.9
"""A block larger than this part of what it stands for is not kept: the receiver's time is not worth the rest."""

SAMPLE_BYTES = 8 << 10
SAMPLES = 4
"""Blocks of a larger tensor that are tried first, spread evenly over it."""

_MAX_RATIO = 255
"""One byte of an LZ4 block stands for at most 255."""


def compress(raw: ReadableBuffer, *, itemsize: int = 1) -> bytes | None:
    """The LZ4 block of `raw`, shuffled when `itemsize` > 1; None where it would not save a tenth."""
    view = memoryview(raw)
    if not 0 < len(view) <= MAX_RAW or sampled_ratio(view, itemsize=itemsize) > WORTH_IT:
        return None
    block = _block(view, itemsize)
    return block if len(block) <= WORTH_IT * len(view) else None


def sampled_ratio(raw: ReadableBuffer, *, itemsize: int = 1) -> float:
    """Compressed size by size, of a few blocks of `raw`; of all of it where it is hardly larger than those.

    A sample sees no repetition over a distance, and is somewhat pessimistic about it. 1.0 for nothing.
    """
    view = memoryview(raw)
    if len(view) <= 2 * SAMPLES * SAMPLE_BYTES:
        pieces = [view] if view.nbytes else []
    else:
        stride = (len(view) - SAMPLE_BYTES) // (SAMPLES - 1) // itemsize * itemsize
        pieces = [view[at : at + SAMPLE_BYTES] for at in range(0, SAMPLES * stride, stride)]
    size = sum(map(len, pieces))
    return sum(len(_block(piece, itemsize)) for piece in pieces) / size if size else 1.0


def check_claim(block_length: int, raw_length: int) -> None:
    """Refuse a claimed size that no honest block of this length has, before anything is allocated for it."""
    if not block_length < raw_length <= min(MAX_RAW, block_length * _MAX_RATIO):
        raise WireError(f"an LZ4 block of {block_length} bytes cannot stand for {raw_length}")


def decompress(block: ReadableBuffer, raw_length: int, *, itemsize: int = 1) -> memoryview:
    """The `raw_length` bytes in `block`, unshuffled when `itemsize` > 1."""
    import lz4.block

    view = memoryview(block)
    check_claim(len(view), raw_length)
    if raw_length % itemsize:
        raise WireError(f"{raw_length} shuffled bytes are no whole elements of {itemsize}")
    try:
        raw = lz4.block.decompress(view, uncompressed_size=raw_length)
    except (lz4.block.LZ4BlockError, ValueError, MemoryError):
        raise WireError(f"an LZ4 block that does not decode to its {raw_length} bytes") from None
    if len(raw) != raw_length:
        raise WireError(f"an LZ4 block that decodes to {len(raw)} bytes, {raw_length} were announced")
    return memoryview(unshuffle(raw, itemsize) if itemsize > 1 else raw).toreadonly()


def _block(view: memoryview, itemsize: int) -> bytes:
    import lz4.block

    return bytes(lz4.block.compress(shuffle(view, itemsize) if itemsize > 1 else view, store_size=False))


def shuffle(raw: ReadableBuffer, itemsize: int) -> memoryview:
    """First bytes of all elements, then second bytes, and so on."""
    import numpy as np

    data = np.frombuffer(raw, np.uint8)
    count = len(data) // itemsize
    planes = np.empty((itemsize, count), np.uint8)
    if itemsize == 2:  # a shift and a narrowing copy take a third of the time of a strided one
        pairs = data.view("<u2")
        planes[0] = pairs
        planes[1] = pairs >> np.uint16(8)
    else:
        elements = data.reshape(count, itemsize)
        for i in range(itemsize):
            planes[i] = elements[:, i]
    return _flat(planes)


def unshuffle(planes: ReadableBuffer, itemsize: int) -> memoryview:
    """What `shuffle` was given."""
    import numpy as np

    rows = np.frombuffer(planes, np.uint8).reshape(itemsize, -1)
    if itemsize == 2:
        pairs = rows[1].astype("<u2")
        np.left_shift(pairs, 8, out=pairs)
        np.bitwise_or(pairs, rows[0], out=pairs)
        return _flat(pairs)
    elements = np.empty((rows.shape[1], itemsize), np.uint8)
    for i in range(itemsize):
        elements[:, i] = rows[i]
    return _flat(elements)


def _flat(array: Any) -> memoryview:
    """An array's own bytes."""
    return memoryview(array.reshape(-1).view("u1"))
