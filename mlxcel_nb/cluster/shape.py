"""What a link is made to be like: `--link 5ms,1Gbit`, `--link 0-3:40ms`. Pure; any thread may call.

A `LinkShape` says what happens to what is *sent* over one link; `net.shaping.relay` makes it happen. The texts come
from users: whatever cannot be read is a `ConfigError` that shows how to write it.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mlxcel_nb.errors import ConfigError

MAX_LATENCY_S = 2.0
"""One way: a peer that answers later than that is shown as suspect although nothing is wrong with it."""

MIN_BYTES_PER_S = 1000.0
"""8 kbit/s: the handshake's deadline and pings need this much."""

MAX_LOSS = 0.5

_NANOSECONDS = {"us": 10**3, "ms": 10**6, "s": 10**9}
_BITS = {"kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9}
"""The units of a latency and of a rate, in the smallest that is told apart."""

_HOW = "Write LATENCY,RATE,LOSS or some of them, as in 5ms,1Gbit or 200us,10Gbit,0.1%."
_HOW_PAIR = "Write A-B:SHAPE with two engines' numbers, as in 0-3:40ms, or their ids, as in mac1..mac2:40ms."

_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-zµ%]+(?:/s)?)", re.IGNORECASE)
_PAIR = re.compile(r"(\d{1,6})-(\d{1,6})")
_ENGINE = "engine-{}"


@dataclass(frozen=True, kw_only=True)
class LinkShape:
    """How a link treats what one end sends.

    Args:
        latency_s: from the last byte put on the link to its arrival, one way.
        bytes_per_s: what the link carries in one direction; None for as much as it can.
        loss: the share of segments that are lost on the way, 0 to `MAX_LOSS`.
    """

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s <= MAX_LATENCY_S:
            raise ConfigError(f"a latency of {self.latency_s:g} s", advice=f"0 to {MAX_LATENCY_S:g} s are possible.")
        if self.bytes_per_s is not None and not MIN_BYTES_PER_S <= self.bytes_per_s < math.inf:
            raise ConfigError(
                f"a rate of {self.bytes_per_s * 8:g} bit/s", advice=f"It takes {MIN_BYTES_PER_S * 8 / 1000:g} kbit."
            )
        if not 0 <= self.loss <= MAX_LOSS:
            raise ConfigError(f"a loss of {self.loss:.3%}", advice=f"0 to {MAX_LOSS:.0%} are possible.")

    def __str__(self) -> str:
        """As `parse_link` reads it, to the nanosecond and the bit."""
        return ",".join(self._parts("")) or "0ms"

    @property
    def words(self) -> str:
        """For people: "5 ms, 1 Gbit/s, 0.1 % lost"."""
        return ", ".join(self._parts(" ")) or "as it is"

    def _parts(self, space: str) -> list[str]:
        """What differs from a link as it is, `space` between figures and units."""
        parts = []
        if self.latency_s:
            parts.append(_figure(round(self.latency_s * 1e9), _NANOSECONDS, space))
        if self.bytes_per_s is not None:
            parts.append(_figure(round(self.bytes_per_s * 8), _BITS, space) + ("/s" if space else ""))
        if self.loss:
            parts.append(f"{self.loss * 100:.12g}{space}%{' lost' if space else ''}")
        return parts


def parse_link(text: str) -> LinkShape:
    """Read "5ms,1Gbit", "1Gbit", "200us,10Gbit,0.1%": latency one way, rate and loss, each once, in any order.

    Raises:
        ConfigError: what is not understood, or a figure beyond what can be.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, value = _quantity(part.strip(), text)
        if name in found:
            raise ConfigError(f"link {text!r} has two of what {part.strip()!r} says", advice=_HOW)
        found[name] = value
    return LinkShape(**found)


def _quantity(part: str, text: str) -> tuple[str, float]:
    """A field of `LinkShape` and its value."""
    match = _QUANTITY.fullmatch(part)
    if match is None:
        raise ConfigError(f"link {text!r}: {part!r} is not a latency, a rate or a loss", advice=_HOW)
    number, unit = match.groups()
    unit = unit.lower().replace("µ", "u")
    if unit == "%":
        return "loss", round(float(number) / 100, 9)
    if unit in _NANOSECONDS:
        return "latency_s", round(float(number) * _NANOSECONDS[unit]) / 1e9
    for name, bits in _BITS.items():
        if unit in {name.lower(), f"{name.lower()}/s"}:
            return "bytes_per_s", round(float(number) * bits) / 8
    raise ConfigError(f"link {text!r}: {unit!r} is no unit", advice="There are us, ms, s; kbit, Mbit, Gbit; %.")


Shapes = Callable[[str], LinkShape | None]
"""One node's view: the shape of its link to the node of that id."""


