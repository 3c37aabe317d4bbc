"""How many cores this process may use. Pure but for one question to the system; any thread."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The cores this process may run on, at least one: a container or `taskset` may leave it fewer than there are."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
