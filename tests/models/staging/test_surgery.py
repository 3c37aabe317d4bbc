"""What is kept of a model and what is not, and how its other parts are told apart."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models import architecture, catalogue, stages
from mlxcel_nb.models.staging.skeleton import Skeleton, Use
from mlxcel_nb.plan.part import Part, whole
from tests.tiny import CONFIG


def taken_apart(name: str = "", **changes: Any) -> Skeleton:
    """The skeleton of an entry of the catalogue, or of *tiny*."""
    entry = catalogue.entry(name)
    model = architecture.build(copy.deepcopy(entry.config) if entry else {**CONFIG, **changes})
    found = stages.find_skeleton(model, entry.n_layers if entry else 5)
    assert found is not None
    return found


def test_the_skeleton_of_a_tied_and_of_an_untied_model() -> None:
    for tied in (True, False):
        found = taken_apart(tie_word_embeddings=tied)
        assert (found.layer_path(3), found.embedding_path) == ("model.layers.3", "model.embed_tokens")
        assert found.tied is tied
        assert found.rounds == 1


@pytest.mark.parametrize(
    ("name", "uses"),
    [
        ("gpt2", {"wte": Use.BEFORE | Use.AFTER, "wpe": Use.BEFORE, "ln_f": Use.AFTER}),
        ("gpt_neox", {"embed_in": Use.BEFORE, "final_layer_norm": Use.AFTER, "embed_out": Use.AFTER}),
        ("gemma3n", {"altup_projections.1": Use.BEFORE, "altup_unembed_projections.1": Use.AFTER,
                     "embed_tokens_per_layer": Use.BEFORE}),
        ("plamo2", {"embed_tokens": Use.BEFORE, "norm": Use.AFTER}),
        ("nanochat", {"wte": Use.BEFORE, "lm_head": Use.AFTER}),
        ("nanbeige", {"embed_tokens": Use.BEFORE, ".norm": Use.BETWEEN | Use.AFTER, "lm_head": Use.AFTER}),
        ("iquestloopcoder", {"embed_tokens": Use.BEFORE, "gate_projections.1": Use.BETWEEN, "lm_head": Use.AFTER}),
    ],
)  # fmt: skip
def test_what_stands_outside_the_layers_is_told_apart_by_when_it_is_used(name: str, uses: dict[str, Use]) -> None:
    found = taken_apart(name)
    for ending, use in uses.items():
        (path,) = [path for path in found.uses if path.endswith(ending)]
        assert found.uses[path] & use == use


def test_a_look_leaves_the_model_as_it_was() -> None:
    """Kimi K3 keeps factors of its weights, which at that time are not drawn yet."""
    entry = catalogue.entry("kimi_k3")
    assert entry is not None
    model = architecture.build(copy.deepcopy(entry.config))
    before = [(type(module), sorted(module), sorted(vars(module))) for _, module in model.named_modules()]
    stages.find_skeleton(model, entry.n_layers)
    assert [(type(m), sorted(m), sorted(vars(m))) for _, m in model.named_modules()] == before


def test_a_pruned_stage_wants_the_weights_of_its_own_layers_alone() -> None:
    def wanted(part: Part, *, tied: bool) -> set[str]:
        skeleton = taken_apart(tie_word_embeddings=tied)
        stages.prune(skeleton, part)
        return {".".join(name.split(".")[:3]) for name, _ in stages.named_arrays(skeleton.model)}

    table, norm, head = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
    assert wanted(Part((0, 2), 5, 0, 3), tied=True) == {table, "model.layers.0", "model.layers.1"}
    assert wanted(Part((2, 4), 5, 1, 3), tied=True) == {"model.layers.2", "model.layers.3"}
    assert wanted(Part((4, 5), 5, 2, 3), tied=True) == {table, "model.layers.4", norm}
    assert wanted(Part((4, 5), 5, 2, 3), tied=False) == {"model.layers.4", norm, head}
    assert wanted(Part((4, 5), 5, 2, 3, 1, 2), tied=True) == {"model.layers.4"}
    assert len(wanted(whole(5), tied=False)) == 8


def test_layers_of_other_stages_answer_for_the_attributes_models_read_and_for_their_class() -> None:
    skeleton = taken_apart(sliding_window=8, layer_types=["full_attention"] + ["sliding_attention"] * 4)
    kind = type(skeleton.layers[0])
    stages.prune(skeleton, Part((0, 2), 5, 0, 2))
    stages.join(skeleton, Part((0, 2), 5, 0, 2), stages.Switches())
    assert [layer.use_sliding for layer in skeleton.model.layers] == [False, True, True, True, True]
    assert len(skeleton.model.make_cache()) == 5
    assert all(isinstance(layer, kind) for layer in skeleton.layers)


def test_a_held_layer_keeps_the_names_of_its_weights() -> None:
    skeleton = taken_apart()
    names = [name for name, _ in stages.named_arrays(skeleton.model)]
    stages.join(skeleton, whole(5), stages.Switches())
    assert [name for name, _ in stages.named_arrays(skeleton.model)] == names


def test_what_cannot_be_stages_is_refused_by_name_and_one_stage_is_not() -> None:
    two = Part((0, 2), 5, 0, 2)
    assert stages.check_stages(None, "anything.py", whole(5)) == []
    with pytest.raises(ConfigError, match=r"anything\.py, which is Python code of its own"):
        stages.check_stages(taken_apart(), "anything.py", two)
    with pytest.raises(ConfigError, match="llama, which does not run its layers"):
        stages.check_stages(None, "llama", two)


def test_an_architecture_newer_than_the_catalogue_is_let_in_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "architectures", lambda: ["novel"])
    (warning,) = stages.check_stages(taken_apart(), "novel", Part((0, 2), 5, 0, 2))
    assert "novel are untested" in warning
    assert stages.check_stages(taken_apart(), "llama", Part((0, 2), 5, 0, 2)) == []
    (warning,) = stages.check_stages(taken_apart(), "bitnet", Part((0, 2), 5, 0, 2))
    assert "cannot run it" in warning


def test_a_model_that_does_not_call_its_layers_in_order_is_no_chain() -> None:
    found = taken_apart()
    found.places.reverse()
    found.look()
    assert found.rounds == 0


def test_a_part_is_right_for_any_batch() -> None:
    part = whole(5)
    skeleton = taken_apart()
    switches = stages.Switches()
    stages.join(skeleton, part, switches)
    assert skeleton.model(mx.zeros((3, 4), mx.int32)).shape == (3, 1, 257)
