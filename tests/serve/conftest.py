"""A server over real engines, for each file of tests that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.serve.served import Served
from mlxcel_nb.serve.server import ApiServer
from tests.cluster.harness import nothing_left
from tests.tiny import make_tiny


@pytest.fixture(scope="module")
def smollm2_server(smollm2: Path) -> Iterator[ApiServer]:
    """The real model in two stages."""
    with nothing_left(Cluster(2)) as cluster:
        cluster.load(str(smollm2), pp=2)
        with ApiServer(Served(cluster, names=["smollm2", "other-name"]), port=0) as server:
            yield server


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A fast model of no sense, which never ends by itself where `ignore_eos` is set."""
    folder = make_tiny(tmp_path_factory.mktemp("models") / "tiny")
    with nothing_left(Cluster(1)) as cluster:
        cluster.load(str(folder))
        with ApiServer(Served(cluster), port=0) as server:
            yield server
