"""What a load says while it goes on: one bar, and how far every node is."""

from __future__ import annotations

import io

from mlxcel_nb.client.report import LoadProgress
from mlxcel_nb.commands.console import Progress
from mlxcel_nb.commands.load import Meter
from mlxcel_nb.display.view import View


def drawn(*news: LoadProgress) -> list[str]:
    """Every state that would be shown, if the eye were fast enough."""
    out = io.StringIO()

    def draw(view: View) -> None:
        out.write(f"{view.text}\n")

    with Progress("Loading m", draw=draw, end=lambda _view, _result: None, interval_s=-1) as progress:
        meter = Meter(progress)
        for each in news:
            meter(each)
    return out.getvalue().splitlines()[1:]


def at(node: str, what: str, done: int, total: int = 100_000_000, *, comparing: bool = False) -> LoadProgress:
    return LoadProgress(node_id=node, what=what, done_bytes=done, total_bytes=total, comparing=comparing)


def test_every_node_is_told_and_the_bar_is_their_sum() -> None:
    lines = drawn(at("engine-0", "layer 7", 50_000_000), at("engine-1", "layer 16", 10_000_000))
    assert lines[-1] == "Loading m 30%  60 MB of 200 MB; engine-0: layer 7 50%, engine-1: layer 16 10%"


def test_files_that_are_compared_are_another_thing_than_what_is_loaded() -> None:
    first = at("engine-0", "model.safetensors", 400_000_000, 500_000_000, comparing=True)
    second = at("engine-1", "model.safetensors", 500_000_000, 500_000_000, comparing=True)
    lines = drawn(first, second, at("engine-0", "the embedding", 1_000_000))
    assert "90%  900 MB of 1 GB; read to compare files; engine-0: model.safetensors 80%" in lines[-2]
    assert lines[-1] == "Loading m 1%  1 MB of 100 MB; engine-0: the embedding 1%"


def test_of_many_nodes_those_furthest_behind_are_told() -> None:
    lines = drawn(*(at(f"engine-{n}", "layer 1", (9 - n) * 10_000_000) for n in range(6)))
    assert "engine-2: layer 1 70%, engine-3" in lines[-1]
    assert lines[-1].endswith("engine-5: layer 1 40%, 2 more")
    assert "engine-1" not in lines[-1]


def test_a_node_that_has_nothing_to_load_is_no_trouble() -> None:
    assert "engine-0: the model 0%" in drawn(at("engine-0", "the model", 0, 0))[-1]
