"""Hot links that have moved to shared memory, both ends in this process, for the tests of this folder."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from mlxcel_nb.net.further.agree import agree
from mlxcel_nb.net.further.offer import Offer
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.shared_memory.offer import SharedMemoryOffer
from mlxcel_nb.net.shared_memory.stream import SharedMemoryStream
from tests.net.far import LIMIT_S
from tests.net.helpers import hot_pair

two_ends = hot_pair
"""Still on TCP."""


def offer(link: Link) -> partial[SharedMemoryOffer]:
    return partial(SharedMemoryOffer, link)


def agree_both(ends: tuple[HotLink, HotLink], *offering: Callable[[], Offer]) -> list[str]:
    """What each end says; `offering` is what each does, shared memory by default."""
    ways = offering or tuple(offer(end.link) for end in ends)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        agreed = [pool.submit(agree, end, way) for end, way in zip(ends, ways, strict=True)]
        return [future.result(LIMIT_S) for future in agreed]


@contextlib.contextmanager
def both_moved() -> Iterator[tuple[HotLink, HotLink]]:
    with two_ends() as ends:
        assert agree_both(ends) == ["", ""]
        yield ends


def stream_of(hot: HotLink) -> SharedMemoryStream:
    assert isinstance(hot._sock, SharedMemoryStream)
    return hot._sock


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def mappings() -> int:
    """Rings that are mapped in this process."""
    return Path("/proc/self/maps").read_text().count("/memfd:mlxcel-nb")
