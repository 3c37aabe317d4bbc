"""Blocks that come from elsewhere, to be kept as if they had been read here. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_TRANSFER = 2**53 - 1
"""Transfers are known by a number up to this."""


@dataclass(eq=False)
class Adoption:
    """Blocks that every member of a home has at hand.

    Args:
        transfer: by which members know them.
        tokens: from a sequence's first one to the last one of these blocks.
        begin: the first block of the sequence that is at hand; those before it have to be kept already.
        home: whose blocks they become.
        kept: how many blocks of `tokens` are kept; None until a plan has been made of it.
    """

    transfer: int
    tokens: list[int] = field(repr=False)
    begin: int
    home: int = 0
    kept: int | None = None
