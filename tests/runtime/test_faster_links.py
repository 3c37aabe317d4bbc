"""Members that offer each other a faster path before they load: all agree, pair by pair, and say why they stay."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator

import pytest

from mlxcel_nb.cluster.transports import RDMA_BIT, TCP_BIT
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.hot.interrupt import Interrupt
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.runtime.loading import speed_up
from tests.net.helpers import detached_pairs

MEMBERS = 3


@contextlib.contextmanager
def sped_up(change: Callable[[Link], None]) -> Iterator[list[HotLink]]:
    """Both ends of every link of three members that have all done what they do before they load."""
    pairs = iter(detached_pairs(MEMBERS))
    links: list[dict[int, HotLink]] = [{} for _ in range(MEMBERS)]
    for a in range(MEMBERS):
        for b in range(a + 1, MEMBERS):
            for me, other, link in zip((a, b), (b, a), next(pairs), strict=True):
                change(link)
                links[me][other] = HotLink(link)
    interrupt = Interrupt()
    with concurrent.futures.ThreadPoolExecutor(MEMBERS) as pool:
        for done in [pool.submit(speed_up, mine, interrupt) for mine in links]:
            done.result(20)
    interrupt.close()
    every = [hot for mine in links for hot in mine.values()]
    try:
        yield every
    finally:
        for hot in every:
            hot.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared memory is used on Linux only")
def test_members_of_one_host_move_to_shared_memory() -> None:
    with sped_up(lambda link: None) as every:
        assert {(hot.link.transport, hot.link.why) for hot in every} == {("shared memory", "")}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared memory is used on Linux only")
def test_members_whose_system_forbids_shared_memory_stay_on_tcp_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose filter refuses the call; `status` shows these words beside the link."""

    def forbidden(_name: str, _flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    with sped_up(lambda link: None) as every:
        why = "no shared memory: this system gives none: Operation not permitted"
        assert {(hot.link.transport, hot.link.why) for hot in every} == {("tcp", why)}


def test_three_members_without_an_adapter_all_stay_on_tcp_and_none_waits_for_another_in_vain() -> None:
    def on_other_hosts(link: Link) -> None:
        link.transports = TCP_BIT | RDMA_BIT  # as if both had found an adapter that has gone since
        link.peer = dataclasses.replace(link.peer, address=("192.0.2.1", 1))

    with sped_up(on_other_hosts) as every:
        for hot in every:
            assert hot.link.transport == "tcp"
            assert hot.link.why.startswith("no RDMA: ")


def test_a_peer_that_knows_nothing_of_it_is_not_asked() -> None:
    def plain(link: Link) -> None:
        link.peer = dataclasses.replace(link.peer, hello={**link.peer.hello, "features": []})

    with sped_up(plain) as every:
        assert {(hot.link.transport, hot.link.why) for hot in every} == {("tcp", "")}
