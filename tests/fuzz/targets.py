"""What is fuzzed: each target feeds bytes of a stranger's or a member's choice to the real code of `wire/`.

A target takes any bytes and raises only when something is wrong: an error outside the family of `MlxcelError`, more
memory than the caps allow, or data that is not what was sent. Payloads are sealed and tagged with the right keys
where a check of those would end every input at once, so that what lies behind them is reached too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import lz4.block

from mlxcel_nb.wire import compression, machine
from tests.fuzz.arrays import tensors
from tests.fuzz.caches import transfers
from tests.fuzz.datagrams import beacons
from tests.fuzz.handshakes import handshake
from tests.fuzz.packs import packed
from tests.fuzz.streams import frames

MAX_BYTES = {"handshake": 512, "frames": 256, "tensors": 384, "kv": 256, "beacons": 192, "messages": 384}
"""Length of an input in the guided run: room for what a target can tell apart, and no more, as long inputs are slow."""

TARGETS: dict[str, Callable[[bytes], None]] = {
    "handshake": handshake,
    "frames": frames,
    "tensors": tensors,
    "kv": transfers,
    "beacons": beacons,
    "messages": packed,
}


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """What targets run in: LZ4 may not be asked for more than a block can honestly stand for, and the key of each side,
    which is always the same here, is worked out once.
    """
    keys: Any = machine
    real_decompress, real_keys = lz4.block.decompress, keys.X25519PrivateKey

    def decompress(block: Any, *, uncompressed_size: int) -> bytes:
        assert uncompressed_size <= min(compression.MAX_RAW, 255 * len(block)), f"LZ4 is asked for {uncompressed_size}"
        return bytes(real_decompress(block, uncompressed_size=uncompressed_size))

    class Precomputed:
        from_private_bytes = staticmethod(functools.cache(real_keys.from_private_bytes))
        generate = real_keys.generate

    lz4.block.decompress, keys.X25519PrivateKey = decompress, Precomputed
    try:
        yield
    finally:
        lz4.block.decompress, keys.X25519PrivateKey = real_decompress, real_keys
