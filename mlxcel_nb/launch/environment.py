"""What a process of a local cluster inherits, and how the cores are shared out."""

from __future__ import annotations

import os
import site
from collections.abc import Mapping
from pathlib import Path

from mlxcel_nb.util.cores import usable_cores


def threads_for(n: int) -> int:
    """BLAS threads of each of `n` engines on this machine: the cores shared out, at least one."""
    return max(1, usable_cores() // n)


def child_environment(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """What a child inherits: no secret, no settings that would steer ipyparallel, as many threads as it is given."""
    dropped = ("IPP_", "MLXCEL_CLUSTER_SECRET", "JPY_PARENT_PID", "PYTHONINSPECT")
    env = {key: value for key, value in environ.items() if not key.startswith(dropped)}
    for key in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        env[key] = str(threads)
    env["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # else a frozen-modules warning heads every log
    root = str(Path(__file__).resolve().parents[2])
    if root not in {*site.getsitepackages(), site.getusersitepackages()}:
        # A checkout: found by us through sys.path, which a fresh interpreter does not inherit.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    return env
