"""Every rectangle of every dtype is read as it lies in the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models import slices
from mlxcel_nb.models.safetensors_index import TensorEntry, read_header
from mlxcel_nb.models.slices import SliceReader

DTYPES = [mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.uint8, mx.int8, mx.int32, mx.int64, mx.uint16, mx.bool_]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_columns_and_the_whole_of_every_dtype(tmp_path: Path, dtype: mx.Dtype, monkeypatch: object) -> None:
    rng = np.random.default_rng(0)
    array = mx.array(rng.integers(0, 2 if dtype == mx.bool_ else 100, (37, 24))).astype(dtype)
    file = tmp_path / "a.safetensors"
    mx.save_safetensors(str(file), {"pad": mx.zeros((3,), mx.uint8), "x": array, "v": array[0], "s": array[0, 0]})
    entries = read_header(file)
    with SliceReader() as reader:
        assert reader.read(entries["x"]).dtype == dtype
        for axis, start, stop in [(0, 0, 37), (0, 5, 9), (0, 36, 37), (1, 0, 24), (1, 7, 8), (1, 3, 24), (0, 4, 4)]:
            expected = array[start:stop] if axis == 0 else array[:, start:stop]
            found = reader.read(entries["x"], axis, [(start, stop)])
            assert found.shape == expected.shape
            assert mx.array_equal(found, expected).item()
        assert mx.array_equal(reader.read(entries["v"], 0, [(2, 9)]), array[0, 2:9]).item()
        assert mx.array_equal(reader.read(entries["s"]), array[0, 0]).item()


def test_columns_are_picked_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = mx.arange(1000 * 6).reshape(1000, 6).astype(mx.float32)
    mx.save_safetensors(str(tmp_path / "a.safetensors"), {"x": array})
    entry = read_header(tmp_path / "a.safetensors")["x"]
    for block in (1, 24 * 7, 24 * 1000):
        monkeypatch.setattr(slices, "BLOCK", block)
        with SliceReader() as reader:
            assert mx.array_equal(reader.read(entry, 1, [(2, 5)]), array[:, 2:5]).item()


@pytest.mark.parametrize("piece", [1, 24 * 7, 1 << 20])
@pytest.mark.parametrize("source", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("target", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_what_is_converted_piece_by_piece_is_what_mlx_makes_of_it_at_once(
    tmp_path: Path, source: mx.Dtype, target: mx.Dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "PIECE", piece)
    array = mx.random.normal((4, 37, 6), key=mx.random.key(0)).astype(source)
    file = tmp_path / "a.safetensors"
    mx.save_safetensors(str(file), {"x": array, "s": array[0, 0, 0], "n": mx.arange(6)})
    entries = read_header(file)
    with SliceReader() as reader:
        for axis, ranges in [(0, None), (0, [(1, 2), (3, 4)]), (1, [(5, 9), (30, 37)]), (2, [(2, 5)])]:
            expected = (
                array if ranges is None else mx.concatenate([mx.take(array, mx.arange(*r), axis) for r in ranges], axis)
            )
            found = reader.read(entries["x"], axis, ranges, dtype=target)
            assert found.dtype == target
            assert mx.array_equal(found, expected.astype(target)).item()
        assert mx.array_equal(reader.read(entries["s"], dtype=target), array[0, 0, 0].astype(target)).item()
        assert reader.read(entries["n"], dtype=target).dtype == mx.int32


def test_what_lies_between_is_left_in_the_file_where_it_is_worth_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = mx.arange(8 * 4096).reshape(8, 4096).astype(mx.float32)
    mx.save_safetensors(str(tmp_path / "a.safetensors"), {"x": array})
    entry = read_header(tmp_path / "a.safetensors")["x"]
    asked: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(sum(len(each) for each in buffers))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    with SliceReader() as reader:
        for ranges, expected in [([(0, 2048)], 8 * 8192), ([(0, 4000)], 8 * 16384), ([(9, 10), (3000, 3001)], 8 * 8)]:
            asked.clear()
            found = reader.read(entry, 1, ranges)
            assert mx.array_equal(found, mx.concatenate([array[:, a:b] for a, b in ranges], 1)).item()
            assert sum(asked) == expected


def test_files_are_closed_and_an_absent_one_is_named(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "a.safetensors"), {"x": mx.zeros((4, 4))})
    entry = read_header(tmp_path / "a.safetensors")["x"]
    reader = SliceReader()
    with reader:
        reader.read(entry)
    assert reader._files == {}
    (tmp_path / "a.safetensors").unlink()
    with SliceReader() as reader, pytest.raises(ModelError, match=r"a\.safetensors cannot be read"):
        reader.read(entry)


def test_a_dtype_mlx_does_not_have_is_named(tmp_path: Path) -> None:
    with SliceReader() as reader, pytest.raises(ModelError, match="F64"):
        reader.read(TensorEntry(tmp_path / "a.safetensors", "F64", (1,), 0, 8))


@pytest.mark.parametrize(("axis", "ranges"), [(0, [(1, 3)]), (1, [(5, 30)]), (2, [(2, 5), (50, 64)])])
def test_experts_larger_than_a_piece_are_converted_in_pieces_too(
    tmp_path: Path, axis: int, ranges: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What loading asks room for is four pieces, however large a row of the first axis is."""
    monkeypatch.setattr(slices, "PIECE", 1024)
    array = mx.random.normal((3, 40, 64), key=mx.random.key(0)).astype(mx.bfloat16)  # 5 KiB each
    mx.save_safetensors(str(tmp_path / "a.safetensors"), {"x": array})
    entry = read_header(tmp_path / "a.safetensors")["x"]
    pieces: list[int] = []
    read = SliceReader.read

    def noted(self: SliceReader, piece: TensorEntry, *args: Any, **how: Any) -> Any:
        if how.get("dtype") is None:
            pieces.append(piece.end - piece.begin)
        return read(self, piece, *args, **how)

    monkeypatch.setattr(SliceReader, "read", noted)
    with SliceReader() as reader:
        found = reader.read(entry, axis, ranges, dtype=mx.float32)
    expected = mx.concatenate([mx.take(array, mx.arange(*each), axis) for each in ranges], axis)
    assert mx.array_equal(found, expected.astype(mx.float32)).item()
    assert max(pieces) <= 1024
