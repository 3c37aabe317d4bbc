"""How engines' processes ended, as the launcher tells it.

Filled on the launcher's waiter threads. It knows nothing of the cluster, so that those threads do not keep a cluster
alive that nobody holds any more.
"""

from __future__ import annotations

import threading
import time


class Exits:
    """Descriptions by node id, e.g. "ended by SIGKILL"."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._asked: dict[str, float] = {}
        self._news = threading.Condition()

    def tell(self, node_id: str, description: str) -> None:
        with self._news:
            self._known[node_id] = description
            self._news.notify_all()

    def wait_for(self, node_id: str, timeout: float) -> str | None:
        """How `node_id` ended, as soon as it is known; None when it is not within `timeout` seconds."""
        with self._news:
            self._news.wait_for(lambda: node_id in self._known, timeout)
            return self._known.get(node_id)

    def asked_for_s(self, node_id: str) -> float:
        """Seconds since this was called first for `node_id`: who asks later, of other answers it gave, waits less."""
        now = time.monotonic()
        with self._news:
            return now - self._asked.setdefault(node_id, now)

    def known(self) -> dict[str, str]:
        with self._news:
            return dict(self._known)
