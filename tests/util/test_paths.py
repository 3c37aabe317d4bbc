"""Sizes of a folder that changes meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlxcel_nb.util.paths import sizes_below


def test_what_vanishes_meanwhile_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "first").write_bytes(b"123")
    for name in ("kept", "removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"1")
    sizes = sizes_below(tmp_path)
    assert next(sizes) == (tmp_path / "first", 3)
    shutil.rmtree(tmp_path / "removed")
    assert list(sizes) == [(tmp_path / "kept" / "file", 1)]


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert list(sizes_below(tmp_path / "nowhere")) == []
