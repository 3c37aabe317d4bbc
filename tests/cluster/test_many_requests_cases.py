"""Cases with several requests at once, on two engines and a tiny model: who fails, leaves, waits or is refused harms
nobody else, and each text is what the request gives by itself.

Tiny echoes its last token with great certainty. Requests draw with much heat and seeds of their own: so each token
depends on all that is kept of what came before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.report import Completion
from mlxcel_nb.errors import Busy, MlxcelError, NodeFailed, RequestError
from mlxcel_nb.models import catalogue
from mlxcel_nb.models.params import SamplingParams
from tests import many
from tests.cluster.harness import (
    failures,
    limit_engine,
    note_failures,
    nothing_left,
    on_engine,
    raise_for_seed,
    raise_in_layer,
    wait_until,
)
from tests.many import Ask, facts
from tests.tiny import make_tiny, write_tokenizer

LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "pp2": {"layers": "0-1,2-4"}}

pytestmark = pytest.mark.timeout(180)
HOT = 30.0
EOS = 256


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def engines() -> Iterator[Cluster]:
    with nothing_left(Cluster(2)) as cluster:
        yield cluster


@pytest.fixture(params=LAYOUTS)
def loaded(request: pytest.FixtureRequest, engines: Cluster, tiny: str) -> Iterator[Cluster]:
    engines.load(tiny, **LAYOUTS[request.param])
    on_engine(engines, "engine-0", note_failures)
    yield engines
    engines.unload()


@pytest.fixture
def third(loaded: Cluster) -> Iterator[int]:
    """The third layer, counted among those that engine-1 holds; what `raise_for_seed` does there ends with the test."""
    assert loaded.model is not None
    index = 2 - loaded.model.parts[1].layers[0]
    yield index
    on_engine(loaded, "engine-1", raise_for_seed, index, None)


@pytest.fixture
def limited(engines: Cluster) -> Iterator[Cluster]:
    """Whose limits a test may change; they are its own again afterwards."""
    yield engines
    if engines.model is not None:
        engines.unload()
    on_engine(engines, "engine-0", limit_engine)


def ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple((seed * 31 + 7 * i * (i + seed)) % 256 for i in range(length))


def drawn(length: int, out: int, seed: int, after_s: float = 0.0) -> Ask:
    params = SamplingParams(max_tokens=out, temperature=HOT, seed=seed, ignore_eos=True)
    return Ask(ids(length, seed), params, after_s)


def by_themselves(cluster: Cluster, asks: list[Ask]) -> list[Completion]:
    return [cluster.generate(ask.prompt, ask.params) for ask in asks]


def answered(found: list[Completion | MlxcelError]) -> list[Completion]:
    """All of which are answers."""
    errors = [each for each in found if isinstance(each, MlxcelError)]
    assert not errors
    return [each for each in found if isinstance(each, Completion)]


def texts(answers: list[Completion]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


def test_a_layer_that_raises_once_ends_nobody(loaded: Cluster, third: int) -> None:
    """Case 25: rank 1 raises inside layer 3 while 4 decode together. All are read again, each by itself, and go on."""
    asks = [drawn(20 + 9 * each, 30, each) for each in range(4)]
    alone = texts(by_themselves(loaded, asks))
    on_engine(loaded, "engine-1", raise_in_layer, third, 20)
    assert texts(answered(many.together(loaded, asks))) == alone
    assert [each for each in on_engine(loaded, "engine-0", failures) if "struck in layer" in each]


def test_who_always_fails_ends_alone(loaded: Cluster, third: int) -> None:
    """Case 25: whenever one of 4 is in a step, rank 1 raises inside layer 3. It ends with the error and its node; the
    others end with their texts, and so does the next one.
    """
    asks = [drawn(20 + 9 * each, 30, each) for each in range(4)]
    alone = texts(by_themselves(loaded, asks))
    on_engine(loaded, "engine-1", raise_for_seed, third, 2)
    found = many.together(loaded, asks)
    assert isinstance(found[2], NodeFailed) and found[2].node == "engine-1" and "struck in layer" in str(found[2])
    assert texts(answered([found[0], found[1], found[3]])) == [alone[0], alone[1], alone[3]]
    on_engine(loaded, "engine-1", raise_for_seed, third, None)
    assert texts(answered(many.together(loaded, asks))) == alone


def test_who_leaves_gives_the_memory_back_and_the_others_go_on(loaded: Cluster) -> None:
    """Case 32: of six that decode or read their prompts, one is stopped, one cancelled while its prompt is read, one
    interrupted, and a whole client is closed with two; all ranks are free of them at once. Case 31: and one client
    never reads.
    """
    before = many.active_bytes(loaded)
    staying = [drawn(30, 60, 1), drawn(200, 60, 2)]
    alone = texts(by_themselves(loaded, staying))
    endless = SamplingParams(max_tokens=1500, temperature=HOT, seed=9, ignore_eos=True)
    unread = loaded.stream(ids(20, 9), replace(endless, max_tokens=60))
    with many.another(loaded) as client:
        theirs = [client.stream(ids(40, 4), endless), client.stream(ids(500, 5), endless)]
        stopped, early = loaded.stream(ids(30, 6), endless), loaded.stream(ids(1200, 7), endless)
        wait_until(lambda: stopped.next(1.0), deadline_s=20, what="the first text")
        early.cancel()
        interrupted = threading.Thread(target=interrupt_soon, args=(loaded, endless))
        interrupted.start()
        wait_until(lambda: theirs[0].next(1.0), deadline_s=20, what="the other client's first text")
        stopped.cancel()
    found = answered(many.together(loaded, staying))
    assert texts(found) == alone
    interrupted.join(20)
    assert not interrupted.is_alive()
    assert {stopped.result().finish_reason, early.result().finish_reason} == {"cancelled"}
    wait_until(lambda: facts(loaded).running == 0, deadline_s=10, what="all to have left")
    assert unread.result().generation_tokens == 60
    many.free(loaded, before)


def interrupt_soon(cluster: Cluster, params: SamplingParams) -> None:
    """Ask, and be interrupted after the first text, as a cell is."""
    stream = cluster.stream(ids(50, 8), params)
    try:
        for _ in stream:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        stream.cancel()
    assert stream.result().finish_reason == "cancelled"


def test_answers_end_once_each_for_its_own_reason(loaded: Cluster) -> None:
    """Case 22, for ends that need no death, in company; Case 18: three stop strings at once, each cuts its own text."""
    ends = {
        "stop": Ask(ids(9, 1), SamplingParams(max_tokens=30, logit_bias={EOS: 100}, min_tokens=7)),
        "length": drawn(30, 12, 2),
        "cancelled": replace(drawn(60, 1500, 3), leave_at=3),
    }
    written = [drawn(25 + each, 40, 10 + each) for each in range(3)]
    whole = by_themselves(loaded, written)
    stops = [answer.text[6 + each : 8 + each] for each, answer in enumerate(whole)]
    cut = [replace(ask, params=replace(ask.params, stop=(stop,))) for ask, stop in zip(written, stops, strict=True)]
    found = answered(many.together(loaded, [*ends.values(), *cut]))
    assert [each.finish_reason for each in found] == [*ends, *["stop"] * 3]
    assert found[0].generation_tokens == 8
    for answer, alone, stop in zip(found[3:], whole, stops, strict=True):
        assert (answer.text, answer.stop_reason) == (alone.text[: alone.text.index(stop)], stop)


def test_a_bad_request_is_nobody_else_s(loaded: Cluster) -> None:
    """Case 20: prompts of 2048, 2049 and 20480 tokens for a context of 2048, an empty one, a token that is none, an
    answer of a form that cannot be: each is refused, or cut, while two others go on.
    """
    good = [drawn(40, 60, 1), drawn(90, 60, 2)]
    alone = texts(by_themselves(loaded, good))
    short = SamplingParams(max_tokens=4, ignore_eos=True)
    fits = Ask((7,) * 2048, short)
    bad = [
        Ask((7,) * 2049, short),
        Ask((7,) * 20480, short),
        Ask((), short),
        Ask((1, 257), short),
        Ask(ids(9, 9), SamplingParams(max_tokens=4, regex="(((")),
    ]
    found = many.together(loaded, [*good, fits, *bad])
    assert texts(answered(found[:2])) == alone
    assert answered([found[2]])[0].generation_tokens == 1
    assert all(isinstance(each, RequestError) for each in found[3:]) and len(found) == 3 + len(bad)
    assert not on_engine(loaded, "engine-0", failures)


def test_three_clients_one_after_the_other_leave_nothing(loaded: Cluster) -> None:
    """Case 35, of engines: whoever asks next finds them as the first one did."""
    before = many.active_bytes(loaded)
    asks = [drawn(300, 20, each) for each in range(4)]
    found = []
    for _ in range(3):
        with many.another(loaded) as client:
            found.append(texts(answered(many.together(client, asks))))
            client.stream(ids(700, 3), SamplingParams(max_tokens=1000, ignore_eos=True))
        many.free(loaded, before)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_with_room_for_two(layout: str, limited: Cluster, tiny: str) -> None:
    """Case 40: two run, the others wait, all finish; who is put back for space has the same text. One that never fits
    is refused, one that outgrows all room ends where that does.
    """
    asks = [drawn(215 + each, 50, each) for each in range(5)]
    limited.load(tiny, **LAYOUTS[layout])
    alone = texts(by_themselves(limited, asks))
    limited.unload()
    on_engine(limited, "engine-0", limit_engine, tokens=512)
    limited.load(tiny, **LAYOUTS[layout])
    on_engine(limited, "engine-0", note_failures)
    before = many.active_bytes(limited)
    assert texts(answered(many.together(limited, asks))) == alone
    assert facts(limited).preemptions
    with pytest.raises(RequestError, match="the prompt has 600 tokens, and the nodes have room for 512"):
        limited.generate(ids(600, 1))
    longest = limited.generate(ids(500, 1), SamplingParams(max_tokens=99, ignore_eos=True))
    assert (longest.generation_tokens, longest.finish_reason) == (13, "length")
    assert not on_engine(limited, "engine-0", failures)
    many.free(limited, before)


def test_300_at_once_are_answered_or_told_that_it_is_busy(limited: Cluster, tiny: str) -> None:
    """Case 26."""
    limited.load(tiny, pp=2)
    asks = [replace(drawn(8, 2, each % 7), after_s=0.0) for each in range(300)]
    alone = texts(by_themselves(limited, asks[:7]))
    found = many.together(limited, asks)
    refused = [each for each in found if isinstance(each, MlxcelError)]
    assert all(isinstance(each, Busy) for each in refused)
    assert len(refused) <= 300 - 192  # of one caller: a quarter of the 256 places stays free
    for number, each in enumerate(found):
        assert isinstance(each, Busy) or (isinstance(each, Completion) and each.token_ids == alone[number % 7])
    assert answered(many.together(limited, asks[:1]))[0].token_ids == alone[0]


def test_a_short_queue_says_busy_and_those_who_wait_are_served(limited: Cluster, tiny: str) -> None:
    """Case 26."""
    on_engine(limited, "engine-0", limit_engine, max_rows=2, max_waiting=3)
    limited.load(tiny, pp=2)
    asks = [drawn(8, 40, each % 3) for each in range(12)]
    alone = texts(by_themselves(limited, asks[:3]))
    found = many.together(limited, asks)
    refused = [each for each in found if isinstance(each, MlxcelError)]
    assert all(isinstance(each, Busy) and "waiting already" in str(each) for each in refused)
    assert 1 <= len(refused) <= 12 - 3
    for number, each in enumerate(found):
        assert isinstance(each, Busy) or (isinstance(each, Completion) and each.token_ids == alone[number % 3])


@pytest.mark.parametrize("apart", [True, False], ids=["two programs", "two callers of one"])
def test_two_clients_are_served_in_turn(apart: bool, limited: Cluster, tiny: str) -> None:
    """One asks 24 times, then another 3 times: these are done long before the first one's last."""
    on_engine(limited, "engine-0", limit_engine, max_rows=3)
    limited.load(tiny, pp=2)
    ended: list[str] = []

    async def ask(client: many.Asker, name: str, number: int) -> None:
        params = drawn(20, 20, number).params
        if isinstance(client, Cluster) and not apart:
            stream = client.stream(ids(20, number), params, caller=name)
        else:
            stream = client.stream(ids(20, number), params)
        async for _ in stream:
            pass
        ended.append(name)

    async def everybody(second: many.Asker) -> None:
        firsts = [asyncio.create_task(ask(limited, "first", each)) for each in range(24)]
        await asyncio.sleep(0)  # those are sent before any of the others
        await asyncio.gather(*firsts, *(ask(second, "second", each) for each in range(3)))

    with many.another(limited) if apart else contextlib.nullcontext(limited) as second:
        asyncio.run(everybody(second))
    last = max(place for place, name in enumerate(ended) if name == "second")
    assert ended[last:].count("first") >= 10, ended


