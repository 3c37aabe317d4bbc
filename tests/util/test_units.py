"""Numbers as people read them."""

from __future__ import annotations

import pytest

from mlxcel_nb.util.units import bytes_text, figure, ms_text


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (269e6, "269 MB"), (36e9, "36 GB"), (5e12, "5 TB"), (None, None)],
)
def test_sizes(size: float | None, shown: str | None) -> None:
    assert bytes_text(size) == shown


def test_figures_have_three_digits_and_no_exponent() -> None:
    assert [figure(x) for x in (0.2134, 21.34, 999.6, 2130.4)] == ["0.213", "21.3", "1000", "2130"]


def test_round_trips_line_up() -> None:
    assert [ms_text(x) for x in (0.000_05, 1.5, None)] == ["0.050 ms", "1500.000 ms", None]
