"""How a tensor should travel, and why."""

from __future__ import annotations

import pytest

from mlxcel_nb.net.measuring.rates import codec_rates
from mlxcel_nb.wire.dtypes import DTYPES, dtype_named
from mlxcel_nb.wire.encoding import ENCODINGS, Rate, choose, size_ratio

RATES = {"lz4": Rate(0.8e9, 3e9), "int8": Rate(1.2e9, 4e9), "int4": Rate(1e9, 3e9)}
FLOAT32, FLOAT16, INT32 = dtype_named("float32"), dtype_named("float16"), dtype_named("int32")


@pytest.mark.parametrize(
    ("link", "lossy", "lz4_ratio", "encoding"),
    [
        (10e6, "none", 1.0, "plain"),
        (10e6, "none", 0.6, "lz4"),
        (10e6, "int8", 0.6, "int8"),
        (10e6, "int4", 0.6, "int4"),
        (1e9, "int4", 0.6, "plain"),
        (5e9, "int4", 0.6, "plain"),
        (10e6, "int4", 0.1, "lz4"),
    ],
)
def test_slow_links_are_worth_the_work_and_fast_ones_are_not(
    link: float, lossy: str, lz4_ratio: float, encoding: str
) -> None:
    choice = choose(FLOAT32, link_bytes_per_s=link, rates=RATES, lossy=lossy, lz4_ratio=lz4_ratio)
    assert choice.encoding == encoding


def test_the_reason_names_the_link_and_what_was_weighed() -> None:
    slow = choose(FLOAT32, link_bytes_per_s=125e6, rates=RATES, lossy="int8")
    assert slow.reason.startswith("the link carries 125 MB/s; int8 needs 28% of it and, both ends included, ")
    fast = choose(FLOAT32, link_bytes_per_s=2e9, rates=RATES, lossy="int8")
    assert fast.reason.startswith("the link carries 2 GB/s; int8 would take ")
    assert "nothing else makes int32 smaller" in choose(INT32, link_bytes_per_s=1e6, rates=RATES, lossy="int4").reason


def test_what_may_lose_nothing_loses_nothing() -> None:
    for dtype in (FLOAT32, INT32):
        assert choose(dtype, link_bytes_per_s=1e3, rates=RATES, lossy="none", lz4_ratio=0.5).encoding == "lz4"
    assert choose(INT32, link_bytes_per_s=1e3, rates=RATES, lossy="int4", lz4_ratio=0.5).encoding == "lz4"


def test_a_gain_within_the_noise_is_none() -> None:
    assert choose(FLOAT16, link_bytes_per_s=1e3, rates=RATES, lossy="none", lz4_ratio=0.95).encoding == "plain"


def test_only_what_has_been_measured_is_considered() -> None:
    assert choose(FLOAT32, link_bytes_per_s=1e3, rates={}, lossy="int4").encoding == "plain"


def test_codes_take_what_bits_and_scales_take() -> None:
    assert size_ratio("int8", FLOAT32) == pytest.approx((1 + 8 / 64) / 4)
    assert size_ratio("int4", FLOAT16, group=32) == pytest.approx((0.5 + 4 / 32) / 2)
    assert size_ratio("plain", FLOAT16) == 1


@pytest.mark.parametrize("bad", [{"link_bytes_per_s": 0}, {"link_bytes_per_s": 1.0, "lossy": "int2"}])
def test_senseless_figures_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=r"link of 0|int2"):
        choose(FLOAT32, rates=RATES, **bad)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_this_processor_s_rates_are_measured_for_every_dtype(dtype: object) -> None:
    rates = codec_rates(dtype.name)  # type: ignore[attr-defined]
    assert set(rates) <= set(ENCODINGS) and "lz4" in rates
    assert ("int8" in rates) == (dtype.name in {"float32", "float16", "bfloat16"})  # type: ignore[attr-defined]
    assert all(rate.encode > 1e6 and rate.decode > 1e6 for rate in rates.values())
