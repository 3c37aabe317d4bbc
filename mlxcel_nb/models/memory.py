"""How much memory this process may still take. MLX dies by a signal when an allocation fails, so it is asked before.

`room` does the reading and may be called from any thread; `smallest` decides and is pure.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

RESERVE = 32 << 20
"""Bytes left alone for the interpreter, the allocator's slack and one step's activations."""


@dataclass(frozen=True)
class MemoryRoom:
    """Bytes that may still be taken, and the limit that says so."""

    available: int
    limit: str


def smallest(rooms: list[MemoryRoom], reserve: int = RESERVE) -> MemoryRoom:
    """The tightest of several limits, less the reserve; never below zero."""
    tightest = min(rooms, key=lambda room: room.available)
    return MemoryRoom(max(0, tightest.available - reserve), tightest.limit)


def room() -> MemoryRoom:
    """What is left on this host for this process, by the tightest of: memory, control group, address-space limit."""
    rooms = [_host()]
    rooms += [found for found in (_address_space(), _cgroup()) if found]
    return smallest(rooms)


def _host() -> MemoryRoom:
    import psutil

    return MemoryRoom(psutil.virtual_memory().available, "the host's memory")


def _address_space() -> MemoryRoom | None:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or sys.platform != "linux":
        return None
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    return MemoryRoom(soft - pages * os.sysconf("SC_PAGE_SIZE"), "the address-space limit")


def _cgroup() -> MemoryRoom | None:
    """The tightest control group above this process; page cache it could drop counts as free."""
    try:
        lines = Path("/proc/self/cgroup").read_text("ascii").splitlines()
    except OSError:
        return None
    rooms: list[MemoryRoom] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(base):
                break
            rooms += _group_room(group, limit, usage)
    return min(rooms, key=lambda room: room.available, default=None)


def _group_room(group: Path, limit: str, usage: str) -> list[MemoryRoom]:
    try:
        most = (group / limit).read_text("ascii").strip()
        if most == "max" or int(most) >= 1 << 60:
            return []
        used = int((group / usage).read_text("ascii"))
        stats = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
    except (OSError, ValueError):
        return []
    droppable = int(stats.get("inactive_file", 0)) + int(stats.get("active_file", 0))
    return [MemoryRoom(int(most) - used + droppable, "the control group's limit")]
