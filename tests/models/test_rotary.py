"""Rotary positions on a processor against MLX's own: to the bit, and never those of an earlier step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from mlxcel_nb.models.loading import load_part
from mlxcel_nb.models.rotary import Angles, Rotary, stand_in
from mlxcel_nb.plan.part import whole
from tests.tiny import make_tiny


def pair(dims: int = 16, **options: Any) -> tuple[nn.RoPE, Rotary]:
    rope = nn.RoPE(dims, **options)
    return rope, Rotary(rope, Angles(rope))


def same(a: mx.array, b: mx.array) -> bool:
    return mx.array_equal(a, b).item() is True


@pytest.mark.parametrize("options", [{}, {"base": 500.0}, {"scale": 0.25}])
@pytest.mark.parametrize("width", [16, 24])
def test_it_turns_as_mlx_does(options: dict[str, float], width: int) -> None:
    rope, ours = pair(**options)
    for length, offset in ((1, 0), (1, 700), (40, 0), (40, 3), (7, 3), (40, 3)):
        for heads in (3, 1):
            x = mx.random.normal((2, heads, length, width))
            assert same(ours(x, offset=offset), rope(x, offset=offset)), (length, offset)


def test_rows_of_a_batch_have_their_own_positions() -> None:
    rope, ours = pair()
    for offsets in ([0, 5, 900], [1, 6, 901]):
        offset = mx.array(offsets)
        for length in (1, 4, 1):
            x = mx.random.normal((3, 2, length, 16))
            assert same(ours(x, offset=offset), rope(x, offset=offset))  # type: ignore[arg-type]  # MLX takes both


def test_positions_that_are_counted_up_in_place_are_read_anew_in_the_next_forward() -> None:
    rope, ours = pair()
    offset = mx.array([7])
    x = mx.random.normal((1, 2, 1, 16))
    for _ in range(3):
        assert same(ours(x, offset=offset), rope(x, offset=offset))  # type: ignore[arg-type]
        offset += 1
        ours._angles.forget()


def test_after_a_forward_nothing_is_held(tmp_path: Path) -> None:
    part = load_part(make_tiny(tmp_path), whole(5))
    assert part.angles
    for length in (5, 1):
        mx.eval(part.forward(mx.array([[*range(length)]]), part.make_cache()))
        assert all(angles._latest is None for angles in part.angles)


def test_what_it_does_not_know_is_left_to_mlx() -> None:
    rope, ours = pair()
    x = mx.random.normal((1, 2, 5, 16)).astype(mx.bfloat16)
    assert same(ours(x, offset=2), rope(x, offset=2))


def test_it_stands_where_a_model_turns_in_halves() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope, self.other, self.pairs = nn.RoPE(8), nn.RoPE(8, base=5.0), nn.RoPE(8, traditional=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [Layer(), Layer()]

    model = Model()
    assert len(stand_in(model)) == 2
    first, second = model.layers
    assert isinstance(first.rope, Rotary) and isinstance(first.other, Rotary) and isinstance(second.rope, Rotary)
    assert type(first.pairs) is nn.RoPE
    assert (first.other.dims, first.other.base, first.other.scale) == (8, 5.0, 1.0)
    assert not stand_in(model), "ours stay as they are"
    assert first.rope._angles is second.rope._angles is not first.other._angles
