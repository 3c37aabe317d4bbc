"""Members that talk for minutes while others come, go, are stopped and killed: what is claimed of long runs.

Two members stay; two guests are ended, killed and started again all the time. All change keys every few frames, read
slowly now and then, and are joined by links of several shapes; where a link is as it is, tensors go through shared
memory as well. Every message, stream item and tensor is numbered and its content follows from its number
(`benchmarks.sides.soaking`). In the end each claim holds or the run has failed.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.flood import Talker
from mlxcel_nb.cluster.secret import random_secret
from mlxcel_nb.cluster.shape import parse_links

MINUTES = 10.0
REKEY_EVERY = 7
CHURN_S = 2.0
STOPPED_S = 1.0
"""Below what makes a peer suspect."""

STAYING = ("stays-0", "stays-1")
GUESTS = ("guest-0", "guest-1")
MEMBERS = (*STAYING, *GUESTS)
LINKS = ("0-2:1ms,400Mbit", "1-2:3ms,100Mbit,0.1%", "1-3:500us")
"""By number in MEMBERS; the link of those who stay is as it is."""

SHARED_MEMORY = sys.platform.startswith("linux")

WARM_UP = 0.25
"""Share of the run whose memory is not looked at: buffers grow to the size of what they have to hold."""

GROWTH_BYTES = 8 << 20
"""Of the fitted line, over the rest of the run."""

SETTLE_S = 30.0

_WORDS = {"in_memory": "tensors in shared memory", "fds": "descriptors", "rings": "mapped rings"}


class Soaking(Talker):
    """One member."""

    def __init__(self, name: str, secret: str) -> None:
        super().__init__("benchmarks.sides.soaking")
        self.name = name
        told = self.tell(name=name, secret=secret, rekey_every=REKEY_EVERY, links=LINKS, members=MEMBERS)
        self.address: str = told["address"]

    def tell(self, **order: Any) -> dict[str, Any]:
        return self.ask(json.dumps(order))

    def facts(self) -> dict[str, Any]:
        return self.tell(do="facts")

    def join(self, other: Soaking, *, renew: bool = False) -> None:
        shaped = parse_links(LINKS, MEMBERS).between(self.name, other.name)
        kinds = ("hot", "memory", "control") if SHARED_MEMORY and not shaped else ("hot", "control")
        self.tell(do="join", address=other.address, kinds=kinds, renew=renew)


class Soak:
    """One run.

    Args:
        growth_bytes: what the line through a member's memory may rise by after the warm-up.
    """

    def __init__(self, seconds: float, *, growth_bytes: int = GROWTH_BYTES) -> None:
        self.seconds = seconds
        self.growth_bytes = growth_bytes
        self.claims: list[dict[str, Any]] = []
        self.churn = dict.fromkeys(("killed", "ended", "stopped"), 0)
        self._secret = random_secret().reveal().hex()
        self._chance = random.Random(1)
        self._staying: list[Soaking] = []
        self._guests: dict[str, Soaking] = {}
        self._memory: list[list[tuple[float, float]]] = []
        self._errors: list[str] = []
        self._totals: dict[str, int] = {}

    def run(self) -> dict[str, Any]:
        """All of it: the claims, and what went through."""
        try:
            self._begin()
            base = [member.facts() for member in self._staying]
            for name in GUESTS:
                self._welcome(name)
            self._soak()
            self._end(base)
        finally:
            for member in (*self._staying, *self._guests.values()):
                member.__exit__(None, None, None)
        return {
            "what": f"members that talk for {self.seconds:g} s while others come and go",
            **{name: f"{count:,}" for name, count in self._totals.items()},
            **self.churn,
            "failed": [claim["claim"] for claim in self.claims if claim["holds"] != "yes"],
            "figures": self.claims,
        }

    def _begin(self) -> None:
        for name in STAYING:
            self._staying.append(Soaking(name, self._secret))
        self._staying[1].join(self._staying[0])
        self._memory = [[] for _ in STAYING]

        def met() -> bool:
            every = [member.facts() for member in self._staying]
            hot = [list(facts["heats"].values()) for facts in every]
            return all(len(f["talks"]) == 1 for f in every) and all(len(h) == 1 + SHARED_MEMORY and all(h) for h in hot)

        _until(met, "the two that stay to meet")

    def _welcome(self, name: str) -> None:
        guest = self._guests[name] = Soaking(name, self._secret)
        for member in self._staying:
            guest.join(member, renew=True)

    def _soak(self) -> None:
        began = time.monotonic()
        churned = began
        while (now := time.monotonic()) < began + self.seconds:
            for member, memory in zip(self._staying, self._memory, strict=True):
                memory.append((now - began, float(member.facts()["rss"])))
            if now - churned >= CHURN_S:
                churned = now
                self._churn()
            time.sleep(min(1.0, CHURN_S / 4))  # the pace of the samples

    def _churn(self) -> None:
        name = self._chance.choice(GUESTS)
        how = self._chance.choice(("killed", "ended", "stopped", "stopped"))
        self.churn[how] += 1
        if how == "stopped":
            process = self._chance.choice([*self._staying, self._guests[name]]).process
            process.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_S)  # a slow reader, as slow as can be
            process.send_signal(signal.SIGCONT)
            return
        guest = self._guests.pop(name)
        if how == "ended":
            self._note(guest.tell(do="end"))
        guest.__exit__(None, None, None)
        self._welcome(name)

    def _note(self, facts: dict[str, Any]) -> None:
        """Keep what a member that ends has to say."""
        self._errors += facts["errors"]
        for name, count in facts["totals"].items():
            self._totals[name] = self._totals.get(name, 0) + count

    def _end(self, base: Sequence[dict[str, Any]]) -> None:
        for guest in self._guests.values():
            self._note(guest.tell(do="end"))
            guest.__exit__(None, None, None)
        self._guests.clear()
        one, two = self._staying
        for member in self._staying:
            member.tell(do="hush")

        def settled() -> bool:
            first, second = one.facts()["talks"], two.facts()["talks"]
            if set(first) != {STAYING[1]} or set(second) != {STAYING[0]}:
                return False
            here, there = first[STAYING[1]], second[STAYING[0]]
            return bool(here["sent"] == there["got"] and here["got"] == there["sent"])

        arrived = _until(settled, "all that was sent to arrive", fails=False)
        last = [member.facts() for member in self._staying]
        for facts in last:
            self._note(facts)
        ends = [end for facts in last for end in facts["ends"] if end.startswith(STAYING)]
        self._claim("nothing lost, repeated, swapped or changed", not self._errors, "; ".join(self._errors[:3]))
        self._claim("the links of those who stay never ended", not ends, "; ".join(ends[:3]))
        sent = last[0]["talks"].get(STAYING[1], {}).get("sent", {})
        self._claim("all that those who stay sent each other has arrived", arrived, f"{sum(sent.values()):,} one way")
        for number, member in enumerate(self._staying):
            self._claim_flat(member, self._memory[number])
            for what in ("fds", "threads", "rings"):
                self._claim_back(member, what, base[number][what])
        through = ("rekeys", "messages", "streams", "tensors", "in_memory", "pings")
        for what in through if SHARED_MEMORY else set(through) - {"in_memory"}:
            self._claim(f"there were {_WORDS.get(what, what)}", self._totals[what] > 0, f"{self._totals[what]:,}")

    def _claim_flat(self, member: Soaking, memory: Sequence[tuple[float, float]]) -> None:
        growth = fitted_growth(memory, WARM_UP)
        figure = f"{growth / 1e6:+.2f} MB of {memory[-1][1] / 1e6:.0f}"
        self._claim(f"memory of {member.name} is flat", growth < self.growth_bytes, figure)

    def _claim_back(self, member: Soaking, what: str, base: int) -> None:
        back = _until(lambda: bool(member.facts()[what] <= base), what, fails=False)
        self._claim(
            f"{_WORDS.get(what, what)} of {member.name} are back to base", back, f"{base}, then {member.facts()[what]}"
        )

    def _claim(self, text: str, holds: bool, figure: Any) -> None:
        self.claims.append({"claim": text, "holds": "yes" if holds else "NO", "figure": str(figure) or "none"})


def fitted_growth(samples: Sequence[tuple[float, float]], warm_up: float) -> float:
    """How much a straight line through what comes after the warm-up (a share of the time) rises, by least squares."""
    begin = samples[0][0] + warm_up * (samples[-1][0] - samples[0][0])
    points = [(x, y) for x, y in samples if x >= begin]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return slope * (points[-1][0] - points[0][0])


def _until(condition: Callable[[], bool], what: str, *, fails: bool = True) -> bool:
    end = time.monotonic() + SETTLE_S
    while not condition():
        if time.monotonic() > end:
            if fails:
                raise TimeoutError(f"waited {SETTLE_S:g} s for {what}")
            return False
        time.sleep(0.1)  # the pace of the looks
    return True


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The soak that was asked for."""
    if arguments.quick:
        return Soak(20.0, growth_bytes=5 * GROWTH_BYTES).run()
    return Soak(60.0 * arguments.minutes).run()
