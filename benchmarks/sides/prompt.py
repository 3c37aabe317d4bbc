"""A prompt of any length, the same on every side and in every run: no tokenizer, no chance."""

from __future__ import annotations


def prompt_ids(count: int, vocabulary: int) -> list[int]:
    """`count` ids spread over the vocabulary, without the first hundred, many of which are special."""
    return [100 + (i * 7919) % (vocabulary - 100) for i in range(count)]
