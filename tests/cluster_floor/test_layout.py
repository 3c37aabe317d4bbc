"""A model's layout over nodes: ranges, mesh positions, and which members need a link."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from mlxcel_nb.cluster.layout import (
    Layout,
    check_replicas,
    make_layout,
    parse_layers,
    parse_name,
    replicated,
    split_evenly,
)
from mlxcel_nb.errors import ConfigError


@pytest.mark.parametrize(
    ("n_layers", "pp", "lengths"),
    [(30, 1, [30]), (30, 2, [15, 15]), (30, 4, [8, 8, 7, 7]), (5, 5, [1] * 5), (5, 3, [2, 2, 1])],
)
def test_even_split_covers_all_layers_in_order(n_layers: int, pp: int, lengths: list[int]) -> None:
    ranges = split_evenly(n_layers, pp)
    assert [b - a for a, b in ranges] == lengths
    assert ranges[0][0] == 0 and ranges[-1][1] == n_layers
    assert all(a[1] == b[0] for a, b in pairwise(ranges))


def test_more_stages_than_layers_is_refused_with_the_limit() -> None:
    with pytest.raises(ConfigError, match="1 to 5"):
        split_evenly(5, 6)


def test_manual_ranges_include_both_ends() -> None:
    assert parse_layers("0-3, 4-29", 30) == ((0, 4), (4, 30))
    assert parse_layers("0,1-4", 5) == ((0, 1), (1, 5))


@pytest.mark.parametrize("text", ["0-3,5-29", "0-3,3-29", "0-28", "1-29", "0-30", "a-b", "", "5-3,4-29", "0-29,"])
def test_manual_ranges_that_do_not_cover_the_model_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_layers(text, 30)


def test_names_are_those_of_the_command_line() -> None:
    assert make_layout(4).name == "single"
    assert make_layout(4, tp=2).name == "tp2"
    assert make_layout(4, pp=3).name == "pp3"
    assert make_layout(4, tp=2, pp=2).name == "tp2xpp2"


def test_manual_ranges_and_pp_must_agree() -> None:
    assert make_layout(4, layers="0-1,2-3").pp == 2
    with pytest.raises(ConfigError, match="2 stages"):
        make_layout(4, pp=3, layers="0-1,2-3")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"pp": "2"}, r"pp='2' is not a whole number\. Write it like pp=2"),
        ({"tp": 2.5}, r"tp=2\.5 is not a whole number"),
        ({"ep": None}, "ep=None is not a whole number"),
        ({"layers": [(0, 1), (2, 3)]}, r"layers=\[\(0, 1\), \(2, 3\)\] is not a text\. Write it like layers="),
    ],
)
def test_what_is_no_number_or_no_text_is_refused_by_name(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_layout(4, **asked)


def test_every_needed_pair_has_one_link_and_the_lower_member_dials() -> None:
    assert make_layout(4).edges() == []
    assert make_layout(4, tp=2).edges() == [(0, 1)]
    assert make_layout(4, pp=3).edges() == [(0, 1), (0, 2), (1, 2)]
    mesh = make_layout(4, tp=2, pp=2)
    assert mesh.edges() == [(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)]
    assert mesh.sampler == 2
    assert (1, 5) in make_layout(4, tp=2, pp=3).edges()  # the last stage may hand back to the first


def test_a_layout_survives_the_wire() -> None:
    layout = make_layout(30, tp=2, pp=3)
    assert Layout.from_dict(layout.to_dict()) == layout
    with pytest.raises(ConfigError):
        Layout.from_dict({"stages": [[0, 2], [3, 4]], "tp": 1})


def test_a_name_says_what_it_was_made_from() -> None:
    for layout in (
        make_layout(4),
        make_layout(4, tp=2),
        make_layout(4, pp=3),
        make_layout(4, tp=2, pp=2),
        make_layout(4, ep=3),
    ):
        assert parse_name(layout.name) == (layout.tp, layout.pp, layout.ep)
    assert parse_name("pp2xtp3") == (3, 2, 1)
    for wrong in ("", "tp", "tp0", "tp2xtp2", "ep", "ep0", "ep2xep2", "tp2x", "tp2 xpp2", "tp99999"):
        with pytest.raises(ConfigError, match="is not a layout"):
            parse_name(wrong)


def test_replicas_are_named_before_the_layout_of_each_and_are_no_layout_themselves() -> None:
    assert [replicated(name, 2) for name in ("single", "tp2", "tp2xpp2")] == ["dp2", "dp2xtp2", "dp2xtp2xpp2"]
    assert replicated("tp2", 1) == "tp2" and replicated("single", 1) == "single"
    for name in ("dp2", "dp2xtp2", "pp2xdp3"):
        with pytest.raises(ConfigError, match="replicas are whole copies"):
            parse_name(name)


@pytest.mark.parametrize(
    ("dp", "why"), [(0, "0 replicas"), (-1, "-1 replicas"), ("2", "write it like"), (1.5, "whole")]
)
def test_numbers_of_replicas_that_cannot_be_are_refused(dp: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"(?i){why}"):
        check_replicas(dp)
