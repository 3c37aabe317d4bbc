"""Reading and writing the few kinds of field that headers are made of.

Pure. `Reader` walks untrusted bytes: it never reads past the end, and `finish` refuses what is left over.
"""

from __future__ import annotations

from mlxcel_nb.errors import WireError

MAX_STR8 = 255


def str8(text: str) -> bytes:
    """One length byte, then the UTF-8 of `text`."""
    data = text.encode()
    if len(data) > MAX_STR8:
        raise ValueError(f"text of {len(data)} bytes does not fit into {MAX_STR8}")
    return bytes([len(data)]) + data


def clip(text: str, limit: int = MAX_STR8) -> str:
    """`text` cut at a character so that its UTF-8 fits into `limit` bytes."""
    return text.encode(errors="replace")[:limit].decode(errors="ignore")


def printable(text: str) -> str:
    """A peer's text made safe to show: control, format and other invisible characters become `?`."""
    return "".join(character if character.isprintable() else "?" for character in text)


class Reader:
    """Takes fields off the front of `data`; `what` names it in errors."""

    def __init__(self, data: bytes | bytearray | memoryview, what: str) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._what = what

    def take(self, size: int, field: str) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise WireError(f"{self._what} ends within its {field}")
        taken = bytes(self._data[self._at : end])
        self._at = end
        return taken

    def integer(self, size: int, field: str) -> int:
        return int.from_bytes(self.take(size, field), "big")

    def str8(self, field: str) -> str:
        data = self.take(self.integer(1, field), field)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise WireError(f"{field} of {self._what} is not UTF-8") from None

    @property
    def position(self) -> int:
        """How many bytes have been taken."""
        return self._at

    def finish(self) -> None:
        """Refuse trailing bytes."""
        if rest := len(self._data) - self._at:
            raise WireError(f"{self._what} has {rest} trailing byte{'s' if rest > 1 else ''}")
