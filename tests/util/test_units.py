"""Numbers as people read them."""

from __future__ import annotations

import pytest

from mlxcel_nb.util.units import bytes_text, figure, ms_text, rate_text, trip_text


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


@pytest.mark.parametrize(
    ("rate", "text"),
    [(117e6, "936 Mbit/s"), (1.25e9, "10 Gbit/s"), (1.2499e8, "1000 Mbit/s"), (125.0, "1 kbit/s"), (1, "8 bit/s")],
)
def test_rates_are_in_bits_as_links_are_sold(rate: float, text: str) -> None:
    assert rate_text(rate) == text


@pytest.mark.parametrize(("trip", "text"), [(84.12e-6, "84.1 µs"), (2.313e-3, "2.31 ms"), (1.5, "1.5 s")])
def test_round_trips_have_three_digits(trip: float, text: str) -> None:
    assert trip_text(trip) == text