def test_a_prefix_is_reused_up_to_where_it_diverges(loaded: Cluster) -> None:
    """Case 43, where every token is kept: whole blocks of 32 before the first that differs, in the same text."""
    cold = drawn(100, 20, 1)
    diverging = replace(cold, prompt=cold.prompt[:70] + ids(40, 77))
    alone = texts(by_themselves(loaded, [cold]))
    many.forget(loaded)
    reference = texts(by_themselves(loaded, [diverging]))
    many.forget(loaded)
    counted = [facts(loaded).counts["reused_tokens"]]
    for ask, text in ((cold, alone[0]), (diverging, reference[0]), (cold, alone[0])):
        assert loaded.generate(ask.prompt, ask.params).token_ids == text
        counted.append(facts(loaded).counts["reused_tokens"])
    assert [b - a for a, b in itertools.pairwise(counted)] == [0, 64, 96]


def test_nothing_is_reused_where_a_window_has_slid(engines: Cluster, tmp_path: Path) -> None:
    """Case 43: a window of 8, a prefix of 20 that diverges at 15: equal to a cold run, and nothing counts as reused."""
    entry = catalogue.entry("gemma3_text")
    assert entry is not None
    folder = catalogue.write(entry, tmp_path)
    write_tokenizer(folder)
    cold = Ask(ids(20, 1), SamplingParams(max_tokens=20, temperature=HOT, seed=1, ignore_eos=True))
    asks = [cold, replace(cold, prompt=cold.prompt[:15] + ids(5, 7)), drawn(40, 20, 2), drawn(100, 20, 3)]
    engines.load(str(folder), pp=2)
    alone = texts(by_themselves(engines, asks))
    assert texts(answered(many.together(engines, asks))) == alone
    assert facts(engines).counts["reused_tokens"] == 0
    engines.unload()
