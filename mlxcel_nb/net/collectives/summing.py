"""Sums of buffers of floats in the order given: the same bits wherever the same buffers meet. Pure.

float16 and bfloat16 are added up in float32 and rounded once, at the end. NumPy has no bfloat16: its bits come and
go as uint16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]

FLOATS: dict[str, type[np.generic]] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""Element types that can be summed, and what NumPy holds them in."""

_NAN_BITS = 0x7FC0


def sum_into(out: Array, parts: Sequence[Array], dtype: str) -> None:
    """`out` = the sum of `parts`, arrays of one shape, first to last. `out` may be one of them."""
    if dtype == "float32" and len(parts) > 1:
        if len(parts) > 2:  # by when its turn comes, `out` holds something else
            parts = [part.copy() if part is out else part for part in parts]
        np.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            np.add(out, part, out=out)
        return
    total = widen(parts[0], dtype)
    for part in parts[1:]:
        np.add(total, widen(part, dtype), out=total)
    np.copyto(out, narrow(total, dtype))


def widen(x: Array, dtype: str) -> Array:
    """A float32 copy of `x`."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def narrow(x: Array, dtype: str) -> Array:
    """float32 `x` as `dtype`, rounded to nearest, ties to even; what is too large for float16 becomes infinite."""
    if dtype == "float32":
        return x
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16)
    bits = x.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(_NAN_BITS), rounded)
