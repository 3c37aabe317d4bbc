"""Whether engines that are lost are started again, and after which pause. Pure; times are in seconds.

A machine that was short of memory for a moment has them back at once. Where they are lost again and again, something
is wrong that a command cannot mend, and whoever watches over it is told by its end.
"""

from __future__ import annotations

PAUSES_S = (0.0, 2.0, 10.0)
"""Before each try."""

STEADY_S = 600.0
"""Engines that have answered for so long were well: the tries before them no longer count."""


class Revival:
    """The tries of one command."""

    def __init__(self) -> None:
        self.tries = 0

    def pause_s(self, served_s: float) -> float | None:
        """How long to wait before the next try; None where there is none left.

        Args:
            served_s: how long those that are lost had answered; 0 where they did not even start.
        """
        if served_s >= STEADY_S:
            self.tries = 0
        if self.tries == len(PAUSES_S):
            return None
        self.tries += 1
        return PAUSES_S[self.tries - 1]
