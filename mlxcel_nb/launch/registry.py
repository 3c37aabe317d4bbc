"""The clusters that run on this host under this user: one private folder and one small record each.

A record names the owner and its processes by pid and start time and holds no keys. Called by `LocalCluster` and by
`cluster list`, from any thread; trusts only files that this user owns. What a dead owner left is swept at the
next start: processes are killed only when pid and start time both match, and a record of another host is let be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlxcel_nb.errors import ClusterError
from mlxcel_nb.launch.process import is_alive, kill_group, started
from mlxcel_nb.util.paths import runtime_dir

FORMAT = 1
ID = re.compile(r"[0-9a-f]{8}")

MAX_FOLDER = 88
"""Bytes of a private folder's path: with a socket's name behind it, it must fit into the 104 of a Unix socket."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """A process of a cluster."""

    name: str
    pid: int
    started: float

    def __post_init__(self) -> None:
        if type(self.pid) is not int or self.pid < 2 or not isinstance(self.started, (int, float)):
            raise ValueError("not a process")

    @property
    def alive(self) -> bool:
        return is_alive(self.pid, self.started)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterRecord:
    """What `cluster list` shows of one cluster, and what a sweep needs."""

    id: str
    name: str
    n: int
    created: float
    host: str
    folder: str
    owner: ProcessRecord
    processes: tuple[ProcessRecord, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> ClusterRecord:
        """Raises ValueError, TypeError or KeyError on anything that is not such a record."""
        data: dict[str, Any] = json.loads(text)
        if data.pop("format") != FORMAT:
            raise ValueError("unknown format")
        data["owner"] = ProcessRecord(**data["owner"])
        data["processes"] = tuple(ProcessRecord(**item) for item in data["processes"])
        return cls(**data)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)})


def _temporary_base() -> Path:
    return Path(tempfile.gettempdir()) / f"mlxcel_nb-{os.getuid()}"


def _make_private(path: Path) -> None:
    """Make `path` a folder that only this user can enter.

    Raises:
        OSError: it cannot be made, or belongs to somebody else.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if info.st_uid != os.getuid() or path.is_symlink():
        raise PermissionError(f"{path} belongs to another user")
    if info.st_mode & 0o077:
        path.chmod(0o700)


def base_dir() -> Path:
    """Where the records lie: the runtime folder, or one in the system's temporary folder where that is no use."""
    problem: OSError | None = None
    for base in (runtime_dir(), _temporary_base()):
        try:
            _make_private(base)
        except OSError as error:
            problem = error
        else:
            return base
    raise ClusterError(f"no private folder for the cluster: {problem}", advice="Set XDG_RUNTIME_DIR to a writable one.")


def write_private(path: Path, text: str) -> None:
    """Write `text` to `path`, mode 0600, so that readers see all of it or the old file."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    fresh.replace(path)


def open_record(name: str, n: int) -> ClusterRecord:
    """A new record, owned by this process, and its empty private folder."""
    base = base_dir()
    cluster_id = secrets.token_hex(4)
    folder = base / cluster_id
    if len(os.fsencode(folder)) > MAX_FOLDER:
        _make_private(_temporary_base())
        folder = _temporary_base() / cluster_id
    owner = ProcessRecord(name="owner", pid=os.getpid(), started=started(os.getpid()) or 0.0)
    record = ClusterRecord(
        id=cluster_id, name=name, n=n, created=time.time(), host=socket.gethostname(), folder=str(folder), owner=owner
    )
    save(record)  # before the folder: a folder without a record is always litter
    folder.mkdir(mode=0o700)
    return record


def _path(record: ClusterRecord) -> Path:
    return base_dir() / f"{record.id}.json"


def save(record: ClusterRecord) -> None:
    """Write the record down; anew when its processes change."""
    write_private(_path(record), record.to_json())


def discard(record: ClusterRecord) -> None:
    """Remove the folder and the record."""
    folder = Path(record.folder)
    if ID.fullmatch(record.id) and folder.name == record.id:
        shutil.rmtree(folder, ignore_errors=True)
    _path(record).unlink(missing_ok=True)


def end_leftovers(record: ClusterRecord) -> None:
    """Kill the recorded processes that still live, except ourselves; never a pid that has found another owner."""
    for process in record.processes:
        if process.pid != os.getpid() and process.alive:
            kill_group(process.pid, signal.SIGKILL)


def read(path: Path) -> ClusterRecord | None:
    """The record in `path`; None when it is not one."""
    try:
        record = ClusterRecord.from_json(path.read_text())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return record if record.id == path.stem else None


def _records(base: Path) -> Iterator[tuple[Path, ClusterRecord | None]]:
    for path in sorted(base.glob("*.json")):
        yield path, read(path)


def list_clusters() -> list[ClusterRecord]:
    """Clusters of this user whose owner lives, oldest first. Makes no folders."""
    here = socket.gethostname()
    records = (record for base in _existing() for _, record in _records(base))
    found = [record for record in records if record and record.host == here and record.owner.alive]
    return sorted(found, key=lambda record: record.created)


def _existing() -> Iterator[Path]:
    """Folders of this user's that may hold records."""
    for base in (runtime_dir(), _temporary_base()):
        with contextlib.suppress(OSError):
            info = base.lstat()
            if stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid():
                yield base


def sweep() -> None:
    """Remove what dead owners of this host left behind, and files that are no records."""
    base = base_dir()
    here = socket.gethostname()
    for path, record in _records(base):
        if record is None:
            with contextlib.suppress(OSError):
                path.unlink()
        elif record.host == here and not record.owner.alive:
            end_leftovers(record)
            discard(record)
    for entry in base.iterdir():
        if ID.fullmatch(entry.name) and entry.is_dir() and not (base / f"{entry.name}.json").exists():
            shutil.rmtree(entry, ignore_errors=True)
