"""How one model is laid over nodes: pipeline stages by tensor ranks, or expert-parallel ranks. Pure.

The mesh is stage-major: member `stage * width + rank` is rank `rank` of pipeline stage `stage`. Member 0 leads: it
decides every step. Rank 0 of the last stage samples. With one stage both are the same node.

Expert-parallel ranks each have a whole model but for its experts, of which each has some. Every sequence is at home on
one of them, which keeps its cache and samples its tokens; the experts of all answer for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

from mlxcel_nb.errors import ConfigError

LayerRange = tuple[int, int]
"""First layer and one past the last."""

SPELLING = 'Write them like "tp2", "pp3", "tp2xpp2" or "ep2".'


class Sizes(NamedTuple):
    """How many ranks and stages a layout has, whatever the model's layers are."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def members(self) -> int:
        """Nodes it needs."""
        return self.tp * self.pp * self.ep


def check_replicas(dp: int) -> None:
    """Refuse a number of replicas that is none.

    Raises:
        ConfigError: with what to write.
    """
    if not isinstance(dp, SupportsIndex):
        raise ConfigError(f"dp={dp!r:.40} is not a whole number", advice="Write it like dp=2.")
    if dp < 1:
        raise ConfigError(f"{dp} replicas", advice="Ask for at least one.")


def replicated(name: str, dp: int) -> str:
    """The name of `dp` replicas of a layout: dp2xtp2; dp2 where each is on a node of its own."""
    if dp == 1:
        return name
    return f"dp{dp}" if name == "single" else f"dp{dp}x{name}"


_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True)
class Layout:
    """The mesh of one model instance.

    Args:
        stages: one half-open layer range per pipeline stage, contiguous from layer 0.
        tp: tensor ranks in every stage.
        ep: expert-parallel ranks; more than one only where there are no tensor ranks and no further stages.
    """

    stages: tuple[LayerRange, ...]
    tp: int = 1
    ep: int = 1

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def width(self) -> int:
        """Members of a stage."""
        return self.tp * self.ep

    @property
    def size(self) -> int:
        """Nodes the layout needs."""
        return self.pp * self.width

    @property
    def n_layers(self) -> int:
        return self.stages[-1][1]

    @property
    def name(self) -> str:
        """Short name as the command line spells it: single, tp2, pp3, tp2xpp2, ep2."""
        parts = [f"{kind}{n}" for kind, n in (("tp", self.tp), ("pp", self.pp), ("ep", self.ep)) if n > 1]
        return "x".join(parts) or "single"

    def stage_of(self, member: int) -> int:
        return member // self.width

    def rank_of(self, member: int) -> int:
        return member % self.width

    def member(self, stage: int, rank: int) -> int:
        return stage * self.width + rank

    @property
    def sampler(self) -> int:
        """The member that holds the logits and samples; of expert-parallel ranks the first, see `sampler_at`."""
        return self.sampler_at(0)

    def sampler_at(self, home: int) -> int:
        """The member that samples for a sequence that is at home on rank `home`; tensor ranks have but one home, 0."""
        return self.member(self.pp - 1, home)

    def runs(self, member: int, home: int) -> bool:
        """Whether `member` computes a sequence at home on rank `home`, or only its experts answer for it."""
        return self.ep == 1 or self.rank_of(member) == home

    def edges(self) -> list[tuple[int, int]]:
        """Pairs of members that need a link, the dialling one first (the lower).

        Ranks of a stage exchange partial sums, or tokens for their experts; a stage hands its output to the same rank
        of the next, the last to the first where layers run several times over; the leader sends step plans to all.
        """
        pairs: set[tuple[int, int]] = {(0, m) for m in range(1, self.size)}
        for stage in range(self.pp):
            ranks = [self.member(stage, r) for r in range(self.width)]
            pairs.update((a, b) for a in ranks for b in ranks if a < b)
            if stage + 1 < self.pp:
                pairs.update((m, m + self.width) for m in ranks)
            if stage > 1:
                pairs.update((self.rank_of(m), m) for m in ranks if stage + 1 == self.pp)
        return sorted(pairs)

    def to_dict(self) -> dict[str, Any]:
        return {"stages": [list(s) for s in self.stages], "tp": self.tp, "ep": self.ep}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Layout:
        try:
            stages = tuple((int(a), int(b)) for a, b in data["stages"])
            layout = cls(stages, int(data["tp"]), int(data.get("ep", 1)))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a layout: {data!r}") from error
        _check_cover(layout.stages, layout.n_layers if stages else 0)
        _check_ranks(layout)
        return layout


def split_evenly(n_layers: int, pp: int) -> tuple[LayerRange, ...]:
    """`n_layers` in `pp` contiguous ranges whose lengths differ by at most one, the longer ones first.

    Raises:
        ConfigError: more stages than layers.
    """
    if pp < 1:
        raise ConfigError(f"{pp} pipeline stages", advice="Ask for at least one.")
    if pp > n_layers:
        what = f"{pp} pipeline stages for a model of {n_layers} layers"
        raise ConfigError(what, advice=f"Ask for 1 to {n_layers} stages.")
    base, extra = divmod(n_layers, pp)
    ranges, start = [], 0
    for stage in range(pp):
        end = start + base + (stage < extra)
        ranges.append((start, end))
        start = end
    return tuple(ranges)


def parse_layers(text: str, n_layers: int) -> tuple[LayerRange, ...]:
    """Manual ranges as users write them, both ends included: "0-3,4-29" is 4 and 26 layers.

    Raises:
        ConfigError: not a list of ranges, or ranges that leave a gap, overlap, or miss the last layer.
    """
    ranges = [parse_range(part.strip()) for part in text.split(",")]
    _check_cover(tuple(ranges), n_layers)
    return tuple(ranges)


