"""One rank of ours: all-reduces of float32 over encrypted links, between buffers or between MLX arrays."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.harness import serve
from benchmarks.sides.joining import hot_links
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.net.collectives import exchange
from mlxcel_nb.net.collectives import group as group_module
from mlxcel_nb.net.collectives.group import Group
from mlxcel_nb.net.hot.interrupt import Interrupt
from mlxcel_nb.net.hot.moulds import Shape
from mlxcel_nb.net.hot.tag import Tag

DEADLINE_S = 2.0
WARM = 20


class Steps:
    """Clocks around the parts of an all-reduce."""

    def __init__(self) -> None:
        self._now: dict[str, float] = {}
        self._all: dict[str, list[float]] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Any:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            step = name
            try:
                return call(*arguments)
            except BlockingIOError:
                step = "poll in vain"
                raise
            finally:
                self._now[step] = self._now.get(step, 0.0) + time.perf_counter() - began

        return timed

    @contextlib.contextmanager
    def around(self, link: Any) -> Iterator[None]:
        """While open, the clocks are in place; they reach into the product's insides, as a profiler does."""
        sock, lay_out, group = link._sock, Shape.lay_out, vars(group_module)
        sum_into, wait = group["sum_into"], vars(exchange)["wait"]
        sealer, opener = link._sealer, link._reader.opener
        link._sock = SimpleNamespace(
            send=self.timed("send", sock.send), recv_into=self.timed("receive", sock.recv_into), fileno=sock.fileno
        )
        sealer.seal_mould = self.timed("seal", sealer.seal_mould)
        opener.open_mould = self.timed("open", opener.open_mould)
        group["sum_into"] = self.timed("sum", sum_into)
        vars(exchange)["wait"] = self.timed("sleep", wait)
        Shape.lay_out = self.timed("lay out", lay_out)  # type: ignore[method-assign]
        try:
            yield
        finally:
            link._sock = sock
            del sealer.seal_mould, opener.open_mould
            group["sum_into"], vars(exchange)["wait"] = sum_into, wait
            Shape.lay_out = lay_out  # type: ignore[method-assign]

    def end(self, whole: float) -> None:
        """One all-reduce is over."""
        steps = {**self._now, "Python between": whole - sum(self._now.values()), "whole": whole}
        for name, seconds in steps.items():
            self._all.setdefault(name, []).append(seconds * 1e6)
        self._now.clear()

    def medians(self) -> dict[str, float]:
        """Of the steps that most all-reduces have."""
        rounds = len(self._all["whole"])
        return {name: statistics.median(took) for name, took in self._all.items() if len(took) > rounds / 2}


def main(rank: int, size: int, spin: bool, shared_memory: bool) -> None:
    links = hot_links(rank, size, spin=spin, shared_memory=shared_memory)
    interrupt = Interrupt()
    group = Group(rank, links, interrupt)
    step = 0

    def buffers(nbytes: int) -> Callable[[], Any]:
        x, out = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)

        def once() -> None:
            nonlocal step
            step += 1
            group.all_reduce(Tag(1, step, 1), x, out=out, deadline=time.monotonic() + DEADLINE_S)

        return once

    def arrays(nbytes: int) -> Callable[[], Any]:
        import mlx.core as mx

        from mlxcel_nb.runtime.fabric import sum_over

        mx.set_default_device(mx.cpu)
        x = mx.ones((nbytes // 4,))
        mx.eval(x)

        def once() -> None:
            nonlocal step
            step += 1
            sum_over(group, Tag(1, step, 1), x * 0.5, deadline=time.monotonic() + DEADLINE_S)

        return once

    def run(nbytes: int, count: int, between: str) -> dict[str, Any]:
        once = buffers(nbytes) if between == "buffers" else arrays(nbytes)
        for _ in range(WARM):
            once()
        times = []
        for _ in range(count):
            began = time.perf_counter()
            once()
            times.append((time.perf_counter() - began) * 1e6)
        return {"times": times if rank == 0 else []}

    def profile(nbytes: int, count: int) -> dict[str, Any]:
        """Microseconds of each step of an all-reduce between buffers, by clocks around them, each of which adds its
        own tenth of a microsecond; what they leave of the whole is Python's.
        """
        link, steps = next(iter(links.values())), Steps()
        once = buffers(nbytes)
        for _ in range(WARM):
            once()
        with steps.around(link):
            for _ in range(count):
                began = time.perf_counter()
                once()
                steps.end(time.perf_counter() - began)
        return {"steps": steps.medians() if rank == 0 else {}}

    def until_lost() -> dict[str, Any]:
        """Exchange until a peer is gone; by the clock all processes share, when that was noticed."""
        once = buffers(8192)
        while True:
            began = time.monotonic()
            try:
                once()
            except MlxcelError as error:
                return {"noticed": time.monotonic(), "waited_s": time.monotonic() - began, "named": error.node}

    def answer(**order: Any) -> dict[str, Any]:
        jobs: dict[str, Callable[..., dict[str, Any]]] = {"run": run, "profile": profile, "until_lost": until_lost}
        return jobs[order.pop("do", "run")](**order)

    serve({"rank": rank}, answer)


main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "spin", sys.argv[4:] == ["shared-memory"])
