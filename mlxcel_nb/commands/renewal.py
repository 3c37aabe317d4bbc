"""The cluster secret, read again while a node or a listener runs: what SIGHUP asks for. Reads files, on the caller's
thread.
"""

from __future__ import annotations

from collections.abc import Callable

from mlxcel_nb.cluster.secret import Secrets
from mlxcel_nb.errors import MlxcelError


def renewed(held: Secrets, read: Callable[[], Secrets]) -> tuple[Secrets, str]:
    """The secrets that are good from now on, and the line that says so; where none can be read, those that were."""
    try:
        found = read()
    except MlxcelError as error:
        return held, f"the cluster secret stays as it is: {error}"
    now = held.renewed(found)
    change = "the same" if now.current == held.current else "a new one"
    if now.previous is None:
        older = "no other is good"
    elif now.previous is found.previous:
        older = "an older one is still good"
    else:
        older = "the one before is good until the next SIGHUP"
    return now, f"the cluster secret is {change}, and {older}"
