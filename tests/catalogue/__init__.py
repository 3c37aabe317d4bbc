"""Which entries of the catalogue a test takes: some that stand for all and a part that rotates, or every one.

`python -m tests.catalogue`, or `make catalogue`, runs all of them; names after it, those alone.
"""

from __future__ import annotations

import functools
import os
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path

from mlxcel_nb.models.catalogue.families import ENTRIES

WANTED = "MLXCEL_NB_CATALOGUE"
"""Environment: "all", or names with commas between them; absent or empty for what CI takes."""

TURNS = 8
"""Commits after which, on the average, each entry has had its turn."""

RUNNING = tuple(name for name, entry in ENTRIES.items() if not entry.fails)
"""Those that mlx-lm itself can run on a CPU."""


def chosen(standing: Sequence[str] = ()) -> list[str]:
    """The entries to test now: `standing` ones and this commit's part of the others, unless the environment says."""
    wanted = os.environ.get(WANTED, "")
    if wanted and wanted != "all":
        names = wanted.split(",")
        unknown = sorted(set(names) - set(RUNNING))
        assert not unknown, f"the catalogue has no {', '.join(unknown)} that runs on a CPU"
        return names
    return [name for name in RUNNING if wanted or name in standing or zlib.crc32(name.encode()) % TURNS == _turn()]


@functools.cache
def _turn() -> int:
    """Whose turn it is: told by the commit, so that a failure is met again by whoever runs the same one."""
    here = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return int(found.stdout.strip() or "0", 16) % TURNS
