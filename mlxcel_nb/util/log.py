"""One log format for every node.

Levels are chosen by `MLXCEL_NB_LOG` (default WARNING). No module logs a prompt, a token, a secret or a key:
there is no redaction filter to lean on, because nothing of the kind is ever handed to a logger. Exceptions that come
from elsewhere may quote what they failed on, so they are logged as their `trail`.
"""

from __future__ import annotations

import logging
import os
import traceback

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def get_logger(name: str) -> logging.Logger:
    """Logger under the package's root, e.g. `get_logger("net")` for `mlxcel_nb.net`."""
    return logging.getLogger(f"mlxcel_nb.{name}")


def trail(error: BaseException) -> str:
    """The type of `error` and the places it came through, to be logged: its message may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    return f"{type(error).__name__}, from\n{frames}" if frames else type(error).__name__


def configure(node_id: str | None = None) -> None:
    """Send this process's records to standard error, each line led by `node_id`. Called once, by a process's main."""
    handler = logging.StreamHandler()
    prefix = f"[{node_id}] " if node_id else ""
    handler.setFormatter(logging.Formatter(prefix + FORMAT))
    root = logging.getLogger("mlxcel_nb")
    root.handlers[:] = [handler]
    root.setLevel(os.environ.get("MLXCEL_NB_LOG", "WARNING").upper())
    root.propagate = False
