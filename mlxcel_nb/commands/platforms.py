"""Which systems this runs on, and whether MLX has a back end here.

`unsupported` and `back_end_advice` are pure: what they judge is an argument. Nothing heavy is imported.
"""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterable
from pathlib import Path


def unsupported(system: str, machine: str) -> str | None:
    """One line for a system MLX does not run on; None where it does."""
    if system == "Windows":
        return "mlxcel_nb does not run on Windows itself; install it in WSL2, where it is a Linux program"
    if system == "Darwin" and machine != "arm64":
        return "mlxcel_nb needs a Mac with Apple silicon; MLX has no build for Intel Macs"
    return None


def back_end_advice(system: str, places: Iterable[str]) -> str | None:
    """One line when no place where mlx is installed holds MLX's library; None when one does."""
    if any(any(Path(place, "lib").glob("libmlx.*")) for place in places):
        return None
    if system == "Darwin":
        return "MLX is not installed; run: pip install mlx"
    return (
        "MLX has no back end here; run: pip install 'mlxcel_nb[cpu]', "
        "or with an NVIDIA card 'mlxcel_nb[cuda12]' or 'mlxcel_nb[cuda13]'"
    )


def missing_back_end() -> str | None:
    """`back_end_advice` for this interpreter. Imports nothing heavy."""
    spec = importlib.util.find_spec("mlx")
    return back_end_advice(platform.system(), spec.submodule_search_locations or () if spec else ())


def here() -> str | None:
    """`unsupported` for this machine."""
    return unsupported(platform.system(), platform.machine())
