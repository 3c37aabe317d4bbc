"""What was measured between the nodes of a cluster, and what is slow about it. Pure.

`net.measuring.all_pairs` measures and fills a `Mesh`; `warnings` judges it by comparison: with what other pairs do,
with the other direction, with what the interfaces say they can, and with a better way that the two have in common.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxcel_nb.cluster.paths import TITLES, routes
from mlxcel_nb.cluster.places import LOOPBACK, PREFERENCE, VPN, WIFI, Interface, Place
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.net.measuring.pair import Measured
from mlxcel_nb.util.units import rate_text, trip_text

HERE = "here"
"""The row of whoever asked: a notebook's kernel, or a shell."""

SLOW = 3.0
"""A pair is slow with a third of the median's rate or three times its round trip; lopsided likewise."""

NOTICED_S = 200e-6
"""Round trips differ by as much as this on one switch, by chance and by load."""

FULL = 0.7
"""With this share of its interface's speed a slow path is at its limit."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One direction between two nodes: `source` dialled and sent.

    Args:
        ours, theirs: the IP addresses at both ends, "" where they are not known.
        shape: what the link is made to be like, in words; "" for a link as it is.
        error: why there is no measurement, instead of one.
        advice: what to do about that, "" where nobody knows.
    """

    source: str
    target: str
    measured: Measured | None = None
    ours: str = ""
    theirs: str = ""
    shape: str = ""
    error: str = ""
    advice: str = ""

    @property
    def failure(self) -> str:
        """Why there is no measurement and what to do, as an error says it; a link that was made slow is said to be."""
        shaped = f"The link is shaped {self.shape}." if self.shape else ""
        return str(MlxcelError(self.error, advice=" ".join(filter(None, (self.advice, shaped))) or None))


