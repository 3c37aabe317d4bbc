"""One log format for every node.

Levels are chosen by `MLXCEL_NB_LOG` (default WARNING). No module logs a prompt, a token, a secret or a key:
there is no redaction filter to lean on, because nothing of the kind is ever handed to a logger.
"""

from __future__ import annotations

import logging
import os

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def get_logger(name: str) -> logging.Logger:
    """Logger under the package's root, e.g. `get_logger("net")` for `mlxcel_nb.net`."""
    return logging.getLogger(f"mlxcel_nb.{name}")


def configure(node_id: str | None = None) -> None:
    """Send this process's records to standard error, each line led by `node_id`. Called once, by a process's main."""
    handler = logging.StreamHandler()
    prefix = f"[{node_id}] " if node_id else ""
    handler.setFormatter(logging.Formatter(prefix + FORMAT))
    root = logging.getLogger("mlxcel_nb")
    root.handlers[:] = [handler]
    root.setLevel(os.environ.get("MLXCEL_NB_LOG", "WARNING").upper())
    root.propagate = False
