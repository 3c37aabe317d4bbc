"""How many layers each stage gets, on nodes that differ: by time where speeds are known, else by memory. Pure.

Both are one problem. Each stage has a cost that grows with every layer it is given; the dearest stage should cost as
little as can be, and among splits as good as that the costs should be as even as can be. It is solved exactly, by
dynamic programming over the borders between stages, in O(stages x layers^2).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from mlxcel_nb.cluster.layout import LayerRange
from mlxcel_nb.plan.estimate import PROCESS, Load, activations, makes_logits
from mlxcel_nb.plan.facts import ModelFacts
from mlxcel_nb.plan.nodes import Node, Speed

Cost = Callable[[int, int, int], float]
"""Of stage s with layers a to b: grows with b; infinite where they do not fit."""

SLACK = 1e-9
"""Relative; two sums of the same figures may differ by the order they were added in."""


def split_layers(n_layers: int, n_stages: int, cost: Cost) -> tuple[LayerRange, ...] | None:
    """Contiguous ranges, one a stage, or None where no split has a finite cost."""
    if not 1 <= n_stages <= n_layers:
        return None
    table = [
        {
            (a, b): cost(stage, a, b)
            for a in _starts(stage, n_layers, n_stages)
            for b in _ends(stage, a, n_layers, n_stages)
        }
        for stage in range(n_stages)
    ]
    dearest = _best(table, n_layers, max)
    if dearest is None:
        return None
    bound = dearest[0] * (1 + SLACK)
    within = [{span: value * value for span, value in row.items() if value <= bound} for row in table]
    even = _best(within, n_layers, lambda one, other: one + other)
    assert even is not None  # the split that met the bound is among them
    return even[1]


def _starts(stage: int, n_layers: int, n_stages: int) -> range:
    """Where a stage may begin, so that those before and after it get a layer each."""
    return range(1) if stage == 0 else range(stage, n_layers - (n_stages - stage) + 1)


def _ends(stage: int, start: int, n_layers: int, n_stages: int) -> Sequence[int]:
    left = n_stages - stage - 1
    return [n_layers] if left == 0 else range(start + 1, n_layers - left + 1)


def _best(
    table: Sequence[dict[LayerRange, float]], n_layers: int, join: Callable[[float, float], float]
) -> tuple[float, tuple[LayerRange, ...]] | None:
    """The path from layer 0 to the last whose joined costs are least."""
    reached: dict[int, tuple[float, tuple[LayerRange, ...]]] = {0: (0.0, ())}
    for row in table:
        found: dict[int, tuple[float, tuple[LayerRange, ...]]] = {}
        for (a, b), value in row.items():
            if a in reached and value < math.inf:
                total = join(reached[a][0], value)
                if b not in found or total < found[b][0]:
                    found[b] = (total, (*reached[a][1], (a, b)))
        reached = found
    return reached.get(n_layers)


class StageCosts:
    """What layers cost on the nodes of each stage, looked up in running sums.

    Args:
        nodes, speeds: of each member, stage-major.
    """

    def __init__(
        self, facts: ModelFacts, nodes: Sequence[Node], speeds: Sequence[Speed], tp: int, pp: int, load: Load
    ) -> None:
        self._nodes, self._speeds, self._tp, self._pp = nodes, speeds, tp, pp
        self._ranks = facts.ranks[tp]
        self._laps = facts.laps
        self._held = [
            _running(layer.weights + load.sequences * layer.cache_at(load.context) for layer in rank.layers)
            for rank in self._ranks
        ]
        self._read = [
            _running(layer.active + layer.cache_at(load.context) for layer in rank.layers) for rank in self._ranks
        ]
        whole = (0, facts.n_layers)  # the widest layer may be anywhere: an estimate from above
        self._beside = [
            [
                PROCESS
                + self._ranks[number].ends.of(stage, pp)
                + activations(facts, self._ranks[number], whole, tp, load, head=makes_logits(facts, stage, number, pp))
                for number in range(tp)
            ]
            for stage in range(pp)
        ]

    def memory(self, stage: int, a: int, b: int) -> float:
        """The largest share of its memory that a rank takes; above 1 it does not fit."""
        return max(
            (self._beside[stage][number] + self._held[number][b] - self._held[number][a])
            / self._nodes[stage * self._tp + number].memory
            for number in range(self._tp)
        )

    def time(self, stage: int, a: int, b: int) -> float:
        """Seconds of the slowest rank for a token; infinite where it does not fit."""
        if self.memory(stage, a, b) > 1:
            return math.inf
        slowest = 0.0
        for number, rank in enumerate(self._ranks):
            speed = self._speeds[stage * self._tp + number]
            read = self._read[number][b] - self._read[number][a] + (rank.head if stage == self._pp - 1 else 0)
            slowest = max(slowest, read / speed.bandwidth + self._laps * (b - a) * speed.per_layer)
        return slowest


def _running(values: Iterable[int]) -> list[int]:
    """Sums of the first none, one, two and so on."""
    return [0, *itertools.accumulate(values)]
