"""The arithmetic of the benchmarks, and a side that answers, is silent, or dies."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.harness import Side, compare, environment, percentile

SIDE = """
from benchmarks.harness import serve

speeds = iter([2.0, 4.0, 6.0])
serve({"name": "x"}, lambda: {"speed": next(speeds)})
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a module out of source, importable by the processes a test starts."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))

    def make(source: str) -> str:
        (tmp_path / "a_side.py").write_text(source)
        return "a_side"

    return make


def test_a_ratio_is_taken_pair_by_pair() -> None:
    pairs = [({"speed": 10.0}, {"speed": 5.0}), ({"speed": 2.0}, {"speed": 1.0}), ({"speed": 9.0}, {"speed": 3.0})]
    assert compare("speed", ("ours", "theirs"), pairs) == {
        "figure": "speed",
        "ours": 9.0,
        "theirs": 3.0,
        "ratio": 2.0,
        "low": 2.0,
        "high": 3.0,
    }


@pytest.mark.parametrize(("share", "value"), [(0.5, 2), (0.75, 3), (0.99, 4), (1.0, 4), (0.0, 1)])
def test_a_percentile_is_one_of_the_values(share: float, value: int) -> None:
    assert percentile([4, 1, 3, 2], share) == value


def test_a_side_stays_up_and_measures_once_a_run(module) -> None:
    with Side("x", module(SIDE), [], deadline_s=20) as side:
        assert side.about == {"name": "x"}
        assert [side.run()["speed"] for _ in range(3)] == [2.0, 4.0, 6.0]


def test_a_silent_side_ends_the_benchmark(module) -> None:
    name = module("import sys\nsys.stdin.read()")
    with pytest.raises(TimeoutError, match=r"quiet gave no answer within 0\.2 s"):
        Side("quiet", name, [], deadline_s=0.2)


def test_a_dead_side_says_so(module) -> None:
    with pytest.raises(RuntimeError, match="short ended with status 3"):
        Side("short", module("raise SystemExit(3)"), [], deadline_s=20)


def test_the_environment_names_cores_and_versions() -> None:
    found = environment()
    assert found["cores"] >= 1
    assert found["python"] == sys.version.split()[0]
    assert found["mlx"]
