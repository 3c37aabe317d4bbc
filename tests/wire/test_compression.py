"""LZ4 blocks: kept only where they pay, found out from a sample, and shuffled bytes come back as they were."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire import compression
from mlxcel_nb.wire.compression import MAX_RAW, compress, decompress, sampled_ratio, shuffle, unshuffle

NOISE = np.random.default_rng(0)


@given(st.binary(max_size=400), st.sampled_from([1, 2, 4, 8]))
def test_shuffled_bytes_are_planes_and_come_back(data: bytes, itemsize: int) -> None:
    data = data[: len(data) // itemsize * itemsize]
    planes = shuffle(data, itemsize)
    assert bytes(planes) == b"".join(data[i::itemsize] for i in range(itemsize))
    assert bytes(unshuffle(planes, itemsize)) == data


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1000, 60_000])
def test_a_block_comes_back(itemsize: int, count: int) -> None:
    raw = (np.arange(count) % 50).astype(f"<u{itemsize}").tobytes()
    block = compress(raw, itemsize=itemsize)
    assert block is not None and len(block) < 0.9 * len(raw)
    assert bytes(decompress(block, len(raw), itemsize=itemsize)) == raw


@pytest.mark.parametrize("size", [0, 1, 100, 1 << 20, MAX_RAW + 1])
def test_what_does_not_pay_or_is_too_large_stays_plain(size: int) -> None:
    assert compress(NOISE.bytes(size)) is None
    if size > MAX_RAW:
        assert compress(bytes(size)) is None


def test_a_block_that_saves_less_than_a_tenth_is_not_kept() -> None:
    for zeros, kept in ((80, False), (150, True)):
        raw = NOISE.bytes(1000 - zeros) + bytes(zeros)
        assert (compress(raw) is not None) == kept


def test_shuffling_finds_what_floats_have_in_common() -> None:
    raw = NOISE.uniform(1, 1.9, 1 << 17).astype("<f4").tobytes()
    assert sampled_ratio(raw, itemsize=4) < sampled_ratio(raw) - 0.05


def test_a_sample_decides_about_large_data_and_looks_at_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = compression._block

    def counted(view: memoryview, itemsize: int) -> bytes:
        seen.append(len(view))
        return real(view, itemsize)

    monkeypatch.setattr(compression, "_block", counted)
    noise, half = NOISE.bytes(4 << 20), bytes(2 << 20)
    assert compress(noise) is None and sum(seen) == compression.SAMPLES * compression.SAMPLE_BYTES
    for raw in (half + noise[: 2 << 20], noise[: 2 << 20] + half):
        assert 0.3 < sampled_ratio(raw) < 0.7
        assert compress(raw) is not None


def test_shuffled_data_has_whole_elements() -> None:
    block = compress(bytes(1001))
    assert block is not None
    with pytest.raises(WireError, match="whole elements of 4"):
        decompress(block, 1001, itemsize=4)
