"""One rank as a process, for `test_collectives`: joins the others, does what it is told, and says what came of it.

    python -m tests.net.collective_rank RANK SIZE WAY [memory]

WAY is "own" for the ways the product chooses, or the name of the one to take for everything; with "memory" the links
move to shared memory first. Each line of standard input is a job, a method of `Ranks`.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.net.collectives import ways as collectives
from mlxcel_nb.net.collectives.group import Group, Tag
from mlxcel_nb.net.collectives.summing import Array, narrow, widen
from mlxcel_nb.net.further.agree import agree
from mlxcel_nb.net.hot.hot_link import HotLink, Interrupt
from mlxcel_nb.net.shared_memory.offer import SharedMemoryOffer
from tests.net.rank import join, tell

TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}


@functools.cache
def own(rank: int, dtype: str, count: int) -> Array:
    """What rank `rank` brings, which every rank can work out."""
    x = np.random.default_rng(100 * rank + count).standard_normal(count).astype(np.float32)
    return narrow(x, dtype)


@functools.cache
def reference(size: int, dtype: str, count: int) -> Array:
    """The sum of what all ranks bring, in float64."""
    return np.sum([widen(own(rank, dtype, count), dtype).astype(np.float64) for rank in range(size)], axis=0)


class Ranks:
    """The jobs, all of which every rank does at the same time."""

    def __init__(self, group_: Group) -> None:
        self.group = group_
        self.step = 0

    def tag(self) -> Tag:
        self.step += 1
        return Tag(1, self.step, 1)

    def all_reduce(self, dtype: str, count: int, in_place: bool = False) -> str:
        x = own(self.group.rank, dtype, count).copy()
        before = x.copy()
        total = self.group.all_reduce(self.tag(), x, dtype=dtype, out=x if in_place else None)
        assert in_place or np.array_equal(x, before)
        return self.judge(total, dtype, slice(None), count)

    def reduce_scatter(self, dtype: str, count: int) -> str:
        block = self.group.reduce_scatter(self.tag(), own(self.group.rank, dtype, count), dtype=dtype)
        self.judge(block, dtype, collectives.blocks(count, self.group.size)[self.group.rank], count)
        return ""

    def judge(self, total: Array, dtype: str, which: slice, count: int) -> str:
        """Fail unless `total` is the sum, as near as its type allows; its bits, in short."""
        exact = reference(self.group.size, dtype, count)[which]
        np.testing.assert_allclose(widen(total, dtype), exact, TOLERANCE[dtype], TOLERANCE[dtype])
        return hashlib.sha256(total.tobytes()).hexdigest()

    def all_gather(self, counts: list[int]) -> str:
        parts = self.group.all_gather(self.tag(), bytes([self.group.rank]) * counts[self.group.rank])
        assert [bytes(part) for part in parts] == [bytes([rank]) * count for rank, count in enumerate(counts)]
        return ""

    def all_to_all(self, counts: list[list[int]]) -> str:
        """`counts[a][b]` bytes go from rank a to rank b."""
        rank, size = self.group.rank, self.group.size
        parts = self.group.all_to_all(
            self.tag(), [bytes([16 * rank + other]) * counts[rank][other] for other in range(size)]
        )
        assert [bytes(part) for part in parts] == [bytes([16 * a + rank]) * counts[a][rank] for a in range(size)]
        return ""

    def broadcast(self, root: int, count: int) -> str:
        data = own(root, "float32", count)
        got = self.group.broadcast(self.tag(), root, data if self.group.rank == root else None)
        assert bytes(got) == data.tobytes()
        return ""

    def pass_on(self, count: int) -> str:
        """Everybody sends to the next and receives from the one before."""
        rank, size, tag = self.group.rank, self.group.size, self.tag()
        data = own(rank, "float32", count)
        self.group.send_to((rank + 1) % size, tag, "float32", data.shape, data)
        dtype, dims, got = self.group.recv_from((rank - 1) % size, tag)
        assert (dtype, dims) == ("float32", (count,))
        assert bytes(got) == own((rank - 1) % size, "float32", count).tobytes()
        return ""

    def barrier(self) -> str:
        """Nobody is through before the last has come; the clock is the machine's."""
        time.sleep(0.05 * self.group.rank)  # they come one after the other
        came = time.monotonic()
        self.group.barrier(self.tag())
        gone = time.monotonic()
        times = np.frombuffer(b"".join(self.group.all_gather(self.tag(), np.array([came, gone]))), np.float64)
        assert times[1::2].min() >= times[0::2].max()
        return ""

    def until(self, count: int, patience_s: float, leave_after: int = 0) -> dict[str, Any]:
        """Sum until something ends it; rank 0 of those that remain tells that they are at it."""
        x, rounds = own(self.group.rank, "float32", count), 0
        while True:
            began = time.monotonic()
            try:
                self.group.all_reduce(self.tag(), x, deadline=began + patience_s)
            except MlxcelError as error:
                waited = time.monotonic() - began
                return {"error": error.code, "node": error.node, "text": str(error), "waited_s": waited}
            rounds += 1
            if rounds == 5:
                tell(going=rounds)
            if rounds == leave_after:
                return {"left": rounds}

    def other_shape(self, count: int) -> dict[str, Any]:
        """The last rank brings one element less."""
        x = np.ones(count - (self.group.rank == self.group.size - 1), np.float32)
        try:
            self.group.all_reduce(self.tag(), x, deadline=time.monotonic() + 3)
        except MlxcelError as error:
            return {"error": error.code, "node": error.node, "text": str(error)}
        return {"error": None}


def main(rank: int, size: int, way: str, *path: str) -> None:
    links = {other: HotLink(link) for other, link in asyncio.run(join(rank, size)).items()}
    for _, link in sorted(links.items()) if path else ():
        assert agree(link, functools.partial(SharedMemoryOffer, link.link)) == ""
    chosen = None if way == "own" else collectives.Way(way)
    ranks = Ranks(Group(rank, links, Interrupt(), way=chosen))
    tell(joined=rank)
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        call: Callable[..., Any] = getattr(ranks, job.pop("do"))
        tell(done=call(**job))
    for link in links.values():
        link.close("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
