"""What a tensor of a step is paired by. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from mlxcel_nb.errors import WireError

_NAME = re.compile(r"(\d{1,18})\.(\d{1,18})\.(\d{1,18})(?:\.(\d{1,18}))?", re.ASCII)


class Tag(NamedTuple):
    """Epoch of the plan, step within it, and count of exchanges within the step. Later ones compare greater.

    A collective that goes through several phases numbers them by itself: `phase` is 0 for everybody else.
    """

    epoch: int
    step: int
    seq: int
    phase: int = 0

    @property
    def name(self) -> str:
        """The tensor's name on the wire."""
        name = f"{self.epoch}.{self.step}.{self.seq}"
        return f"{name}.{self.phase}" if self.phase else name

    @property
    def encoded(self) -> bytes:
        """The same, as it stands in a header: small tensors have no time for a detour over text."""
        return b"%d.%d.%d" % self[:3] if not self.phase else self.name.encode()

    def at(self, phase: int) -> Tag:
        """The tag of one phase."""
        return self._replace(phase=phase)

    @classmethod
    def parse(cls, name: str) -> Tag:
        match = _NAME.fullmatch(name)
        if match is None:
            raise WireError(f"a tensor named {name!r:.60} where EPOCH.STEP.SEQ is due")
        return cls(int(match[1]), int(match[2]), int(match[3]), int(match[4] or 0))
