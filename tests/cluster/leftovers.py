"""What a local cluster leaves behind, as its tests look for it."""

from __future__ import annotations

from pathlib import Path

import psutil


def processes_of(folder: Path) -> list[psutil.Process]:
    """Processes with this private folder among their arguments."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def nothing_left(folder: Path) -> bool:
    """No process, no private folder, no record."""
    return not processes_of(folder) and not folder.exists() and not list(folder.parent.glob("*.json"))
