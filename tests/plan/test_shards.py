"""Heads and feed-forward units over ranks: whole kv-groups, nothing lost, nothing twice, and clear refusals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.plan.shards import check_tp, head_group, split_evenly, split_heads, working_sizes

SMOLLM2: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536,
}  # fmt: skip


def heads(*args: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [(share.queries, share.keys) for share in split_heads(*args)]


def test_ranks_get_whole_kv_groups_as_evenly_as_can_be() -> None:
    assert heads(9, 3, 2) == [((0, 6), (0, 2)), ((6, 9), (2, 3))]
    assert heads(9, 3, 3) == [((0, 3), (0, 1)), ((3, 6), (1, 2)), ((6, 9), (2, 3))]
    assert heads(32, 8, 3) == [((0, 12), (0, 3)), ((12, 24), (3, 6)), ((24, 32), (6, 8))]


def test_kv_heads_are_replicated_when_there_are_fewer_than_ranks() -> None:
    """Case 2."""
    assert heads(8, 2, 4) == [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 6), (1, 2)), ((6, 8), (1, 2))]
    assert heads(8, 4, 5) == [
        ((0, 1), (0, 1)), ((1, 2), (0, 1)), ((2, 4), (1, 2)), ((4, 6), (2, 3)), ((6, 8), (3, 4)),
    ]  # fmt: skip
    assert heads(6, 2, 4) == [((0, 2), (0, 1)), ((2, 3), (0, 1)), ((3, 5), (1, 2)), ((5, 6), (1, 2))]


def test_a_size_that_cannot_work_is_refused_with_the_numbers_and_the_sizes_that_do() -> None:
    """Case 1."""
    with pytest.raises(ConfigError, match=r"size 7 .* 6 heads and 2 kv-heads.*Sizes that work: 1-6\."):
        split_heads(6, 2, 7)
    with pytest.raises(ConfigError, match=r"whole quantisation groups \(4 heads\).*Sizes that work: 1-2\."):
        split_heads(8, 4, 3, 4)


def test_quantisation_groups_wider_than_a_head_keep_heads_together() -> None:
    assert heads(8, 4, 2, 4) == [((0, 4), (0, 2)), ((4, 8), (2, 4))]
    assert heads(16, 2, 4, 2) == [((0, 4), (0, 1)), ((4, 8), (0, 1)), ((8, 12), (1, 2)), ((12, 16), (1, 2))]
    assert working_sizes(16, 2, 2) == [1, 2, 3, 4, 5, 6, 7, 8]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 64), st.sampled_from([1, 1, 2, 4]))
def test_every_split_covers_every_head_once_and_gives_each_rank_the_kv_heads_it_reads(
    kv_heads: int, group: int, tp: int, unit: int
) -> None:
    count = kv_heads * group
    try:
        shares = split_heads(count, kv_heads, tp, unit)
    except ConfigError:
        assert tp > 1 or count % unit
        assert tp not in working_sizes(count, kv_heads, unit)
        return
    assert len(shares) == tp
    assert [h for share in shares for h in range(*share.queries)] == list(range(count))
    for share in shares:
        assert share.queries[0] % unit == 0
        assert share.n_queries % share.n_keys == 0
        per_key = share.n_queries // share.n_keys
        for place, head in enumerate(range(*share.queries)):
            assert share.keys[0] + place // per_key == head // group


def test_feed_forward_units_are_cut_at_whole_groups() -> None:
    assert split_evenly(1536, 5) == ((0, 308), (308, 615), (615, 922), (922, 1229), (1229, 1536))
    assert split_evenly(192, 4, 32) == ((0, 64), (64, 128), (128, 160), (160, 192))
    assert split_evenly(100, 2, 64) == ((0, 64), (64, 100))
    with pytest.raises(ConfigError):
        split_evenly(64, 3, 32)


def test_the_real_model_can_be_cut_for_1_to_9_ranks() -> None:
    for tp in range(1, 10):
        check_tp(SMOLLM2, tp)
    with pytest.raises(ConfigError, match=r"size 10 .* 9 heads and 3 kv-heads.*1-9"):
        check_tp(SMOLLM2, 10)


def test_models_of_which_the_config_names_no_heads_are_not_refused() -> None:
    check_tp({"model_type": "mamba"}, 64)
    check_tp({"text_config": SMOLLM2}, 9)
    with pytest.raises(ConfigError, match="1-9"):
        check_tp({"text_config": SMOLLM2}, 10)


def test_layers_that_share_keys_are_cut_at_a_group_that_suits_them_all() -> None:
    assert head_group([1, 64, 128, 64]) == 128
    assert head_group([]) == 1
