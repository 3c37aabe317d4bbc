"""How many characters of a text one token can stand for: a text that is longer than a context of such tokens cannot
fit, and nobody has to read it to know. Pure.

The number must never be too small, or a prompt that fits would be refused. So it is given only where each character of
a text is known to end up in some token:

* The model is BPE, and what its vocabulary does not know becomes bytes, or an unknown token for each character. Where a
  run of unknown characters becomes one token, or none, there is no bound; nor for words (WordPiece and its kin). Of
  bytes some may be missing, as control characters are in SmolLM2's vocabulary: those are not counted.
* Nothing is dropped on the way there, as white space is between words, nor made one by a pattern.
* No added token takes the white space beside it along, which may be of any length.

A token then stands for at most as many characters as its name has, for a name has one for each byte or character; times
what normalisers make of several. Unicode's composed forms (NFC, NFKC) take four characters into one at most: no
character's canonical decomposition is longer, and the composed text decomposes into what the given one does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mlxcel_nb.models.text import NAMES_OF_BYTES

COMPOSED = 4
"""Characters that composition makes one of, at most: U+1F82 is a letter and three marks."""

_KEEPING = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}
"""Pre-tokenizers that keep every character. Of `Split` and `Punctuation` those do that do not remove."""

_GROWING = {"ByteLevel", "Lowercase", "NFD", "NFKD", "Prepend"}
"""Normalisers that give at least as many characters as they take."""


class Reach(NamedTuple):
    """What tokens stand for.

    Args:
        most: characters of a token at most; 0 where there is no such number.
        dropped: characters that become no token.
    """

    most: int = 0
    dropped: str = ""

    def fits(self, text: str, tokens: int) -> bool:
        """Whether `text` may be so few tokens; True where nobody knows."""
        most = tokens * self.most
        return not most or len(text) <= most or len(text) - sum(map(text.count, self.dropped)) <= most


NOT_KNOWN = Reach()


def reach(
    vocabulary: Mapping[str, int],
    *,
    normalizer: Mapping[str, Any] | None,
    pre_tokenizer: Mapping[str, Any] | None,
    unknown: str | None,
    fused: bool,
    byte_fallback: bool,
) -> Reach:
    """What a token of a BPE model stands for.

    Args:
        vocabulary: names of tokens, added ones included.
        normalizer, pre_tokenizer: as tokenizer.json has them.
        unknown, fused, byte_fallback: what becomes of characters that the vocabulary does not know: its fields
            `unk_token`, `fuse_unk` and `byte_fallback`.
    """
    steps, cuts = _parts(normalizer, "normalizers"), _parts(pre_tokenizer, "pretokenizers")
    dropped = ""
    if unknown in vocabulary and not fused:
        pass
    elif any(each.get("type") == "ByteLevel" for each in (*steps, *cuts)):
        missing = {byte for name, byte in NAMES_OF_BYTES.items() if name not in vocabulary}
        if not missing.isdisjoint(_FOLLOWING):
            return NOT_KNOWN
        dropped = "".join(chr(byte) for byte in sorted(missing) if byte < 0x80)
    elif not byte_fallback or not all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return NOT_KNOWN
    if not all(map(_keeps, cuts)) or (dropped and any(step.get("type") != "Prepend" for step in steps)):
        return NOT_KNOWN  # a normaliser may make what is dropped of something else
    most = max(map(len, vocabulary), default=0)
    for step in steps:
        most *= _shrinks(step)
    return Reach(most, dropped) if most else NOT_KNOWN


_FOLLOWING = range(0x80, 0xC0)
"""Bytes of which every character of several has one at least."""


def _parts(described: Mapping[str, Any] | None, within: str) -> list[Mapping[str, Any]]:
    """The steps of a normaliser or a pre-tokenizer, those of sequences in their place."""
    if described is None:
        return []
    if described.get("type") != "Sequence":
        return [described]
    inner: Iterable[Mapping[str, Any]] = described.get(within) or []
    return [step for each in inner for step in _parts(each, within)]


def _keeps(cut: Mapping[str, Any]) -> bool:
    if cut.get("type") in ("Split", "Punctuation"):
        return cut.get("behavior") in ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
    return cut.get("type") in _KEEPING


def _shrinks(step: Mapping[str, Any]) -> int:
    """Characters that a normaliser makes one of, at most; 0 where there may be any number."""
    kind = step.get("type")
    if kind in ("NFC", "NFKC"):
        return COMPOSED
    if kind == "Replace":
        taken, given = (step.get("pattern") or {}).get("String"), step.get("content")
        if not isinstance(taken, str) or not taken or not given:
            return 0  # a pattern may match any length
        return -(-len(taken) // len(given))
    return 1 if kind in _GROWING else 0
