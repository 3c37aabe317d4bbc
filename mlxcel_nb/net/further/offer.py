"""What one end offers for a further path between two that are connected already. Belongs to the hot link's thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.links.stream import Stream


class Unavailable(Exception):
    """This path cannot be used; the text says why, for the link's status."""


class FurtherStream(Stream, Protocol):
    """What carries the frames of a further path."""

    def flush(self, within_s: float) -> bool:
        """Wait until the peer has what was sent; whether it has."""


class Offer(Protocol):
    """One way to carry frames beside the TCP connection, from this end.

    Attributes:
        name: what the two call it; both have to mean the same one.
        path_id: of the further path, whose keys are its own (docs/wire.md).
        words: what the peer has to know to use it, MessagePack's types.
        transport: what the link's status calls it.
    """

    name: ClassVar[str]
    path_id: ClassVar[int]
    words: Mapping[str, Any]
    transport: str

    def connect(self, link: Link, theirs: Mapping[str, Any]) -> FurtherStream:
        """The stream between what both ends offered; it owns what this offer held.

        Raises:
            Unavailable: the two do not fit, with the reason.
            WireError: what the peer says makes no sense.
        """

    def close(self) -> None:
        """Give everything back that no stream owns; twice is once."""
