"""Attention and gates on a processor against MLX's own, over every shape and mask that models ask for.

A process has the forwarder only if it was there before MLX: all this is run here, without it, and in another one.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_nb.models import blas, processor
from tests.conftest import REPO
from tests.models.test_blas import makes_few_rows

SIZES = ((1, 128, 128), (1, 300, 300), (1, 70, 513), (3, 40, 100), (1, 1, 2000), (8, 1, 300), (1, 17, 700))
HEADS = ((9, 3), (4, 4), (8, 1))


def largest(x: mx.array) -> float:
    return float(np.abs(np.array(x)).max())


def masks(batch: int, heads: int, length: int, past: int) -> dict[str, mx.array | str | None]:
    causal = mx.arange(past)[None] <= mx.arange(past - length, past)[:, None]
    starts = mx.arange(batch)[:, None] * 3  # rows of a batch are padded on the left
    padded = (mx.arange(past)[None] >= starts)[:, None, None]
    slopes = mx.arange(1, heads + 1)[None, :, None, None] / -heads
    distance = (mx.arange(past - length, past)[:, None] - mx.arange(past)[None])[None, None]
    return {
        "none": None,
        "causal": "causal",
        "window": causal & (mx.arange(past)[None] > mx.arange(past - length, past)[:, None] - 20),
        "padded": padded,
        "padded and causal": padded & causal,
        "added": mx.where(causal, 0.0, -mx.inf),
        "least": mx.where(causal, 0.0, mx.finfo(mx.float32).min),
        "of each head": mx.where(causal, slopes * distance, -mx.inf),
    }


@pytest.mark.parametrize(("size", "heads"), list(itertools.product(SIZES, HEADS)))
def test_attention_is_mlx_s(size: tuple[int, int, int], heads: tuple[int, int]) -> None:
    batch, length, past = size
    mx.random.seed(7)
    queries = mx.random.normal((batch, heads[0], length, 32)) * 3
    keys = mx.random.normal((batch, heads[1], past + 5, 32))[:, :, :past]  # as a cache gives them: cut from more
    values = mx.random.normal((batch, heads[1], past, 24))
    for name, mask in masks(batch, heads[0], length, past).items():
        found = processor.attention(queries, keys, values, scale=0.3, mask=mask)
        right = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)
        assert found.shape == right.shape
        assert largest(found - right) < 2e-5, name


def test_pieces_that_do_not_come_out_even_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys = mx.random.normal((2, 6, 37, 16)), mx.random.normal((2, 3, 150, 16))
    whole = {name: processor.attention(queries, keys, keys, scale=0.25, mask=mask)
             for name, mask in masks(2, 6, 37, 150).items()}  # fmt: skip
    for piece in (1, 3000, 20000):
        monkeypatch.setattr(processor, "PIECE", piece)
        for name, mask in masks(2, 6, 37, 150).items():
            found = processor.attention(queries, keys, keys, scale=0.25, mask=mask)
            assert largest(found - whole[name]) < 2e-6, (piece, name)


def test_a_row_that_sees_nothing_gives_numbers() -> None:
    queries, keys = mx.random.normal((1, 4, 50, 16)), mx.random.normal((1, 4, 80, 16))
    nothing = mx.zeros((50, 80), mx.bool_)
    assert mx.isfinite(processor.attention(queries, keys, keys, scale=0.25, mask=nothing)).all().item()


def test_scores_as_large_as_they_get_are_right() -> None:
    queries, keys = mx.random.normal((1, 2, 64, 16)) * 1e4, mx.random.normal((1, 2, 128, 16)) * 1e3
    found = processor.attention(queries, keys, keys, scale=1.0, mask="causal")
    right = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=1.0, mask="causal")
    assert mx.allclose(found, right, rtol=1e-4, atol=1e-4).item()


def test_powers_of_two_are_right_over_their_range() -> None:
    y = -np.concatenate([np.linspace(0, 124.9, 200_001), np.arange(125), np.geomspace(1e-30, 1, 1000)]).astype("f4")
    right = np.exp2(y.astype(np.float64))
    assert (np.abs(np.array(processor.power_of_two(mx.array(y)), dtype=np.float64) / right - 1)).max() < 5e-7
    assert np.array(processor.power_of_two(mx.array([0.0, -1.0, -2.0]))).tolist() == [1.0, 0.5, 0.25]
    ends = np.array(processor.power_of_two(mx.array([-np.inf, -1e30, -127.0, -126.0])))
    assert (ends <= 2.0**-126).all() and not np.isnan(ends).any()
    assert mx.isnan(processor.power_of_two(mx.array([mx.nan]))).item()


def test_an_array_that_is_cut_from_another_is_read_where_it_lies() -> None:
    x = -mx.arange(120).reshape(4, 5, 6).astype(mx.float32)
    wide = mx.broadcast_to(x[0, 0], (3, 6))
    for part in (x[:, 2], x[..., 1], x[1:3, ::2, 3:4], x.transpose(2, 0, 1), x[0, 0, :1], wide):
        assert processor.power_of_two(part).tolist() == (2.0**part).tolist()
    empty = processor.power_of_two(mx.zeros((0, 5)))
    assert empty.shape == (0, 5)


def test_gates_are_right_over_their_range() -> None:
    x = np.concatenate([np.linspace(-90, 90, 100_001), np.geomspace(1e-30, 1, 1000), [0.0, -0.0]]).astype("f4")
    wide = x.astype(np.float64)
    right = wide / (1 + np.exp(-wide))
    found = np.array(processor.silu(mx.array(x)), dtype=np.float64)
    assert np.abs(found - right).max() < 8e-6  # of values up to 90
    near = np.abs(wide) < 8
    assert np.abs(found - right)[near].max() < 1.5e-6
    ends = processor.silu(mx.concatenate([mx.full((9000,), -1e30), mx.full((9000,), 1e30)]))
    assert largest(ends[:9000]) < 1e-6 and ends[-1].item() == pytest.approx(1e30)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_what_is_not_in_float32_is_left_to_mlx(dtype: mx.Dtype) -> None:
    x = mx.random.normal((1, 4, 64, 32)).astype(dtype)
    assert processor.attention(x, x, x, scale=0.2, mask="causal").dtype == dtype
    assert processor.swiglu(mx.random.normal((100, 100)).astype(dtype), mx.ones((100, 100), dtype)).dtype == dtype


def test_what_is_not_asked_for_by_any_cache_is_mlx_s_to_judge() -> None:
    queries, keys = mx.random.normal((1, 4, 300, 16)), mx.random.normal((1, 4, 200, 16))
    more = processor.attention(queries, keys, keys, scale=0.25, mask="causal")  # more queries than keys
    right = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.25, mask="causal")
    assert mx.allclose(more, right, equal_nan=True).item()
    with pytest.raises(ValueError, match="mask"):
        processor.attention(queries, queries, queries, scale=0.25, mask="none")


@pytest.mark.skipif(sys.platform != "linux" or not makes_few_rows(), reason="no forwarder here, or not these functions")
def test_all_of_it_holds_with_the_forwarder() -> None:
    code = f"""
