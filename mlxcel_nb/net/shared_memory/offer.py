"""Shared memory as a further path of a hot link between processes of one host. For the thread that owns the link."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, ClassVar

from mlxcel_nb.errors import WireError
from mlxcel_nb.net.further.bell import Bell
from mlxcel_nb.net.further.offer import Unavailable
from mlxcel_nb.net.links.addresses import is_numeric
from mlxcel_nb.net.links.link import SHARED_MEMORY, Link, local_address
from mlxcel_nb.net.shared_memory.ring import DATA_AT
from mlxcel_nb.net.shared_memory.segment import WORD_BYTES, Segment
from mlxcel_nb.net.shared_memory.stream import SharedMemoryStream

ELSEWHERE = "the ends are not on one host"

RING_BYTES = 1 << 20
"""Of each direction: two pieces of a large tensor."""


class SharedMemoryOffer:
    """The ring that this end writes to.

    Raises:
        Unavailable: the peer is on another host, or the system has no such memory.
    """

    name: ClassVar[str] = SHARED_MEMORY
    path_id: ClassVar[int] = 2
    transport = "shared memory"

    def __init__(self, link: Link) -> None:
        if not _on_one_host(link):
            raise Unavailable(ELSEWHERE)
        self._ours = Segment.make(DATA_AT + RING_BYTES)
        self._connected = False
        process, descriptor = self._ours.where
        self.words: Mapping[str, Any] = {"process": process, "descriptor": descriptor, "word": self._ours.word}

    def connect(self, link: Link, theirs: Mapping[str, Any]) -> SharedMemoryStream:
        process, descriptor, word = (theirs.get(key) for key in ("process", "descriptor", "word"))
        if not (isinstance(process, int) and isinstance(descriptor, int) and process > 0 and descriptor >= 0):
            raise WireError("an offer of shared memory without a place", node=link.peer.node_id)
        if not isinstance(word, bytes) or len(word) != WORD_BYTES:
            raise WireError("an offer of shared memory without its word", node=link.peer.node_id)
        their_segment = Segment.open(process, descriptor, word, DATA_AT + RING_BYTES)
        try:
            stream = SharedMemoryStream(self._ours, their_segment, Bell(link))
        except BaseException:
            their_segment.close()
            raise
        self._connected = True
        return stream

    def close(self) -> None:
        if not self._connected:
            self._ours.close()


def _on_one_host(link: Link) -> bool:
    """Two namespaces may share one memory and be two hosts to everybody: addresses tell. Loopback never leaves one."""
    ends = {local_address(link.sock), link.peer.address[0].partition("%")[0]}
    return len(ends) == 1 or all(is_numeric(ip) and ipaddress.ip_address(ip).is_loopback for ip in ends)
