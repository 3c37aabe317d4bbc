"""Sequences that decode together give what each gives alone, and leave nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.models import architecture, batching, catalogue
from mlxcel_nb.models.batching import Group, passes
from mlxcel_nb.models.batching_rows import arrays_of, rounded, why_not
from mlxcel_nb.models.caches import every
from mlxcel_nb.models.catalogue.families import ENTRIES
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.models.part import LoadedPart
from mlxcel_nb.plan.part import Part
from tests.models.batches import Groups, by_itself, come_and_go, prefilled
from tests.tiny import make_tiny

pytestmark = pytest.mark.usefixtures("not_compiled")

KINDS = ("qwen3", "gemma3_text", "mamba2", "falcon_h1", "llama4")
"""Plain caches, windows among them, states, both in a layer, and one that runs row by row."""

EQUAL = 1e-4


@pytest.fixture
def exact_memory() -> Iterator[None]:
    """Buffers that MLX keeps to use again are larger than what is asked for, and counted as they are."""
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


def loaded(name: str, tmp_path: Path, pp: int = 1) -> list[LoadedPart]:
    n = ENTRIES[name].n_layers
    folder = catalogue.write(ENTRIES[name], tmp_path / name)
    layout = make_layout(n, pp=pp)
    return [load_part(folder, Part(span, n, at, pp)) for at, span in enumerate(layout.stages)]


def expected(parts: list[LoadedPart]) -> dict[int, Any]:
    return {sequence: by_itself(parts, sequence) for sequence in range(5)}


@pytest.mark.parametrize("name", KINDS)
def test_rows_that_come_and_go_are_equal_to_each_alone(name: str, tmp_path: Path) -> None:
    parts = loaded(name, tmp_path)
    assert bool(parts[0].one_by_one) == (name == "llama4")
    assert come_and_go(parts, expected(parts)) <= EQUAL


@pytest.mark.usefixtures("exact_memory")
@pytest.mark.parametrize("name", KINDS)
def test_an_empty_group_holds_nothing(name: str, tmp_path: Path) -> None:
    (part,) = loaded(name, tmp_path)
    answers = expected([part])
    before = mx.get_active_memory()
    groups = Groups([part])
    groups.join(0, 1, 2)
    groups.step(answers, 2)
    held = groups.groups[0].nbytes
    assert 0 < held <= mx.get_active_memory() - before
    groups.leave(1)
    groups.step(answers, 2)
    groups.leave(0, 2)
    assert groups.groups[0].nbytes == 0
    assert groups.groups[0].rows == ()
    assert mx.get_active_memory() == before


@pytest.mark.usefixtures("exact_memory")
def test_a_row_that_is_taken_out_shares_nothing_with_its_group(tmp_path: Path) -> None:
    (part,) = loaded("gemma3_text", tmp_path)
    prefilled([part], 0)  # what the model itself computes once is there
    before = mx.get_active_memory()
    group = Group(part)
    group.join([(sequence, prefilled([part], sequence)[0]) for sequence in range(3)])
    caches = group.take_out(1)
    group.leave([0, 2])
    arrays = arrays_of(caches)
    spare = 1 << 14  # MLX copies no array that would be smaller than its source by less than this
    assert mx.get_active_memory() - before <= sum(x.nbytes + spare for x in arrays)
    del caches, arrays
    assert mx.get_active_memory() == before


def test_who_joins_takes_the_place_of_who_has_left(tmp_path: Path) -> None:
    """In place: nothing is copied but the newcomer, and the order of rows is that of joining."""
    parts = loaded("qwen3", tmp_path)
    answers, groups = expected(parts), Groups(parts)
    groups.join(0, 1, 2)
    groups.step(answers)
    groups.leave(0)
    groups.join(3)
    (group,) = groups.groups
    assert (group.rows, group.width) == ((1, 2, 3), 3)
    assert groups.step(answers, 2) <= EQUAL


def test_one_that_is_longer_than_all_makes_the_batch_longer(tmp_path: Path) -> None:
    parts = loaded("qwen3", tmp_path)
    answers, groups = expected(parts), Groups(parts)
    groups.join(0, 3, 4)
    groups.step(answers)
    groups.leave(4)
    groups.join(1)
    assert groups.step(answers, 2) <= EQUAL


def test_a_place_that_is_free_is_given_up_when_it_has_cost_a_copy(tmp_path: Path) -> None:
    parts = loaded("gemma3_text", tmp_path)
    answers, groups = expected(parts), Groups(parts)
    groups.join(0, 1, 2, 3)
    groups.leave(1)
    widths = []
    for _ in range(4):
        widths.append(groups.groups[0].width)
        assert groups.step(answers) <= EQUAL
    assert widths == [4, 4, 3, 3]


def test_columns_that_only_padding_has_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest leaves, and what is left moves to the front."""
    monkeypatch.setattr(batching, "PADDING", 2)
    for name in ("qwen3", "gemma3_text"):
        parts = loaded(name, tmp_path)
        answers, groups = expected(parts), Groups(parts)
        groups.join(0, 1, 3)
        groups.leave(1)
        assert groups.step(answers, 5) <= EQUAL
        assert groups.groups[0].width == 2
        batch = groups.groups[0]._batch
        assert batch is not None
        assert {min(cache.left_padding.tolist()) for cache in every(batch)} <= {0, -1, -2, -3, -4, -5}


