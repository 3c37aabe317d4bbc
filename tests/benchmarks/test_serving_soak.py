"""A few seconds of the soak that `python -m benchmarks serving-soak` runs for minutes, with a model of no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serving_soak import GROWTH_BYTES, ServingSoak, floor
from benchmarks.soak import fitted_growth
from benchmarks.traffic import NEAR, _sure
from tests.tiny import make_tiny


@pytest.mark.timeout(300)
def test_a_server_that_has_too_much_to_do_answers_some_and_refuses_the_rest(tmp_path: Path) -> None:
    soak = ServingSoak(
        8.0, calibrate_s=3.0, growth_bytes=8 * GROWTH_BYTES, max_wait_s=0.5, longest=64, output=32,
        model=str(make_tiny(tmp_path / "tiny")), layouts=("pp 2",),
    )  # fmt: skip
    report = soak.run()
    # How fast it all is depends on what else the machine does: in so short a run that decides these.
    by_luck = ("first texts", "there are refusals")
    assert not [claim for claim in report["failed"] if not any(luck in claim for luck in by_luck)], report
    assert report["figures"]


def test_memory_is_judged_by_what_it_falls_back_to() -> None:
    """A saw that returns to the same foot is flat, however high its teeth; one whose feet rise is not."""
    saw = [(float(at), 300.0 + 100.0 * (at % 7)) for at in range(300)]
    assert fitted_growth(floor(saw, 30.0), 0.3) == 0
    rising = [(at, value + at) for at, value in saw]
    assert 150 < fitted_growth(floor(rising, 30.0), 0.3) < 250
    assert floor(saw[:20], 30.0) == saw[:20], "of a run that is shorter, all there is"


def test_a_text_is_sure_up_to_the_first_near_tie() -> None:
    tops = [{"a": -0.1, "b": -3.0}, {"c": -0.7, "d": -0.7 - NEAR / 2}, {"e": -0.1, "f": -3.0}]
    likely = {"text_offset": [0, 2, 3], "top_logprobs": tops}
    assert _sure({"text": "aaceee", "logprobs": likely}) == "aa"
    assert _sure({"text": "aaceee", "logprobs": {**likely, "top_logprobs": [tops[0]] * 3}}) == "aaceee"
