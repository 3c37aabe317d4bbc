"""Element types of arrays on the wire: a code, the name NumPy and MLX share, a size in bytes. Pure tables."""

from __future__ import annotations

from dataclasses import dataclass

from mlxcel_nb.errors import WireError


@dataclass(frozen=True)
class DType:
    code: int
    name: str
    itemsize: int


DTYPES = tuple(
    DType(code, name, itemsize)
    for code, (name, itemsize) in enumerate(
        [
            ("float32", 4),
            ("float16", 2),
            ("bfloat16", 2),
            ("int32", 4),
            ("int16", 2),
            ("int8", 1),
            ("uint8", 1),
            ("uint32", 4),
            ("bool", 1),
            ("int64", 8),
            ("uint16", 2),
            ("uint64", 8),
            ("float64", 8),
            ("complex64", 8),
        ]
    )
)
"""Indexed by code."""

_BY_NAME = {dtype.name: dtype for dtype in DTYPES}


def dtype_named(name: str) -> DType:
    """The type called `name`; an `mlx.core.float32` may be passed as its `str` with the module stripped."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise WireError(f"arrays of type {name!r} cannot travel; known are {', '.join(_BY_NAME)}") from None


def dtype_coded(code: int) -> DType:
    """The type with the code a peer sent."""
    if code >= len(DTYPES):
        raise WireError(f"a tensor of unknown dtype {code}")
    return DTYPES[code]
