"""Blocking on several hot links at once, with a deadline and a way to be woken. For the thread that owns them."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlxcel_nb.errors import StepTimeout
from mlxcel_nb.net.hot.interrupt import Interrupt
from mlxcel_nb.util import times

if TYPE_CHECKING:
    from mlxcel_nb.net.hot.line import Line


class Patience:
    """A deadline, a `time.monotonic()` value, that moves along while there is progress."""

    __slots__ = ("budget_s", "deadline")

    def __init__(self, deadline: float | None) -> None:
        now = time.monotonic()
        self.deadline = now + times.STEP_S if deadline is None else deadline
        self.budget_s = max(0.0, self.deadline - now)

    def renew(self) -> None:
        self.deadline = time.monotonic() + self.budget_s


def wait(
    links: Sequence[Line], interrupt: Interrupt | None, patience: Patience, what: str,
    others: Sequence[Line] = (),
) -> None:  # fmt: skip
    """Block until one of `links` can read (or write, where it has something to), without using the processor.

    Args:
        others: links that end the wait as well when they can read, but that nobody is to blame for.

    Raises:
        StepTimeout: when `patience` ends; names the first of `links` and `what`.
    """
    poller = select.poll()
    for link in links:
        poller.register(link, select.POLLIN | (select.POLLOUT if link.wants_write else 0))
    for link in others:
        poller.register(link, select.POLLIN)
    if interrupt is not None:
        poller.register(interrupt, select.POLLIN)
    now = time.monotonic()
    due = {link.frame_due(now): link for link in links}
    first = min(due)
    left = min(patience.deadline, first) - now
    ready = left > 0 and poller.poll(math.ceil(left * 1000))
    now = time.monotonic()
    for link in links:
        link.watched_until = now
    if ready:
        if interrupt is not None:
            interrupt.check()
        return
    if first <= patience.deadline:
        due[first].frame_overdue()
    raise StepTimeout(
        f"no progress for {patience.budget_s:.2g} s while waiting for {what} (host {links[0].host})",
        node=links[0].node,
        advice="The node may be stopped, overloaded or cut off.",
    )
