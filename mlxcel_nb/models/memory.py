"""How much memory this process may still take, and when it should give some back. MLX dies by a signal when an
allocation fails, so it is asked before.

`room` and `resident` do the reading and may be called from any thread; `smallest` and `Slack` decide and are pure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RESERVE = 32 << 20
"""Bytes left alone for the interpreter, the allocator's slack and one step's activations."""


WORTH = 64 << 20
"""Bytes of slack that are worth giving back: on a heap of 2 GB that takes 0.1 s."""

LOOK_S = 5.0
"""Between two looks at it."""


class Slack:
    """What malloc keeps beyond what is in use, while a model is loaded; times are the caller's, in seconds.

    Small arrays that stay, as kept keys and values are, lie between larger ones that have gone: at twice the load that
    it could bear, an engine of SmolLM2 had 3 GB of slack beside 1 GB after eight minutes.
    """

    def __init__(self) -> None:
        self._least: int | None = None
        self._next = 0.0

    def is_worth(self, now: float, slack: Callable[[], int]) -> bool:
        """Whether so much has come since it was least that it should be given back; looks now and then."""
        if now < self._next:
            return False
        self._next = now + LOOK_S
        found = slack()
        self._least = found if self._least is None else min(self._least, found)
        return found > self._least + WORTH

    def given_back(self, slack: int) -> None:
        """So much is left, which cannot be helped."""
        self._least = slack


def resident() -> int | None:
    """Bytes of memory that this process has; None where the system does not say so at once."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


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
