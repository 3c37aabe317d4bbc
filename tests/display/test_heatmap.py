"""The heat maps of `net test`, as people read them: figures, bars and marks, with or without colours."""

from __future__ import annotations

import re
from dataclasses import replace

from mlxcel_nb.display.heatmap import BARS, mesh_view
from mlxcel_nb.net.measuring.mesh import HERE, Pair
from tests.net.test_mesh import GIGABIT, figures, mesh


def test_rows_are_sources_and_columns_targets_with_a_bar_for_how_each_does() -> None:
    found = mesh(3, ab=figures(rate=GIGABIT / 20), bc=figures(rtt=50e-3))
    found = replace(
        found, nodes=(HERE, *found.nodes), pairs=(Pair(source=HERE, target="a", measured=figures()), *found.pairs)
    )
    rates, trips, notes = mesh_view(found).text.split("\n\n")
    title, heads, here, a, b, c = rates.splitlines()
    assert title == "Bandwidth, from each row to each column"
    assert heads.split() == ["a", "b", "c"]
    assert here.split("  ")[0] == HERE and f"{BARS[4]} 936 Mbit/s" in here
    assert re.split(r"\s{2,}", a) == ["a", "·", f"{BARS[0]} 46.8 Mbit/s !", f"{BARS[4]} 936 Mbit/s"]
    assert "!" not in b + c
    assert f"{BARS[0]} 50 ms !" in trips and "Round trip, median" in trips
    assert "Median of the pairs of nodes: 936 Mbit/s, 200 µs." in notes
    assert "! a to b: 46.8 Mbit/s" in notes and "! b to c: a round trip takes 50 ms" in notes


def test_what_is_slow_both_ways_is_marked_both_ways() -> None:
    far = figures(rtt=50e-3)
    rates, trips, notes = mesh_view(mesh(3, bc=far, cb=far)).text.split("\n\n")
    assert trips.count("50 ms !") == trips.count("!") == 2 and "!" not in rates
    assert notes.count("! ") == 1 and "! b to c: a round trip takes 50 ms" in notes


def test_a_pair_that_failed_shows_why_in_its_cell_and_in_full_below() -> None:
    why = "host 10.0.0.1:9000 is offline: connection refused"
    found = mesh(3, ab=why, cb=why)
    view = mesh_view(found)
    assert "✕ connection refused" in view.text
    assert f"✕ a to b, c to b: {why}" in view.text
    assert f'title="{why}"' in view.html
    assert "No path is slow" not in view.text


def test_a_pair_that_failed_says_what_to_do_and_how_its_link_is_shaped() -> None:
    found = mesh(3, ab="no progress for 10 s", bc="host b:9 is offline: no answer")
    advised = {"ab": {"shape": "8 kbit/s"}, "bc": {"advice": "The host may be off."}}
    pairs = tuple(replace(pair, **advised.get(pair.source + pair.target, {})) for pair in found.pairs)
    view = mesh_view(replace(found, pairs=pairs))
    assert "✕ a to b: no progress for 10 s. The link is shaped 8 kbit/s." in view.text
    assert "✕ b to c: host b:9 is offline: no answer. The host may be off." in view.text
    assert "  ✕ no answer" in view.text, "a cell has room for what it comes down to"


def test_nothing_slow_is_said_too() -> None:
    assert "No path is slow." in mesh_view(mesh(3)).text


def test_colour_is_one_of_three_carriers_and_text_keeps_the_page_s_own() -> None:
    html = mesh_view(mesh(3, ab=figures(rate=1e6))).html
    slow = next(cell for cell in re.findall(r"<td.*?</td>", html) if "8 Mbit/s" in cell)
    assert "rgba(" in slow and "outline:" in slow and f"{BARS[0]} 8 Mbit/s !" in slow
    assert not re.search(r"<td[^>]*[;\"]color:", slow)
    assert html.count('<th scope="row"') == 6 and html.count('<th scope="col"') == 6


def test_what_nodes_call_themselves_cannot_write_html() -> None:
    found = mesh(2)
    pairs = tuple(
        replace(p, source=p.source.replace("a", "<b>"), target=p.target.replace("a", "<b>")) for p in found.pairs
    )
    view = mesh_view(replace(found, nodes=("<b>", "b"), pairs=pairs))
    assert "<b>" not in view.html and "&lt;b&gt;" in view.html
    assert "\x1b" not in mesh_view(mesh(2, ab="\x1b[2J")).text


def test_nobody_answered_at_all() -> None:
    view = mesh_view(mesh(2, ab="offline", ba="offline"))
    assert "Median" not in view.text and view.text.count("✕") == 5