@dataclass(frozen=True, kw_only=True)
class LinkPlan:
    """The links of a whole cluster.

    Args:
        general: every link that is not among `pairs`, the notebook's to the engines too.
        pairs: by the two nodes' ids.
    """

    general: LinkShape | None = None
    pairs: Mapping[frozenset[str], LinkShape] = field(default_factory=dict)

    def between(self, one: str, other: str) -> LinkShape | None:
        """The shape of the link between two nodes, the same in both directions; None for the link as it is."""
        return self.pairs.get(frozenset((one, other)), self.general)

    def seen_from(self, node_id: str) -> Shapes | None:
        """What one node has to know; None when every link stays as it is."""
        return functools.partial(self.between, node_id) if self.general or self.pairs else None


def parse_links(texts: Sequence[str], members: Sequence[str] | None = None) -> LinkPlan:
    """Read every `--link` of a command: shapes for all links, and for the link between two members.

    Args:
        members: node ids by number; `engine-0`, `engine-1` and so on when None. Empty where nodes have no numbers: then
            pairs are of any ids.

    Raises:
        ConfigError: a text that is not understood, two for the same links, or a member that is not there.
    """
    general: LinkShape | None = None
    pairs: dict[frozenset[str], LinkShape] = {}
    for text in texts:
        ends, colon, rest = text.strip().rpartition(":")
        shape = parse_link(rest)
        if not colon:
            if general is not None:
                raise ConfigError(f"two shapes for every link, {general} and {shape}", advice=_HOW_PAIR)
            general = shape
            continue
        pair = _pair(ends, text, members)
        if pair in pairs:
            raise ConfigError(f"two shapes for the link {ends}: {pairs[pair]} and {shape}", advice="Give one.")
        pairs[pair] = shape
    return LinkPlan(general=general, pairs=pairs)


def _pair(ends: str, text: str, members: Sequence[str] | None) -> frozenset[str]:
    if ".." in ends:
        one, other = (name.strip() for name in ends.split("..", 1))
        if not one or not other or one == other:
            raise ConfigError(f"link {text!r}: {ends!r} is not a pair of nodes", advice=_HOW_PAIR)
        for name in (one, other):
            if members and name not in members:
                raise ConfigError(f"link {text!r}: there is no node {name}", advice=f"There are {', '.join(members)}.")
        return frozenset((one, other))
    match = _PAIR.fullmatch(ends)
    if match is None:
        raise ConfigError(f"link {text!r}: {ends!r} is not a pair of engines", advice=_HOW_PAIR)
    numbers = [int(number) for number in match.groups()]
    if numbers[0] == numbers[1]:
        raise ConfigError(f"link {text!r}: engine {numbers[0]} has no link to itself", advice=_HOW_PAIR)
    if members is None:
        return frozenset(_ENGINE.format(number) for number in numbers)
    if not members:
        advice = "Only a cluster file numbers nodes. Write ids, as in mac1..mac2:40ms."
        raise ConfigError(f"link {text!r}: nodes have no numbers here", advice=advice)
    for number in numbers:
        if number >= len(members):
            last = len(members) - 1
            raise ConfigError(f"link {text!r}: there is no engine {number}", advice=f"They are numbered 0 to {last}.")
    return frozenset(members[number] for number in numbers)


def _figure(count: int, units: dict[str, int], space: str) -> str:
    """`count` in the largest unit of which there is at least one, or else in the smallest."""
    name = next((name for name in reversed(units) if count >= units[name]), next(iter(units)))
    return f"{count / units[name]:.15g}{space}{name}"
