"""Files of saved keys and values: what is written is read again, whole or not at all, by its owner alone."""

from __future__ import annotations

import errno
import json
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxcel_nb.errors import ConfigError, ModelError
from mlxcel_nb.models import kv_file
from mlxcel_nb.models.kv_file import BOTH, KvHeader, KvLayer, KvReader, KvWriter

TOKENS = [7, 0, 4_000_000_000, 9, 3]
LAYERS = (KvLayer(3, 4, 2), None, KvLayer(1, 6, 6))


def header(**changes: Any) -> KvHeader:
    told: dict[str, Any] = {
        "model": "tiny", "model_sha256": "ab" * 32, "architecture": "llama", "dtype": "float32", "layout": "tp2",
        "tokens": len(TOKENS), "layers": LAYERS, "created": 1.5, "messages": ({"role": "user", "content": "Grüße"},),
    }  # fmt: skip
    return KvHeader(**{**told, **changes})


def arrays(seed: int = 0) -> dict[tuple[int, str], np.ndarray]:
    drawn = np.random.default_rng(seed)
    return {
        (index, which): drawn.standard_normal((layer.heads, len(TOKENS), layer.dim(which))).astype(np.float32)
        for index, layer in enumerate(LAYERS)
        if layer
        for which in BOTH
    }


def save(path: Path, about: KvHeader | None = None) -> None:
    """In pieces of two heads and three tokens, the last ones first."""
    with KvWriter(path, about or header(), TOKENS) as writer:
        for (index, which), x in arrays().items():
            for tokens in ((3, 5), (0, 3)):
                for begin in range(0, x.shape[0], 2):
                    heads = (begin, min(begin + 2, x.shape[0]))
                    writer.write(index, which, heads, tokens, x[slice(*heads), slice(*tokens)].tobytes())  # type: ignore[arg-type]
        writer.finish()


def test_any_heads_and_tokens_are_read_again_however_they_were_written(tmp_path: Path) -> None:
    save(path := tmp_path / "kv" / "a.safetensors")
    with KvReader(path) as reader:
        assert reader.header == header() and reader.tokens() == TOKENS
        for (index, which), x in arrays().items():
            for heads in ((0, x.shape[0]), (x.shape[0] - 1, x.shape[0])):
                data = reader.read(index, which, heads, (1, 4))  # type: ignore[arg-type]
                assert data == x[slice(*heads), 1:4].tobytes()


def test_it_is_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    save(path := tmp_path / "a.safetensors")
    found = load_file(path)
    assert found["tokens"].tolist() == TOKENS
    assert all(np.array_equal(found[f"layers.{index}.{which}"], x) for (index, which), x in arrays().items())


def test_its_owner_alone_may_read_it(tmp_path: Path) -> None:
    save(path := tmp_path / "kv" / "a.safetensors")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_every_bent_byte_and_every_cut_is_noticed(tmp_path: Path) -> None:
    save(path := tmp_path / "a.safetensors")
    whole = path.read_bytes()
    for at in [*range(0, len(whole), 7), len(whole) - 1]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ModelError):
            KvReader(path)
    for size in (0, 7, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            KvReader(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ModelError, match=f"it has {len(whole) + 1} of {len(whole)} bytes"):
        KvReader(path)


@pytest.mark.parametrize(
    "changes",
    [{"tokens": 1 << 40}, {"tokens": 0}, {"layers": []}, {"layers": [[1, 1, 1 << 40]]}, {"layers": [None]},
     {"dtype": "int8"}, {"format": 2}, {"model": 3}, {"created": "x"}, {"messages": [{"role": 3}]}, {"more": 1}],
)  # fmt: skip
def test_a_description_of_what_cannot_be_is_refused_before_anything_is_taken_for_it(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    about = json.dumps({**json.loads(header().to_json()), **changes})
    text = json.dumps({"__metadata__": {"about": about, "sha256": "0" * 64}}).encode()
    (path := tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ModelError, match="no whole file"):
        KvReader(path)


def test_a_writer_that_gives_up_leaves_what_was_there(tmp_path: Path) -> None:
    save(path := tmp_path / "a.safetensors")
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError), KvWriter(path, header(), TOKENS):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="has not been written"), KvWriter(path, header(), TOKENS) as writer:
        writer.finish()
    with pytest.raises(ValueError, match="bytes of keys"), KvWriter(path, header(), TOKENS) as writer:
        writer.write(0, "keys", (0, 1), (0, 1), b"x")
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_disk_without_room_is_said_with_the_bytes_that_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 67, for what is saved."""

    class Full:
        free = 10

    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: Full)
    with pytest.raises(ModelError, match=r"not enough room in .*: 1\.\d+ kB are needed, 10 B are free"):
        KvWriter(tmp_path / "a.safetensors", header(), TOKENS)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    """Case 67, for what is saved."""
    with (
        pytest.raises(ModelError, match=r"filled up: 1\.\d+ kB are needed"),
        KvWriter(tmp_path / "a.safetensors", header(), TOKENS) as writer,
    ):

        class Full:
            def __getattr__(self, name: str) -> Any:
                return getattr(own, name)

            def write(self, _data: Any) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

        own, writer._stream = writer._stream, Full()  # type: ignore[assignment]
        writer.write(0, "keys", (0, 1), (0, 1), bytes(16))
    assert not list(tmp_path.iterdir())


def test_they_are_listed_and_removed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXCEL_NB_CACHE", str(tmp_path))
    assert kv_file.list_saved() == []
    with pytest.raises(ModelError, match="nothing is saved as a"):
        kv_file.saved("a")
    save(kv_file.path_of("a"))
    kv_file.path_of("b").write_bytes(b"no")
    a, b = kv_file.list_saved()
    assert (a.name, a.header, a.problem) == ("a", header(), "") and a.nbytes > header().nbytes
    assert (b.name, b.header) == ("b", None) and "no whole file" in b.problem
    with pytest.raises(ModelError, match="nothing is saved as c"):
        kv_file.remove("c")
    assert kv_file.remove("a") == a.nbytes and not a.path.exists()
    for name in ("", "../a", ".a", "a/b", "a" * 101, "a\n"):
        with pytest.raises(ConfigError):
            kv_file.path_of(name)
