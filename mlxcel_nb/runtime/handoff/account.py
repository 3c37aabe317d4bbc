"""What it took to send keys and values. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from mlxcel_nb.errors import WireError


@dataclass(frozen=True)
class Account:
    """What it took one member to send its part of a transfer, or all members together.

    Args:
        nbytes: of the arrays.
        sent: bytes of the messages that carried them.
        before: of those, bytes that were on their way before the last token had been read.
        after_s: from then to the last acknowledgement.
        error: the largest relative error of what went as codes.
        encoding: how floats went: plain, lz4, int8 or int4.
    """

    nbytes: int = 0
    sent: int = 0
    before: int = 0
    after_s: float = 0.0
    error: float = 0.0
    encoding: str = "plain"

    def to_list(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def from_list(cls, told: Any) -> Account:
        """The inverse of `to_list`.

        Raises:
            WireError: it cannot be read.
        """
        kinds = (int, int, int, float, float, str)
        if (
            not isinstance(told, list)
            or len(told) != len(kinds)
            or any(type(x) is not kind for x, kind in zip(told, kinds, strict=True))
            or any(isinstance(x, (int, float)) and not (0 <= x < 2**53 and math.isfinite(x)) for x in told)
            or len(told[-1]) > 16
        ):
            raise WireError("what it took to send keys and values cannot be read")
        return cls(*told)


def together(accounts: Sequence[Account]) -> Account:
    """Of all members, who send at the same time."""
    return Account(
        nbytes=sum(each.nbytes for each in accounts),
        sent=sum(each.sent for each in accounts),
        before=sum(each.before for each in accounts),
        after_s=max((each.after_s for each in accounts), default=0.0),
        error=max((each.error for each in accounts), default=0.0),
        encoding=next((each.encoding for each in accounts if each.nbytes), "plain"),
    )
