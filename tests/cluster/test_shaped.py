"""A cluster whose links are made slower: as slow as was asked, told in its status, and right in what it says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models.params import SamplingParams
from tests.cluster.harness import nothing_left
from tests.tiny import make_tiny

TOKENS = 16
ASK = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


def test_tokens_are_the_same_and_every_link_takes_its_time(tmp_path: Path) -> None:
    """Two stages over a link of 5 ms between them and one of 2 ms to the notebook, against one engine alone."""
    tiny = str(make_tiny(tmp_path / "tiny"))
    with nothing_left(Cluster(2, link=["2ms,1Gbit", "0-1:5ms"])) as cluster:
        cluster.load(tiny)
        alone = cluster.generate([1, 2, 3], ASK)
        cluster.unload()
        cluster.load(tiny, pp=2)
        began = time.monotonic()
        split = cluster.generate([1, 2, 3], ASK)
        took = time.monotonic() - began
        links = {frozenset((link.source, link.target)): link for link in cluster.status().links}
    assert split.token_ids == alone.token_ids
    assert took > TOKENS * 0.010  # to the second stage and back, for every token
    between = links.pop(frozenset(("engine-0", "engine-1")))
    assert between.shape == "5 ms" and between.rtt_s is not None and between.rtt_s >= 0.010
    assert len(links) == 2
    for link in links.values():
        assert link.shape == "2 ms, 1 Gbit/s" and link.rtt_s is not None and link.rtt_s >= 0.004


def test_a_link_that_cannot_be_is_refused_before_an_engine_starts() -> None:
    with pytest.raises(ConfigError, match="there is no engine 2"):
        Cluster(2, link="0-2:5ms")
