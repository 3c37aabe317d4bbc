"""Fuzzed bytes read as a list of choices: what hypothesis and the coverage-guided fuzzer both steer by."""

from __future__ import annotations

from mlxcel_nb.errors import MlxcelError


class Script:
    """Takes choices off the front of `data`; zeros and nothing once it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def number(self, size: int = 1) -> int:
        return int.from_bytes(self.take(size), "big")

    def take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken

    def rest(self) -> bytes:
        return self.take(len(self._data))

    def short(self) -> bytes:
        """A string led by its length in one byte."""
        return self.take(self.number())

    def long(self) -> bytes:
        """A string led by its length in two bytes."""
        return self.take(self.number(2))

    def pieces(self, data: bytes) -> list[bytes]:
        """`data` cut into pieces whose lengths are choices, at most 16 of them and a rest."""
        cut = []
        for _ in range(16):
            if not self or not data:
                break
            size = 1 + self.number()
            cut.append(data[:size])
            data = data[size:]
        return [*cut, data] if data else cut


def bend(script: Script, whole: bytes) -> bytes:
    """`whole` with up to three of its bytes replaced, and cut or lengthened, as the script says."""
    if not whole:
        return whole
    data = bytearray(whole)
    for _ in range(script.number() & 3):
        data[script.number(2) % len(data)] = script.number()
    change = script.number()
    if change >= 224:
        del data[script.number(2) % len(data) :]
    elif change >= 192:
        data += script.short()
    return bytes(data)


def check_words(error: MlxcelError, limit: int = 2000) -> None:
    """What is said of bent bytes is short, and fit for a terminal."""
    words = str(error)
    assert len(words) < limit and words.isprintable(), repr(words)
