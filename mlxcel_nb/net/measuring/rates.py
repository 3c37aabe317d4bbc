"""How fast this processor encodes and decodes tensors: a few milliseconds of measuring, for `wire.encoding` to decide
by.

Callable from any thread; blocks it for some 20 ms the first time, then remembers. Measured on one
thread, as a transfer runs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from mlxcel_nb.wire import compression, floats, quantising
from mlxcel_nb.wire.dtypes import dtype_named
from mlxcel_nb.wire.encoding import Rate
from mlxcel_nb.wire.quantised import FLOATS

SAMPLE = (4, 512, 128)
"""Shape of what is encoded: heads, tokens, head dimension."""

RUN = 256
"""Bytes of zeros and of noise in turn, for LZ4."""

REPEATS = 3
"""The best of so many: what the first one pays for memory and caches is not its own."""


@functools.cache
def codec_rates(dtype: str, *, group: int = 64) -> dict[str, Rate]:
    """Bytes of `dtype` per second, by encoding."""
    import numpy as np

    noise = np.random.default_rng(0).standard_normal(SAMPLE).astype("<f4").reshape(-1)
    itemsize = dtype_named(dtype).itemsize
    raw = memoryview(floats.narrowed(noise, dtype) if dtype in FLOATS else noise).cast("B")
    mixed = np.frombuffer(raw, np.uint8).copy()
    mixed.reshape(-1, RUN)[::2] = 0  # so that the block is one worth keeping
    block = compression.compress(mixed, itemsize=itemsize)
    assert block is not None
    rates = {
        "lz4": Rate(
            _rate(lambda: compression.compress(mixed, itemsize=itemsize), len(raw)),
            _rate(lambda: compression.decompress(block, len(raw), itemsize=itemsize), len(raw)),
        )
    }
    if dtype in FLOATS:
        for name, bits in (("int8", 8), ("int4", 4)):
            codes, _ = quantising.quantise(dtype, SAMPLE, raw, bits=bits, group=group, measure=False)
            rates[name] = Rate(
                _rate(functools.partial(_quantise, dtype, raw, bits, group), len(raw)),
                _rate(functools.partial(quantising.dequantise, dtype, SAMPLE, codes), len(raw)),
            )
    return rates


def _quantise(dtype: str, raw: memoryview, bits: int, group: int) -> None:
    quantising.quantise(dtype, SAMPLE, raw, bits=bits, group=group, measure=False)


def _rate(work: Callable[[], object], size: int) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return size / max(best, 1e-9)
