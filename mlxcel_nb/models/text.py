"""From token ids to the text a reader sees: whole characters only, and nothing of a stop string. Pure; no MLX."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

INCOMPLETE = "\ufffd"
"""What a decoder puts for bytes that are no character, or not yet."""

MAX_HELD = 16
"""Ids held back at most: a character takes four bytes, so more without one is no text and is let through."""

MAX_SILENT = 64
"""Ids without any text of their own, such as special tokens, that are kept as context for the next one."""


class Decoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


class Detokenizer:
    """Turns ids into deltas that joined are the decoding of all of them.

    Each id decodes a window of a few ids, from the last delta's beginning on: what a token looks like depends on its
    neighbours (spaces, bytes of one character), and decoding everything anew would cost the square of the length.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._told = 0  # ids of the window whose text is out already
        self._told_text = ""

    def add(self, token: int) -> str:
        """The text that `token` completes; "" while a character is incomplete."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if text.endswith(INCOMPLETE) and len(self._window) - self._told < MAX_HELD:
            return ""
        return self._tell(text)

    def flush(self) -> str:
        """What is held back still, once: the end of the ids has come, so an incomplete character stays so."""
        if self._told == len(self._window):
            return ""
        return self._tell(self._tokenizer.decode(self._window))

    def _tell(self, text: str) -> str:
        delta = text[len(self._told_text) :]
        self._window = self._window[self._told :] if delta else self._window[-MAX_SILENT:]
        self._told_text = self._tokenizer.decode(self._window)
        self._told = len(self._window)
        return delta


class StopStrings:
    """Ends a text before the first of some strings, wherever tokens begin and end.

    Only what may still become one of them is held back. The one that is complete first counts, so the result is
    the same however the text is cut into deltas.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._matched: str | None = None

    def feed(self, delta: str, *, armed: bool = True) -> tuple[str, str | None]:
        """(text to emit, the stop string that ended it or None). After a match all text is dropped.

        Args:
            armed: False for text that is to come whatever it holds, as an answer's first `min_tokens`; no stop string
                begins in it.
        """
        if self._matched is not None:
            return "", self._matched
        text = self._held + delta
        if not armed:
            self._held = ""
            return text, None
        found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, self._matched = min(found)
            self._held = ""
            return text[: end - len(self._matched)], self._matched
        keep = self._may_become_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What is held back still: the text has ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _may_become_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stops), default=0)
        for size in range(min(len(text), longest - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


def _alphabet() -> dict[str, int]:
    """The characters that stand for bytes in the vocabularies of GPT-2's kind: visible ones for themselves."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(others)}


NAMES_OF_BYTES = _alphabet()
"""What tokens of one byte are called in those vocabularies."""


def named_bytes(name: str) -> bytes | None:
    """The bytes that a token's name in a vocabulary spells, as GPT-2's do or as `<0xF0>`; None where it is no such."""
    if re.fullmatch("<0x[0-9A-F]{2}>", name):
        return bytes([int(name[3:5], 16)])
    return bytes(map(NAMES_OF_BYTES.__getitem__, name)) if name and NAMES_OF_BYTES.keys() >= {*name} else None
