"""Handshakes while strangers hold on to the port: silent ones, and ones that send a byte a second.

The listener and the strangers are processes of their own; the proper peers are in this one. tests/net/test_floods.py
runs the same with bounds that hold on any machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from benchmarks.harness import REPO, percentile
from benchmarks.sides.guarded import CLUSTER
from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.cluster.secret import Secret, random_secret
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.wire.handshake import Identity

STRANGERS = 2000
HANDSHAKES = 200
MODES = ("silent", "drip")
GOAL_S = 0.1
ANSWER_S = 60.0
PACE_S = 0.02
"""Between two handshakes: a peer that comes now and then, not a load of its own."""


class Talker:
    """A process that answers lines with JSON objects.

    Args:
        start: makes the process, as `subprocess.Popen` does; another one may put it on another host.
    """

    def __init__(self, module: str, *arguments: object, start: Any = subprocess.Popen) -> None:
        self.process = start(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def ask(self, line: str) -> dict[str, Any]:
        """Its answer to `line`."""
        self.process.stdin.write(line.encode() + b"\n")
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """What it says next.

        Raises:
            TimeoutError: it says nothing.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(ANSWER_S):
                raise TimeoutError(f"no answer from {self.process.args} within {ANSWER_S:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with status {self.process.wait(10)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()


class Guarded(Talker):
    """A listener in a process of its own, at `host`."""

    def __init__(self, host: str = "127.0.0.1", **options: Any) -> None:
        super().__init__("benchmarks.sides.guarded", host, **options)
        self.secret = random_secret()
        try:
            self.address = Address(host, self.ask(self.secret.reveal().hex())["port"])
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def facts(self) -> dict[str, Any]:
        """What it says of itself."""
        return self.ask("facts")

    def peer(self, node_id: str) -> tuple[Identity, Secret, Address]:
        """What a proper peer of that name dials with."""
        me = Identity(cluster=CLUSTER, node_id=node_id, role="worker", incarnation=new_incarnation())
        return me, self.secret, self.address


@contextmanager
def flood(guarded: Guarded, mode: str, count: int = STRANGERS, **options: Any) -> Iterator[Talker]:
    """`count` strangers, each of whom has been connected at least once."""
    arguments = (guarded.address.host, guarded.address.port, count, mode)
    with Talker("benchmarks.sides.attacker", *arguments, **options) as strangers:
        strangers.answer()
        yield strangers


async def handshakes(guarded: Guarded, count: int, pace_s: float = PACE_S) -> list[float]:
    """Seconds from the first packet to the first control frame, for peers that come one after the other."""
    took = []
    for number in range(count):
        began = time.perf_counter()
        link = await dial(*guarded.peer(f"peer-{number}"))
        took.append(time.perf_counter() - began)
        link.close()
        await asyncio.sleep(pace_s)
    return took


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Median, p90 and most of the handshakes' times, with and without strangers; round trips of a link that stands."""
    count = 30 if arguments.quick else HANDSHAKES
    rows = []
    with Guarded() as guarded:
        for mode in ("quiet", *MODES):
            if mode == "quiet":
                rows.append(_measure(guarded, mode, count))
                continue
            with flood(guarded, mode) as strangers:
                rows.append(_measure(guarded, mode, count))
                rows[-1]["connections"] = strangers.ask("end")["opened"]
        counts = guarded.facts()["counts"]
    return {
        "what": f"handshakes with a listener that {STRANGERS} strangers hold on to, milliseconds",
        "goal": f"median and p90 under {GOAL_S * 1000:g}, links that stand untouched",
        "evicted": counts.get("evicted", 0),
        "figures": rows,
    }


def _measure(guarded: Guarded, mode: str, count: int) -> dict[str, Any]:
    async def both() -> tuple[list[float], list[float]]:
        changes: list[str] = []
        standing = ControlLink(
            await dial(*guarded.peer("standing")), on_state=lambda _, state, why: changes.append(f"{state}: {why}")
        )
        trips: list[float] = []

        async def pinging() -> None:
            while True:
                trips.append(await standing.ping())
                await asyncio.sleep(PACE_S)

        task = asyncio.ensure_future(pinging())
        took = await handshakes(guarded, count)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        standing.close()
        if changes:
            raise RuntimeError(f"a link that stood was touched: {changes}")
        return took, trips

    took, trips = asyncio.run(both())
    return {
        "strangers": mode,
        "handshakes": len(took),
        "p50": statistics.median(took) * 1000,
        "p90": percentile(took, 0.9) * 1000,
        "max": max(took) * 1000,
        "ping_p50": statistics.median(trips) * 1000,
        "connections": 0,
    }
