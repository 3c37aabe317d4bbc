"""Folders that exist whole or not at all.

A folder is built beside its target, reaches the disk, and is renamed into place. One builder works at a time, over
threads and processes; others wait and find the result. A builder killed at any moment leaves only a hidden scratch
folder, which the next one sweeps. Any thread may call; every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mlxcel_nb.errors import ModelError
from mlxcel_nb.util.units import bytes_text

fcntl: Any
try:
    import fcntl
except ImportError:  # no flock on this platform: the rename alone keeps folders whole, builders may do work twice
    fcntl = None

BUILD_S = 1800.0
"""How long to wait for another builder of the same folder: a slow download of a large model."""

_POLL_S = 0.1
_ROOM = "Free some space, or set MLXCEL_NB_CACHE to a folder on another disk."
_NOT_A_FOLDER = frozenset(
    [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG]
)
"""What the system says of a place where no folder can be."""

_NO_LOCKS = frozenset([errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL])
"""What flock says on file systems without locks; the rename alone must do there."""


def build_folder(
    target: Path,
    build: Callable[[Path], Path],
    *,
    needed_bytes: int,
    is_whole: Callable[[Path], bool],
    deadline_s: float = BUILD_S,
    waiting: Callable[[], None] | None = None,
) -> Path:
    """Return `target`, made by `build` if it is not there or not whole.

    Args:
        build: given a scratch folder, returns the folder in it that becomes `target`.
        needed_bytes: room the scratch folder takes at its largest.
        waiting: called once when another builder is at work.

    Raises:
        ModelError: no room, the disk is full, or the other builder took longer than `deadline_s`.
    """
    parent = target.parent
    with disk_errors(parent, needed_bytes):
        parent.mkdir(parents=True, exist_ok=True)
        with _only_builder(parent / f".{target.name}.lock", deadline_s, waiting) as alone:
            if target.is_dir():
                if is_whole(target):
                    return target
                remove_folder(target)
            if alone:
                _sweep(target)
            require_room(parent, needed_bytes)
            scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.building-", dir=parent))
            try:
                made = build(scratch)
                sync_tree(made)
                _move(made, target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return target


def remove_folder(target: Path) -> None:
    """Take `target` away: hidden in one rename, then deleted."""
    hidden = Path(tempfile.mkdtemp(prefix=f".{target.name}.removing-", dir=target.parent))
    with contextlib.suppress(FileNotFoundError):
        target.rename(hidden / target.name)
    shutil.rmtree(hidden, ignore_errors=True)


def require_room(folder: Path, needed_bytes: int) -> None:
    """Raise unless the disk that holds `folder` has `needed_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        sizes = f"{bytes_text(needed_bytes)} are needed, {bytes_text(free)} are free"
        raise ModelError(f"not enough room in {folder}: {sizes}", advice=_ROOM)


@contextlib.contextmanager
def disk_errors(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turns a full disk, and a folder that may not be written, into errors that say so."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(
                f"the disk of {folder} filled up: {bytes_text(needed_bytes)} are needed", advice=_ROOM
            ) from error
        if error.errno in _NOT_A_FOLDER:
            advice = "Set MLXCEL_NB_CACHE to a folder that you may write to."
            raise ModelError(f"{error.filename or folder}: {error.strerror}", advice=advice) from error
        raise


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder` to the disk."""
    for path in (folder, *folder.rglob("*")):
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _move(made: Path, target: Path) -> None:
    """Rename into place. Without locks another builder may have come first; its folder is as good."""
    try:
        made.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not target.is_dir():
            raise
    _sync(target.parent)


def _sweep(target: Path) -> None:
    """Delete what killed builders of `target` left. Only for the holder of its lock: no other builder is alive."""
    for pattern in (f".{target.name}.building-*", f".{target.name}.removing-*"):
        for stale in target.parent.glob(pattern):
            shutil.rmtree(stale, ignore_errors=True)


@contextlib.contextmanager
def _only_builder(lock: Path, deadline_s: float, waiting: Callable[[], None] | None) -> Iterator[bool]:
    """Hold `lock`; yields whether it really excludes others. The kernel drops it when its process ends, however."""
    with lock.open("a+") as stream:
        alone = _acquire(stream.fileno(), lock, deadline_s, waiting)
        if alone:
            stream.truncate(0)
            stream.write(str(os.getpid()))
            stream.flush()
        yield alone


def _acquire(handle: int, lock: Path, deadline_s: float, waiting: Callable[[], None] | None) -> bool:
    if fcntl is None:
        return False
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        if waiting:
            waiting()
            waiting = None
        if time.monotonic() >= deadline:
            name = lock.name.removeprefix(".").removesuffix(".lock")
            by = lock.read_text().strip() or "another process"
            raise ModelError(f"waited {deadline_s:g} s for process {by}, which is making {name}")
        time.sleep(_POLL_S)
