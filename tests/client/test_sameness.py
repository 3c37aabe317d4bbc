"""Whether nodes have the same model is judged by the hashes of its files; who differs is told, with a table of all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.client import sameness
from mlxcel_nb.client.differences import NAMED, Found, difference
from mlxcel_nb.client.router import Router
from mlxcel_nb.client.sameness import check_same
from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.display.errors import table_view
from mlxcel_nb.errors import (
    EngineLost,
    MlxcelError,
    ModelAbsent,
    ModelCutShort,
    ModelError,
    NodeFailed,
    StepTimeout,
    WireError,
)
from mlxcel_nb.runtime.protocol import LoadOrder, Member
from tests.net.helpers import SECRET
from tests.runtime.nodes import running
from tests.tiny import make_tiny

GOOD = {"config.json": "c" * 64, "model.safetensors": "0123456789abcdef" * 4}
OTHER = {**GOOD, "config.json": "d" * 64}


def has(node: str, digests: dict[str, str] | None = None, error: MlxcelError | None = None, **more: Any) -> Found:
    """A node with the good files, or other ones, or an error in their place."""
    if error is None and digests is None:
        digests = GOOD
    return Found(node=node, digests=digests, error=error, **{"host": f"host-{node}", "path": f"/models/{node}", **more})


def refused(*found: Found) -> MlxcelError:
    error = difference(found)
    assert error is not None
    return error


def states(error: MlxcelError) -> list[str | None]:
    assert error.table is not None
    return [row[3] for row in error.table.rows]


def test_equal_files_are_no_matter_wherever_they_lie() -> None:
    """Case 45."""
    assert difference([has("a"), has("b", dict(reversed(GOOD.items())), path="/else/where"), has("c")]) is None


@pytest.mark.parametrize("name", GOOD)
def test_another_file_is_named_with_both_hashes(name: str) -> None:
    error = refused(has("a"), has("b", {**GOOD, name: "f" * 64}))
    assert type(error) is ModelError
    assert error.node == "b"
    assert f"another {name} than a" in error.cause
    assert "f" * 16 in error.cause
    assert GOOD[name][:16] in error.cause
    assert "nothing was loaded" in error.cause
    assert "Copy" in str(error.advice)
    assert states(error) == ["● ok", f"✕ another {name}"]


def test_a_file_too_many_and_one_too_few_are_told_apart() -> None:
    more = refused(has("a"), has("b", {**GOOD, "chat_template.jinja": "e" * 64}))
    assert "b: has a chat_template.jinja with sha256 eeee" in str(more)
    assert states(more) == ["● ok", "✕ chat_template.jinja too many"]
    less = refused(has("a"), has("b", {"config.json": "c" * 64}))
    assert "b: has no model.safetensors, which a has with sha256 0123" in str(less)
    assert states(less) == ["● ok", "✕ no model.safetensors"]


def test_the_odd_one_out_is_to_blame_even_if_it_comes_first() -> None:
    """Case 45."""
    error = refused(has("a", OTHER), has("b"), has("c"))
    assert error.node == "a"
    assert error.table is not None
    assert error.table.notes == ("Held against b's files, the most common: 2 of 3 nodes have them.",)


def test_of_as_many_the_leaders_files_are_right() -> None:
    """Case 45."""
    error = refused(has("a", OTHER), has("b"))
    assert error.node == "b"
    assert error.table is not None
    assert error.table.notes == ("Held against a's files, the leader's: no others are more common.",)


def test_where_the_leader_has_none_the_first_that_has_some_counts() -> None:
    error = refused(has("a", error=ModelAbsent("m is not a folder", node="a")), has("b"), has("c", OTHER))
    assert error.table is not None
    assert error.table.notes == ("Held against b's files, the first in order: no others are more common.",)
    assert states(error) == ["✕ absent", "● ok", "✕ another config.json"]


def test_every_kind_of_node_has_its_row() -> None:
    """Case 45."""
    error = refused(
        has("a", size=1234567),
        has("b", error=ModelAbsent("m is not a folder", node="b")),
        has("c", error=ModelCutShort("m/model.safetensors is truncated: it has 3 of 4 bytes", node="c"), size=3),
        has("d", OTHER),
        has("e", error=ModelError("m/model-00001-of-00002.safetensors is missing", node="e")),
        has("f", error=StepTimeout("no progress for 60 s with hashes of files", node="f"), host="", path=""),
        has("g", error=EngineLost("was killed by SIGKILL", node="g"), host="", path=""),
        has("h", error=NodeFailed("ValueError: no", node="h")),
        Found(node="i"),
        has("j"),
    )
    assert str(error) == (
        "b: m is not a folder; c: m/model.safetensors is truncated: it has 3 of 4 bytes; 5 more; nothing was loaded. "
        "Copy the model's folder from one to the other, or get it again, so that all nodes have the same files."
    )
    assert isinstance(error, ModelError)
    assert len(error.lines()) == 1 + 2 + 10 + 1
    assert error.table is not None
    assert error.table.columns == ("node", "host", "path", "state", "sha256 of config.json", "bytes")
    assert error.table.rows[0] == ("a", "host-a", "/models/a", "● ok", "c" * 12, "1,234,567")
    assert error.table.rows[3] == ("d", "host-d", "/models/d", "✕ another config.json", "d" * 12, None)
    assert error.table.rows[5] == ("f", None, None, "✕ no answer", None, None)
    assert states(error) == [
        "● ok", "✕ absent", "✕ cut short", "✕ another config.json", "✕ not whole", "✕ no answer", "✕ gone", "✕ failed",
        "○ still reading", "● ok",
    ]  # fmt: skip


def test_two_nodes_are_both_named_with_their_causes() -> None:
    """Case 45."""
    error = refused(has("a"), has("b", error=ModelAbsent("m is not a folder", node="b")), has("c", OTHER))
    assert NAMED == 2
    assert error.cause == (
        f"m is not a folder; c: has another config.json than a: sha256 {'d' * 16}, not {'c' * 16}; nothing was loaded"
    )


def test_each_file_in_which_nodes_differ_has_a_column_of_hashes() -> None:
    error = refused(has("a"), has("b", OTHER), has("c", {**GOOD, "model.safetensors": "e" * 64}), has("d"))
    assert error.table is not None
    assert error.table.columns[4:6] == ("sha256 of config.json", "sha256 of model.safetensors")
    assert [row[4:6] for row in error.table.rows[:3]] == [
        ("c" * 12, "0123456789ab"),
        ("d" * 12, "0123456789ab"),
        ("c" * 12, "e" * 12),
    ]


def test_where_no_hash_differs_the_whole_models_is_shown() -> None:
    error = refused(has("a"), has("b", error=ModelAbsent("m is not a folder", node="b")), has("c"))
    assert error.table is not None
    assert error.table.columns[4] == "sha256"
    shown = [row[4] for row in error.table.rows]
    assert shown[0] == shown[2] and shown[0] is not None and shown[1] is None
    assert error.table.notes == ("Nodes with a whole model have a's.",)


def test_all_nodes_may_be_without_a_model() -> None:
    error = refused(*(has(node, error=ModelAbsent("m is not a folder", node=node)) for node in "abc"))
    assert str(error).startswith("a: m is not a folder; b: m is not a folder; 1 more; nothing was loaded.")
    assert states(error) == ["✕ absent"] * 3


def test_a_node_that_is_silent_is_an_error_of_that_kind_with_the_table() -> None:
    """Case 45."""
    error = refused(has("a"), has("b", error=StepTimeout("no progress", node="b")), Found(node="c"))
    assert type(error) is StepTimeout
    assert str(error) == "b: no progress; nothing was loaded"
    assert states(error) == ["● ok", "✕ no answer", "○ still reading"]


def test_a_node_that_is_gone_is_that_error_alone() -> None:
    gone = EngineLost("was killed by SIGKILL", node="b", advice="Start again.")
    assert refused(has("a"), has("b", error=gone), Found(node="c")) is gone
    assert gone.table is None


def test_the_table_is_escaped_where_it_is_drawn_and_plain_beside_it() -> None:
    """Case 45."""
    error = refused(has("a", path="/models/<b>&co"), has("b", OTHER))
    assert error.table is not None
    view = table_view(error.table)
    assert "/models/&lt;b&gt;&amp;co" in view.html
    assert "<b>" not in view.html
    assert "/models/<b>&co" in view.text
    assert view.text.splitlines()[0] == error.table.title
    assert view.text.splitlines()[-1] == error.table.notes[0]


def test_a_node_that_says_nothing_is_given_up_at_its_deadline_and_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 45."""
    with running("a") as there, running("b") as silent:
        router = Router("test", SECRET)
        try:
            assert there._address is not None and silent._address is not None
            router.connect({"a": there._address, "b": silent._address})
            monkeypatch.setattr(silent._hashing, "order", lambda _asker, _message: None)
            order = LoadOrder(
                id="1", instance="1", model=str(tmp_path / "m"), layout=make_layout(2, pp=2), dtype="auto", step_s=1.0,
                members=tuple(Member(node_id=each, address="127.0.0.1:1") for each in "ab"),
            )  # fmt: skip
            with pytest.raises(ModelError, match=r"^a: .*m is not a folder; b: no progress for 2 s with") as absent:
                check_same(router, [order], None, lambda error: error, stall_s=2.0)
            assert states(absent.value) == ["✕ absent", "✕ no answer"]
            whole = replace(order, model=str(make_tiny(tmp_path / "m")))
            with pytest.raises(StepTimeout, match=r"^b: no progress for 2 s with hashes of files; nothing") as caught:
                check_same(router, [whole], None, lambda error: error, stall_s=2.0)
            assert states(caught.value) == ["● ok", "✕ no answer"]
        finally:
            router.close()


@pytest.mark.parametrize(
    "told", [{}, {"digests": []}, {"digests": {}}, {"digests": {"a": "short"}}, {"digests": {"a": 1}}]
)
def test_a_word_that_is_none_is_refused(told: dict[str, object]) -> None:
    with pytest.raises(WireError) as caught:
        sameness._read({"type": "reply", **told}, "mac2")
    assert caught.value.node == "mac2"


def test_what_a_node_says_of_itself_cannot_move_the_cursor_nor_fill_the_screen() -> None:
    said = {"digests": {"a\x1b[2J": "a" * 64}, "host": "h\n\x1b", "path": "/p\x1b" + "x" * 5000, "bytes": -1}
    found = sameness._read({"type": "reply", **said}, "mac2")
    assert found.digests == {"a [2J": "a" * 64}
    assert (found.host, found.path[:4], len(found.path), found.size) == ("h  ", "/p x", sameness.LONGEST_PATH, None)
    assert sameness._read({"type": "reply", **said, "host": 1, "path": None, "bytes": True}, "mac2").size is None
