"""Records of clusters: honest after crashes, harmless to strangers (case 54)."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel_nb.errors import ClusterError
from mlxcel_nb.launch import registry
from mlxcel_nb.launch.process import started
from mlxcel_nb.launch.registry import ClusterRecord, ProcessRecord

DEAD = ProcessRecord(name="owner", pid=2**22 + 7, started=1.0)
"""No pid is as high as this."""


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "x"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    return tmp_path / "x" / "mlxcel_nb"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    yield process
    process.kill()
    process.communicate()


def test_a_record_is_private_and_lists_its_cluster(base: Path) -> None:
    record = registry.open_record("mine", 2)
    assert registry.list_clusters() == [record]
    assert (base / f"{record.id}.json").stat().st_mode & 0o777 == 0o600
    assert Path(record.folder).stat().st_mode & 0o777 == base.stat().st_mode & 0o777 == 0o700
    registry.discard(record)
    assert registry.list_clusters() == [] and list(base.iterdir()) == []


def test_a_sweep_leaves_a_living_owner_alone() -> None:
    record = registry.open_record("mine", 1)
    registry.sweep()
    assert registry.list_clusters() == [record] and Path(record.folder).is_dir()


def test_what_a_dead_owner_left_is_not_listed_and_swept(base: Path) -> None:
    registry.save(dataclasses.replace(registry.open_record("theirs", 1), owner=DEAD))
    assert registry.list_clusters() == []
    registry.sweep()
    assert list(base.iterdir()) == []


def test_a_reused_pid_is_not_the_owner(sleeper: subprocess.Popen[bytes]) -> None:
    owner = ProcessRecord(name="owner", pid=sleeper.pid, started=(started(sleeper.pid) or 0) - 100)
    registry.save(dataclasses.replace(registry.open_record("old", 1), owner=owner))
    assert registry.list_clusters() == []


def test_a_process_of_a_dead_owner_is_killed_and_one_that_only_has_its_pid_is_not(
    sleeper: subprocess.Popen[bytes],
) -> None:
    def leave(start: float) -> None:
        engine = ProcessRecord(name="engine-0", pid=sleeper.pid, started=start)
        registry.save(dataclasses.replace(registry.open_record("left", 1), owner=DEAD, processes=(engine,)))

    start = started(sleeper.pid)
    assert start is not None
    leave(start - 100)
    registry.sweep()
    assert sleeper.poll() is None
    leave(start)
    registry.sweep()
    assert sleeper.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 2}', '{"format": 1, "owner": {"pid": 1}}'])
def test_a_file_that_is_no_record_is_swept_with_its_folder(base: Path, text: str) -> None:
    registry.base_dir()
    (base / "0123abcd.json").write_text(text)
    (base / "0123abcd").mkdir()
    assert registry.list_clusters() == []
    registry.sweep()
    assert list(base.iterdir()) == []


def test_a_record_that_points_outside_removes_nothing_there(base: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    record = registry.open_record("odd", 1)
    registry.save(dataclasses.replace(record, owner=DEAD, folder=str(precious)))
    registry.sweep()
    assert precious.is_dir() and list(base.iterdir()) == []


def test_a_record_of_another_host_is_let_be() -> None:
    record = dataclasses.replace(registry.open_record("far", 1), owner=DEAD, host="elsewhere")
    registry.save(record)
    registry.sweep()
    assert registry.list_clusters() == [] and Path(record.folder).is_dir()


def test_a_long_path_moves_the_folder_to_where_sockets_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("deep" * 20)))
    monkeypatch.setattr(tempfile, "tempdir", None)
    record = registry.open_record("deep", 1)
    assert len(record.folder) <= registry.MAX_FOLDER
    registry.discard(record)
    assert not Path(record.folder).exists()


def test_a_runtime_folder_that_cannot_be_used_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(blocked))
    assert registry.base_dir() == tmp_path / "t" / f"mlxcel_nb-{os.getuid()}"
    monkeypatch.setattr(tempfile, "tempdir", str(blocked))
    with pytest.raises(ClusterError, match="XDG_RUNTIME_DIR"):
        registry.base_dir()


def test_a_folder_open_to_others_is_closed(base: Path) -> None:
    base.mkdir(parents=True)
    base.chmod(0o755)
    registry.base_dir()
    assert base.stat().st_mode & 0o777 == 0o700


def test_clusters_are_listed_oldest_first() -> None:
    names = ["a", "b", "c"]
    for age, name in enumerate(names):
        record = registry.open_record(name, 1)
        registry.save(dataclasses.replace(record, created=time.time() - age))
    assert [record.name for record in registry.list_clusters()] == names[::-1]


def test_a_record_survives_its_own_json() -> None:
    record = dataclasses.replace(registry.open_record("x", 1), processes=(DEAD,))
    assert ClusterRecord.from_json(record.to_json()) == record
