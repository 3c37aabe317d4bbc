"""Numbers as a person reads them, the same in a table, a bar and an error. Pure."""

from __future__ import annotations

from typing import overload


@overload
def bytes_text(count: float) -> str: ...
@overload
def bytes_text(count: None) -> None: ...
@overload
def bytes_text(count: float | None) -> str | None: ...
def bytes_text(count: float | None) -> str | None:
    """A size, in powers of 1000: 269 MB."""
    if count is None:
        return None
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{figure(count / size)} {unit}"
    return f"{count:.0f} B"


def ms_text(seconds: float | None) -> str | None:
    """A round trip in milliseconds, to the microsecond, so that a column of them lines up."""
    return None if seconds is None else f"{seconds * 1e3:.3f} ms"


def rate_text(bytes_per_s: float) -> str:
    """A rate as links are sold, in bits: 941 Mbit/s."""
    bits = 8 * bytes_per_s
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{figure(bits / size)} {unit}"
    return f"{bits:.0f} bit/s"


def trip_text(seconds: float) -> str:
    """A round trip with three digits that count: 84.1 µs, 2.31 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{figure(seconds / size)} {unit}"
    return f"{figure(seconds * 1e6)} µs"


def figure(value: float) -> str:
    """A number with three digits that count, and never an exponent: 0.213, 21.3, 2130."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
