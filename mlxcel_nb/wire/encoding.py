"""How a tensor should travel: plain, under LZ4, or as int8 or int4 codes. A decision by time alone, with its reason
in words.

An encoding is worth its while when what it takes off the link is more than what it costs both processors. Pure; the
figures come from whoever has measured them: the link's from a net test, the processor's from `net.measuring.rates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlxcel_nb.util.units import bytes_text
from mlxcel_nb.wire.dtypes import DType
from mlxcel_nb.wire.quantised import FLOATS

ENCODINGS = ("plain", "lz4", "int8", "int4")

GAIN = 0.9
"""An encoding must need no more than this part of the time that plain bytes need: both figures are measured, and
move."""


@dataclass(frozen=True)
class Rate:
    """Bytes of the array a processor handles in a second: to encode it, and to decode it again."""

    encode: float
    decode: float


@dataclass(frozen=True)
class Choice:
    """`seconds_per_gb` is what a gigabyte of the array is expected to take, processors included."""

    encoding: str
    reason: str
    seconds_per_gb: float


def size_ratio(encoding: str, dtype: DType, *, lz4_ratio: float = 1.0, group: int = 64) -> float:
    """Bytes on the link for a byte of the array."""
    if encoding == "lz4":
        return lz4_ratio
    if encoding in {"int8", "int4"}:
        bits = 8 if encoding == "int8" else 4
        return (bits / 8 + 2 * dtype.itemsize / group) / dtype.itemsize
    return 1.0


def choose(
    dtype: DType,
    *,
    link_bytes_per_s: float,
    rates: Mapping[str, Rate],
    lossy: str = "none",
    lz4_ratio: float = 1.0,
    group: int = 64,
) -> Choice:
    """The encoding with which a tensor of `dtype` is at the other end, decoded, first.

    Args:
        link_bytes_per_s: what the link carries, measured.
        rates: by encoding; one that is not in it is not considered.
        lossy: the coarsest form that is allowed: "none", "int8" or "int4".
        lz4_ratio: compressed size by size, of a sample (`compression.sampled_ratio`).
        group: elements that share a scale.
    """
    if link_bytes_per_s <= 0:
        raise ValueError(f"a link of {link_bytes_per_s} bytes per second")
    if lossy not in {"none", "int8", "int4"}:
        raise ValueError(f"{lossy!r} is not none, int8 or int4")
    plain = 1e9 / link_bytes_per_s
    seconds = {"plain": plain}
    for encoding, rate in rates.items():
        ratio = size_ratio(encoding, dtype, lz4_ratio=lz4_ratio, group=group)
        if encoding in _allowed(dtype, lossy) and ratio < 1:
            seconds[encoding] = 1e9 * (ratio / link_bytes_per_s + 1 / rate.encode + 1 / rate.decode)
    best = min(seconds, key=lambda encoding: (seconds[encoding], ENCODINGS.index(encoding)))
    link = f"the link carries {bytes_text(link_bytes_per_s)}/s"
    if best != "plain" and seconds[best] <= GAIN * plain:
        ratio = size_ratio(best, dtype, lz4_ratio=lz4_ratio, group=group)
        return Choice(
            best,
            f"{link}; {best} needs {ratio:.0%} of it and, both ends included, {seconds[best] / plain:.0%} of the time",
            seconds[best],
        )
    others = {encoding: seconds[encoding] for encoding in seconds if encoding != "plain"}
    if others:
        nearest = min(others, key=lambda encoding: others[encoding])
        return Choice(
            "plain", f"{link}; {nearest} would take {others[nearest] / plain:.0%} of the time of plain bytes", plain
        )
    return Choice("plain", f"{link}; nothing else makes {dtype.name} smaller here", plain)


def _allowed(dtype: DType, lossy: str) -> tuple[str, ...]:
    if lossy == "none" or dtype.name not in FLOATS:
        return ("lz4",)
    return ("lz4", "int8") if lossy == "int8" else ("lz4", "int8", "int4")
