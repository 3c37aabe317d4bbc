"""MLX arrays and the wire's bytes: every dtype, every bit, no copy where none is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_nb.errors import WireError
from mlxcel_nb.models.arrays import Landing, as_bytes, from_bytes, memory_is_shared, mlx_type, wire_name
from mlxcel_nb.wire.dtypes import DTYPES
from mlxcel_nb.wire.tensors import Assembler, TensorHeader, decode, encode, payloads

NAMES = pytest.mark.parametrize("name", [dtype.name for dtype in DTYPES])


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with mx.stream(mx.cpu):  # float64 lives nowhere else
        yield


def every_bit(name: str, shape: tuple[int, ...]) -> mx.array:
    """Random bytes as an array: values that are not numbers among them."""
    itemsize = next(dtype.itemsize for dtype in DTYPES if dtype.name == name)
    data = np.random.default_rng(7).bytes(math.prod(shape) * itemsize)
    if name == "bool":
        data = bytes(byte & 1 for byte in data)
    return from_bytes(data, name, shape)


@NAMES
@pytest.mark.parametrize("shape", [(), (1,), (5, 3), (0, 4), (2, 3, 4, 5)])
def test_an_array_goes_over_the_wire_and_back_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    x = every_bit(name, shape)
    assert (wire_name(x.dtype), mlx_type(name), x.shape) == (name, x.dtype, shape)
    header, data = decode(memoryview(b"".join(map(bytes, encode(name, shape, "t", as_bytes(x))))))
    y = from_bytes(data, header.dtype, header.dims)
    assert (y.dtype, y.shape) == (x.dtype, x.shape) and bytes(as_bytes(y)) == bytes(as_bytes(x))


@NAMES
def test_an_array_in_pieces_lands_in_an_array_s_own_memory(name: str) -> None:
    x = every_bit(name, (3, 700))
    landings: list[Landing] = []

    def place(header: TensorHeader, size: int) -> memoryview:
        landings.append(Landing(header.dtype, header.dims))
        assert len(landings[0].memory) == size
        return landings[0].memory

    assembler, done = Assembler(place=place), None
    for payload in payloads(encode(name, x.shape, "t", as_bytes(x)), 1, part_bytes=600):
        done = assembler.add(1, memoryview(b"".join(map(bytes, payload))))
    assert done is not None
    y = landings[0].array()
    assert (y.dtype, y.shape) == (x.dtype, x.shape) and bytes(as_bytes(y)) == bytes(as_bytes(x))


@NAMES
def test_another_order_in_memory_travels_in_c_order(name: str) -> None:
    x = every_bit(name, (4, 6))
    y = from_bytes(as_bytes(mx.swapaxes(x, 0, 1)), name, (6, 4))
    assert bytes(as_bytes(mx.swapaxes(y, 0, 1))) == bytes(as_bytes(x))
    assert bytes(as_bytes(x[:, 2:5])) == bytes(as_bytes(mx.contiguous(x[:, 2:5])))


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_neither_way_copies_on_a_back_end_whose_memory_is_shared(name: str) -> None:
    if not memory_is_shared():
        pytest.skip("this back end gives no view of its memory")  # there arrays are copied: see the next test
    landing = Landing(name, (64,))
    before = as_bytes(landing.array())
    landing.memory[:] = bytes(range(len(landing.memory) // 2)) * 2
    assert bytes(before) == bytes(landing.memory) == bytes(as_bytes(landing.array()))


def test_a_back_end_without_shared_memory_is_served_by_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxcel_nb.models.arrays.memory_is_shared", lambda: False)
    landing = Landing("bfloat16", (2, 2))
    landing.memory[:] = b"\x80\x3f" * 4
    assert mx.array_equal(landing.array(), mx.ones((2, 2), mx.bfloat16))


def test_bytes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(WireError, match=r"7 bytes are no \(2, 2\) int16, which take 8"):
        from_bytes(bytes(7), "int16", (2, 2))
    with pytest.raises(WireError, match="float8"):
        from_bytes(b"", "float8", (0,))
