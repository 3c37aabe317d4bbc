"""An error is a line or two, with the last words of whoever is gone under it."""

from __future__ import annotations

import pickle

from mlxcel_nb.errors import ClusterError, EngineLost, MlxcelError, NodeFailed, from_dict, wrap


def lost() -> MlxcelError:
    error = EngineLost("the process ended with exit code 1", node="engine-1", advice="Mend it.")
    error.add_note("engine-1 said last:\nTraceback (most recent call last):\n  File \x1b[2J\nImportError: no")
    return error


def test_the_notes_of_an_error_are_shown_under_it_indented_and_cannot_move_the_cursor() -> None:
    """Case 53."""
    assert lost().lines() == [
        "engine-1: the process ended with exit code 1. Mend it.",
        "    engine-1 said last:",
        "    Traceback (most recent call last):",
        "      File  [2J",
        "    ImportError: no",
    ]
    assert lost()._render_traceback_() == [f"EngineLost: {lost()}", *lost().lines()[1:]]


def test_an_error_without_notes_is_one_line() -> None:
    assert ClusterError("nothing runs", advice="Start it.").lines() == ["nothing runs. Start it."]


def test_naming_the_node_keeps_the_notes() -> None:
    error = ClusterError("no")
    error.add_note("why")
    assert error.at("engine-3").lines() == ["engine-3: no", "    why"]
    assert lost().at("engine-3").node == "engine-1"


def test_an_error_survives_the_wire_and_a_pickle() -> None:
    error = lost()
    for same in (from_dict(error.to_dict()), pickle.loads(pickle.dumps(error))):
        assert (type(same), str(same)) == (EngineLost, str(error))
    assert str(wrap(ValueError("first\nsecond"), "engine-0")) == "engine-0: ValueError: first"
    assert isinstance(wrap(ValueError(), "engine-0"), NodeFailed)


def test_a_code_stands_for_the_class_that_gave_it() -> None:
    class Special(ClusterError):
        """Of one module's own, with its parent's code."""

    assert type(from_dict(Special("no").to_dict())) is ClusterError
