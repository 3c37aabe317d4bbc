"""MLX arrays as the wire's bytes, and back, without a copy where MLX allows.

Out: the memory of an evaluated array is looked at in place (`as_bytes`). In: an array is made first, and what arrives
is written into its memory (`Landing`, which fits `wire.tensors.Assembler`'s `place`), or bytes that lie elsewhere are
copied once (`from_bytes`). bfloat16, for which there is no buffer format, is seen as uint16 and keeps every bit.

For the thread that owns the arrays. float64 exists on the CPU alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire.dtypes import DTYPES, dtype_named

_MLX = {
    dtype.name: mx.bool_ if dtype.name == "bool" else getattr(mx, dtype.name)
    for dtype in DTYPES
}  # fmt: skip
_NAMES = {kind: name for name, kind in _MLX.items()}


def wire_name(dtype: mx.Dtype) -> str:
    """What the wire calls an MLX element type."""
    return _NAMES[dtype]


def mlx_type(name: str) -> mx.Dtype:
    """The MLX element type that the wire calls `name`."""
    return _MLX[dtype_named(name).name]


def as_bytes(x: mx.array) -> memoryview:
    """The memory of `x`, in C order: its own when it is contiguous, else that of a copy. Evaluates `x`.

    The view keeps the memory alive, not the values: nothing may write to `x` in place meanwhile.
    """
    if x.dtype == mx.bfloat16:
        x = x.view(mx.uint16)
    mx.eval(x)
    memory = np.array(x, copy=False)
    if not memory.flags.c_contiguous:
        memory = np.ascontiguousarray(memory)
    return memoryview(memory.reshape(-1).view(np.uint8)) if memory.size else memoryview(b"")


def copied(x: mx.array, take: Callable[[int], memoryview]) -> memoryview:
    """The elements of `x`, in C order, in memory that `take` gives. Evaluates `x`."""
    view = x.view(mx.uint16) if x.dtype == mx.bfloat16 else x
    mx.eval(view)
    elements = np.array(view, copy=False)
    memory = take(elements.nbytes)
    if elements.size:
        np.frombuffer(memory, elements.dtype).reshape(elements.shape)[...] = elements
    return memory


def from_bytes(data: memoryview | bytes | bytearray, dtype: str, shape: Sequence[int]) -> mx.array:
    """The array whose elements are `data`, copied once.

    Raises:
        WireError: `data` is not as long as type and shape say.
    """
    kind = dtype_named(dtype)
    size, expected = memoryview(data).nbytes, math.prod(shape) * kind.itemsize
    if size != expected:
        raise WireError(f"{size} bytes are no {tuple(shape)} {dtype}, which take {expected}")
    elements = np.frombuffer(data, np.uint16 if dtype == "bfloat16" else np.dtype(dtype)).reshape(shape)
    with _stream(_MLX[dtype]):
        if dtype == "bfloat16":
            return mx.array(elements).view(mx.bfloat16)
        return mx.array(elements, _MLX[dtype])


class Landing:
    """An array that is still to arrive: bytes written to `memory` become its elements.

    Args:
        dtype: as the wire names it.
        shape: of the array.
    """

    def __init__(self, dtype: str, shape: Sequence[int]) -> None:
        self._dtype, self._shape = dtype, tuple(shape)
        size = math.prod(self._shape) * dtype_named(dtype).itemsize
        self._array: mx.array | None = None
        if size and memory_is_shared():
            self._array = _zeros(self._shape, mlx_type(dtype))
            self.memory = as_bytes(self._array)
        else:
            self.memory = memoryview(bytearray(size))

    def array(self) -> mx.array:
        """The array, once its bytes are there. `memory` is not to be written to any more."""
        return from_bytes(self.memory, self._dtype, self._shape) if self._array is None else self._array


@functools.cache
def memory_is_shared() -> bool:
    """Whether writing to an array's view changes the array on this back end; tried once, on four bytes."""
    x = _zeros((4,), mx.uint8)
    try:
        as_bytes(x)[:] = b"\1\2\3\4"
    except (TypeError, ValueError):
        return False
    return bool(mx.array_equal(x, mx.array([1, 2, 3, 4], mx.uint8)))


def _zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    with _stream(dtype):
        x = mx.zeros(shape, dtype)
        mx.eval(x)
        return x


def _stream(dtype: mx.Dtype) -> mx.StreamContext:
    """Where an array of `dtype` can live."""
    return mx.stream(mx.cpu if dtype == mx.float64 else mx.default_device())
