"""Looking for what must not be there: a canary in each form that a program could have written it down in."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Canary:
    """Bytes, or a text with its token ids, that nothing may keep.

    Args:
        name: what a failed test calls it.
        ids: token ids of the text, for logs and messages that hold numbers instead.
    """

    name: str
    value: bytes
    ids: Sequence[int] = ()

    def forms(self) -> dict[str, bytes]:
        """Every spelling that is searched for, by the name of the spelling."""
        value = self.value
        spelled = {
            "raw": value,
            "hex": value.hex().encode(),
            "HEX": value.hex().upper().encode(),
            "repr": repr(value)[2:-1].encode(),
            "list of bytes": ", ".join(map(str, value)).encode(),
            "utf-16": value.decode("latin-1").encode("utf-16-le"),
        }
        for shift in range(3):  # base64 of a longer text that holds the value at any place
            whole = base64.b64encode(bytes(shift) + value)
            spelled[f"base64 at {shift}"] = whole[-(-shift * 8 // 6) : -4]
        if value.isascii():
            spelled["json"] = json.dumps(value.decode())[1:-1].encode()
        if self.ids:
            spelled["token ids"] = ", ".join(map(str, self.ids)).encode()
            spelled["token ids, packed"] = ",".join(map(str, self.ids)).encode()
        return spelled

    def found_in(self, data: bytes) -> list[str]:
        """Names of the spellings that `data` holds."""
        return [f"{self.name} ({form})" for form, needle in self.forms().items() if needle in data]


def found_in(canaries: Iterable[Canary], data: bytes) -> list[str]:
    """Which canaries `data` holds, and how they are spelled."""
    return [found for canary in canaries for found in canary.found_in(data)]


def found_below(canaries: Sequence[Canary], *roots: Path, except_for: Iterable[str] = ()) -> dict[str, list[str]]:
    """Files below `roots`, names included, that hold a canary; files called as in `except_for` are not read.

    Programs are at work there: what vanishes meanwhile, as a database's journal does, was seen by its name alone.
    """
    skipped = set(except_for)
    found: dict[str, list[str]] = {}
    for path in (path for root in roots for path in everything_below(root)):
        data = b""
        with contextlib.suppress(FileNotFoundError):
            if path.name not in skipped and path.is_file():
                data = path.read_bytes()
        if hits := found_in(canaries, bytes(path) + data):
            found[str(path)] = hits
    return found


def everything_below(root: Path) -> list[Path]:
    """`root` and what is in it, however deep. `Path.rglob` raises for a folder that vanishes while it looks."""
    return [root, *(Path(place, name) for place, folders, files in os.walk(root) for name in (*folders, *files))]
