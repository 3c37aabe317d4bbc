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

TURNS = 12
"""Commits after which, on the average, each entry has had its turn."""

RUNNING = tuple(name for name, entry in ENTRIES.items() if not entry.fails)
"""Those that mlx-lm itself can run on a CPU."""


def chosen(standing: Sequence[str] = ()) -> list[str]:
    """The entries to test now: `standing` ones and this commit's part of the others, unless the environment says."""
    names = wanted()
    return [name for name in RUNNING if name in names or (not names and (name in standing or has_its_turn(name)))]


def wanted() -> Sequence[str]:
    """The entries that the environment names, every one for "all"; none when it says nothing."""
    told = os.environ.get(WANTED, "")
    if told in ("", "all"):
        return RUNNING if told else ()
    names = told.split(",")
    unknown = sorted(set(names) - set(RUNNING))
    assert not unknown, f"the catalogue has no {', '.join(unknown)} that runs on a CPU"
    return names


def has_its_turn(case: str) -> bool:
    """Whether this commit is one of those that test `case`, an entry or a thing to do with one."""
    return zlib.crc32(case.encode()) % TURNS == _turn()


@functools.cache
def _turn() -> int:
    """Whose turn it is: told by the commit, so that a failure is met again by whoever runs the same one."""
    here = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return int(found.stdout.strip() or "0", 16) % TURNS
