"""The HTTP API at twice what it can do, for minutes: what is claimed of a server that has too much to do.

Callers come at random times, whoever of them still waits (a Poisson process), twice as often as a short run before
found that the server can answer. They are of all kinds (`benchmarks.traffic`). The server and its engines are processes
of their own. In the end each claim holds or the run has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import traffic
from benchmarks.flood import Talker
from benchmarks.harness import percentile
from benchmarks.serving import MODEL, Prompts
from benchmarks.soak import fitted_growth
from benchmarks.traffic import Callers, Fate, Truth
from mlxcel_nb.serve.backlog import FEW, MAX_WAIT_S

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"pp 2": (2, {"pp": 2}), "one process": (1, {})}
"""Engines, and how the model is split. Each has its share of the minutes."""

OVERLOAD = 2.0
CROWD = 24
"""Callers who ask again as soon as they have their answer, to find the capacity."""

WARM_UP = 0.3
"""Share of the run whose memory is not looked at: queues fill, and buffers grow to the size of what they hold."""

GROWTH_BYTES = 64 << 20
"""Of the line fitted to a process's resident memory over the rest of the run, MLX's arrays left out: these come and go
with requests, and are looked at when everybody has gone."""

FLOOR_S = 30.0
"""Of each such span the least counts: between two looks at its slack, an engine has what freed arrays lay in."""

ARRAYS_BYTES, REUSED_BYTES = 1 << 20, 2 * 4096
"""What arrays may take beyond weights and kept blocks, and beside that each kept block, which is one array: MLX hands
out memory that it has had, if it is at most two pages more than what is asked for (measured, 0.32.4)."""

SLACK = 2.0
"""The rate at which callers are served may halve while one waits: more answers are under way than when he came."""

SETTLE_S = 60.0
TRUTHS, TRUTH_TOKENS = 8, 32


class Served(Talker):
    """The server and its engines."""

    def __init__(self, **order: Any) -> None:
        super().__init__("benchmarks.sides.served")
        try:
            told = self.tell(**order)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.url: str = told["url"]
        self.folder: str = told["folder"]
        self.block_bytes: int = told["block_bytes"]
        self.kv_shares: dict[str, float] = told["kv_shares"]
        self.processes = {name: psutil.Process(pid) for name, pid in told["pids"].items()}
        known = set(self.processes.values())
        for each in psutil.Process(self.process.pid).children(recursive=True):
            if each not in known:
                self.processes[f"process {each.pid}"] = each

    def tell(self, **order: Any) -> dict[str, Any]:
        return self.ask(json.dumps(order))

    def facts(self) -> dict[str, Any]:
        return self.tell(do="facts")

    def weights(self) -> dict[str, float]:
        """Of each engine at rest, what its arrays take beside kept blocks."""
        facts = self.facts()
        kept = facts["kept_blocks"] * self.block_bytes
        return {name: nbytes - kept * self.kv_shares[name] for name, nbytes in facts["arrays"].items()}


class ServingSoak:
    """One run.

    Args:
        seconds: of twice the capacity, all layouts together.
        calibrate_s, crowd: how long the capacity is looked for at each layout, by how many who ask all the time.
        growth_bytes: what the line through a process's memory may rise by after the warm-up.
        max_wait_s: beyond which the server is to say that it is busy.
        longest, output: most tokens in and out.
    """

    def __init__(
        self,
        seconds: float,
        *,
        calibrate_s: float = 60.0,
        crowd: int = CROWD,
        growth_bytes: int = GROWTH_BYTES,
        max_wait_s: float = MAX_WAIT_S,
        longest: int = traffic.LONGEST,
        output: int = traffic.OUTPUT,
        model: str = MODEL,
        layouts: Sequence[str] = tuple(LAYOUTS),
    ) -> None:
        self.claims: list[dict[str, Any]] = []
        self.figures: dict[str, str] = {}
        self._model = model
        self._layouts = layouts
        self._seconds = seconds / len(layouts)
        self._calibrate_s = calibrate_s
        self._crowd = crowd
        self._growth_bytes = growth_bytes
        self._max_wait_s = max_wait_s
        self._sizes = (longest, output)
        self._layout = ""
        self._memory: dict[str, list[tuple[float, float]]] = {}
        self._fullest = 0.0
        self._weights: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        """All of it: the claims, and what went through."""
        for name in self._layouts:
            engines, split = LAYOUTS[name]
            self._layout = name
            order = {"engines": engines, "split": split, "model": self._model, "max_wait_s": self._max_wait_s}
            with Served(**order) as served:
                asyncio.run(self._soak(served))
                self._end(served)
        return {
            "what": f"{Path(self._model).name} behind the HTTP API at {OVERLOAD:g} times what it can do, "
            f"{self._seconds:g} s a layout",
            **self.figures,
            "failed": [claim["claim"] for claim in self.claims if claim["holds"] != "yes"],
            "figures": self.claims,
        }

    # -- what happens

    async def _soak(self, served: Served) -> None:
        prompts = Prompts(served.folder)
        unbounded = httpx.Limits(max_connections=None, max_keepalive_connections=self._crowd)
        async with httpx.AsyncClient(timeout=None, limits=unbounded) as client:
            sizes = [8 + i * self._sizes[0] // (2 * TRUTHS) for i in range(TRUTHS)]
            truths = await traffic.learn(client, served.url, [prompts.text(size) for size in sizes], TRUTH_TOKENS)
            self._weights = served.weights()
            capacity = await self._capacity(client, served.url, self._callers(prompts, truths, 1))
            began = time.monotonic()
            looking = asyncio.create_task(self._look(served, began))
            fates = await self._flood(client, served.url, self._callers(prompts, truths, 2), capacity * OVERLOAD)
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            self._judge(fates, capacity)
            await self._settle(client, served)

    def _callers(self, prompts: Prompts, truths: Sequence[Truth], seed: int) -> Callers:
        return Callers(prompts.text, truths, seed, *self._sizes)

    async def _capacity(self, client: httpx.AsyncClient, url: str, callers: Callers) -> float:
        """Requests a second that end while a crowd asks again and again, the first of each left out."""
        ended: list[float] = []
        enough = asyncio.Event()
        begun = time.monotonic()

        async def one() -> None:
            while True:
                fate = await traffic.answer(client, url, callers.next())
                if fate.outcome == "refused":
                    await asyncio.sleep(1.0)  # as it was told
                    continue
                ended.append(fate.ended)
                if len(ended) >= 3 * self._crowd and fate.ended >= begun + self._calibrate_s:
                    enough.set()

        crowd = [asyncio.create_task(one()) for _ in range(self._crowd)]
        try:
            async with asyncio.timeout(traffic.DEADLINE_S):
                await enough.wait()
        finally:
            for each in crowd:
                each.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
        return (len(ended) - self._crowd) / (ended[-1] - ended[self._crowd - 1])

    async def _flood(self, client: httpx.AsyncClient, url: str, callers: Callers, rate: float) -> list[Fate]:
        """Everybody who came, and what became of him; the last have their answers, or their deadline has passed."""
        chance = random.Random(3)
        tasks: list[asyncio.Task[Fate]] = []
        began = now = time.monotonic()
        due = began
        while (due := due + chance.expovariate(rate)) < began + self._seconds:
            if (now := time.monotonic()) < due:
                await asyncio.sleep(due - now)  # until the next one comes
            tasks.append(asyncio.create_task(traffic.answer(client, url, callers.next())))
        return list(await asyncio.gather(*tasks))

    async def _look(self, served: Served, began: float) -> None:
        """Memory while callers come, once a second."""
        self._memory = {name: [] for name in served.processes}
        self._fullest = 0.0
        while (at := time.monotonic() - began) < self._seconds:
            facts = await asyncio.to_thread(served.facts)
            self._fullest = max(self._fullest, facts["kv_used_bytes"] / max(1, facts["kv_available_bytes"]))
            for name, process in served.processes.items():
                self._memory[name].append((at, process.memory_info().rss - facts["arrays"].get(name, 0)))
            await asyncio.sleep(1.0)  # the pace of the samples

    # -- what is claimed

    def _judge(self, fates: Sequence[Fate], capacity: float) -> None:
        by = Counter(fate.outcome for fate in fates)
        wrong = [f"{fate.outcome}, {fate.detail}" for fate in fates if fate.outcome in ("failed", "misfit", "stuck")]
        whole = [fate for fate in fates if fate.outcome == "whole"]
        self._claim(f"every request has its end within {traffic.DEADLINE_S:g} s", not by["stuck"], f"{len(fates):,}")
        self._claim("none fails in another way than it should", not wrong, f"{len(wrong)} do; {'; '.join(wrong[:3])}")
        why = Counter(fate.detail for fate in fates if fate.outcome == "refused")
        told = ", ".join(f"{count:,} with {detail}" for detail, count in why.items())
        self._claim("refusals are 429 or 503 in OpenAI's shape with a hint", not by["misfit"], told)
        self._claim("there are refusals", bool(why), f"{by['refused']:,} of {len(fates):,}")
        bad = [fate for fate in fates if fate.wish.manner == "bad"]
        good = all(fate.outcome in ("bad", "refused") for fate in bad)
        self._claim("what cannot be is a 400", good, f"{by['bad']} of {len(bad)}, the rest refused")
        ended = all(len(fate.finish) == fate.wish.body.get("n", 1) for fate in whole)
        self._claim("every answer says why it ended", ended, f"{len(whole):,} answers")
        forms = [f for f in whole if "response_format" in f.wish.body and f.finish == ["stop"]]
        self._claim("answers of a form have it", all(_fits(fate.text) for fate in forms), len(forms))
        self._judge_truths([fate for fate in whole if fate.wish.truth is not None])
        self._judge_waits(fates)
        self._claim("keys and values never take more than their room", self._fullest <= 1, f"{self._fullest:.0%}")
        for name, samples in self._memory.items():
            growth = fitted_growth(floor(samples, FLOOR_S), WARM_UP)
            seconds = (1 - WARM_UP) * (samples[-1][0] - samples[0][0])
            figure = f"{growth / 1e6:+.1f} MB of {samples[-1][1] / 1e6:.0f} in {seconds:.0f} s"
            beside = " beside arrays" if name in self._weights else ""
            self._claim(f"memory of {name}{beside} is flat", growth < self._growth_bytes, figure)
        times = [fate.ended - fate.asked for fate in whole]
        counts = ", ".join(f"{count:,} {what}" for what, count in sorted(by.items()))
        self.figures[self._layout] = (
            f"capacity {capacity:.2f} requests a second, {len(fates) / self._seconds:.2f} came; {counts}; "
            f"whole answers took {percentile(times, 0.5):.1f} s, p99 {percentile(times, 0.99):.1f} s"
            if times
            else f"capacity {capacity:.2f} requests a second; {counts}"
        )

    def _judge_truths(self, fates: Sequence[Fate]) -> None:
        def sure(fate: Fate) -> bool:
            assert fate.wish.truth is not None
            return fate.text.startswith(fate.wish.truth.sure)

        same = sum(fate.text == fate.wish.truth.text for fate in fates if fate.wish.truth is not None)
        as_sure = sum(sure(fate) for fate in fates)
        figure = f"{as_sure} of {len(fates)}, {same} as a whole"
        self._claim("greedy texts are those of quiet, up to a near tie", as_sure == len(fates) > 0, figure)

    def _judge_waits(self, fates: Sequence[Fate]) -> None:
        """First texts come within what the bounded queue implies.

        Who is let in finds so many before him that he waits `max_wait_s` by the rate of that moment, or `FEW` of them.
        """
        waits = [fate.first - fate.asked for fate in fates if fate.first is not None]
        answered = [fate for fate in fates if fate.outcome in ("whole", "left")]
        took = max(fate.ended for fate in fates) - min(fate.asked for fate in fates)
        bound = SLACK * max(self._max_wait_s, FEW * took / max(1, len(answered)))
        figure = f"{percentile(waits, 0.99):.1f} s, half of them within {percentile(waits, 0.5):.1f} s"
        self._claim(f"p99 of first texts within {bound:.0f} s", percentile(waits, 0.99) <= bound, figure)

    async def _settle(self, client: httpx.AsyncClient, served: Served) -> None:
        """When everybody has gone, nothing is left but the blocks that are kept for those who begin alike."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            facts = await asyncio.to_thread(served.facts)
            held = {name: facts[name] for name in ("running", "waiting", "kv_tokens")}
            rest = facts["kv_used_bytes"] - facts["kept_blocks"] * served.block_bytes
            page = (await client.get(f"{served.url}/metrics", timeout=SETTLE_S)).text
            flying = [line for line in page.splitlines() if line.startswith("mlxcel_answers_in_flight{")]
            quiet = not any(held.values()) and not rest and all(line.endswith(" 0.0") for line in flying)
            if quiet or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)  # the pace of the looks
        self._claim("nothing runs or waits in the end", quiet, f"{held}, {rest} bytes, {flying}" if not quiet else "")
        kept, allowed = facts["kept_blocks"] * served.block_bytes, ARRAYS_BYTES + REUSED_BYTES * facts["kept_blocks"]
        self._claim("keys and values are those of kept blocks", not rest, f"{kept / 1e6:.0f} MB")
        left = {name: nbytes - self._weights[name] for name, nbytes in served.weights().items()}
        nothing = all(abs(nbytes) < allowed for nbytes in left.values())
        figure = ", ".join(f"{name} {nbytes / 1e6:+.2f} MB" for name, nbytes in left.items())
        self._claim("no array is left but weights and kept blocks", nothing, figure)
        health = await client.get(f"{served.url}/health", timeout=SETTLE_S)
        self._claim("/health says ok", health.status_code == 200, health.json()["status"])

    def _end(self, served: Served) -> None:
        """Stopped, nothing is left of it."""
        stopped = served.tell(do="end") == {"ended": True}
        _, left = psutil.wait_procs(list(served.processes.values()), timeout=SETTLE_S)
        self._claim("no process is left", stopped and not left, ", ".join(map(str, left)) or len(served.processes))

    def _claim(self, text: str, holds: bool, figure: Any) -> None:
        """A claim of the layout that runs, and whether it holds."""
        claim = {"claim": f"{self._layout}: {text}", "holds": "yes" if holds else "NO", "figure": str(figure) or "none"}
        self.claims.append(claim)


def floor(samples: Sequence[tuple[float, float]], span_s: float) -> list[tuple[float, float]]:
    """The least of each span of so many seconds, and when that was; a last one that is cut short is left out."""
    spans: dict[int, list[tuple[float, float]]] = {}
    for at, value in samples:
        spans.setdefault(int((at - samples[0][0]) // span_s), []).append((at, value))
    whole = [each for number, each in spans.items() if (number + 1) * span_s <= samples[-1][0] - samples[0][0]]
    return [min(each, key=lambda sample: sample[1]) for each in whole] or list(samples)


def _fits(text: str) -> bool:
    try:
        basket = json.loads(text)
    except ValueError:
        return False
    return isinstance(basket, dict) and basket.keys() == {"fruit", "count"}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The soak that was asked for."""
    if arguments.quick:
        loose = 8 * GROWTH_BYTES
        return ServingSoak(
            30.0, calibrate_s=5.0, crowd=6, growth_bytes=loose, max_wait_s=5.0, longest=64, output=12
        ).run()
    seconds = 60.0 * arguments.minutes
    return ServingSoak(seconds, calibrate_s=min(60.0, seconds / 8)).run()
