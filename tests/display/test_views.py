"""Rich HTML and its plain-text twin."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from mlxcel_nb.client.report import (
    ClusterStatus,
    Completion,
    LinkReport,
    LoadReport,
    NodeReport,
    PartReport,
    Timings,
)
from mlxcel_nb.display.reports import footer, layers_text, load_view, node_view, status_view
from mlxcel_nb.display.view import RUN_MIME, Column, State, View, printable, progress, table

EVIL = "<img src=x onerror=alert(1)>&\"'"

PARTS = (
    PartReport(node_id="engine-0", stage=0, rank=0, layers=(0, 15), planned_bytes=1, resident_bytes=269_000_000),
    PartReport(node_id="engine-1", stage=1, rank=0, layers=(15, 30), planned_bytes=1, resident_bytes=269_000_000),
)
DONE = Completion(
    text="SECRET ANSWER",
    token_ids=(1, 2, 3),
    finish_reason="length",
    prompt_tokens=7,
    generation_tokens=64,
    timings=Timings(ttft_s=0.213, tokens_per_s=21.34),
    layout="pp2",
)


def status(name: str = "mlxcel") -> ClusterStatus:
    return ClusterStatus(
        name=name,
        router_id="router-00000000",
        state="ready",
        nodes=(
            NodeReport(node_id="engine-0", state="alive", stage=0, rank=0, layers=(0, 15), blas="openblas", threads=1),
            NodeReport(node_id="engine-1", state="suspect", reason="silent for 4 s", stage=1, rank=0, layers=(15, 30)),
            NodeReport(node_id=name, state="dead", reason="connection reset"),
        ),
        links=(LinkReport(source="router", target="engine-0", cipher="aes-256-gcm", transport="tcp", rtt_s=0.000213),),
        model=LoadReport(model="smollm2-135m", path="/m", layout="pp2", dtype="float32", parts=PARTS, load_s=1.23),
        last=DONE,
        warnings=("mlx differs",),
    )


class Tags(HTMLParser):
    """Checks that tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


LOADED = LoadReport(model="smollm2-135m", path="/m", layout="pp2", dtype="float32", parts=PARTS, load_s=1.23)
VIEWS = [status_view(status()), status_view(status(EVIL)), load_view(LOADED), footer(DONE), progress(EVIL, 1, 2)]


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_both_twins_in_well_formed_html(view: View) -> None:
    bundle = view._repr_mimebundle_(include=None, exclude=None)
    assert bundle["text/plain"] == repr(view) == view.text
    assert set(Tags(bundle["text/html"]).seen) <= {"div", "span", "table", "thead", "tbody", "tr", "th", "td"}


def test_every_string_is_escaped() -> None:
    for view in (status_view(status(EVIL)), progress(EVIL, 1, 2, EVIL), table(EVIL, [Column(EVIL)], [[EVIL]], [EVIL])):
        assert "<img" not in view.html
        assert EVIL in view.text


def test_colours_have_a_fallback_outside_jupyterlab() -> None:
    for view in VIEWS:
        assert all("," in use for use in re.findall(r"var\([^)]*\)", view.html))


def test_a_dead_node_holds_nothing_and_a_living_one_is_not_blamed_for_it() -> None:
    lost = "engine-1: was killed by SIGKILL"
    nodes = (
        NodeReport(node_id="engine-0", state="alive", stage=0, rank=0, layers=(0, 15), error=lost),
        NodeReport(node_id="engine-1", state="dead", reason="was killed by SIGKILL"),
    )
    found = dataclasses.replace(status(), nodes=nodes)
    lines = status_view(found).text.splitlines()
    alive, dead = (next(line for line in lines if line.startswith(f"engine-{n}")) for n in (0, 1))
    assert "● alive " in alive and "SIGKILL" not in alive and "269 MB" in alive
    assert "✕ dead (was killed by SIGKILL)" in dead and "269 MB" not in dead
    assert f"The model no longer works: {lost}" in lines
    third = NodeReport(node_id="engine-2", state="alive", error="engine-1: connection to host 127.0.0.1 lost")
    assert status_view(dataclasses.replace(found, nodes=(*nodes, third))).text.count("no longer works") == 1
    assert "weights" not in node_view(found, "engine-1").text and lost in node_view(found, "engine-0").text


