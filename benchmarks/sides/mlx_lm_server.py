"""mlx-lm's own server on a free port, with MLX's BLAS as pip installs it or with the one our engines put behind it."""

from __future__ import annotations

import os
import runpy
import sys


def main(folder: str, port: str, blas: str) -> None:
    if blas == "same":
        from mlxcel_nb.models.blas import load_fast_blas

        load_fast_blas(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    sys.argv = ["mlx_lm.server", "--model", folder, "--port", port, "--log-level", "WARNING"]
    runpy.run_module("mlx_lm.server", run_name="__main__", alter_sys=True)


main(*sys.argv[1:])
