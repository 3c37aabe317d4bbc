"""A split that the catalogue has not proved for an architecture is let in, and said to be untested."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.models import architecture, catalogue, sizes
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.models.untested import of_ranks
from mlxcel_nb.plan.part import Part, part_of, whole
from tests.tiny import make_tiny

RANK = Part((0, 5), 5, 0, 1, 1, 2)


def test_what_the_catalogue_has_proved_needs_no_words() -> None:
    assert of_ranks("llama", RANK) == []
    assert of_ranks("novel", whole(5)) == []


def test_ranks_of_what_it_cannot_run_or_does_not_know_are_told_apart() -> None:
    assert "tensor ranks of model type novel are untested: it is newer" in of_ranks("novel", RANK)[0]
    assert "bitnet are untested: mlx-lm cannot run it" in of_ranks("bitnet", RANK)[0]
    assert "expert-parallel ranks of" in of_ranks("novel", Part((0, 5), 5, ep_rank=1, ep_size=2))[0]


def test_a_load_and_a_plan_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny(tmp_path / "m")
    assert load_part(folder, RANK, all_reduce=lambda x: x).warnings == []
    monkeypatch.setattr(catalogue, "entry", lambda _name: None)
    (warning,) = load_part(folder, RANK, all_reduce=lambda x: x).warnings
    assert warning.startswith("tensor ranks of model type llama are untested")
    assert load_part(folder, whole(5)).warnings == []
    notes = sizes.gather(architecture.read_config(folder), name="m", ranks=2).notes
    assert warning in notes
    assert any(note.startswith("pipeline stages of model type llama") for note in notes)


def test_a_load_and_a_plan_say_so_of_spread_experts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = catalogue.entry("qwen3_moe")
    assert one is not None
    folder = catalogue.write(one, tmp_path)
    config = architecture.read_config(folder)
    assert not any("untested" in note for note in sizes.gather(config, name="m", ranks=2).notes)
    monkeypatch.setattr(catalogue, "entry", lambda _name: None)
    part = part_of(make_layout(one.n_layers, ep=2), 0, 1)
    (warning,) = load_part(folder, part, exchange=list).warnings
    assert warning.startswith("expert-parallel ranks of model type qwen3_moe are untested")
    assert warning in sizes.gather(config, name="m", ranks=2).notes
