"""Many requests at once, made from a seed: what is asked and when, one by one for comparison, and all together.

.venv/bin/python -m tests.many          # 8 and 32 requests, up to 1500 tokens in and 200 out, on every layout
.venv/bin/python -m tests.many tp2 pp3  # on these
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from mlxcel_nb.client import asking
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.report import Completion
from mlxcel_nb.client.router import Router, new_id
from mlxcel_nb.client.stream import Stream
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.runtime.engine_facts import EngineFacts
from mlxcel_nb.runtime.protocol import GenerateOrder
from tests.cluster.harness import Recorded, held, nothing_left, on_engine, record_gaps, recorded_gaps, wait_until
from tests.waiting import until

LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp3": {"pp": 3},
    "tp2xpp2": {"tp": 2, "pp": 2},
    "dp2": {"dp": 2},
}

SLACK_BYTES = 1 << 20
"""What MLX may hold more than before when all caches are gone: small arrays that something still refers to."""

NEAR = 5e-4
"""Two logits this close may change places when a row is added up in company: sums of float32 in another order move
SmolLM2's, which reach 20 and more, by some 1e-4."""


@dataclass(frozen=True)
class Ask:
    """One request.

    Args:
        after_s: when it is asked, from the beginning of all.
        leave_at: cancelled when so many tokens are there; None for never.
    """

    prompt: tuple[int, ...] = field(repr=False)
    params: SamplingParams
    after_s: float = 0.0
    leave_at: int | None = None


def text_ids(folder: Path) -> list[int]:
    """A text that nobody edits, and that models know: the licence of this repository."""
    from mlxcel_nb.models.tokenizer import load_tokenizer

    licence = Path(__file__).parents[1] / "LICENSE"
    return load_tokenizer(folder).encode(licence.read_text("utf-8"))


