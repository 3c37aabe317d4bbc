"""Models of the catalogue and tiny ones, whole and split in this process; a spoiled weight is found where it is."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.errors import ModelError
from mlxcel_nb.models import loading
from mlxcel_nb.models.catalogue.families import ENTRIES
from mlxcel_nb.models.verifying import catalogued, running
from mlxcel_nb.models.verifying.catalogued import compared, examine
from mlxcel_nb.models.verifying.comparing import Verdict
from mlxcel_nb.models.verifying.running import run
from tests.tiny import make_tiny

pytestmark = pytest.mark.usefixtures("not_compiled")

PROMPT = np.array([[(7 * i + 3) % 257 for i in range(12)]], np.int32)
TOKENS = 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def verdict_on(folder: Path, dtype: str = "auto", **layout: Any) -> Verdict:
    whole = run(folder, make_layout(5), [PROMPT], TOKENS, dtype=dtype)
    forced = [record.tokens for record in whole.records]
    made = make_layout(5, **layout)
    split = run(folder, made, [PROMPT], TOKENS, forced=forced, dtype=dtype)
    return compared(made.name, whole.records, split.records, split.dtype)


def test_layouts_of_the_tiny_model_are_equal(tiny: Path) -> None:
    for layout in ({"tp": 3}, {"pp": 2}, {"tp": 2, "pp": 2}, {"layers": "0,1-4"}):
        verdict = verdict_on(tiny, **layout)
        assert verdict.equal
        assert verdict.judged
        assert verdict.tokens == TOKENS
        assert len(verdict.layer_deltas) == 5


@pytest.mark.parametrize("layout", [{"tp": 3}, {"tp": 2, "pp": 2}])
def test_ranks_that_share_the_vocabulary_are_equal(tiny: Path, layout: dict[str, int]) -> None:
    whole = run(tiny, make_layout(5), [PROMPT], TOKENS)
    forced = [record.tokens for record in whole.records]
    split = run(tiny, make_layout(5, **layout), [PROMPT], TOKENS, forced=forced, vocab_parallel=True)
    assert compared("shared", whole.records, split.records, split.dtype).equal


def test_a_spoiled_row_of_the_vocabulary_is_after_every_layer(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No prompt looks this token up, but its logit is wrong: on rank 1, and so on rank 0 that samples."""

    def change(model: Any) -> None:
        model.model.embed_tokens.weight[-1] *= 1.5

    spoil(monkeypatch, rank=1, stage=0, change=change)
    whole = run(tiny, make_layout(5), [PROMPT], TOKENS)
    forced = [record.tokens for record in whole.records]
    split = run(tiny, make_layout(5, tp=2), [PROMPT], TOKENS, forced=forced, vocab_parallel=True)
    verdict = compared("tp2", whole.records, split.records, split.dtype)
    assert not verdict.equal
    assert verdict.layer is None


def test_a_prompt_of_several_chunks_is_read_as_engines_read_it(tiny: Path) -> None:
    prompt = np.random.default_rng(2).integers(0, 257, (2, 2 * running.CHUNK + 3))
    whole = run(tiny, make_layout(5), [prompt], 2)
    split = run(tiny, make_layout(5, tp=2), [prompt], 2, forced=[whole.records[0].tokens])
    assert whole.records[0].logits.shape == (2, 2 * running.CHUNK + 4, 257)
    assert compared("tp2", whole.records, split.records, split.dtype).equal


def test_bfloat16_is_reported_and_not_judged(tiny: Path) -> None:
    """Case 12."""
    verdict = verdict_on(tiny, "bfloat16", tp=2)
    assert (verdict.dtype, verdict.judged) == ("bfloat16", False)
    assert 0 < verdict.delta < 1


def spoil(monkeypatch: pytest.MonkeyPatch, rank: int, stage: int, change: Any) -> None:
    """From now on the part of this rank and stage is loaded with some weight changed."""
    load = loading.load_part

    def load_spoiled(folder: Path, part: Any, **how: Any) -> Any:
        loaded = load(folder, part, **how)
        if part.tp_size * part.n_stages > 1 and (part.tp_rank, part.stage) == (rank, stage):
            change(loaded.model)
        return loaded

    monkeypatch.setattr(running, "load_part", load_spoiled)


def test_a_spoiled_share_of_one_rank_is_found_in_its_layer(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: Any) -> None:
        model.layers[3].mlp.down_proj.weight *= 1.5

    spoil(monkeypatch, rank=1, stage=0, change=change)
    verdict = verdict_on(tiny, tp=2)
    assert not verdict.equal
    assert verdict.layer == 3
    assert verdict.delta > 1e-3
    assert max(verdict.layer_deltas[:3]) < 1e-5


def test_a_spoiled_norm_is_found_on_the_rank_that_has_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that every rank has a copy of: one rank's copy is wrong, and its share of what follows."""

    def change(model: Any) -> None:
        model.layers[2].post_attention_layernorm.weight *= 1.5

    spoil(monkeypatch, rank=0, stage=0, change=change)
    assert verdict_on(tiny, tp=2).layer == 2


def test_a_spoiled_stage_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: Any) -> None:
        model.layers[4].self_attn.o_proj.weight *= 1.5

    spoil(monkeypatch, rank=0, stage=1, change=change)
    verdict = verdict_on(tiny, pp=2)
    assert (verdict.layer, verdict.member) == (4, "stage 1")


def test_a_spoiled_head_is_after_every_layer(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: Any) -> None:
        model.model.norm.weight *= 1.5

    spoil(monkeypatch, rank=0, stage=1, change=change)
    verdict = verdict_on(tiny, pp=2)
    assert not verdict.equal
    assert verdict.layer is None


def test_what_a_rank_raises_ends_all_and_is_raised(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: Any) -> None:
        raise ModelError("spoiled")

    spoil(monkeypatch, rank=1, stage=0, change=change)
    with pytest.raises(ModelError, match="spoiled"):
        verdict_on(tiny, tp=3)


def test_runs_share_the_threads_of_their_ranks(tiny: Path) -> None:
    verdict_on(tiny, tp=3)
    before = threading.active_count()
    verdict_on(tiny, tp=3)
    assert threading.active_count() == before


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma3n", "nanbeige"])
def test_entries_of_the_catalogue_are_examined(name: str) -> None:
    found = examine(name, ["tp2", "pp2", "tp2xpp2"])
    assert not found.wrong
    assert [each.layout for each in found.verdicts] == ["tp2", "pp2", "tp2xpp2"]
    assert all(each.equal and each.tokens == catalogued.STEPS + 1 for each in found.verdicts)
    assert catalogued.Finding.from_dict(found.to_dict()) == found


def test_a_layout_that_is_refused_is_no_error_and_says_why() -> None:
    found = examine("llama", ["pp99"])
    assert not found.wrong
    assert "99 pipeline stages" in found.verdicts[0].refused


def test_what_mlx_lm_cannot_run_is_told_apart() -> None:
    name = next(name for name, entry in ENTRIES.items() if entry.fails)
    found = examine(name, ["tp2"])
    assert not found.wrong
    assert ENTRIES[name].fails in found.cannot


def test_what_the_catalogue_lacks_is_untested() -> None:
    found = examine("newer_than_we", ["tp2"])
    assert found.untested
    assert not found.wrong
