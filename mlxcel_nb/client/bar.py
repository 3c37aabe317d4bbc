"""A bar over a batch: prompts done, and tokens a second. In a notebook a widget, on a terminal a line, else nothing.

For the thread that runs the batch. tqdm is imported when a bar is wanted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlxcel_nb.client.report import BatchProgress
from mlxcel_nb.util.units import figure

INTERVAL_S = 0.2
"""Between two drawings of it."""


@contextmanager
def shown(total: int, *, wanted: bool) -> Iterator[Callable[[BatchProgress], None] | None]:
    """What `batch.run` tells of its progress; None where there is nobody to show a bar to, or nothing to count.

    Args:
        total: requests.
    """
    if not wanted or total < 2 or not (_in_kernel() or _on_terminal()):
        yield None
        return
    # Not tqdm.auto, which decides once in the life of a process: for whoever imports it first.
    kind: Any = importlib.import_module("tqdm.notebook" if _in_kernel() else "tqdm.std").tqdm

    class Bar(kind):
        monitor_interval = 0  # no thread of its own

    with Bar(
        total=total, desc="Generating", unit="prompt", mininterval=INTERVAL_S, miniters=0, dynamic_ncols=True
    ) as bar:

        def tell(news: BatchProgress) -> None:
            bar.set_postfix_str(f"{figure(news.tokens_per_s)} tokens/s", refresh=False)
            bar.update(news.done - bar.n)

        yield tell


def _in_kernel() -> bool:
    """A notebook's kernel draws."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _on_terminal() -> bool:
    """A terminal draws; a pipe and a closed stream do not."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False