def workload(
    text: Sequence[int],
    count: int,
    *,
    seed: int,
    longest: int,
    most: int,
    within_s: float,
    leaving: int = 0,
    temperature: float = 0.0,
) -> list[Ask]:
    """`count` requests that arrive at random within `within_s` seconds; the last `leaving` of them are cancelled.

    Lengths are from 8 to `longest` tokens in and 1 to `most` out, even in their logarithm, the longest among them. A
    third of the prompts begin where the text does, so that prefixes are shared. Each has a seed of its own, for a
    `temperature` that is not 0.
    """
    drawn = random.Random(seed)
    asks = []
    for number in range(count):
        length = longest if number == 0 else round(8 * (longest / 8) ** drawn.random())
        out = most if number == 1 else round(most ** drawn.random())
        begin = 0 if number % 3 == 0 else drawn.randrange(len(text) - length)
        params = SamplingParams(max_tokens=out, ignore_eos=True, temperature=temperature, seed=number)
        asks.append(Ask(tuple(text[begin : begin + length]), params, drawn.uniform(0, within_s)))
    for number in range(count - leaving, count):
        params = replace(asks[number].params, max_tokens=max(2, most // 2))
        asks[number] = replace(asks[number], params=params, leave_at=drawn.randrange(max(2, most // 4)))
    return asks


class Asker(Protocol):
    """Whoever asks: a cluster of this process, or another client of it."""

    def stream(self, prompt: Sequence[int], params: SamplingParams, /) -> Stream: ...


class Another:
    """A client of its own for a cluster of this process, as a second notebook is."""

    def __init__(self, cluster: Cluster) -> None:
        assert cluster.model is not None
        self._leader = cluster.model.parts[0].node_id
        self._instance = on_engine(cluster, self._leader, instance)
        self._router = Router(cluster.name, cluster.secret)
        self._router.connect({node.node_id: node.address for node in cluster.nodes})

    def stream(self, prompt: Sequence[int], params: SamplingParams, /) -> Stream:
        order = GenerateOrder(id=new_id(), instance=self._instance, params=params, token_ids=list(prompt))
        line = asking.open_line(self._router, self._leader, order, explain=lambda error: error, ended=lambda _: None)
        return Stream(line, stall_s=60.0)

    def close(self) -> None:
        self._router.close()


def another(cluster: Cluster) -> closing[Another]:
    """Another client, whose links are closed at the end, whatever it has asked."""
    return closing(Another(cluster))


def instance() -> str:
    """On an engine: the name of what is loaded."""
    from tests.cluster.harness import this_node

    return str(this_node()._worker.instance.order.instance)


async def _answered(client: Asker, ask: Ask) -> Completion | MlxcelError:
    await asyncio.sleep(ask.after_s)  # the moment of its arrival is a part of the request
    try:
        stream = client.stream(ask.prompt, ask.params)
        if ask.leave_at == 0:
            stream.cancel()
        async for _ in stream:
            if ask.leave_at is not None and len(stream.token_ids) >= ask.leave_at:
                stream.cancel()
    except MlxcelError as error:
        return error
    assert stream.completion is not None
    return stream.completion


def together(client: Asker, asks: Sequence[Ask], *, within_s: float = 300.0) -> list[Completion | MlxcelError]:
    """The answers, or errors, of requests that arrive when they want to, in the order of `asks`."""

    async def every() -> list[Completion | MlxcelError]:
        async with asyncio.timeout(within_s):
            return await asyncio.gather(*(_answered(client, ask) for ask in asks))

    return asyncio.run(every())


@dataclass(frozen=True)
class Alone:
    """What a request gives by itself: ids, and for each how far the two likeliest logits were apart."""

    ids: tuple[int, ...]
    gaps: tuple[float, ...]


def alone(cluster: Cluster, asks: Sequence[Ask]) -> list[Alone]:
    """Each request's answer when no other is there, on a cluster that holds the whole model on its first engine."""
    on_engine(cluster, "engine-0", record_gaps)
    found = []
    for ask in asks:
        answer = cluster.generate(ask.prompt, ask.params)
        made: Recorded = on_engine(cluster, "engine-0", recorded_gaps)
        assert tuple(token for token, _ in made) == answer.token_ids
        found.append(Alone(answer.token_ids, tuple(gap for _, gap in made)))
    return found


def check(ask: Ask, answer: Completion | MlxcelError, single: Alone) -> str:
    """What is wrong with an answer that was made in company; empty where nothing is."""
    if isinstance(answer, MlxcelError):
        return f"an error: {answer}"
    if ask.leave_at is not None and answer.finish_reason == "cancelled":
        expected = single.ids[: len(answer.token_ids)]
    else:
        expected = single.ids
        if answer.finish_reason != "length":
            return f"ended with {answer.finish_reason}"
    if answer.token_ids == expected:
        return ""
    pairs = zip(answer.token_ids, expected, strict=False)
    at = next((at for at, (mine, its) in enumerate(pairs) if mine != its), min(len(answer.token_ids), len(expected)))
    gap = single.gaps[at] if at < len(single.gaps) else float("nan")
    lengths = f"{len(ask.prompt)} tokens in, {len(answer.token_ids)} of {len(expected)} out"
    return f"{lengths}, another at {at}, where alone the best two were {gap:.1e} apart"


def check_all(asks: Sequence[Ask], answers: Sequence[Completion | MlxcelError], singles: Sequence[Alone]) -> list[str]:
    """What is wrong, one line a request."""
    found = [check(*each) for each in zip(asks, answers, singles, strict=True)]
    return [f"request {number}: {wrong}" for number, wrong in enumerate(found) if wrong]


def free(cluster: Cluster, before: dict[str, int]) -> None:
    """Wait until nothing is allocated on any engine: first all but kept blocks, then without them.

    Args:
        before: MLX's bytes on each engine when the model had just been loaded.
    """

    def clean() -> bool:
        return all(on_engine(cluster, node, held).caches == 0 for node in before)

    wait_until(clean, deadline_s=20, what="every engine to have no cache")
    forget(cluster)

    def much() -> dict[str, str]:
        facts = {node: on_engine(cluster, node, held) for node in before}
        return {
            node: f"{each.nbytes} bytes of caches, MLX has {each.active} and had {before[node]}"
            for node, each in facts.items()
            if each.nbytes or each.active > before[node] + SLACK_BYTES
        }

    if not until(lambda: not much(), 20.0):
        raise AssertionError(f"not freed: {much()}")


def forget(cluster: Cluster) -> None:
    """Have all kept blocks freed, on every replica."""
    assert cluster.model is not None
    leaders = {part.replica: part.node_id for part in reversed(cluster.model.parts)}
    for node in leaders.values():
        on_engine(cluster, node, forget_prefixes)
    # Their plans free them; of as many requests each replica gets one.
    asked = [cluster.stream([0], SamplingParams(max_tokens=2, ignore_eos=True)) for _ in leaders]
    for stream in asked:
        stream.result()


def forget_prefixes() -> None:
    """On the engine that leads: the next plan frees all kept blocks."""
    from tests.cluster.harness import this_node

    this_node()._worker.engine._scheduler.forget_prefixes()


def engine_facts() -> Any:
    """On the engine that leads: what it has to do and has done."""
    from tests.cluster.harness import this_node

    return this_node()._worker.engine.ledger.facts


def facts(cluster: Cluster) -> EngineFacts:
    """What the leader has to do and has done."""
    assert cluster.model is not None
    found: EngineFacts = on_engine(cluster, cluster.model.parts[0].node_id, engine_facts)
    return found


def active_bytes(cluster: Cluster) -> dict[str, int]:
    """MLX's bytes on each engine that holds a part of the model, the leader first."""
    assert cluster.model is not None
    nodes = [part.node_id for part in cluster.model.parts]
    return {node: on_engine(cluster, node, held).active for node in nodes}


def main(names: Sequence[str]) -> int:
    """Both workloads in full; prints what it finds."""
    from mlxcel_nb.models import store

    folder = store.fetch("smollm2-135m")
    text = text_ids(folder)
    loads = {
        count: workload(text, count, seed=count, longest=1500, most=200, within_s=count / 4, leaving=count // 8)
        for count in (8, 32)
    }
    singles: dict[int, list[Alone]] = {}
    wrong: list[Any] = []
    with ExitStack() as stack:
        cluster = stack.enter_context(nothing_left(Cluster(4)))
        cluster.load(str(folder))
        for count, asks in loads.items():
            began = time.monotonic()
            singles[count] = alone(cluster, asks)
            least = min(min(each.gaps) for each in singles[count])
            made = sum(len(each.ids) for each in singles[count])
            print(f"alone, {count} requests, {made} tokens: {time.monotonic() - began:.1f} s, least gap {least:.1e}")
        cluster.unload()
        for name in names or LAYOUTS:
            cluster.load(str(folder), **LAYOUTS[name])
            before = active_bytes(cluster)
            for count, asks in loads.items():
                began = time.monotonic()
                found = check_all(asks, together(cluster, asks), singles[count])
                free(cluster, before)
                print(f"{name}, {count} requests: {time.monotonic() - began:.1f} s, {len(found)} differ")
                print(*(f"  {each}\n" for each in found), sep="", end="", flush=True)
                wrong += found
            cluster.unload()
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
