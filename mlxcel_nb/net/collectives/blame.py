"""Who holds up a collective, from what its ranks say of whom they wait for. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def culprit(start: str, waits_for: Mapping[str, str]) -> str:
    """The end of the chain that begins at `start`: somebody who waits for nobody, or has nothing to say.

    Args:
        start: the node that this rank waits for.
        waits_for: node to the node it waits for, for all that were heard.
    """
    seen = [start]
    while (further := waits_for.get(seen[-1])) is not None:
        if further in seen:
            return start  # a circle: each knows only what it sees
        seen.append(further)
    return seen[-1]
