"""int8 and int4: codes as MLX has them, errors measured and bounded, other forms within a tolerance or refused."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire import floats, quantised
from mlxcel_nb.wire.dtypes import dtype_named
from mlxcel_nb.wire.quantising import convert, dequantise, quantise

DIMS = (1, 4, 33, 64)
VALUES = np.random.default_rng(0).standard_normal(DIMS).astype("<f4")
FLOATS = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])


def raw(dtype: str, values: Any = VALUES) -> bytes:
    return bytes(floats.narrowed(np.ascontiguousarray(values, "<f4").reshape(-1), dtype).tobytes())


def read(data: Any, dtype: str) -> Any:
    return floats.widened(floats.stored(data, dtype), dtype)


def mlx_array(data: memoryview, dtype: str, shape: tuple[int, ...]) -> mx.array:
    x = mx.array(floats.stored(data, dtype)).reshape(shape)
    return x.view(mx.bfloat16) if dtype == "bfloat16" else x


@FLOATS
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("scale_type", ["", "float32", "float16", "bfloat16"])
def test_no_element_is_off_by_more_than_half_a_scale_and_the_error_is_what_is_measured(
    dtype: str, bits: int, group: int, scale_type: str
) -> None:
    was = read(raw(dtype), dtype)
    data, measured = quantise(dtype, DIMS, raw(dtype), bits=bits, group=group, scale_type=scale_type)
    assert len(data) == quantised.raw_length(dtype_named(dtype), DIMS, bits, group, scale_type)
    off = np.abs(read(dequantise(dtype, DIMS, data), dtype) - was)
    parts = quantised.split(dtype_named(dtype), DIMS, data)
    assert parts.scale_type == (scale_type or dtype)
    half = np.repeat(read(parts.scales, parts.scale_type), group) / 2
    rounding = np.abs(was).max() * {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    assert (off <= half * 1.001 + rounding).all()
    assert measured is not None
    assert measured.max_error == pytest.approx(off.max(), abs=1e-6)
    assert measured.rms_error == pytest.approx(np.sqrt(np.mean(off.astype("<f8") ** 2)), rel=1e-3)
    assert measured.relative_max < (0.01 if bits == 8 else 0.08)
    assert f"{measured.relative_max:.2%}" in str(measured) and f"{measured.relative_rms:.2%}" in str(measured)


@FLOATS
@pytest.mark.parametrize("bits", [8, 4])
def test_mlx_reads_our_codes(dtype: str, bits: int) -> None:
    data, _ = quantise(dtype, DIMS, raw(dtype), bits=bits, group=32)
    parts = quantised.split(dtype_named(dtype), DIMS, data)
    codes = mx.array(np.frombuffer(parts.codes, "<u4")).reshape((*DIMS[:-1], -1))
    scales, biases = (mlx_array(part, dtype, (*DIMS[:-1], -1)) for part in (parts.scales, parts.biases))
    got = mx.dequantize(codes, scales, biases, group_size=32, bits=bits).astype(mx.float32)
    ours = read(dequantise(dtype, DIMS, data), dtype).reshape(DIMS)
    # MLX computes in the array's own type, we in float32: up to two roundings apart.
    allowed = {"float32": 1e-6, "float16": 2**-8, "bfloat16": 2**-5}[dtype]
    assert float(mx.abs(got - mx.array(ours)).max()) <= allowed


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_we_read_the_codes_of_mlx(bits: int) -> None:
    codes, scales, biases = mx.quantize(mx.array(VALUES), group_size=32, bits=bits)
    mx.eval(codes, scales, biases)
    data = memoryview(quantised.prefix(bits, 32) + b"".join(bytes(memoryview(x)) for x in (codes, scales, biases)))
    theirs = np.array(mx.dequantize(codes, scales, biases, group_size=32, bits=bits))
    assert np.allclose(read(dequantise("float32", DIMS, data), "float32").reshape(DIMS), theirs, atol=1e-6)


@given(
    st.lists(st.integers(-(10**9), 10**9).map(lambda n: n * 1e20), min_size=16, max_size=16), st.sampled_from([8, 4])
)
def test_any_finite_group_comes_back_within_half_a_scale(values: list[float], bits: int) -> None:
    data, measured = quantise("float32", (16,), np.array(values, "<f4").tobytes(), bits=bits, group=16)
    assert measured is not None
    spread = max(values) - min(values)
    assert measured.max_error <= spread / ((1 << bits) - 1) / 2 * 1.01 + 1e-6 * max(map(abs, values)) + 1e-37
    assert np.isfinite(read(dequantise("float32", (16,), data), "float32")).all()


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-40])
def test_a_group_of_one_value_is_exact(value: float) -> None:
    data = np.full(64, value, "<f4").tobytes()
    codes, measured = quantise("float32", (64,), data, bits=4, group=64)
    assert measured is not None and measured.max_error == 0
    assert bytes(dequantise("float32", (64,), codes)) == data


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_what_has_no_code_is_refused(bad: float) -> None:
    values = VALUES.reshape(-1)[:64].copy()
    values[7] = bad
    with pytest.raises(WireError, match="not finite, or too large for scales of float16"):
        quantise("float32", (64,), values.tobytes(), bits=8, group=64, scale_type="float16")
    with pytest.raises(WireError, match="made"):
        quantise("float32", (64,), values.tobytes(), bits=3, group=64)
    with pytest.raises(WireError, match="elements"):
        quantise("float32", (2, 64), values.tobytes(), bits=8, group=64)


@FLOATS
@pytest.mark.parametrize("bits", [8, 4])
def test_int8_or_int4_arrives_as_another_float(dtype: str, bits: int) -> None:
    """Case 39: sender int8 or int4, receiver float16 (and the others)."""
    data, measured = quantise("float32", DIMS, raw("float32"), bits=bits, group=64)
    got = read(dequantise("float32", DIMS, data, to=dtype), dtype)
    assert measured is not None
    assert np.abs(got - VALUES.reshape(-1)).max() <= measured.max_error + 5 * 2**-8


@FLOATS
def test_smaller_groups_and_wider_codes_are_exact(dtype: str) -> None:
    """Case 39: a sender's groups of 64 become a receiver's groups of 32 without loss."""
    for bits, group, to in ((8, 64, (8, 32)), (4, 64, (4, 32)), (4, 64, (8, 64)), (4, 128, (8, 32)), (8, 64, (8, 64))):
        dims = (2, 8, 128)
        data, _ = quantise(dtype, dims, raw(dtype, VALUES.reshape(-1)[:2048]), bits=bits, group=group)
        new, measured = convert(dtype, dims, data, bits=to[0], group=to[1])
        assert quantised.split(dtype_named(dtype), dims, new)[:2] == to
        assert bytes(dequantise(dtype, dims, new)) == bytes(dequantise(dtype, dims, data))
        assert measured.max_error == 0


@FLOATS
def test_larger_groups_stay_within_the_tolerance_or_are_refused_with_both_forms_named(dtype: str) -> None:
    """Case 39: groups of 32 to groups of 64, and int8 to int4."""
    data, _ = quantise(dtype, DIMS, raw(dtype), bits=8, group=32)
    new, measured = convert(dtype, DIMS, data, bits=8, group=64)
    assert 0 < measured.relative_max < 0.01
    off = np.abs(read(dequantise(dtype, DIMS, new), dtype) - read(dequantise(dtype, DIMS, data), dtype)).max()
    assert measured.max_error == pytest.approx(off, abs=1e-6)
    with pytest.raises(WireError, match=r"int8 in groups of 32 .* int4 in groups of 64: .*at most 2.0% are taken"):
        convert(dtype, DIMS, data, bits=4, group=64)
    assert convert(dtype, DIMS, data, bits=4, group=64, tolerance=0.1)[1].relative_max > 0.02


@given(st.floats(-(2.0**127), 2.0**127, width=32))
def test_bfloat16_is_rounded_to_the_nearest_and_down_and_up(value: float) -> None:
    x = np.array([value], "<f4")
    expected = np.array(mx.array(x).astype(mx.bfloat16).view(mx.uint16))
    assert floats.narrowed(x, "bfloat16") == expected
    for dtype in ("bfloat16", "float16", "float32"):
        if dtype == "float16" and abs(value) > 60_000:
            continue
        below, above = (read(f(x, dtype), dtype)[0] for f in (floats.rounded_down, floats.rounded_up))
        assert below <= value <= above
        assert (below == above) == (value in {below, above})


def test_not_a_number_stays_one_in_bfloat16() -> None:
    odd = np.array([0x7F800001, 0xFFFFFFFF, 0x7F800000], "<u4").view("<f4")
    back = read(floats.narrowed(odd, "bfloat16"), "bfloat16")
    assert np.isnan(back[:2]).all() and np.isposinf(back[2])