def test_a_batch_takes_no_more_than_its_longest_row_for_each(tmp_path: Path) -> None:
    """And a third for those who have left: what a scheduler may count on, around a border of 256 tokens."""
    (part,) = loaded("qwen3", tmp_path)

    def caches(length: int) -> list[Any]:
        held = part.make_cache()
        mx.eval(part.forward(mx.zeros((1, length), mx.int32), held))
        return held

    per_token = sum(x.nbytes for x in arrays_of(caches(256))) // 256
    lengths = {0: 250, 1: 300, 2: 20, 3: 12, 4: 12}
    group = Group(part)

    def steps(count: int) -> None:
        for _ in range(count):
            mx.eval(group.forward(mx.zeros((len(lengths), 1), mx.int32)))
            for row in lengths:
                lengths[row] += 1
            assert group.nbytes <= 4 / 3 * len(lengths) * rounded(max(lengths.values())) * per_token

    group.join([(row, caches(length)) for row, length in lengths.items()])
    steps(1)
    for gone in (1, 0):
        group.leave([gone])
        del lengths[gone]
        steps(3)
    lengths[5] = 254
    group.join([(5, caches(254))])
    steps(4)
    group.leave([5])
    del lengths[5]
    steps(2)


def test_one_that_is_alone_has_caches_of_its_own(tmp_path: Path) -> None:
    """Without padding or masks: a single stream decodes as fast as if nobody batched."""
    from mlx_lm.models.cache import KVCache

    parts = loaded("qwen3", tmp_path)
    answers, groups = expected(parts), Groups(parts)
    groups.join(0, 1)
    groups.step(answers)
    groups.leave(1)
    (group,) = groups.groups
    assert {type(cache) for cache in group.take_out(0)} == {KVCache}


def test_row_by_row_there_is_a_handover_for_each(tmp_path: Path) -> None:
    first, second = loaded("llama4", tmp_path, pp=2)
    group = Group(first)
    group.join([(5, first.make_cache()), (3, first.make_cache())])
    assert (group.passes, group.width) == (2, 1)
    found = group.forward(mx.array([[1], [2]]))
    assert [second.size_of(each) for each in found] == [(1, 1)] * 2
    assert [passes(second, rows) for rows in (0, 1, 3)] == [0, 1, 3]
    second.one_by_one = ""
    assert [passes(second, rows) for rows in (0, 1, 3)] == [0, 1, 1]


def test_what_caches_of_any_kind_take_is_known(tmp_path: Path) -> None:
    from mlx_lm.models.cache import QuantizedKVCache

    (part,) = loaded("deepseek_v41", tmp_path)
    group = Group(part)
    group.join([(0, prefilled([part], 0)[0])])
    assert group.nbytes > 0
    quantised = QuantizedKVCache(group_size=32)
    quantised.update_and_fetch(mx.zeros((1, 1, 3, 32)), mx.zeros((1, 1, 3, 32)))
    assert sum(x.nbytes for x in arrays_of([quantised])) == quantised.nbytes


def test_several_tokens_of_every_row_at_once(tmp_path: Path) -> None:
    """All logits of a step of three tokens a row are those of three steps, with windows that wrap around in it."""
    for name in ("qwen3", "gemma3_text", "falcon_h1"):
        (part,) = loaded(name, tmp_path)
        for before in (0, 5):
            ids = np.arange(3 * (before + 3), dtype=np.int32).reshape(3, -1) * 7 % 257
            given = []
            for at_once in (True, False):
                group = Group(part)
                group.join([(row, prefilled([part], row)[0]) for row in (0, 1, 3)])
                for at in range(before):
                    group.forward(mx.array(ids[:, at : at + 1]))
                if at_once:
                    given.append(group.forward(mx.array(ids[:, before:]), all_logits=True))
                else:
                    steps = [group.forward(mx.array(ids[:, at : at + 1])) for at in range(before, before + 3)]
                    given.append(mx.concatenate(steps, axis=1))
            assert np.abs(np.array(given[0]) - np.array(given[1])).max() <= EQUAL


def test_what_is_newer_than_the_catalogue_runs_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "entry", lambda name: None)
    (part,) = loaded("qwen3", tmp_path)
    assert "newer than our catalogue" in part.one_by_one
    group = Group(part)
    group.join([(0, prefilled([part], 0)[0]), (1, prefilled([part], 1)[0])])
    assert group.passes == 2
    assert group.forward(mx.array([[1], [2]])).shape == (2, 1, 257)


@pytest.mark.parametrize("scaling", ["dynamic", "linear"])
def test_positions_that_depend_on_a_sequence_s_length_run_row_by_row(scaling: str, tmp_path: Path) -> None:
    folder = make_tiny(
        tmp_path / "m", rope_scaling={"type": scaling, "factor": 2.0}, model_type="internlm2", bias=False
    )
    config = json.loads((folder / "config.json").read_text())
    model = architecture.build(config)
    assert bool(why_not(model, "internlm2")) == (scaling == "dynamic")