import sys
from mlxcel_nb.models import blas
blas.load_fast_blas(2)
import pytest
status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", "not forwarder", {__file__!r}])
from mlxcel_nb.models import processor
sys.exit(status or (0 if processor.prepare() is not None else "exponentials do not come from the forwarder"))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has used none of it."""
    known = processor.prepare()
    monkeypatch.setattr(processor, "_marks", [])
    yield
    if known is not None:
        blas.mark(*(np.asarray(mark).ctypes.data for mark in (known.power, known.silu)))


@pytest.mark.usefixtures("unprepared")
def test_where_mlx_does_not_multiply_as_it_did_nothing_is_taken_for_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_works", lambda marks: False)
    assert processor.prepare() is None
    x = mx.arange(6.0)
    assert mx.array_equal(processor.silu(x), x * mx.sigmoid(x)).item()
    for _ in range(50):  # at whatever addresses
        assert (x[:, None] @ mx.array([[3.0]])).reshape(-1).tolist() == [0.0, 3.0, 6.0, 9.0, 12.0, 15.0]


@pytest.mark.usefixtures("unprepared")
def test_threads_that_ask_first_get_the_same_functions() -> None:
    together = threading.Barrier(4)

    def ask() -> object:
        together.wait(10)
        return processor.prepare()

    with ThreadPoolExecutor(4) as pool:
        found = [each.result(10) for each in [pool.submit(ask) for _ in range(4)]]
    assert all(each is found[0] for each in found)
    x = mx.arange(-5.0, 5.0)
    assert mx.allclose(processor.silu(x), x * mx.sigmoid(x), atol=1e-6).item()


def test_without_a_forwarder_there_are_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_forwarder", None)
    assert not blas.mark(1, 2)