def test_names_and_states_stay_on_one_line_and_long_words_may_wrap() -> None:
    shown = table("", [Column("node")], [["engine-0"], ["OpenBLAS 0.3.34.481.3 (SkylakeX)"]]).html
    short, long = re.findall(r'<td style="([^"]*)"', shown)
    assert "nowrap" in short and "nowrap" not in long


def test_a_bar_says_what_it_measures_and_no_figure_it_does_not_know() -> None:
    assert 'aria-label="Loading m"' in progress("Loading m", 1, 2).html
    assert 'aria-valuenow="50"' in progress("Loading m", 1, 2).html
    assert "aria-valuenow" not in progress("Loading m", 0, 0).html


def test_a_status_says_who_holds_what_by_which_link_and_how_fast() -> None:
    text = status_view(status()).text
    for word in ("0-14", "15-29", "AES-256-GCM", "0.213 ms", "21.3 tokens/s", "smollm2-135m", "pp2", "mlx differs"):
        assert word in text


def test_a_shaped_link_is_not_taken_for_the_wire() -> None:
    made = dataclasses.replace(status().links[0], shape="5 ms, 1 Gbit/s")
    view = status_view(dataclasses.replace(status(), links=(made,)))
    assert "tcp, shaped 5 ms, 1 Gbit/s" in view.text and "tcp, shaped 5 ms, 1 Gbit/s" in view.html
    assert "shaped" not in status_view(status()).text


def test_one_node_is_told_in_full_with_its_links_alone() -> None:
    text = node_view(status(), "engine-0").text
    for word in ("● alive", "0-14", "openblas", "AES-256-GCM", "269 MB"):
        assert word in text
    assert "15-29" not in text
    assert node_view(status(), "engine-1").text.endswith("Links\nnone")


def test_a_state_is_told_by_shape_and_word() -> None:
    assert str(State("alive")) == "● alive"
    assert str(State("suspect", "silent for 4 s")) == "◐ suspect (silent for 4 s)"
    assert str(State("dead")) == "✕ dead"
    assert "◐" in State("suspect").html() and "suspect" in State("suspect").html()


def test_columns_without_a_value_are_left_out() -> None:
    text = table("", [Column("a"), Column("b"), Column("c", number=True)], [["x", None, 1], ["y", None, None]]).text
    assert text.splitlines() == ["a  c", "x  1", "y  –"]


def test_a_footer_keeps_figures_and_no_words() -> None:
    view = footer(DONE)
    assert view.text == "64 tokens · 21.3 tokens/s · first token 0.21 s · pp2 · length"
    data = view._repr_mimebundle_()[RUN_MIME]
    assert data["generation_tokens"] == 64 and data["finish_reason"] == "length" and data["layout"] == "pp2"
    assert "SECRET" not in str(view._repr_mimebundle_()) and "tokens" not in data


def test_a_footer_of_nothing() -> None:
    empty = Completion(text="", token_ids=(), finish_reason="cancelled")
    assert footer(empty).text == "0 tokens · cancelled"


def test_layers_read_as_they_are_typed() -> None:
    assert [layers_text(x) for x in [(0, 15), (29, 30), (3, 3), None]] == ["0-14", "29-29", "none", None]


def test_model_text_cannot_move_a_cursor() -> None:
    assert printable("a\tb\nc é 汉字 🙂 👩‍👩‍👧") == "a\tb\nc é 汉字 🙂 👩‍👩‍👧"
    assert printable("\x1b[2J\r\x07\x7f\x9b") == "␛[2J␍␇␡␦"


def test_progress_reads_without_a_page() -> None:
    assert progress("Loading m", 1, 4, "67 MB of 269 MB").text == "Loading m 25%  67 MB of 269 MB"
    assert progress("Loading m", 0, 0).text == "Loading m ..."
    assert progress("Loading m", 0, 0, finished=True).text == "Loading m done"
    assert progress("Loading m", 4, 4, finished=True).text == "Loading m 100%"
