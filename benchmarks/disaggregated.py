"""Prompts read by one engine and answered by another, a core each: what is hidden of the transfer, how fast it is, what
rounding saves and costs, and how even a stream stays while long prompts come, beside one engine that does both.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

from benchmarks.harness import PAIRS, Ranks, found, goal, percentile
from benchmarks.serving import Prompts
from benchmarks.sides.meeting import by_dialling
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.report import Completion
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.runtime.spans import Kind, read_spans

MODEL = "smollm2-135m"
LONG = 1500
BULK = 64 << 20
RUN_S = 120.0
STREAM = SamplingParams(max_tokens=1200, ignore_eos=True)
ONE = SamplingParams(max_tokens=1, ignore_eos=True)
FEW = SamplingParams(max_tokens=8, ignore_eos=True)
"""So that what the reader says of the sending has come before the answer ends."""
IDLE_GAPS = 60
TOGETHER = 8
LONG_ANSWER = SamplingParams(max_tokens=160, ignore_eos=True)
"""Longer than it takes to read all of so many prompts."""


@contextlib.contextmanager
def engines(count: int, **split: Any) -> Iterator[Cluster]:
    """So many, a core each, with the model loaded."""
    with Cluster(count, threads=1) as cluster:
        for number, node in enumerate(cluster.nodes):
            psutil.Process(node.pid).cpu_affinity([number % (psutil.cpu_count() or 1)])
        cluster.load(MODEL, **split)
        yield cluster


def _row(figure: str, values: list[float], **limit: Any) -> dict[str, Any]:
    value = statistics.median(values)
    return found({"figure": figure, "value": value, "low": min(values), "high": max(values), **goal(value, **limit)})


def hidden(cluster: Cluster, prompts: Prompts, times: int) -> list[dict[str, Any]]:
    """Of long prompts: the share of the transfer that was sent while they were read, and what was left afterwards."""
    answers = [cluster.generate(prompts.text(LONG), FEW) for _ in range(times)]
    shares = [_told(answer).transfer_hidden or 0.0 for answer in answers]
    late = [1000 * (_told(answer).transfer_s or 0.0) for answer in answers]
    return [
        _row(f"share of the transfer of {LONG} tokens sent while they were read", shares, at_least=0.7),
        _row("ms from the first token until all was there", late),
    ]


def _told(answer: Completion) -> Any:
    assert answer.handover is not None, "it was read elsewhere"
    return answer.handover


def rates(times: int, tokens: int) -> list[dict[str, Any]]:
    """A finished cache over a link of its own, against plain bulk over the same kind of link."""
    with contextlib.ExitStack() as stack:
        bulk = stack.enter_context(
            Ranks("bulk", "benchmarks.sides.link_end", 2, ["ours"], by_dialling, deadline_s=RUN_S)
        )
        caches = stack.enter_context(
            Ranks("caches", "benchmarks.sides.caches_end", 2, [], by_dialling, deadline_s=RUN_S)
        )
        caches.run(tokens=tokens, encoding="plain")
        pairs = [
            (caches.run(tokens=tokens, encoding="plain")["gb_s"], bulk.run(what="bulk", size=BULK, count=3)["gb_s"])
            for _ in range(times)
        ]
        return [
            _row("a finished cache : bulk of the data plane", [ours / theirs for ours, theirs in pairs], at_least=0.7),
            _row("GB/s of a finished cache", [ours for ours, _ in pairs]),
        ]


def rounded(cluster_split: dict[str, Any], prompts: Prompts, length: int) -> list[dict[str, Any]]:
    """What int8 and int4 leave of float16 bytes, and what they change: log-probabilities of the first tokens drawn."""
    rows = []
    texts = [prompts.text(length) for _ in range(3)]
    params = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=5)
    plain: list[Completion] = []
    for encoding, limit in (("plain", None), ("int8", 0.54), ("int4", 0.29)):
        with engines(2, **cluster_split, kv_transfer=encoding, dtype="float16", prefill_from=0) as cluster:
            answers = [cluster.generate(text, params) for text in texts]
        if encoding == "plain":
            plain = answers
            continue
        shares = [_told(a).transfer_sent_bytes / _told(a).transfer_bytes for a in answers]
        rows.append(_row(f"{encoding}: bytes sent : bytes of float16", shares, at_most=limit))
        rows.append(_row(f"{encoding}: largest relative error", [_told(a).transfer_error for a in answers]))
        changes = [_difference(ours, theirs) for ours, theirs in zip(answers, plain, strict=True)]
        rows.append(_row(f"{encoding}: largest change of a log-probability", changes))
    return rows


def _difference(ours: Completion, theirs: Completion) -> float:
    """Over the tokens before the first that differs, and that one: the largest change among the likeliest five."""
    largest = 0.0
    for a, b, mine, other in zip(ours.token_ids, theirs.token_ids, ours.logprobs, theirs.logprobs, strict=True):
        known = dict(other.top)
        largest = max([largest, *(abs(value - known[token]) for token, value in mine.top if token in known)])
        if a != b:
            break
    return largest


def evenness(split: dict[str, Any], count: int, prompts: Prompts, times: int) -> tuple[list[float], list[float]]:
    """Ratios of the p99 gap of a stream to its idle gap, while long prompts come one after the other; idle gaps, ms."""
    ratios, idles = [], []
    with engines(count, **split) as cluster:
        cluster.generate(prompts.text(LONG), ONE)
        for _ in range(times):
            stream, ended = cluster.stream(prompts.text(128), STREAM), threading.Event()
            moments: list[float] = []
            reading = threading.Thread(target=_follow, args=(stream, moments, ended))
            reading.start()
            _until(moments, IDLE_GAPS + 1, ended)
            idle = statistics.median(_gaps(moments[: IDLE_GAPS + 1]))
            began = time.perf_counter()
            for _ in range(4):
                cluster.generate(prompts.text(LONG), FEW)
            until = time.perf_counter()
            assert not ended.is_set(), "the stream ended before the prompts were read"
            stream.cancel()
            reading.join()
            within = _gaps([moment for moment in moments if began <= moment <= until])
            ratios.append(percentile(within, 0.99) / idle)
            idles.append(1000 * idle)
    return ratios, idles


def _follow(stream: Any, moments: list[float], ended: threading.Event) -> None:
    for delta in stream:
        moments += [time.perf_counter()] * max(1, len(delta.tokens))
    ended.set()


def _until(moments: list[float], count: int, ended: threading.Event) -> None:
    while len(moments) < count and not ended.wait(0.05):  # between two looks
        pass


def _gaps(moments: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(moments)]


def together(cluster: Cluster, prompts: Prompts) -> float:
    """Rows of the widest decode step, when so many come at once."""
    texts = [prompts.text(200) for _ in range(TOGETHER)]
    answers = cluster.generate_all(texts, LONG_ANSWER)
    assert all(answer.handover is not None for answer in answers)
    told = cluster._running().ask("engine-1", {"type": "spans", "since": 0})["spans"]
    steps = [span for span in read_spans(told["data"]) if span.kind == Kind.COMPUTE and not span.prefill]
    return float(max(span.rows for span in steps))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from mlxcel_nb.models.store import resolve

    prompts = Prompts(str(resolve(MODEL)))
    times, length = (1, 300) if arguments.quick else (PAIRS, LONG)
    apart = {"prefill": 1, "decode": 1}
    with engines(2, **apart) as cluster:
        rows = hidden(cluster, prompts, times)
        rows.append(_row(f"rows of one step, {TOGETHER} at once", [together(cluster, prompts)], at_least=TOGETHER))
    rows += rates(times, length)
    rows += rounded(apart, prompts, length)
    ratios, idles = evenness(apart, 2, prompts, times)
    what = f"p99 gap of a stream while prompts of {LONG} tokens come : its idle gap"
    rows.append(_row(f"{what}, prefill and decode apart", ratios, at_most=1.5))
    rows.append(_row("idle gap, ms, prefill and decode apart", idles))
    ratios, idles = evenness({}, 1, prompts, times)
    rows.append(_row(f"{what}, one engine on one core", ratios))
    rows.append(_row("idle gap, ms, one engine on one core", idles))
    return {"what": f"{MODEL}, prompts read by one engine and answered by another, a core each", "figures": rows}
