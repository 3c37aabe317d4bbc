"""An engine of which engine-1 says that its MLX is an old one."""

from __future__ import annotations

import sys

from mlxcel_nb.launch import engine
from mlxcel_nb.net.links import link
from mlxcel_nb.util.versions import local_versions

if sys.argv[3] == "engine-1":
    versions = {**local_versions(), "mlx": "0.0.1"}
    link.local_versions = lambda: versions  # type: ignore[assignment, attr-defined]

if __name__ == "__main__":
    sys.exit(engine.main(sys.argv[1:]))
