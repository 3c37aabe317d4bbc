"""Every rectangle of every dtype is read as it lies in the file."""

from __future__ import annotations

from pathlib import Path

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
