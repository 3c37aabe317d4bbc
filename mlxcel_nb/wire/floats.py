"""The three float types of caches as NumPy sees them; bfloat16, which it lacks, as the upper half of a float32.

Pure; any thread. Rounding to bfloat16 is to the nearest, ties to even, as IEEE 754 has it; `rounded_down` and
`rounded_up` go one way only, for bounds that must hold after rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Stored = NDArray[Any]

_NUMPY = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


def stored(data: Any, dtype: str) -> Stored:
    """The elements in a buffer, uncopied; bfloat16 as the uint16 it looks like."""
    import numpy as np

    return np.frombuffer(data, _NUMPY[dtype])


def widened(elements: Stored, dtype: str) -> Floats:
    """As float32, exactly; float32 itself is not copied."""
    import numpy as np

    if dtype == "bfloat16":
        wide: Floats = elements.astype("<u4")
        np.left_shift(wide, 16, out=wide)
        return wide.view("<f4")
    return elements.astype("<f4", copy=False)


def narrowed(values: Floats, dtype: str) -> Stored:
    """float32 as `dtype`, to the nearest; float32 itself is not copied."""
    import numpy as np

    if dtype == "bfloat16":
        bits = values.view("<u4")
        half, upper = np.uint32(0x7FFF), np.uint32(16)
        nearest: Stored = ((bits + (half + ((bits >> upper) & np.uint32(1)))) >> upper).astype("<u2")
        odd = np.isnan(values)
        if odd.any():
            nearest[odd] = 0x7FC0
        return nearest
    with np.errstate(over="ignore"):
        return values.astype(_NUMPY[dtype], copy=False)


def rounded_down(values: Floats, dtype: str) -> Stored:
    """The largest elements of `dtype` that are not above `values`, which are finite."""
    import numpy as np

    near = narrowed(values, dtype)
    down: Stored = np.where(widened(near, dtype) > values, _below(near, dtype), near)
    return down


def rounded_up(values: Floats, dtype: str) -> Stored:
    """The smallest elements of `dtype` that are not below `values`, which are finite."""
    import numpy as np

    near = rounded_down(-values, dtype)
    up: Stored = near ^ np.uint16(0x8000) if dtype == "bfloat16" else -near
    return up


def _below(elements: Stored, dtype: str) -> Stored:
    """The next smaller element of each."""
    import numpy as np

    below: Stored
    if dtype != "bfloat16":
        below = np.nextafter(elements, elements.dtype.type(-np.inf))
        return below
    negative, zero = elements >= 0x8000, (elements & np.uint16(0x7FFF)) == 0
    one = np.uint16(1)
    below = np.where(zero, np.uint16(0x8001), np.where(negative, elements + one, elements - one))
    return below
