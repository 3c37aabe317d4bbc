"""Which files make up a model, and where each tensor lies in them (case 44)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.safetensors_index import INDEX_NAME, read_header, weight_files

A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(6, dtype=np.float16).reshape(2, 3)


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": A}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": B}, tmp_path / "model-00002-of-00002.safetensors")
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    return tmp_path


def test_byte_ranges_hold_the_tensors(sharded: Path) -> None:
    entries = weight_files(sharded)
    assert set(entries) == {"a", "b"}
    for name, want, dtype in (("a", A, "F32"), ("b", B, "F16")):
        file, kind, shape, begin, end = entries[name]
        assert kind == dtype
        assert shape == want.shape
        assert file.read_bytes()[begin:end] == want.tobytes()


def test_a_file_that_the_index_names_and_is_absent_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        weight_files(sharded)


def test_a_shard_absent_without_an_index_is_named(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    assert set(weight_files(sharded)) == {"a", "b"}
    (sharded / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors is missing"):
        weight_files(sharded)


@pytest.mark.parametrize("names", [["a"], ["elsewhere"]], ids=["same tensors", "tensors of another layout"])
def test_a_good_model_with_a_stale_index_is_read(tmp_path: Path, names: list[str]) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    write_index(tmp_path, dict.fromkeys(names, "model-00001-of-00001.safetensors"))
    assert set(weight_files(tmp_path)) == {"a", "b"}
    write_index(tmp_path, dict.fromkeys(names, "model.safetensors"))
    assert set(weight_files(tmp_path)) == {"a", "b"}


def test_a_shard_without_the_tensor_that_the_index_promises_is_named(sharded: Path) -> None:
    save_file({"c": B}, sharded / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors has no tensor b"):
        weight_files(sharded)


def test_every_truncation_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": A}, file)
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            weight_files(tmp_path)
    file.write_bytes(whole)
    assert weight_files(tmp_path)["a"].end == len(whole)


def header(**about: object) -> bytes:
    text = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **about}}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    "data",
    [
        header(dtype="F33"),
        header(dtype=3),
        header(shape=[2]),
        header(shape=[-1]),
        header(shape=[True]),
        header(shape="1"),
        header(data_offsets=[4, 0]),
        header(data_offsets=[0]),
        header(data_offsets=None),
        header(data_offsets=[2**62, 2**62 + 4]),
        b"\2\0\0\0\0\0\0\0[]",
        b"\2\0\0\0\0\0\0\0{}{",
        b"\3\0\0\0\0\0\0\0{{{",
        b"\xff" * 64,
        b"version https://git-lfs.example/spec/v1",
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
    ],
)
def test_a_garbled_header_is_an_error_and_not_a_crash(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    if data.startswith(b"\2\0\0\0\0\0\0\0{}"):
        assert read_header(file) == {}
        return
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        read_header(file)


def test_the_same_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model_one.safetensors")
    save_file({"a": A}, tmp_path / "model_two.safetensors")
    with pytest.raises(ModelError, match="tensor a is in both model_one"):
        weight_files(tmp_path)


BAD_INDEXES = ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}', "[" * 9999]


@pytest.mark.parametrize("index", BAD_INDEXES)
def test_an_index_that_is_none_is_an_error(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX_NAME).write_text(index)
    with pytest.raises(ModelError, match="is not an index"):
        weight_files(tmp_path)


def test_a_folder_without_safetensors_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model\*\.safetensors"):
        weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin"):
        weight_files(tmp_path)
    with pytest.raises(ModelError, match="is not a folder"):
        weight_files(tmp_path / "nowhere")
