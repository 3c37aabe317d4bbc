"""Requests of mixed lengths that arrive at random, some of which leave: on every layout each text is what the request
gives by itself, and nothing stays allocated.

`python -m tests.many` runs the same with up to 1500 tokens in and 200 out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from mlxcel_nb.client.cluster import Cluster
from tests import many
from tests.cluster.harness import failures, note_failures, nothing_left, on_engine
from tests.many import Alone, Ask
from tests.tiny import make_tiny

HOT = 30.0
"""Tiny echoes its last token with great certainty; this much heat makes every token likely, and the text depends on
every bit that is kept of it."""


class Loads(NamedTuple):
    """Requests for a model, and what one process makes of each by itself."""

    model: str
    asks: list[list[Ask]]
    singles: list[list[Alone]]


@pytest.fixture(scope="module")
def engines() -> Iterator[Cluster]:
    with nothing_left(Cluster(4)) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=["drawn", "smollm2"])
def loads(request: pytest.FixtureRequest, engines: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Loads:
    """8 and 32 requests: of full length on a tiny model, whose tokens are drawn; short ones on SmolLM2, greedy."""
    if request.param == "drawn":
        folder = make_tiny(tmp_path_factory.mktemp("tiny") / "tiny")
        lengths = [{"longest": 1500, "most": 90, "temperature": HOT}, {"longest": 200, "most": 40, "temperature": HOT}]
    else:
        folder = request.getfixturevalue("smollm2")
        lengths = [{"longest": 200, "most": 20}, {"longest": 40, "most": 8}]
    text = many.text_ids(folder)
    asks = [
        many.workload(text, count, seed=count, within_s=count / 16, leaving=count // 8, **options)
        for count, options in zip((8, 32), lengths, strict=True)
    ]
    engines.load(str(folder))
    singles = [many.alone(engines, each) for each in asks]
    engines.unload()
    return Loads(str(folder), asks, singles)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", many.LAYOUTS)
def test_each_text_equals_its_sequential_run_and_nothing_stays_allocated(
    layout: str, engines: Cluster, loads: Loads
) -> None:
    """Case 26; Case 32 for those that leave; Case 14 for those that draw: a seed gives the same text in any company."""
    if "smollm2" in loads.model:  # where two tokens are as likely as each other, either may come
        assert min(min(single.gaps) for singles in loads.singles for single in singles) > many.NEAR
    engines.load(loads.model, **many.LAYOUTS[layout])
    before = many.active_bytes(engines)
    on_engine(engines, "engine-0", note_failures)
    for asks, singles in zip(loads.asks, loads.singles, strict=True):
        assert not many.check_all(asks, many.together(engines, asks), singles)
        many.free(engines, before)
    assert not on_engine(engines, "engine-0", failures)
    engines.unload()
