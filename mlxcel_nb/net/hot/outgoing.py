"""What a hot link is about to send. Belongs to the thread that owns the link; no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from mlxcel_nb.wire.frames import Kind

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Outgoing:
    """Payloads of one message that are still to be sealed, each as soon as the socket and the credits allow."""

    __slots__ = ("_payloads", "channel", "kind", "next")

    def __init__(self, kind: Kind, channel: int, payloads: Iterable[Sequence[ReadableBuffer]]) -> None:
        self.kind = kind
        self.channel = channel
        self._payloads: Iterator[Sequence[ReadableBuffer]] = iter(payloads)
        self.next = next(self._payloads, None)

    def advance(self) -> None:
        self.next = next(self._payloads, None)
