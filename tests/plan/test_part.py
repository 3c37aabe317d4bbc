"""A part of a model is a cell of a mesh, and nothing else."""

from __future__ import annotations

import pytest

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.plan.part import Part


def test_a_part_that_contradicts_itself_is_refused() -> None:
    for wrong in ((0, 0), (3, 2), (0, 6)):
        with pytest.raises(ConfigError):
            Part(wrong, 5)
    with pytest.raises(ConfigError):
        Part((0, 5), 5, 0, 2)
    with pytest.raises(ConfigError):
        Part((0, 5), 5, 0, 1, 2, 2)
