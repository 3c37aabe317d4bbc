"""Hashes of a model's files: what they cover, how they are told, and that one process reads for several."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models import digest
from mlxcel_nb.models.digest import file_sha256, folder_digests, whole_sha256
from tests.tiny import make_tiny


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXCEL_NB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_file_that_counts_is_covered(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", model_file="own.py")
    (folder / "own.py").write_text("1")
    (folder / "README.md").write_text("irrelevant")
    found = folder_digests(folder)
    assert set(found) == {"config.json", "model.safetensors", "own.py", "tokenizer.json", "tokenizer_config.json"}
    assert whole_sha256(found) == digest.folder_sha256(folder)
    (folder / "own.py").write_text("2")
    assert [name for name, each in folder_digests(folder).items() if each != found[name]] == ["own.py"]


def test_progress_names_files_and_ends_at_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_PIECE", 1 << 16)
    folder = make_tiny(tmp_path / "m")
    told: list[tuple[str, int, int]] = []
    folder_digests(folder, lambda *now: told.append(now))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][1] == told[-1][2] == sum((folder / name).stat().st_size for name in folder_digests(folder))
    assert len([name for name, _, _ in told if name == "model.safetensors"]) > 10
    told.clear()
    folder_digests(folder, lambda *now: told.append(now))
    assert told == []  # remembered


def test_what_progress_raises_ends_the_reading(tmp_path: Path) -> None:
    def stop(_name: str, _done: int, _total: int) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError):
        folder_digests(make_tiny(tmp_path / "m"), stop)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        folder_digests(folder)


def test_a_file_that_goes_meanwhile_is_named(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")

    def take_away(_name: str, _done: int, _total: int) -> None:
        (folder / "tokenizer.json").unlink(missing_ok=True)

    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read: No such file"):
        folder_digests(folder, take_away)


def test_of_several_that_want_a_file_one_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"x" * 1000)
    reads: list[int] = []
    read = digest._read
    monkeypatch.setattr(digest, "_read", lambda stream, tell: reads.append(1) or read(stream, tell))  # type: ignore[func-returns-value]
    waiting, found = threading.Event(), []
    with file.open("rb") as held:
        fcntl.flock(held.fileno(), fcntl.LOCK_EX)  # as another process would
        threads = [
            threading.Thread(target=lambda: found.append(file_sha256(file, lambda _done: waiting.set())))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        assert waiting.wait(30)
        assert not reads
    for thread in threads:
        thread.join(30)
    assert len(found) == 3
    assert len(set(found)) == len(reads) == 1


def test_whoever_holds_a_file_for_long_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "TURN_S", 0.1)
    file = tmp_path / "x"
    file.write_bytes(b"x" * 1000)
    with file.open("rb") as held:
        fcntl.flock(held.fileno(), fcntl.LOCK_EX)
        assert len(file_sha256(file)) == 64


def test_a_file_that_changes_while_it_is_read_is_not_remembered(tmp_path: Path, own_cache: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"x" * 1000)
    file_sha256(file, lambda _done: os.utime(file, ns=(1, 1)))
    assert not (own_cache / "hashes").exists()


def test_a_file_that_changes_in_place_and_keeps_its_time_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"x" * 1000)
    os.utime(file, ns=(1, 1))
    before = file_sha256(file)
    time.sleep(0.02)  # a kernel's clock for files goes in steps of up to 10 ms
    file.write_bytes(b"y" * 1000)
    os.utime(file, ns=(1, 1))
    assert file_sha256(file) != before
