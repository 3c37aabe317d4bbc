"""`python -m mlxcel_nb.launch.controller FOLDER OWNER_PID`: the control plane's hub, for one local cluster.

Started by `LocalCluster` and by nobody else. It makes its own session key and curve keys and writes them into
the private folder for the client and the engines to come; nothing secret is in its arguments or environment.
It ends when its owner does, takes the engines along that cannot see that themselves, and removes the folder.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from pathlib import Path

from mlxcel_nb.launch import registry
from mlxcel_nb.launch.orphan import OrphanGuard

HEARTBEAT_MS = 500
"""The hub's period. An engine is known only after its second beat, so this decides how long a start takes."""

HEARTBEAT_MISSES = 8
"""With `HEARTBEAT_MS`: the hub forgets a silent engine after 4.5 s."""

ENGINES_LEAVE_S = 0.5
"""Engines see by themselves that the owner is gone; those that are stopped or stuck are killed after this."""


def profile_dir(folder: Path) -> Path:
    return folder / "profile"


def client_file(folder: Path) -> Path:
    """What a client needs to connect."""
    return profile_dir(folder) / "security" / "ipcontroller-client.json"


def engine_file(folder: Path) -> Path:
    """What an engine needs to connect."""
    return profile_dir(folder) / "security" / "ipcontroller-engine.json"


def _clear_away(guard: OrphanGuard, record_path: Path) -> None:
    if guard.asked:
        return  # an owner that lives clears away by itself
    if record := registry.read(record_path):
        time.sleep(ENGINES_LEAVE_S)
        registry.end_leftovers(record)
        registry.discard(record)


def main(argv: list[str]) -> int:
    """Serve until the owner is gone."""
    folder, owner_pid = Path(argv[0]), int(argv[1])
    os.umask(0o077)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard = OrphanGuard(owner_pid)
    guard.before_end(lambda: _clear_away(guard, registry.base_dir() / f"{folder.name}.json"))
    guard.start()

    from traitlets.config import Config

    from mlxcel_nb.launch.compat import controller_class

    config = Config()
    config.ProfileDir.location = str(profile_dir(folder))
    config.BaseIPythonApplication.ipython_dir = str(folder / "ipython")
    config.Session.key = secrets.token_hex(32).encode()
    config.IPController.transport = "ipc"
    config.IPController.ip = str(folder / "z")
    config.IPController.use_threads = True
    config.IPController.enable_curve = True
    config.IPController.db_class = "NoDB"
    config.HeartMonitor.period = HEARTBEAT_MS
    config.HeartMonitor.max_heartmonitor_misses = HEARTBEAT_MISSES
    config.Application.log_level = "WARN"
    controller = controller_class()(config=config)
    controller.initialize([])
    controller.start()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
