"""A few seconds of the soak that `python -m benchmarks soak` runs for minutes: the same claims."""

from __future__ import annotations

import pytest

from benchmarks.soak import Soak, fitted_growth

WARMING_BYTES = 40 << 20
"""In so short a run buffers still grow to the size of what they hold."""


@pytest.mark.timeout(240)
def test_members_that_talk_while_others_come_and_go_lose_and_repeat_nothing() -> None:
    """Keys change every few frames, readers are slow, links are shaped, guests are killed, stopped and ended."""
    report = Soak(12.0, growth_bytes=WARMING_BYTES).run()
    assert not report["failed"], report["figures"]
    assert report["killed"] + report["ended"] + report["stopped"] > 0


def test_a_line_is_fitted_to_what_comes_after_the_warm_up() -> None:
    steps = [(float(t), 100.0 if t < 25 else 500.0 + 2 * t + (t % 2)) for t in range(100)]
    assert fitted_growth(steps, 0.3) == pytest.approx(2 * 69, rel=0.02)
    assert fitted_growth([(0.0, 5.0), (1.0, 5.0)], 0.0) == 0.0
