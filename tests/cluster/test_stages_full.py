"""Uneven stages, full: caches that are as long as the prompts in every stage, and the smallest room, to the last token.

On three engines and a tiny model of five layers; requests draw with much heat, so that each token depends on all that
is kept of what came before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.models.params import SamplingParams
from tests import many
from tests.cluster.harness import nothing_left, on_engine, wait_until
from tests.cluster.test_many_requests_cases import HOT, answered, by_themselves, drawn, ids, texts
from tests.many import Ask, facts
from tests.tiny import make_tiny

pytestmark = pytest.mark.timeout(180)
STAGES = "0-0,1-2,3-4"
LENGTHS = (300, 256, 257, 511)
"""Tokens of prompts, of which a step reads 256 at most."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def engines() -> Iterator[Cluster]:
    with nothing_left(Cluster(3)) as cluster:
        yield cluster
        for node in ("engine-0", "engine-1", "engine-2"):
            on_engine(cluster, node, note_lengths, False)


def note_lengths(on: bool = True) -> None:
    """On an engine: note how many tokens the caches of its own layers hold when a prompt has been read."""
    from mlxcel_nb.models.caches import every
    from mlxcel_nb.runtime import execution

    module: Any = execution
    own = getattr(module, "own_run", execution.Execution.run)
    module.own_run, module.lengths = own, []

    def run(self: Any, plan: Any, recording: Any = None) -> Any:
        outcome = own(self, plan, recording)
        for chunk in (chunk for work in plan.work for chunk in work.chunks if chunk.sample):
            held = [cache for cache in every(self._singles[chunk.sequence]) if cache.keys is not None]
            module.lengths.append([cache.offset for cache in held])
        return outcome

    execution.Execution.run = run if on else own  # type: ignore[method-assign]


def noted_lengths() -> list[list[int]]:
    from mlxcel_nb.runtime import execution

    module: Any = execution
    found: list[list[int]] = module.lengths
    return found


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_every_stage_s_caches_are_as_long_as_the_prompt(groups: int, engines: Cluster, tiny: str) -> None:
    """Case 6: one layer in stage 0; prompts of more than a chunk, one, one and a token, two less one; all at once, in
    1, 2 and 4 micro-batches, and logits equal to one process's.
    """
    params = SamplingParams(max_tokens=12, temperature=HOT, seed=5, ignore_eos=True, logprobs=5)
    asks = [Ask(ids(length, length), params) for length in LENGTHS]
    engines.load(tiny)
    alone = by_themselves(engines, asks)
    engines.unload()
    engines.load(tiny, layers=STAGES, micro_batches=groups)
    for node in ("engine-0", "engine-1", "engine-2"):
        on_engine(engines, node, note_lengths)
    found = answered(many.together(engines, asks))
    for node, layers in (("engine-0", 1), ("engine-1", 2), ("engine-2", 2)):
        lengths = on_engine(engines, node, noted_lengths)
        assert sorted(lengths) == sorted([length] * layers for length in LENGTHS)
    engines.unload()
    assert texts(found) == texts(alone)
    for one, other in zip(found, alone, strict=True):
        for mine, its in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)


def room_for(sequences: int, tokens: int) -> None:
    """On an engine: parts loaded from now on say that so many sequences of so many tokens have room; 0: what is so."""
    from mlxcel_nb.plan.capacity import Room
    from mlxcel_nb.runtime import loading

    module: Any = loading
    own = getattr(module, "own_room_left", loading.room_left)
    module.own_room_left = own

    def room_left(order: Any, part: Any) -> Any:
        room = Room.from_dict(own(order, part))
        assert room is not None
        return Room(room.caches, sequences * room.at(tokens)).to_dict()

    module.room_left = room_left if sequences else own


def test_the_smallest_stage_is_filled_to_the_last_token_and_one_more_waits(engines: Cluster, tiny: str) -> None:
    """Case 11: a stage of four layers with room for two requests of 512 tokens, beside one of one layer with as many
    bytes. Two that fill it exactly run together, a third waits, and nobody is put back.
    """
    asks = [drawn(261, 252, each) for each in range(3)]  # the last token made is never read: 512 in all
    engines.load(tiny)
    alone = texts(by_themselves(engines, asks))
    engines.unload()
    on_engine(engines, "engine-1", room_for, 2 * 2, 512)  # which it shares with the other: they are on one host
    try:
        report = engines.load(tiny, layers="0-0,1-4")
        small, large = report.parts[1], report.parts[0]
        assert small.memory_tokens == report.memory_tokens == report.kv_tokens == 1024
        assert large.memory_tokens == 4 * 1024
        streams = [engines.stream(ask.prompt, ask.params) for ask in asks]
        wait_until(lambda: facts(engines).running == 2, deadline_s=30, what="two requests to run")
        assert facts(engines).waiting == 1
        found = [stream.result() for stream in streams]
        assert [answer.token_ids for answer in found] == alone
        assert not facts(engines).preemptions
    finally:
        on_engine(engines, "engine-1", room_for, 0, 0)
        engines.unload()
