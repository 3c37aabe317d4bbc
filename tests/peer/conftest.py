"""One `net listen` a suite and file of tests; the secrets' files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.peer import ends


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return ends.secret_files(tmp_path_factory.mktemp("secrets"))


@pytest.fixture(scope="module")
def listener(files: dict[str, str]) -> Iterator[ends.Listener]:
    """Both secrets are good here, suite 1. When its tests are over it must be as it was before them."""
    with ends.net_listen(files, "--previous-secret-file", files["older"], "--rekey-every", "5") as running:
        yield running
        running.check_base()
