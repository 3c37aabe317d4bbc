"""What two runs of a model have to agree in, and where they first do not. Pure; any thread; NumPy alone.

A model is run twice in each layout. *Free-running* it goes on from its own tokens, as in any answer. *Teacher-forced*
it is fed what the whole model made, so that its logits can be compared at every position, whatever its own choice would
have been. Layers are compared in the teacher-forced run, by the sketches of `recording`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

EQUAL = 1e-4
"""Largest difference of logits in float32 that a split may make: sums are taken in another order."""

LARGE = 10.0
"""Logits are floats: where the largest exceeds this, what is allowed grows with it."""

SAME_LAYER = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""A layer's output differs when, at some position, it is farther off than this share of its length. Rounding gathers
from layer to layer; these are beyond what it comes to, and far below what a wrong weight does."""

Layers = Mapping[int, np.ndarray]
"""By a layer's index: a sketch of its output, (positions, K)."""


@dataclass(frozen=True)
class Record:
    """What one run gave, for B sequences.

    Args:
        tokens: made free-running, (B, N).
        logits: teacher-forced, float32 (B, P, V), at positions that are the same in every run.
        predicted: where among those P positions the N tokens are told.
        layers: by the name of each member, what it saw of its layers.
    """

    tokens: np.ndarray
    logits: np.ndarray
    predicted: slice
    layers: Mapping[str, Layers] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One layout beside the whole model.

    Args:
        dtype: of the activations.
        judged: equality is promised: float32, and no quantised weights.
        tokens: compared, of each sequence.
        token: the first that differs free-running, from 0; None when all are the same.
        forced_token: the same teacher-forced: the first position at which another token was likeliest.
        delta: max |difference of logits|; infinite where one of the two is not a number.
        allowed: what `delta` may be.
        layer: the first whose output differs; None where there is none.
        member: where that was seen, e.g. "engine-1".
        layer_deltas: of each layer the largest relative difference that a member saw.
        refused: why this layout is not taken, with nothing to compare.
        failed: what it raised on the way.
    """

    layout: str
    dtype: str = ""
    judged: bool = True
    tokens: int = 0
    token: int | None = None
    forced_token: int | None = None
    delta: float = 0.0
    allowed: float = EQUAL
    layer: int | None = None
    member: str = ""
    layer_deltas: tuple[float, ...] = ()
    refused: str = ""
    failed: str = ""

    @property
    def equal(self) -> bool:
        """The same tokens, and in float32 the same logits as well."""
        if self.refused or self.failed or self.token is not None or self.forced_token is not None:
            return False
        return self.delta <= self.allowed if self.judged else math.isfinite(self.delta)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; a difference that is no number is None."""
        deltas = [_number(delta) for delta in self.layer_deltas]
        return {**asdict(self), "equal": self.equal, "delta": _number(self.delta), "layer_deltas": deltas}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Self:
        known = {name: value for name, value in told.items() if name != "equal"}
        known["layer_deltas"] = tuple(math.inf if each is None else each for each in told["layer_deltas"])
        return cls(**{**known, "delta": math.inf if told["delta"] is None else told["delta"]})


def _number(delta: float) -> float | None:
    return delta if math.isfinite(delta) else None


def compare(layout: str, whole: Record, split: Record, *, dtype: str, judged: bool) -> Verdict:
    """How `split` differs from `whole`."""
    deltas, seen_by = layer_differences(whole, split)
    limit = SAME_LAYER.get(dtype, SAME_LAYER["bfloat16"])
    layer = next((index for index, delta in enumerate(deltas) if not delta <= limit), None)
    delta = logit_difference(whole.logits, split.logits)
    told = [record.logits[:, record.predicted].argmax(-1) for record in (whole, split)]
    return Verdict(
        layout=layout,
        dtype=dtype,
        judged=judged,
        tokens=whole.tokens.shape[1],
        token=first_difference(whole.tokens, split.tokens),
        forced_token=first_difference(*told),
        delta=delta,
        allowed=allowed(whole.logits),
        layer=layer,
        member=seen_by[layer] if layer is not None else "",
        layer_deltas=tuple(deltas),
    )


def merge(verdicts: Sequence[Verdict]) -> Verdict:
    """The worst of several prompts or batch sizes that were run in one layout."""

    def first(name: str) -> int | None:
        found = [value for each in verdicts if (value := getattr(each, name)) is not None]
        return min(found, default=None)

    layer = first("layer")
    worst = max(verdicts, key=lambda each: each.delta / each.allowed)
    return Verdict(
        layout=worst.layout,
        dtype=worst.dtype,
        judged=worst.judged,
        tokens=worst.tokens,
        token=first("token"),
        forced_token=first("forced_token"),
        delta=worst.delta,
        allowed=worst.allowed,
        layer=layer,
        member=next((each.member for each in verdicts if each.layer == layer and each.member), ""),
        layer_deltas=tuple(max(each) for each in zip(*(each.layer_deltas for each in verdicts), strict=True)),
    )


def first_difference(ours: np.ndarray, theirs: np.ndarray) -> int | None:
    """The first position at which any sequence of (B, N) differs; a shorter one differs where it ends."""
    n = min(ours.shape[1], theirs.shape[1])
    found = np.flatnonzero((ours[:, :n] != theirs[:, :n]).any(axis=0))
    if found.size:
        return int(found[0])
    return None if ours.shape[1] == theirs.shape[1] else n


def logit_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Max |difference|. Where a model rules a token out with minus infinity, both have to."""
    if ours.shape != theirs.shape:
        return math.inf
    given = np.isfinite(ours)
    same_elsewhere = np.array_equal(ours[~given], theirs[~given])
    if not same_elsewhere or not np.isfinite(theirs[given]).all():
        return math.inf
    return float(np.abs(ours[given] - theirs[given]).max(initial=0.0))


def allowed(logits: np.ndarray) -> float:
    """What float32 may differ by, for logits of this size."""
    largest = float(np.abs(logits[np.isfinite(logits)]).max(initial=0.0))
    return EQUAL * max(1.0, largest / LARGE)


def layer_differences(whole: Record, split: Record) -> tuple[list[float], list[str]]:
    """For each layer of the whole the largest relative difference, and the member that saw it.

    A layer that nobody has watched in either run counts as the same.
    """
    reference: Layers = next(iter(whole.layers.values()), {})
    deltas, members = [0.0] * (max(reference, default=-1) + 1), [""] * (max(reference, default=-1) + 1)
    for member, layers in split.layers.items():
        for index, sketch in layers.items():
            if index in reference and not (delta := relative_difference(reference[index], sketch)) <= deltas[index]:
                deltas[index], members[index] = delta, member
    return deltas, members


def relative_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest |difference| / |ours| over positions, both (positions, K); infinite where that is no number."""
    if ours.shape != theirs.shape:
        return math.inf
    length = np.maximum(np.linalg.norm(ours, axis=-1), np.finfo(np.float32).tiny)
    found = float((np.linalg.norm(ours - theirs, axis=-1) / length).max(initial=0.0))
    return found if np.isfinite(found) else math.inf
