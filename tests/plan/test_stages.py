"""The split of layers is the best there is: compared with all splits."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from mlxcel_nb.plan.stages import split_layers


def all_splits(n_layers: int, n_stages: int) -> list[tuple[tuple[int, int], ...]]:
    borders = itertools.combinations(range(1, n_layers), n_stages - 1)
    return [tuple(itertools.pairwise((0, *between, n_layers))) for between in borders]


@pytest.mark.parametrize("seed", range(20))
def test_no_split_has_a_cheaper_dearest_stage_or_as_cheap_and_more_even(seed: int) -> None:
    rng = random.Random(seed)
    n_layers, n_stages = rng.randint(3, 9), rng.randint(1, 3)
    layers = [rng.randint(1, 9) for _ in range(n_layers)]
    speed = [rng.choice([1, 2, 3]) for _ in range(n_stages)]
    most = [rng.choice([math.inf, 20, 12]) for _ in range(n_stages)]

    def cost(stage: int, a: int, b: int) -> float:
        held = sum(layers[a:b])
        return math.inf if held > most[stage] else held / speed[stage]

    def worth(split: tuple[tuple[int, int], ...]) -> tuple[float, float]:
        costs = [cost(stage, a, b) for stage, (a, b) in enumerate(split)]
        return round(max(costs), 9), round(sum(c * c for c in costs), 9)

    best = min(map(worth, all_splits(n_layers, n_stages)))
    found = split_layers(n_layers, n_stages, cost)
    if best[0] == math.inf:
        assert found is None
    else:
        assert found is not None
        assert worth(found) == best


def test_equal_stages_get_equal_layers() -> None:
    split = split_layers(7, 3, lambda _stage, a, b: float(b - a))
    assert split is not None
    assert sorted(b - a for a, b in split) == [2, 2, 3]


def test_more_stages_than_layers_cannot_be() -> None:
    assert split_layers(2, 3, lambda _stage, a, b: float(b - a)) is None