@dataclass(frozen=True, kw_only=True)
class SlowPath:
    """A path that is slow, why one thinks so, and what to do.

    Args:
        figure: what is wrong: "rate", "trip", or "path" for a way that is not the best there is.
    """

    source: str
    target: str
    figure: str
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.source} to {self.target}: {self.what}. {self.advice}"


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All pairs.

    Args:
        nodes: in the order of the file or the cluster; `HERE` is first where it was measured as well.
        places: what nodes told of their interfaces.
    """

    nodes: tuple[str, ...]
    pairs: tuple[Pair, ...]
    places: Mapping[str, Place] = field(default_factory=dict)

    def pair(self, source: str, target: str) -> Pair | None:
        return next((pair for pair in self.pairs if (pair.source, pair.target) == (source, target)), None)

    @property
    def failed(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.error]

    def median(self, figure: Callable[[Measured], float]) -> float | None:
        """Of all pairs between nodes that were measured."""
        values = [figure(pair.measured) for pair in self.pairs if pair.measured and pair.source != HERE]
        return statistics.median(values) if values else None

    def interface(self, node: str, ip: str) -> Interface | None:
        """The interface of `node` that has the address `ip`."""
        place, bare = self.places.get(node), ip.partition("%")[0]
        if place is None or not bare:
            return None
        return next(
            (each for each in place.interfaces if any(a.partition("/")[0] == bare for a in each.addresses)), None
        )

    def kind(self, pair: Pair) -> str | None:
        """The kind of a pair's path: the lesser of its two ends, loopback within a host; None if it is not known."""
        if pair.ours and pair.ours == pair.theirs:
            return LOOPBACK
        ends = [self.interface(pair.source, pair.ours), self.interface(pair.target, pair.theirs)]
        kinds = [end.kind for end in ends if end is not None]
        if LOOPBACK in kinds:
            return LOOPBACK
        known = [kind for kind in kinds if kind in PREFERENCE]
        return max(known, key=PREFERENCE.index) if known else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`."""
        return {
            "nodes": list(self.nodes),
            "pairs": [
                {
                    "from": pair.source,
                    "to": pair.target,
                    **(pair.measured.to_dict() if pair.measured else {}),
                    "error": pair.error or None,
                    "advice": pair.advice or None,
                    "path": self.kind(pair),
                    "shape": pair.shape or None,
                    "addresses": [pair.ours, pair.theirs],
                }
                for pair in self.pairs
            ],
            "median_rtt_s": self.median(lambda m: m.rtt_s),
            "median_bytes_per_s": self.median(lambda m: m.bytes_per_s),
            "warnings": [
                {"from": w.source, "to": w.target, "figure": w.figure, "what": w.what, "advice": w.advice}
                for w in warnings(self)
            ],
        }


def warnings(mesh: Mesh) -> list[SlowPath]:
    """Whatever is slow, each figure of each direction once, in the order of the pairs and the surest reason first."""
    found: dict[tuple[str, str, str], SlowPath] = {}
    for pair in mesh.pairs:
        if pair.measured is not None:
            for each in _reasons(mesh, pair, pair.measured):
                found.setdefault((each.source, each.target, each.figure), each)
    return list(found.values())


def _reasons(mesh: Mesh, pair: Pair, measured: Measured) -> Iterator[SlowPath]:
    """Why a pair's path is slow, the surest reason first.

    The way between two nodes is not judged by those from here, which may be far away; those are judged by all others.
    """

    def warn(figure: str, what: str, advice: str) -> SlowPath:
        if pair.shape:
            advice = f"The link is shaped {pair.shape}."
        return SlowPath(source=pair.source, target=pair.target, figure=figure, what=what, advice=advice)

    if better := _better(mesh, pair):
        yield warn("path", *better)
    others = [
        other.measured
        for other in mesh.pairs
        if other.measured
        and (other.source != HERE or pair.source == HERE)
        and {other.source, other.target} != {pair.source, pair.target}
    ]
    if others:
        rate = statistics.median(other.bytes_per_s for other in others)
        if measured.bytes_per_s * SLOW < rate:
            what = f"{rate_text(measured.bytes_per_s)}, where the median of the others is {rate_text(rate)}"
            yield warn("rate", what, _limit(mesh, pair, measured) or _LOOK)
        trip = statistics.median(other.rtt_s for other in others)
        if measured.rtt_s > SLOW * trip and measured.rtt_s - trip > NOTICED_S:
            what = f"a round trip takes {trip_text(measured.rtt_s)}, where the median of the others is "
            yield warn("trip", what + trip_text(trip), _FAR)
    back = mesh.pair(pair.target, pair.source)
    if back and back.measured and measured.bytes_per_s * SLOW < back.measured.bytes_per_s:
        what = f"{rate_text(measured.bytes_per_s)} this way and {rate_text(back.measured.bytes_per_s)} the other"
        yield warn("rate", what, _limit(mesh, pair, measured) or _LOPSIDED)
    kind = mesh.kind(pair)
    if kind in (WIFI, VPN) and (limit := _limit(mesh, pair, measured)):
        yield warn("path", f"{rate_text(measured.bytes_per_s)} by {TITLES[kind]}", limit)


def summary(mesh: Mesh, slow: list[SlowPath]) -> list[str]:
    """Warnings as lines, one for a path and one for both directions where it holds for both.

    Where every path of one node is too slow, and no other is, that is one line too.
    """
    rates = {(pair.source, pair.target): pair.measured.bytes_per_s for pair in mesh.pairs if pair.measured}
    rated = [each for each in slow if each.figure == "rate"]
    ends = {(each.source, each.target) for each in rated}
    shapes = {pair.shape for pair in mesh.pairs if (pair.source, pair.target) in ends}
    for node in mesh.nodes:
        touching = {way for way in rates if node in way}
        asked = {way for way in touching if HERE not in way or node == HERE}  # the way from here need not be slow too
        others = [rates[way] for way in rates if way not in touching and HERE not in way]
        if others and len(ends) > 2 and len(shapes) == 1 and asked and asked <= ends <= touching:
            its, ways = [rates[way] for way in ends], "from it" if node == HERE else "to and from it"
            what = (
                f"every path {ways} is slow, {rate_text(min(its))} to {rate_text(max(its))}, where the median "
                f"of the others is {rate_text(statistics.median(others))}"
            )
            rest = (str(each) for each in _once(slow) if each.figure != "rate")
            return [f"{node}: {what}. {rated[0].advice}", *rest]
    return [str(each) for each in _once(slow)]


def _once(slow: Iterable[SlowPath]) -> Iterator[SlowPath]:
    """The surest reason of each direction; what is no matter of direction is not said again for the way back."""
    told: set[tuple[str, str]] = set()
    for each in slow:
        back = (each.target, each.source) in told
        if (each.source, each.target) not in told and (each.figure == "rate" or not back):
            told.add((each.source, each.target))
            yield each


_LOOK = "Look at its cable, its switch port, and at what else uses them; then measure again."
_FAR = "Look for Wi-Fi, a VPN or a distant host on its way, and for power saving of its interface."
_LOPSIDED = "Look at duplex settings, at the cable, and at what else the sender is sending."


def _better(mesh: Mesh, pair: Pair) -> tuple[str, str] | None:
    """A path of a better kind that the two have in common and do not use."""
    used, ours, theirs = mesh.kind(pair), mesh.places.get(pair.source), mesh.places.get(pair.target)
    if used not in PREFERENCE or ours is None or theirs is None:
        return None
    try:
        best = routes(ours, theirs)[0]
    except MlxcelError:
        return None
    if best.kind not in PREFERENCE or PREFERENCE.index(best.kind) >= PREFERENCE.index(str(used)):
        return None
    what = f"goes by {TITLES[str(used)]}, though {best} leads there too"
    return what, f"Give {pair.target} the address {best.address.host}."


def _limit(mesh: Mesh, pair: Pair, measured: Measured) -> str | None:
    """What the interfaces say of a path that is slow."""
    ends = [
        (pair.source, mesh.interface(pair.source, pair.ours)),
        (pair.target, mesh.interface(pair.target, pair.theirs)),
    ]
    known = [(node, end) for node, end in ends if end is not None]
    slow = [(node, end) for node, end in known if end.speed_bps and measured.bytes_per_s * 8 >= FULL * end.speed_bps]
    if slow:
        node, end = min(slow, key=lambda each: each[1].speed_bps)
        speed = rate_text(end.speed_bps / 8)
        return f"{end.name} of {node} runs at {speed}: look at its cable, its port and the switch's."
    for node, end in known:
        if end.kind in (WIFI, VPN):
            return f"{end.name} of {node} is {TITLES[end.kind]}: use a cable, or bring the two closer together."
    return None
