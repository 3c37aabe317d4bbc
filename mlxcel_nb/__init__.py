"""mlxcel_nb: distributed LLM inference from a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "Cluster", "SamplingParams", "__version__", "load_ipython_extension", "unload_ipython_extension"]

if TYPE_CHECKING:
    from mlxcel_nb.client.cluster import Cluster
    from mlxcel_nb.client.llm import LLM
    from mlxcel_nb.models.params import SamplingParams

_HOMES = {
    "Cluster": "mlxcel_nb.client.cluster",
    "LLM": "mlxcel_nb.client.llm",
    "SamplingParams": "mlxcel_nb.models.params",
}


def __getattr__(name: str) -> Any:
    """Import the public classes on first use, so that an engine does not pay for the client."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext mlxcel_nb`."""
    from mlxcel_nb.notebook.extension import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext mlxcel_nb`: stops the clusters this notebook started."""
    from mlxcel_nb.notebook.extension import unload

    unload(shell)
