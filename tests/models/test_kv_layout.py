"""What every rank says it keeps of the keys and values is what lies in its caches, on every architecture whose caches
can be cut: heads are compared with those of the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_nb.errors import RequestError
from mlxcel_nb.models import catalogue
from mlxcel_nb.models.batching_blocks import reusable
from mlxcel_nb.models.caches import every
from mlxcel_nb.models.catalogue.families import ENTRIES
from mlxcel_nb.models.kv_layout import shares
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.plan.kv_shares import KvShare, Shares, sources
from mlxcel_nb.plan.part import Part, whole
from tests.catalogue import chosen
from tests.models.sharding.ranks import across

pytestmark = pytest.mark.usefixtures("not_compiled")

STANDING = ("deepseek_v2", "gemma3_text", "internlm2", "minicpm3", "phi3", "plamo", "qwen3")
"""Latents, windows, one product for all, latents unpacked, heads laid out in turns, and plain ones."""

TOKENS = [[1 + n % 200 for n in range(9)]]


def kept(folder: Path, part: Part, all_reduce: Any = None) -> tuple[Shares, list[Any]]:
    """What a rank says of itself, and its keys and values (1, H, tokens, D) of each cache."""
    own = load_part(folder, part, all_reduce=all_reduce)
    caches = own.make_cache()
    mx.eval(own.forward(mx.array(TOKENS), caches))
    found = []
    for cache in every(caches):
        pair = None if cache.keys is None else (cache.keys, cache.values)
        found.append(pair and [np.array(x[:, :, : cache.offset].astype(mx.float32)) for x in pair])
    return shares(own), found


def on_rank(folder: Path, n: int, tp: int, rank: int, all_reduce: Any) -> tuple[Shares, list[Any]]:
    return kept(folder, Part((0, n), n, 0, 1, rank, tp), all_reduce)


@pytest.mark.parametrize("name", chosen(STANDING))
def test_a_share_is_what_lies_in_the_cache(name: str, tmp_path: Path) -> None:
    n = ENTRIES[name].n_layers
    folder = catalogue.write(ENTRIES[name], tmp_path / "m")
    alone = load_part(folder, whole(n))
    if not reusable(alone.make_cache()):
        with pytest.raises(RequestError, match=r"cannot be saved or loaded: a .* has no place of its own"):
            shares(alone)
        return
    if len(list(every(alone.make_cache()))) != n:
        with pytest.raises(RequestError, match="do not keep a cache each"):
            shares(alone)
        return
    _, expected = kept(folder, whole(n))
    totals = [pair and pair[0].shape[1] for pair in expected]
    for tp in (2, 3):
        ranks = across(tp, partial(on_rank, folder, n, tp))
        for told, held in ranks:
            for share, pair, reference in zip(told, held, expected, strict=True):
                assert (pair is None) == (reference is None)
                if pair is None:
                    continue
                heads = share.heads(reference[0].shape[1])
                for x, y in zip(pair, reference, strict=True):
                    assert x.shape[1] == heads[1] - heads[0]
                    np.testing.assert_allclose(x, y[:, slice(*heads)], atol=1e-3)
        sources({str(rank): told for rank, (told, _) in enumerate(ranks)}, totals)
    if name in ("phi3", "plamo", "qwen3"):
        assert isinstance(ranks[0][0][0], KvShare) and ranks[0][0][0].of == totals[0]
