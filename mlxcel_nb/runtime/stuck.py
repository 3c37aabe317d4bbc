"""An MLX thread that waits inside MLX, where nothing reaches it, for a member that will not come.

Our own waits end when they are told to. A collective of MLX's own does not: it returns, raises, or waits for ever.
The MLX thread says when it goes in (`Inside`); the node's loop hears of trouble with a member, gives the thread a
moment to come out, and then ends what waits for it (`StuckWatch`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlxcel_nb.cluster.collectives import RESTART
from mlxcel_nb.errors import ClusterError, MlxcelError
from mlxcel_nb.net.hot.interrupt import Interrupt

if TYPE_CHECKING:
    from mlxcel_nb.runtime.worker import Worker

GRACE_S = 1.5
"""For a thread to come out after trouble was told; MLX raises within 30 ms where a process has ended."""


class Inside:
    """Whether the MLX thread is inside MLX, where, and since when. It alone sets this; any thread may look.

    Attributes:
        lost: set when a member is lost. It breaks what no cancel may break: the votes on going in.
    """

    def __init__(self) -> None:
        self.lost = Interrupt()
        self.where = ""
        self.since: float | None = None

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        self.where, self.since = where, time.monotonic()
        try:
            yield
        finally:
            self.since = None


class StuckWatch:
    """Looks after the MLX thread once something is wrong. On the node's loop.

    Args:
        gave_up: told once that the thread is stuck, and by what.
    """

    def __init__(self, worker: Worker, gave_up: Callable[[MlxcelError], None]) -> None:
        self._worker = worker
        self._gave_up = gave_up
        self._looking: asyncio.TimerHandle | None = None

    def check(self) -> None:
        """Refuse what the MLX thread would have to do, where it cannot.

        Raises:
            MlxcelError: it has ended, or is stuck.
        """
        worker = self._worker
        if worker.ended is not None:
            raise worker.ended
        if (stuck := worker.stuck) is not None:
            raise ClusterError(f"stuck in {worker.inside.where}: {stuck}", node=worker.node_id, advice=RESTART)

    def trouble(self) -> None:
        """A member is lost or has failed."""
        if self._looking is None:
            self._look_later()

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(GRACE_S, self._look)

    def _look(self) -> None:
        self._looking = None
        if (stuck := self._worker.stuck) is not None:
            self._gave_up(stuck)
        elif self._worker.inside.since is not None and self._worker.troubled:
            self._look_later()
