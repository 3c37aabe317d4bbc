"""Members that offer each other RDMA before they load: all of them agree, pair by pair, and say why where they stay."""

from __future__ import annotations

import concurrent.futures

from mlxcel_nb.cluster.transports import RDMA_BIT, TCP_BIT
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.hot.interrupt import Interrupt
from mlxcel_nb.runtime.loading import speed_up
from tests.net.helpers import detached_pairs

MEMBERS = 3


def test_three_members_without_an_adapter_all_stay_on_tcp_and_none_waits_for_another_in_vain() -> None:
    pairs = iter(detached_pairs(MEMBERS))
    links: list[dict[int, HotLink]] = [{} for _ in range(MEMBERS)]
    for a in range(MEMBERS):
        for b in range(a + 1, MEMBERS):
            for me, other, link in zip((a, b), (b, a), next(pairs), strict=True):
                link.transports = TCP_BIT | RDMA_BIT  # as if both had found an adapter that has gone since
                links[me][other] = HotLink(link)
    interrupt = Interrupt()
    with concurrent.futures.ThreadPoolExecutor(MEMBERS) as pool:
        for done in [pool.submit(speed_up, mine, interrupt) for mine in links]:
            done.result(20)
    interrupt.close()
    for mine in links:
        for hot in mine.values():
            assert hot.link.transport == "tcp"
            assert hot.link.why.startswith("no RDMA: ")
            hot.close()
