"""UCX as a further path of a hot link. Belongs to the thread that owns the link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mlxcel_nb.errors import WireError
from mlxcel_nb.net.further.bell import Bell
from mlxcel_nb.net.further.offer import Unavailable
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.ucx.stream import RDMA, UcxStream, Worker

MAX_ADDRESS = 64 * 1024


class UcxOffer:
    """What UCX can reach this end by.

    Args:
        transports: UCX's own names for what may be used.

    Raises:
        Unavailable: UCX or the adapter is missing.
    """

    name: ClassVar[str] = "ucx"
    path_id: ClassVar[int] = 1

    def __init__(self, transports: str = RDMA) -> None:
        self._worker = Worker(transports)
        self.words: Mapping[str, Any] = {"version": self._worker.version, "worker": self._worker.address}
        self.transport = f"rdma (UCX {self._worker.version}, {transports})"

    def connect(self, link: Link, theirs: Mapping[str, Any]) -> UcxStream:
        address, version = theirs.get("worker"), str(theirs.get("version"))
        if not isinstance(address, bytes) or not 0 < len(address) <= MAX_ADDRESS:
            raise WireError("an offer of UCX without an address", node=link.peer.node_id)
        if version.partition(".")[0] != self._worker.version.partition(".")[0]:
            raise Unavailable(f"UCX is {self._worker.version} here and {version:.20} there")
        return UcxStream(self._worker, address, Bell(link))

    def close(self) -> None:
        self._worker.close()
