"""An engine that starts and never registers."""

from __future__ import annotations

import sys

from mlxcel_nb.launch.orphan import OrphanGuard

guard = OrphanGuard(int(sys.argv[2]))
guard.start()
print("still importing", flush=True)
guard.line(60)
guard.line(60)  # there is no second one
