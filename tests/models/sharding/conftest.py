"""What tests over the catalogue share."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture(scope="module")
def not_compiled() -> Iterator[None]:
    """MLX's `compile` calls a C++ compiler for each fused kernel on a CPU: minutes over all entries, for nothing."""
    mx.disable_compile()
    yield
    mx.enable_compile()
