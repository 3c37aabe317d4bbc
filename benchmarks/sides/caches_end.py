"""One end of a link for caches: finished ones of SmolLM2-135M's shape go from rank 0 to rank 1.

python -m benchmarks.sides.caches_end RANK 2
"""

from __future__ import annotations

import os
import queue
import sys
import time
from typing import Any

from benchmarks.harness import serve
from benchmarks.sides.joining import plain_links
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.net.bulk.bulk_link import BulkLink
from mlxcel_nb.plan.recutting import WHOLE, Holdings, wants
from mlxcel_nb.runtime.handoff.account import Account
from mlxcel_nb.runtime.handoff.arrivals import Arrivals
from mlxcel_nb.runtime.handoff.departures import Departures, Target
from mlxcel_nb.scheduling.step_plan import Hand

LAYERS, HEADS, DIM = 30, 3, 64
WAIT_S = 60.0
MODEL = bytes(32)
OWN: Holdings = ((WHOLE,),) * LAYERS


class End:
    """Rank 0 sends, rank 1 receives."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._number = 0
        self._over: queue.SimpleQueue[Account | MlxcelError] = queue.SimpleQueue()
        self._landed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._departures: dict[str, Departures] = {}
        self._arrivals = Arrivals(OWN, MODEL, limit=1 << 40, landed=lambda _, number: self._landed.put(number))
        link = plain_links(rank, 2)[1 - rank]
        self.about = {"suite": link.suite_name}
        if rank:
            self._arrivals.meet("reader", {"rank-0": OWN}, 0)
        self._link = BulkLink(link, on_frame=self._frame, on_message=lambda *_: None, on_end=self._end, stall_s=WAIT_S)
        self._link.start()
        self._encoding = "plain"

    def _frame(self, _link: BulkLink, payload: memoryview) -> bytes | None:
        if self._rank:
            return self._arrivals.frame(self._arrivals.sender("reader", "rank-0"), payload)
        self._departures[self._encoding].frame("rank-1", payload)
        return None

    def _end(self, _link: BulkLink, error: MlxcelError) -> None:
        self._over.put(error)

    def run(self, tokens: int, encoding: str) -> dict[str, Any]:
        """Bytes a second of the arrays, from the first message until the receiver has said that it has all."""
        self._number += 1
        if self._rank:
            self._arrivals.expect(1, self._number, self._number, tokens)
            self._landed.get(timeout=WAIT_S)
            self._arrivals.take(self._number)
            return {}
        departures = self._made(encoding)
        caches = self._caches(tokens)
        began = time.perf_counter()
        departures.begin(Hand(self._number, "answerer", 1, self._number, "request", tokens))
        departures.finish(self._number, caches)
        account = self._over.get(timeout=WAIT_S)
        took = time.perf_counter() - began
        if isinstance(account, MlxcelError):
            raise account
        return {"gb_s": account.nbytes / 1e9 / took, "share": account.sent / account.nbytes, "error": account.error}

    def _made(self, encoding: str) -> Departures:
        self._encoding = encoding
        if encoding not in self._departures:
            made = self._departures[encoding] = Departures(
                OWN,
                MODEL,
                heads=HEADS,
                room=lambda _: 1 << 36,
                encoding=encoding,
                over=lambda _, how: self._over.put(how),
            )
            made.meet("answerer", [Target("rank-1", self._link, wants(OWN, {"rank-0": OWN})["rank-0"])])
        return self._departures[encoding]

    @staticmethod
    def _caches(tokens: int) -> list[Any]:
        import mlx.core as mx
        from mlx_lm.models.cache import KVCache

        caches = []
        for _ in range(LAYERS):
            cache = KVCache()
            cache.update_and_fetch(*(mx.random.normal((1, HEADS, tokens, DIM)) for _ in range(2)))
            mx.eval(cache.keys, cache.values)
            caches.append(cache)
        return caches


def main(rank: int) -> None:
    end = End(rank)
    serve({**end.about, "pid": os.getpid()}, end.run)


main(int(sys.argv[1]))