def parse_range(text: str) -> LayerRange:
    """One range as users write it: "4-29", or "4" for a single layer.

    Raises:
        ConfigError: not of that form.
    """
    match = _RANGE.fullmatch(text)
    if not match:
        raise ConfigError(f"{text[:64]!r} is not a layer range", advice='Write them like "0-15,16-29".')
    return int(match[1]), int(match[2] or match[1]) + 1


def parse_name(text: str) -> Sizes:
    """Sizes of a layout as `Layout.name` spells it, in any order: "tp2", "pp3xtp2", "ep2", "single".

    Raises:
        ConfigError: not of that form, or ranks of two kinds that do not go together.
    """
    sizes = Sizes()
    words = [] if text == "single" else text.split("x")
    for word in words:
        if re.fullmatch(r"dp[0-9]{1,4}", word):
            what = f"{text[:64]}: data parallel replicas are whole copies, each of which computes as one alone does"
            raise ConfigError(what, advice=f"Name the layout of one of them. {SPELLING}")
        match = re.fullmatch(r"(tp|pp|ep)([1-9][0-9]{0,3})", word)
        if not match or getattr(sizes, match[1]) > 1:
            raise ConfigError(f"{text[:64]!r} is not a layout", advice=SPELLING)
        sizes = sizes._replace(**{match[1]: int(match[2])})
    check_alone(sizes)
    return sizes


class Apart(NamedTuple):
    """A prefill and a decode group, by the names of their layouts."""

    readers: str
    answerers: str

    @property
    def name(self) -> str:
        """As `parse_apart` takes it."""
        if self.readers == self.answerers:
            return "di" if self.readers == "single" else f"di:{self.readers}"
        return f"di:{self.readers}+{self.answerers}"


def parse_apart(text: str) -> Apart | None:
    """Groups that read prompts and answer them, as "di", "di:tp2" for both alike, "di:tp2+pp2"; None for other names.

    Raises:
        ConfigError: what should be a layout is none.
    """
    head, _, rest = text.partition(":")
    if head != "di":
        return None
    readers, _, answerers = rest.partition("+")
    readers = readers or "single"
    found = Apart(readers, answerers or readers)
    for each in found:
        parse_name(each)
    return found


def members_of(text: str) -> int:
    """Nodes that a layout takes, by its name, or both groups of `parse_apart`'s."""
    apart = parse_apart(text)
    return parse_name(text).members if apart is None else sum(parse_name(each).members for each in apart)


def check_alone(sizes: Sizes) -> None:
    """Refuse expert-parallel ranks together with a split that they do not go with.

    Raises:
        ConfigError: which one, and why.
    """
    if sizes.ep > 1 and sizes.tp > 1:
        what = (
            f"{sizes.ep} expert-parallel ranks, which have attention whole, and {sizes.tp} tensor ranks, which cut it"
        )
        raise ConfigError(what, advice="Ask for one of the two.")
    if sizes.ep > 1 and sizes.pp > 1:
        what = f"{sizes.ep} expert-parallel ranks in each of {sizes.pp} pipeline stages are not there yet"
        raise ConfigError(what, advice="Ask for one of the two.")


def _check_ranks(layout: Layout) -> None:
    if layout.tp < 1 or layout.ep < 1:
        raise ConfigError(f"{layout.tp} tensor ranks, {layout.ep} expert-parallel ranks", advice="At least one each.")
    check_alone(Sizes(layout.tp, layout.pp, layout.ep))


def _check_cover(ranges: Sequence[LayerRange], n_layers: int) -> None:
    expected = 0
    for first, end in ranges:
        if first != expected or end <= first:
            raise ConfigError(
                f"layer range {first}-{end - 1} does not go on from layer {expected}",
                advice=f"Ranges are contiguous and cover layers 0 to {n_layers - 1}.",
            )
        expected = end
    if expected != n_layers or not ranges:
        raise ConfigError(
            f"layer ranges end at layer {expected - 1}", advice=f"The model's last layer is {n_layers - 1}."
        )


def make_layout(n_layers: int, *, tp: int = 1, pp: int = 1, ep: int = 1, layers: str | None = None) -> Layout:
    """The layout a user asked for.

    Args:
        n_layers: decoder layers of the model.
        layers: manual ranges; their count is the number of stages, and must agree with `pp` when both are given.

    Raises:
        ConfigError: numbers, or layers, that make no layout.
    """
    for name, value in (("tp", tp), ("pp", pp), ("ep", ep)):
        if not isinstance(value, SupportsIndex):
            raise ConfigError(f"{name}={value!r:.40} is not a whole number", advice=f"Write it like {name}=2.")
    if not isinstance(layers, str | None):
        raise ConfigError(f"layers={layers!r:.40} is not a text", advice='Write it like layers="0-15,16-29".')
    for ranks, kind in ((tp, "tensor"), (ep, "expert-parallel")):
        if ranks < 1:
            raise ConfigError(f"{ranks} {kind} ranks", advice="Ask for at least one.")
    stages = split_evenly(n_layers, pp) if layers is None else parse_layers(layers, n_layers)
    if layers is not None and pp not in (1, len(stages)):
        raise ConfigError(f"layers {layers!r} make {len(stages)} stages, but pp is {pp}", advice="Give one of the two.")
    check_alone(Sizes(tp, len(stages), ep))
    return Layout(stages, tp, ep)
