"""What a node's hellos and status say of its host, from facts that a probe would have found."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlxcel_nb.cluster.transports import RDMA_BIT, TCP_BIT, HostFacts
from mlxcel_nb.net.ucx import library
from mlxcel_nb.runtime.surroundings import Surroundings

ADAPTER = {"system": "Linux", "rdma": "on", "rdma_devices": ("mlx5_0",)}


def known(transport: str = "auto", *, listens: str = "10.0.0.1", **facts: Any) -> Surroundings:
    """The surroundings of a node, once its probe has answered."""

    async def ask() -> Surroundings:
        made = Surroundings("a", transport=transport, probe=lambda: HostFacts(**facts))
        made.listen(listens, 9000)
        await made.place()
        return made

    return asyncio.run(ask())


@pytest.mark.skipif(library.missing() != "", reason=library.missing() or "UCX is here")  # UCX is what offers it
def test_rdma_is_offered_where_an_adapter_and_ucx_are() -> None:
    assert known(**ADAPTER).transports == TCP_BIT | RDMA_BIT


@pytest.mark.parametrize(
    ("transport", "facts", "reason"),
    [
        ("auto", {"system": "Linux"}, "this host has no InfiniBand or RoCE adapter that is up"),
        ("auto", {**ADAPTER, "system": "Darwin"}, "this host has no InfiniBand or RoCE adapter that is up"),
        ("thunderbolt", ADAPTER, "this node's transport is set to thunderbolt"),
        ("tcp", ADAPTER, "this node's transport is set to tcp"),
    ],
)
def test_rdma_is_not_offered_and_the_reason_is_known(transport: str, facts: dict[str, Any], reason: str) -> None:
    host = known(transport, **facts)
    assert host.transports == TCP_BIT
    assert host.no_rdma == reason


def test_rdma_that_was_asked_for_in_vain_shows_in_status() -> None:
    (*_, last) = known("rdma", system="Linux").report()["advice"]
    assert last == "RDMA was asked for and is not used: this host has no InfiniBand or RoCE adapter that is up."


def test_a_node_on_loopback_asks_nothing_and_offers_tcp() -> None:
    host = known(listens="127.0.0.1", **ADAPTER)
    assert host.transports == TCP_BIT
    assert host.report() == {}
