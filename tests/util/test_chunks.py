"""Memory for what comes in many parts."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.util.chunks import ALIGNED, CHUNK, Chunks


@given(st.lists(st.sampled_from([0, 1, 63, 64, 65, 5000, 3 << 20, CHUNK, CHUNK + 1]), max_size=12))
def test_parts_are_apart_and_as_large_as_was_asked(sizes: list[int]) -> None:
    chunks = Chunks()
    taken = [chunks.take(size) for size in sizes]
    assert [len(part) for part in taken] == sizes
    spans = sorted((np.frombuffer(part, np.uint8).ctypes.data, len(part)) for part in taken if len(part))
    assert all(begin % 16 == 0 for begin, _ in spans)
    assert all(begin + size <= after for (begin, size), (after, _) in itertools.pairwise(spans))


def test_a_chunk_goes_with_the_last_that_refers_to_it() -> None:
    chunks = Chunks()
    one, two = chunks.take(ALIGNED), chunks.take(ALIGNED)
    gone = weakref.ref(one.obj)
    chunks.let_go()
    del one
    gc.collect()
    assert gone() is not None
    del two
    gc.collect()
    assert gone() is None
