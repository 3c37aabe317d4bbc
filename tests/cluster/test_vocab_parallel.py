"""Engines that share the vocabulary: the tokens of a single one, greedy and sampled, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.verifying import verify
from mlxcel_nb.display.reports import load_view, status_view
from mlxcel_nb.models.params import SamplingParams
from tests.cluster.harness import nothing_left
from tests.tiny import make_tiny

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.9, top_p=0.95, seed=7, repetition_penalty=1.1)
PROMPT = [(7 * i + 3) % 257 for i in range(300)]
"""Two chunks."""


def answers(cluster: Cluster, folder: Path, **how: Any) -> list[tuple[int, ...]]:
    cluster.load(str(folder), **how)
    made = [cluster.generate(PROMPT, ask).token_ids for ask in (GREEDY, SAMPLED)]
    cluster.unload()
    return made


@pytest.mark.timeout(240)
def test_engines_that_share_the_vocabulary_make_the_tokens_of_a_single_one(tmp_path: Path) -> None:
    """Case 12: over our own links, with the embedding as head and without, and over MLX's ring."""
    tied = make_tiny(tmp_path / "tied")
    untied = make_tiny(tmp_path / "untied", tie_word_embeddings=False)
    with nothing_left(Cluster(4)) as cluster:
        for folder, layouts in ((tied, ({"tp": 3}, {"tp": 2, "pp": 2})), (untied, ({"tp": 2, "pp": 2},))):
            expected = answers(cluster, folder)
            for layout in layouts:
                assert answers(cluster, folder, **layout, vocab_parallel=True) == expected, layout
        # Last: a process is in one such group in its life.
        ring = {"tp": 2, "collectives": "mlx-ring", "vocab_parallel": True}
        assert answers(cluster, untied, **ring) == expected


@pytest.mark.timeout(120)
def test_it_takes_less_memory_and_is_verified_as_any_layout(tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path / "tiny"))
    with nothing_left(Cluster(2)) as cluster:
        whole = cluster.load(folder, tp=2).parts
        cluster.unload()
        report = cluster.load(folder, tp=2, vocab_parallel=True)
        shared = report.parts
        assert report.vocab_parallel
        assert "tp2, float32, vocabulary shared" in load_view(report).text
        assert "vocabulary shared" in status_view(cluster.status()).text
        cluster.unload()
        alone = cluster.load(folder, pp=2, vocab_parallel=True)
        assert not alone.vocab_parallel
        assert "pp2 has no tensor ranks to share a vocabulary" in load_view(alone).text
        assert "vocabulary shared" not in load_view(alone).text
        cluster.unload()
        assert shared[0].resident_bytes < whole[0].resident_bytes
        verdicts = [verdict for verdict, _ in verify(cluster, folder, ("tp2",), PROMPT, 8, vocab_parallel=True)]
        assert [verdict.equal for verdict in verdicts] == [True]
