"""How much of what is bounded one of many may hold. Pure."""

from __future__ import annotations

GREED = 3
"""Nobody may hold more than three times what is free: one alone three quarters, two that ask for all three sevenths
each, and whoever comes next finds room."""


def has_room(own: int, everybody: int, bound: int, more: int = 1) -> bool:
    """Whether one that holds `own` may hold `more` too, of `bound`, of which `everybody` together holds so many."""
    free = bound - everybody
    return more <= free and own + more <= GREED * free
