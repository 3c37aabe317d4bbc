"""Engines that share the vocabulary: the tokens of a single one, greedy and sampled, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.verifying import verify
from mlxcel_nb.models.params import SamplingParams
from tests.cluster.harness import nothing_left
from tests.tiny import make_tiny

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.9, top_p=0.95, seed=7, repetition_penalty=1.1)
PROMPT = [(7 * i + 3) % 257 for i in range(300)]
"""Two chunks."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("tied", [True, False])
def test_engines_that_share_the_vocabulary_make_the_tokens_of_a_single_one(tied: bool, tmp_path: Path) -> None:
    """Case 12: over our own links in every layout, and over MLX's ring."""
    folder = str(make_tiny(tmp_path / "tiny", tie_word_embeddings=tied))
    layouts: list[dict[str, Any]] = [{"tp": 2}, {"tp": 3}, {"tp": 2, "pp": 2}]
    if tied:
        layouts.append({"tp": 2, "collectives": "mlx-ring"})  # last: a process is in one such group in its life
    with nothing_left(Cluster(4)) as cluster:

        def answers(**how: Any) -> list[tuple[int, ...]]:
            cluster.load(folder, **how)
            made = [cluster.generate(PROMPT, ask).token_ids for ask in (GREEDY, SAMPLED)]
            cluster.unload()
            return made

        expected = answers()
        for layout in layouts:
            assert answers(**layout, vocab_parallel=True) == expected, layout
        whole = cluster.load(folder, tp=2).parts
        cluster.unload()
        shared = cluster.load(folder, tp=2, vocab_parallel=True).parts
        assert shared[0].resident_bytes < whole[0].resident_bytes
        cluster.unload()
        verdicts = [verdict for verdict, _ in verify(cluster, folder, ("tp2",), PROMPT, 8, vocab_parallel=True)]
        assert [verdict.equal for verdict in verdicts] == [True]
